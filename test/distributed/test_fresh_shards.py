"""Sharded NVFP4 weights that are written between two forwards: what is multiplied is what the shards are now."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.run_ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig, distributed, quantize

pytestmark = pytest.mark.slow


# --- codes in windows of sharded NVFP4 weights -----------------------------------------------------------------------

ROWS = 96
"""Of each rank's shard: no complete tile of scales."""


def codes(seed, factor=1.0):
    x = torch.randn(2 * ROWS, 64, generator=torch.Generator().manual_seed(seed)) * factor
    return quantize(x.bfloat16(), amax=8 * factor)


def of_shards(write):
    """Write to each rank's shard, and to the same rows of a full weight."""
    return lambda w: [write(part) for part in ([w.to_local()] if isinstance(w, DTensor) else w.split(ROWS))]


def of_all(write):
    """Write to a weight with ``write(weight, shard)``, whose second argument shards a tensor like the weight."""
    return lambda w: write(w, lambda t: sharded_like(w, t) if isinstance(w, DTensor) else t)


def sharded_like(w, t):
    return distribute_tensor(t, w.device_mesh, w.placements)


WINDOWS = {
    "zeros in rows": of_shards(lambda t: t[3:40].zero_()),
    "zeros in blocks": of_shards(lambda t: t[3:40, 16:32].fill_(0)),
    "rows": of_shards(lambda t: t[3:40].copy_(t[50:87].clone())),
    "a larger scale": of_shards(lambda t: t[3:40].copy_(codes(1, 9.0)[:37])),
    "a slice of a slice": of_shards(lambda t: t[3:40][:, 16:48][5:9].copy_(codes(2, 30.0)[:4, 16:48])),
    "columns": of_all(lambda w, shard: w[:, 16:48].copy_(shard(codes(3, 100.0)[:, 16:48].clone()))),
    "the full weight": of_all(lambda w, shard: w.copy_(shard(codes(4)))),
    "dense, of all": lambda w: w.fill_(2.0),
}


@on_ranks(2)
def test_windows_of_sharded_codes(tmp_path):
    sharded, alone = (nn.Sequential(nn.Linear(64, 2 * ROWS, bias=False)).requires_grad_(False) for _ in range(2))
    for model in (sharded, alone):
        quantize_(model, NVFP4WeightOnlyConfig())
        model[0].weight.copy_(codes(0))
    x = torch.randn(5, 64)
    fully_shard(sharded)
    held = sharded[0].weight.to_local()[7:90]
    for name, write in WINDOWS.items():
        write(sharded.state_dict()["0.weight"].data)
        write(alone[0].weight)
        expected = alone[0].weight.dequantize()
        assert torch.equal(sharded(x), alone(x)), name
        sharded.reshard()
        assert torch.equal(sharded[0].weight.full_tensor().dequantize(), expected), name
        assert torch.equal(held.dequantize(), expected.chunk(2)[dist.get_rank()][7:90]), name
        dcp.save(distributed.to_plain(sharded.state_dict()), checkpoint_id=f"{tmp_path}/{name}")
        plain = distributed.to_plain({"0.weight": codes(7).float()})
        dcp.load(plain, checkpoint_id=f"{tmp_path}/{name}")
        assert torch.equal(distributed.from_plain(plain)["0.weight"].dequantize(), expected), name


@on_ranks(2)
def test_writes_that_shards_do_not_support():
    """A dense write to a part of a shard, and values of which each rank quantizes its own."""
    linear = nn.Linear(64, 2 * ROWS, bias=False).requires_grad_(False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    fully_shard(linear)
    before = linear.weight.full_tensor().dequantize()
    with pytest.raises(RuntimeError, match="no smaller scale"):
        linear.weight.to_local()[3:40] = torch.ones(37, 64)
    assert torch.equal(linear.weight.full_tensor().dequantize(), before)
    w, dense = linear.weight, torch.randn(2 * ROWS, 64) * torch.arange(1.0, 2 * ROWS + 1)[:, None]
    w.copy_(sharded_like(w, dense))
    with pytest.raises(RuntimeError, match=r"different per-tensor scales.*distribute_tensor\(quantize\(full\)"):
        linear(torch.randn(2, 64))
    linear.reshard()
    w.copy_(sharded_like(w, quantize(dense)))  # as the message says
    assert torch.equal(w.full_tensor().dequantize(), quantize(dense).dequantize())
