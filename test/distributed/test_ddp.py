"""DistributedDataParallel with frozen weights in NVFP4 and FP8, and with linears that train in NVFP4."""

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, of_all_ranks, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchao.quantization import quantize_

from nvfp4_tensor import FP8Tensor, NVFP4Tensor, NVFP4WeightOnlyConfig
from nvfp4_tensor.distributed import check_ranks, prepare_ddp

pytestmark = pytest.mark.slow


def make(seed, block_rows=1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 32), nn.Linear(32, 8)).bfloat16().to(here())
    model[:3].requires_grad_(False)
    codes = model[2].weight.detach().to(torch.float8_e4m3fn)
    quantize_(model[:1], NVFP4WeightOnlyConfig(block_rows=block_rows))
    model[2].weight = nn.Parameter(FP8Tensor(codes, torch.full((1, 1), 1.0 + seed, device=here())), False)
    return model


@on_ranks(2, cuda=True)
def test_frozen_weights_and_a_trained_head():
    rank = dist.get_rank()
    model = DistributedDataParallel(prepare_ddp(make(seed=rank)))  # rank 0's weights count
    alone = make(seed=0)
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(3)).bfloat16().to(here())
    model(x[4 * rank : 4 * rank + 4]).float().square().mean().backward()
    gradients = []
    for half in (x[:4], x[4:]):
        alone.zero_grad()
        alone(half).float().square().mean().backward()
        gradients.append(alone[3].weight.grad.clone())
    for i, kind in ((0, NVFP4Tensor), (2, FP8Tensor)):
        assert isinstance(model.module[i].weight, kind)
        assert torch.equal(model.module[i].weight.dequantize(), alone[i].weight.dequantize())
    grad = model.module[3].weight.grad
    torch.testing.assert_close(grad, sum(gradients) / 2)
    assert torch.equal(*of_all_ranks(grad.cpu())) and grad.any()


@on_ranks(2)
@pytest.mark.parametrize(
    ("case", "message"),
    [("specs", "weight of '0.weight' is .*1x16.* on rank 0 and .*16x16"), ("trained", "'0.weight'")],
)
def test_errors_are_raised_on_every_rank(case, message):
    model = make(0, block_rows=16 if case == "specs" and dist.get_rank() else 1)
    if case == "trained":
        model[0].weight.requires_grad_()
    with pytest.raises(ValueError, match=message):
        check_ranks(model) if case == "specs" else prepare_ddp(model)


@on_ranks(2, cuda=True)
def test_ddp_alone_says_prepare_ddp():
    for columns in (48, 40):
        frozen = nn.Linear(columns, 32, bias=False).bfloat16().to(here()).requires_grad_(False)
        quantize_(frozen, NVFP4WeightOnlyConfig())
        with pytest.raises(RuntimeError, match="a part of a tensor has no codes"):
            dist.broadcast(frozen.weight.detach().view(-1), 0)
        # Alone in its buffer, of which torch makes one per dtype, and beside a dense parameter.
        for head in (nn.Linear(32, 8).to(here()), nn.Linear(32, 8).bfloat16().to(here())):
            with pytest.raises(RuntimeError, match=r"DistributedDataParallel\(.*prepare_ddp\(model\)\)"):
                DistributedDataParallel(nn.Sequential(frozen, head))
    assert torch.equal(*of_all_ranks(frozen.weight.dequantize().cpu()))
