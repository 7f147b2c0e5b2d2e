"""Tensor parallelism: DTensors of quantized weights, PyTorch's plans and ours, and sequences gathered as codes."""

import pytest
import torch
import torch.distributed as dist
from helpers.bits import relative_error as error
from helpers.run_ranks import here, mesh_of_all, on_ranks
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    distributed,
    quantize,
    quantize_experts,
)
from nvfp4_tensor.distributed import NVFP4ColwiseParallel, NVFP4RowwiseParallel, frozen
from nvfp4_tensor.training import NVFP4TrainingConfig, set_recipe

pytestmark = pytest.mark.slow

CONFIGS = {
    "weight only": NVFP4WeightOnlyConfig(),
    "w4a4": NVFP4Config(),
    "four over six": NVFP4Config(activation_spec=QuantizeSpec(four_over_six="mae")),
    "hadamard": NVFP4Config(
        weight_spec=QuantizeSpec(hadamard_sign=0xD7E8), activation_spec=QuantizeSpec(hadamard_sign=0xD7E8)
    ),
    "row scaled": NVFP4Config(row_scaled=True),
    "stochastic": NVFP4Config(activation_spec=QuantizeSpec(round_mode="stochastic")),
}
TOLERANCES = {"weight only": 0.01, "w4a4": 0.1}
"""bfloat16 sums apart; and activations that each rank quantizes by the amax of its own columns."""


def same(a, b):
    """Whether two NVFP4Tensors have the same codes, block scales and per-tensor scales."""
    pairs = (a.qdata, b.qdata), (a.unswizzled_scale(), b.unswizzled_scale()), (a.row_scale(), b.row_scale())
    return all(torch.equal(p.reshape(-1).view(torch.uint8), q.reshape(-1).view(torch.uint8)) for p, q in pairs)


def mlp(config, dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 96)).to(here(), dtype).requires_grad_(False)
    quantize_(model, CONFIGS[config])
    return model


def y_and_dx(model, x):
    torch.manual_seed(4)
    x = x.detach().contiguous().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


# --- DTensors and PyTorch's plans ------------------------------------------------------------------------------------


@on_ranks(2, 4, cuda=True)
def test_distribute_tensor():
    """Complete tiles of scales, parts of one, columns, and experts: what is joined again has the bits of rank 0's."""
    x = torch.randn(256, 256).bfloat16().to(here())
    experts = torch.randn(4, 48, 64).to(here()) * torch.arange(1, 5, device=here()).view(4, 1, 1)
    for whole, placement in (
        *((quantize(x[:rows, :128].contiguous()), Shard(0)) for rows in (256, 40, 50)),
        *((quantize(x[:48, :columns].contiguous()), Shard(1)) for columns in (256, 192)),
        (quantize(x[:40, :50].contiguous()), Replicate()),
        (quantize_experts(experts), Shard(0)),
    ):
        mine = whole if dist.get_rank() == 0 else torch.empty_like(whole)
        t = distribute_tensor(mine, mesh_of_all(), [placement])
        local = t._local_tensor
        assert isinstance(local, NVFP4Tensor) and torch.equal(t.full_tensor().dequantize(), whole.dequantize())
        assert whole.dim() == 3 or same(t.full_tensor(), whole), (whole.shape, placement)
        if whole.dim() == 3 and dist.get_world_size() == 2:
            assert local.per_tensor_scale.shape == (2, 1)
        from_own = distribute_tensor(whole, mesh_of_all(), [placement], src_data_rank=None)
        assert torch.equal(from_own._local_tensor.dequantize(), local.dequantize())


@on_ranks(2)
def test_static_activations_of_a_rowwise_plan():
    """With a calibrated amax, each rank's codes of the activations are those of one rank: sums alone differ."""
    model = nn.Sequential(nn.Linear(256, 96, bias=False)).to(here()).requires_grad_(False)
    x = torch.randn(64, 256).to(here())
    quantize_(model, NVFP4Config())
    dynamic = model(x)
    weight = model[0].weight._replace(activation_amax=x.abs().amax())
    assert torch.equal(nn.functional.linear(x, weight), dynamic)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    parallelize_module(model, mesh_of_all(), {"0": RowwiseParallel(input_layouts=Replicate())})
    assert error(model(x), dynamic) < 1e-6


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("config", TOLERANCES)
def test_plans_of_pytorch(config):
    model, x = mlp(config), torch.randn(5, 64).bfloat16().to(here())
    expected = y_and_dx(model, x)
    parallelize_module(model, mesh_of_all(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight._local_tensor.shape == (128, 64)
    model.requires_grad_(False)
    for mine, whole, factor in zip(y_and_dx(model, x), expected, (1, 2), strict=True):
        assert error(mine, whole) < factor * TOLERANCES[config]


# --- our plans on frozen weights -------------------------------------------------------------------------------------


def outliers(*shape):
    """Activations whose amax lies in the columns of one rank alone, as that of each row does."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[..., 5] *= 30
    return x.to(here(), torch.bfloat16)


@on_ranks(2, 4, cuda=True)
@pytest.mark.parametrize("config", list(CONFIGS)[1:])
def test_activations_of_a_rowwise_plan_have_the_codes_of_one_process(config):
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model, spec = mlp(config), mlp(config), CONFIGS[config].activation
    parallelize_module(model, mesh_of_all(), {"0": NVFP4ColwiseParallel(), "2": NVFP4RowwiseParallel()})
    width = 256 // world
    assert model[2].weight._local_tensor.shape == (96, width)
    hidden = outliers(24, 256)
    torch.manual_seed(3)  # the draws of stochastic rounding
    whole = quantize(hidden, spec)
    torch.manual_seed(3)
    mine = hidden.chunk(world, 1)[rank].contiguous()
    found = frozen.activations(mine, model[2].weight.to_local(), spec, model[2].sharding)
    assert same(found, whole[:, rank * width : (rank + 1) * width])
    expected, calls = y_and_dx(alone, outliers(24, 64)), [model]
    if config == "row scaled" and world == 2 and here().type == "cpu":
        calls.append(torch.compile(model, backend="aot_eager", fullgraph=True))
    for call in calls:
        for ours, theirs in zip(y_and_dx(call, outliers(24, 64)), expected, strict=True):
            assert error(ours, theirs) < (0.03 if config == "stochastic" else 0.01)


@on_ranks(2, 3)
def test_weight_only():
    """3 ranks cannot share 64 inputs in blocks, but they can share 6 outputs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 6), nn.Linear(64, 96)).requires_grad_(False)
    quantize_(model, NVFP4WeightOnlyConfig())
    x = torch.randn(5, 64)
    expected = model[0](x), model[1](x)
    parallelize_module(model, mesh_of_all(), {"0": NVFP4ColwiseParallel()})
    assert model[0].weight._local_tensor.shape == (6 // world, 64)
    assert "weight=NVFP4 (rne, 1x16" in repr(model[0])
    assert error(model[0](x), expected[0].chunk(world, 1)[rank]) < 1e-6
    if world == 3:
        with pytest.raises(ValueError, match="has 64 inputs, which 3 ranks cannot share in complete blocks of 16"):
            parallelize_module(model, mesh_of_all(), {"1": NVFP4RowwiseParallel()})
        return
    parallelize_module(model, mesh_of_all(), {"1": NVFP4RowwiseParallel()})
    assert error(model[1](x.chunk(world, 1)[rank]), expected[1]) < 1e-6


@on_ranks(2)
@pytest.mark.parametrize(
    ("case", "message"),
    [("recipes", "the recipe of {} is nvidia.*on rank 0 and unbiased.*on rank 1"),
     ("specs", "the NVFP4 weight of {} is .*on rank 0 and .*row scales.*on rank 1"),
     ("outputs", r"NVFP4TrainingLinear\(.* has 48 outputs, which 2 ranks cannot share in complete blocks of 16"),],
)  # fmt: skip
def test_ranks_that_differ_raise_before_communication(case, message):
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(64, 48 if case == "outputs" else 96)).bfloat16()
    if case == "specs":
        quantize_(model.requires_grad_(False), NVFP4Config(row_scaled=bool(rank)))
    else:
        quantize_(model, NVFP4TrainingConfig("unbiased" if rank and case == "recipes" else "nvidia"))
    with pytest.raises(ValueError, match=message.format("'a linear of 64 inputs and 96 outputs'")):
        parallelize_module(model, mesh_of_all(), {"0": NVFP4ColwiseParallel()})


# --- sequences gathered as codes -------------------------------------------------------------------------------------


def sequence_plan():
    return {"0": NVFP4ColwiseParallel(input_layouts=Shard(1))}


def trained():
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(64, 512, bias=False)).bfloat16().to(here())
    quantize_(model, NVFP4TrainingConfig())
    distributed.seed_rounding(model, seed=5, step=3)
    return model


class Sent(TorchDispatchMode):
    """Bytes of what a rank gives to all-gathers."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "_c10d_functional::all_gather_into_tensor":
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_bytes_sent():
    """0.28 of bfloat16's for x, twice that with x^T; 24 tokens per rank are incomplete blocks of x^T, sent dense."""
    x = torch.randn(2, 64, 64).bfloat16().chunk(2, 1)[dist.get_rank()].contiguous()
    model, served = trained(), nn.Sequential(nn.Linear(64, 512)).bfloat16().requires_grad_(False)
    quantize_(served, NVFP4Config())
    qkv = nn.ModuleList(trained()[0] for _ in range(3))
    for module, plan in ((model, sequence_plan()), (served, sequence_plan()), (qkv, {"*": sequence_plan()["0"]})):
        parallelize_module(module, mesh_of_all(), plan)

    def sent(call, x, train=True):
        with Sent() as counted, torch.set_grad_enabled(train):
            call(x)
        return counted.bytes / x.numel()

    shared = x.clone().requires_grad_() * 1  # linears share operands of tensors that an autograd graph computed
    assert sent(model, x) == sent(lambda x: [each(x) for each in qkv], shared) == 1.125
    assert sent(model, x, train=False) == sent(served, x) == 0.5625
    assert sent(model, x[:, :24].contiguous()) == 2.0
    set_recipe(model, forward="bf16")
    assert sent(model, x) == 2.0


@on_ranks(2, cuda=True)
@pytest.mark.parametrize("config", ["w4a4", "row scaled"])
def test_frozen_linears_of_a_sequence(config):
    """y is that of one process, dx up to bfloat16 sums."""
    rank, models = dist.get_rank(), [mlp(config)[:1] for _ in range(2)]
    parallelize_module(models[1], mesh_of_all(), sequence_plan())
    x = outliers(2, 12, 64)
    y, dx = y_and_dx(models[0], x)
    y_, dx_ = y_and_dx(models[1], x.chunk(2, 1)[rank])
    assert torch.equal(y_, y.chunk(2, 2)[rank]) and error(dx_, dx.chunk(2, 1)[rank]) < 0.01


@on_ranks(2)
def test_a_compiled_sequence_has_the_bits_of_an_eager_one():
    model, x = trained(), outliers(2, 32, 64).chunk(2, 1)[dist.get_rank()]
    parallelize_module(model, mesh_of_all(), sequence_plan())
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        distributed.set_step(model, 3)
        model.zero_grad()
        results.append([*y_and_dx(call, x), model[0].weight.grad.to_local()])
    assert all(map(torch.equal, *results))
