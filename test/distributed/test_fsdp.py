"""FSDP2 with frozen NVFP4 weights: results equal those of one rank, bit for bit; bytes sent are counted."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.bits import stored_bits
from helpers.run_ranks import gathered_bytes, here, on_ranks, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, distributed, quantize
from nvfp4_tensor.sharding.fsdp_transport import DIFFERENT_SCALES
from nvfp4_tensor.training import NVFP4TrainingConfig

pytestmark = pytest.mark.slow

CONFIGS = {
    "weight only": NVFP4WeightOnlyConfig(),
    "16x16": NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(block_rows=16)),
    "row scaled": NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(row_scaled=True)),
    "w4a4": NVFP4Config(),
}


class LoRA(nn.Module):
    """A frozen linear with a small trained one."""

    def __init__(self, columns, rows):
        super().__init__()
        self.base = nn.Linear(columns, rows).requires_grad_(False)
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def make(config="weight only", columns=64, hidden=512, out=48, dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = nn.Sequential(LoRA(columns, hidden), nn.ReLU(), LoRA(hidden, out)).to(dtype)
    model = model if model[0].base.weight.is_meta else model.to(here())
    quantize_(model, CONFIGS[config], filter_fn=lambda module, name: name.endswith("base"))
    return model


def shard(model, compiles=False, **options):
    for layer in (model[0], model[2]):
        if compiles:
            layer.compile(backend="aot_eager", fullgraph=True)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(model, rows=6, dtype=torch.bfloat16):
    return torch.randn(rows, model[0].base.in_features, generator=torch.Generator().manual_seed(2)).to(here(), dtype)


# --- the step --------------------------------------------------------------------------------------------------------


def steps_are_those_of_one_rank(config, sizes, reshard, compiles=False):
    alone, model = make(config, *sizes), make(config, *sizes)
    shard(model, compiles, reshard_after_forward=reshard)
    assert isinstance(model[0].base.weight, DTensor) and isinstance(model[0].base.weight._local_tensor, NVFP4Tensor)
    x = batch(alone)
    for _ in range(3):
        losses = []
        for m in (alone, model):
            optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=1.0)
            y = m(x)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(y.detach())
        assert torch.equal(*losses)
    trained = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        full = p.full_tensor()
        assert torch.equal(full, trained[name]), name
        assert not isinstance(full, NVFP4Tensor) or torch.equal(stored_bits(full), stored_bits(trained[name]))


@on_ranks(2, cuda=True)
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("weight only", (64, 512, 48)),  # scales are sent in complete tiles, and in rows
        ("weight only", (50, 512, 256)),  # columns that end within a block
        ("16x16", (64, 256, 64)),
        ("row scaled", (64, 512, 48)),
        ("w4a4", (64, 96, 512)),
    ],
)
def test_steps_equal_those_of_one_rank(config, sizes):
    """Forward and gradients equal in all bits, and after training the codes are what they were."""
    steps_are_those_of_one_rank(config, sizes, True)


@on_ranks(4)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_steps_on_four_ranks_without_resharding(compiles):
    steps_are_those_of_one_rank("weight only", (64, 512, 48), False, compiles)


@on_ranks(2, 8, cuda=True)
def test_bytes_sent():
    """4.5 bits per element, whether scales are sent in tiles (2 ranks) or in rows (8): 0.28125 of bfloat16's.

    And the per-tensor scale, to be compared.
    """
    linear = nn.Linear(256, 512, bias=False).bfloat16().requires_grad_(False).to(here())
    quantize_(linear, NVFP4WeightOnlyConfig())
    with gathered_bytes() as sent:
        fully_shard(linear)(torch.randn(2, 256).bfloat16().to(here()))
    assert sent == [512 // dist.get_world_size() * 256 * 9 // 16 + 4]


@on_ranks(2)
def test_a_shard_is_stored_once_and_the_full_weight_is_freed():
    """A root keeps the full weight after the forward; then its codes and its swizzled scales are freed."""
    linear = nn.Linear(256, 96, bias=False).bfloat16().requires_grad_(False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    fully_shard(linear)
    (param,) = linear._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert param._sharded_param_data.window.stored.qdata.data_ptr() == linear.weight._local_tensor.qdata.data_ptr()
    linear(torch.randn(2, 256).bfloat16())
    gathered = param._unsharded_param
    storages = [part.untyped_storage() for part in (gathered.qdata, gathered.scale)]
    assert [storage.size() for storage in storages] == [96 * 128, 128 * 16]
    linear.reshard()
    assert [storage.size() for storage in storages] == [0, 0]


# --- policies --------------------------------------------------------------------------------------------------------


@on_ranks(2, cuda=True)
def test_cpu_offload():
    alone, model = make(), make()
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=here().type == "cuda"))
    x = batch(alone)
    assert torch.equal(model(x), alone(x)) and torch.equal(model(x), alone(x))


@on_ranks(2, cuda=True)
def test_mixed_precision():
    """float32 parameters and norms together with codes: the gathered weight decodes to the dtype of the products."""
    model = nn.Sequential(LoRA(64, 96), nn.LayerNorm(96), LoRA(96, 32)).to(here())
    quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name.endswith("base"))
    alone = copy.deepcopy(model).bfloat16()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x = batch(model)
    y = model(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and torch.equal(y, alone(x))
    assert model[0].up.weight.grad.dtype == torch.float32


# --- state -----------------------------------------------------------------------------------------------------------


def on_meta():
    with torch.device("meta"):
        model = make()
    return shard(model).to_empty(device=here().type)


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("how", ["full", "sharded", "assign"])
def test_meta_device_and_state_dicts(how):
    source, model = make(), on_meta()
    full = StateDictOptions(full_state_dict=True)
    if how == "full":
        set_model_state_dict(model, source.state_dict(), options=full)
    elif how == "sharded":
        set_model_state_dict(model, shard(make()).state_dict())
    else:
        model.load_state_dict(shard(make()).state_dict(), assign=True)
    x = batch(source)
    assert torch.equal(model(x), source(x))
    with torch.no_grad():  # another state, into storages that have been gathered once
        for p in source.parameters():
            p.mul_(1.5)
    set_model_state_dict(model, source.state_dict(), options=full)
    assert torch.equal(model(x), source(x))
    state = get_model_state_dict(model, options=full)
    for i in (0, 2):
        assert torch.equal(stored_bits(state[f"{i}.base.weight"]), stored_bits(source[i].base.weight))


# --- writes between two forwards -------------------------------------------------------------------------------------

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
    assert len(DIFFERENT_SCALES) < 255  # what torch._assert_async takes on CUDA
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


# --- errors ----------------------------------------------------------------------------------------------------------


def shards_that_do_not_fit_raise(case, message):
    linear = nn.Linear(64, 49 if case == "rows" else 64, bias=False).bfloat16().requires_grad_(False)
    if case.startswith("trained"):
        linear = nn.Sequential(linear.requires_grad_(True))
        quantize_(linear, NVFP4TrainingConfig())
        distributed.enable_nvfp4_all_gather(linear)
    else:
        quantize_(linear, NVFP4WeightOnlyConfig())
    placement = (lambda p: Shard(1)) if case == "columns" else None
    fully_shard(linear, shard_placement_fn=placement, reshard_after_forward=2 if "groups" in case else True)
    with pytest.raises(ValueError, match=message):
        linear(torch.randn(2, 64).bfloat16())


@pytest.mark.parametrize(
    ("case", "world", "message"),
    [
        ("rows", 2, r"Linear\(.*out_features=49.*has 49 rows, which 2 ranks .* pad them to 50"),
        ("trained, three ranks", 3, r"NVFP4TrainingLinear\(.*has 64 rows, which 3 ranks .* pad them to 96"),
        ("columns", 2, r"\(64, 64\) of .*Shard\(0\)"),
        ("groups", 4, r"Linear\(.* resharded to groups of 2 of 4 ranks .*reshard_after_forward=True or False"),
        ("trained, groups", 4, r"NVFP4TrainingLinear\(.* resharded to groups of 2 of 4 ranks"),
    ],
)
def test_errors_are_raised_on_every_rank_before_communication(case, world, message):
    run_ranks(shards_that_do_not_fit_raise, world, case, message)


def broadcasts_from_rank_0():
    model = on_meta()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, make().state_dict() if dist.get_rank() == 0 else {}, options=options)


def test_a_state_dict_only_on_rank_0_raises():
    """Rank 0 says why, before it sends what would end the process of a rank with dense buffers."""
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 raised.*broadcast_from_rank0=True makes dense buffers"):
        run_ranks(broadcasts_from_rank_0, 2)
