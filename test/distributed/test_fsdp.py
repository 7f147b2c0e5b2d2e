"""FSDP2 with frozen NVFP4 weights: results equal those of one rank, bit for bit; bytes sent are counted."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, distributed, quantize_experts
from nvfp4_tensor.training import NVFP4Optimizer, NVFP4TrainingConfig

pytestmark = pytest.mark.slow

CONFIGS = {
    "weight only": NVFP4WeightOnlyConfig(),
    "16x16": NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(block_rows=16)),
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


def shard(model, **options):
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def batch(model, rows=6, dtype=torch.bfloat16):
    return torch.randn(rows, model[0].base.in_features, generator=torch.Generator().manual_seed(2)).to(here(), dtype)


def same_codes(a, b):
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.tensor_data_names]
    return all(torch.equal(p.view(-1).view(torch.uint8), q.view(-1).view(torch.uint8)) for p, q in pairs)


# --- the step --------------------------------------------------------------------------------------------------------


def steps_are_those_of_one_rank(config, sizes, reshard):
    alone, model = make(config, *sizes), make(config, *sizes)
    shard(model, reshard_after_forward=reshard)
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
        assert not isinstance(full, NVFP4Tensor) or same_codes(full, trained[name])


@on_devices
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("weight only", (64, 512, 48)),  # scales are sent in complete tiles, and in rows
        ("weight only", (50, 512, 256)),  # columns that end within a block
        ("16x16", (64, 256, 64)),
        ("w4a4", (64, 96, 512)),
    ],
)
def test_steps_equal_those_of_one_rank(config, sizes, device):
    """Forward and gradients equal in all bits, and after training the codes are what they were."""
    run_ranks(steps_are_those_of_one_rank, 2, config, sizes, True, device=device)


def test_steps_on_four_ranks_without_resharding():
    run_ranks(steps_are_those_of_one_rank, 4, "weight only", (64, 512, 48), False)


def bytes_sent():
    sent = []
    real = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

    def counted(output_tensor, input_tensor, **how):
        sent.append(input_tensor.numel() * input_tensor.element_size())
        return real(output_tensor, input_tensor, **how)

    setattr(dist, real.__name__, counted)
    linear = nn.Linear(256, 512, bias=False).bfloat16().requires_grad_(False).to(here())
    quantize_(linear, NVFP4WeightOnlyConfig())
    fully_shard(linear)(torch.randn(2, 256).bfloat16().to(here()))
    return sent


@pytest.mark.parametrize("world", [2, 8])
def test_bytes_sent(world):
    """4.5 bits per element, whether scales are sent in tiles (2 ranks) or in rows (8): 0.28125 of bfloat16's.

    And the per-tensor scale, to be compared.
    """
    assert run_ranks(bytes_sent, world) == [[512 // world * 256 * 9 // 16 + 4]] * world


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_bytes_sent_between_gpus():
    assert run_ranks(bytes_sent, 2, device="cuda") == [[256 * 256 * 9 // 16 + 4]] * 2


def holds_its_shard_once():
    linear = nn.Linear(256, 96, bias=False).bfloat16().requires_grad_(False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    fully_shard(linear)
    (param,) = linear._get_fsdp_state()._fsdp_param_group.fsdp_params
    assert param._sharded_param_data.window.stored.qdata.data_ptr() == linear.weight._local_tensor.qdata.data_ptr()
    linear(torch.randn(2, 256).bfloat16())
    gathered = param._unsharded_param
    sizes = [part.untyped_storage().size() for part in (gathered.qdata, gathered.scale)]
    linear.reshard()
    return sizes, [part.untyped_storage().size() for part in (gathered.qdata, gathered.scale)]


def test_a_shard_is_stored_once_and_the_full_weight_is_freed():
    """A root keeps the full weight after the forward; then its codes and its swizzled scales are freed."""
    assert run_ranks(holds_its_shard_once, 2) == [([96 * 128, 128 * 16], [0, 0])] * 2


def experts_are_sharded():
    experts = nn.Module()
    whole = quantize_experts(torch.randn(4, 48, 64).bfloat16())
    experts.w = nn.Parameter(whole.clone(), requires_grad=False)
    fully_shard(experts)
    local = experts.w._local_tensor
    assert local.per_tensor_scale.shape == (4 // dist.get_world_size(), 1)
    experts.unshard()
    assert same_codes(experts.w, whole)


def test_experts_are_sharded_with_their_scales():
    run_ranks(experts_are_sharded, 2)


# --- policies --------------------------------------------------------------------------------------------------------


def offloads_to_the_cpu():
    alone, model = make(), make()
    shard(model, offload_policy=CPUOffloadPolicy(pin_memory=here().type == "cuda"))
    x = batch(alone)
    assert torch.equal(model(x), alone(x)) and torch.equal(model(x), alone(x))


@on_devices
def test_cpu_offload(device):
    run_ranks(offloads_to_the_cpu, 2, device=device)


def mixes_precisions():
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


@on_devices
def test_mixed_precision(device):
    run_ranks(mixes_precisions, 2, device=device)


# --- state -----------------------------------------------------------------------------------------------------------


def on_meta():
    with torch.device("meta"):
        model = make()
    return shard(model).to_empty(device=here().type)


def starts_on_meta(how):
    source = make()
    model = on_meta()
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
    assert all(same_codes(state[f"{i}.base.weight"], source[i].base.weight) for i in (0, 2))


@on_devices
@pytest.mark.parametrize("how", ["full", "sharded", "assign"])
def test_meta_device_and_state_dicts(how, device):
    run_ranks(starts_on_meta, 2, how, device=device)


def differ_in_scale():
    """A write into one rank's shard, as an optimizer that knows nothing of shards makes."""
    linear = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
    quantize_(linear, NVFP4WeightOnlyConfig())
    fully_shard(linear)
    said = []
    for _ in range(2):
        try:
            linear(torch.randn(2, 64).bfloat16())
        except RuntimeError as error:
            said.append(str(error))
        linear.reshard()
        if dist.get_rank() == 1:
            linear.weight._local_tensor.mul_(3)
    try:
        NVFP4Optimizer(linear.parameters(), lr=1.0)
    except ValueError as error:
        said.append(str(error))
    return said


def test_shards_of_different_scales_are_an_error():
    for first, second in run_ranks(differ_in_scale, 2):
        assert "different per-tensor scales" in first and "is a shard of an NVFP4 weight" in second


# --- errors ----------------------------------------------------------------------------------------------------------


def error_of(case):
    rows = {"rows": 49}.get(case, 64)
    linear = nn.Linear(64, rows, bias=False).bfloat16().requires_grad_(False)
    if case.startswith("trained"):
        linear = nn.Sequential(linear.requires_grad_(True))
        quantize_(linear, NVFP4TrainingConfig())
        distributed.enable_nvfp4_all_gather(linear)
    else:
        quantize_(linear, NVFP4WeightOnlyConfig())
    placement = (lambda p: Shard(1)) if case == "columns" else None
    fully_shard(linear, shard_placement_fn=placement, reshard_after_forward=2 if "groups" in case else True)
    try:
        linear(torch.randn(2, 64).bfloat16())
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "world", "message"),
    [
        ("rows", 2, r"Linear\(.*out_features=49.*has 49 rows, which 2 ranks .* pad them to 50"),
        ("three ranks", 3, r"Linear\(.*out_features=64.*has 64 rows, which 3 ranks .* pad them to 66"),
        ("trained, three ranks", 3, r"NVFP4TrainingLinear\(.*has 64 rows, which 3 ranks .* pad them to 96"),
        ("columns", 2, r"\(64, 64\) of .*Shard\(0\)"),
        ("groups", 4, r"Linear\(.* resharded to groups of 2 of 4 ranks .*reshard_after_forward=True or False"),
        ("trained, groups", 4, r"NVFP4TrainingLinear\(.* resharded to groups of 2 of 4 ranks"),
    ],
)
def test_errors_are_raised_on_every_rank_before_communication(case, world, message):
    for said in run_ranks(error_of, world, case):
        assert re.search(message, said), said


def broadcasts_from_rank_0():
    model = on_meta()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        set_model_state_dict(model, make().state_dict() if dist.get_rank() == 0 else {}, options=options)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            raise
        return str(error)


def test_a_state_dict_only_on_rank_0_raises():
    """Rank 0 says why, before it sends what would end the process of a rank with dense buffers."""
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 raised.*broadcast_from_rank0=True makes dense buffers"):
        run_ranks(broadcasts_from_rank_0, 2)
