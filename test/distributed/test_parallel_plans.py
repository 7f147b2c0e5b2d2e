"""Our plans of tensor parallelism on quantized linears: activations get the codes that one process makes."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, distributed, quantize
from nvfp4_tensor.distributed import frozen
from nvfp4_tensor.training import NVFP4TrainingConfig

pytestmark = pytest.mark.slow

CONFIGS = {
    "w4a4": NVFP4Config(),
    "four over six": NVFP4Config(activation_spec=QuantizeSpec(four_over_six="mae")),
    "hadamard": NVFP4Config(
        weight_spec=QuantizeSpec(hadamard_sign=0xD7E8), activation_spec=QuantizeSpec(hadamard_sign=0xD7E8)
    ),
    "row scaled": NVFP4Config(activation_spec=QuantizeSpec(row_scaled=True)),
    "stochastic": NVFP4Config(activation_spec=QuantizeSpec(round_mode="stochastic")),
}


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def same(a, b):
    """Whether two NVFP4Tensors have the same codes, block scales and per-tensor scales."""
    pairs = (a.qdata, b.qdata), (a.unswizzled_scale(), b.unswizzled_scale()), (a.row_scale(), b.row_scale())
    return all(torch.equal(p.reshape(-1).view(torch.uint8), q.reshape(-1).view(torch.uint8)) for p, q in pairs)


def mlp(config, dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 96)).to(here(), dtype).requires_grad_(False)
    quantize_(model, CONFIGS[config])
    return model


def outliers(rows, columns, dtype=torch.bfloat16):
    """Activations whose amax lies in the columns of one rank alone, as that of each row does."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2))
    x[:, 5] *= 30
    return x.to(here(), dtype)


def rowwise_codes(config, compiled):
    """This rank's codes, and the columns that are its own of those of one process; and both outputs and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    alone, model = mlp(config), mlp(config)
    plan = {"0": distributed.NVFP4ColwiseParallel(), "2": distributed.NVFP4RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    hidden, spec = outliers(24, 256), CONFIGS[config].activation
    mine = hidden.chunk(world, 1)[rank].contiguous()
    torch.manual_seed(3)  # the draws of stochastic rounding
    whole = quantize(hidden, spec)
    torch.manual_seed(3)
    found = frozen.activations(mine, model[2].weight.to_local(), spec, model[2].sharding)
    width = 256 // world
    assert same(found, whole[:, rank * width : (rank + 1) * width])
    apply = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    results = []
    for m in (alone, apply):
        torch.manual_seed(4)
        x = outliers(24, 64).requires_grad_()
        y = m(x)
        y.float().square().mean().backward()
        results.append((y.detach(), x.grad))
    for one, several in zip(*results, strict=True):
        assert error(several, one) < (0.03 if config == "stochastic" else 0.01), config
    return model[2].weight._local_tensor.shape


@on_devices
@pytest.mark.parametrize("config", CONFIGS)
def test_activations_of_a_rowwise_plan_equal_one_process(config, device):
    assert run_ranks(rowwise_codes, 2, config, False, device=device) == [(96, 128)] * 2


@pytest.mark.parametrize("config", ["w4a4", pytest.param("row scaled", marks=pytest.mark.slow)])
def test_compiled(config):
    run_ranks(rowwise_codes, 2, config, True)


def test_on_four_ranks():
    assert run_ranks(rowwise_codes, 4, "w4a4", False) == [(96, 64)] * 4


def weight_only():
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 6), nn.Linear(64, 96)).to(here()).requires_grad_(False)
    quantize_(model, NVFP4WeightOnlyConfig())
    x = torch.randn(5, 64).to(here())
    expected = model[0](x), model[1](x)
    plan = {"0": distributed.NVFP4ColwiseParallel(), "1": distributed.NVFP4RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    assert isinstance(model[0].weight._local_tensor, NVFP4Tensor)
    assert "weight=NVFP4 (rne, 1x16" in repr(model[0])
    rank, world = dist.get_rank(), dist.get_world_size()
    assert error(model[0](x), expected[0].chunk(world, 1)[rank]) < 1e-6
    assert error(model[1](x.chunk(world, 1)[rank]), expected[1]) < 1e-6


@pytest.mark.parametrize("world", [2, 3])
def test_weight_only(world):
    run_ranks(weight_only if world == 2 else three_ranks, world)


def differing(case):
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    model = nn.Sequential(nn.Linear(64, 96)).bfloat16()
    if case == "recipes":
        quantize_(model, NVFP4TrainingConfig("unbiased" if rank else "nvidia"))
    else:
        quantize_(model.requires_grad_(False), NVFP4Config(row_scaled=bool(rank)))
    try:
        parallelize_module(model, mesh, {"0": distributed.NVFP4ColwiseParallel()})
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "recipes",
            "the recipe of 'a linear of 64 inputs and 96 outputs' is nvidia.*on rank 0 and unbiased.*on rank 1",
        ),
        (
            "specs",
            "the NVFP4 weight of 'a linear of 64 inputs and 96 outputs' is .*on rank 0 and .*row scales.*on rank 1",
        ),
    ],
)
def test_ranks_that_differ_raise_before_communication(case, message):
    for error in run_ranks(differing, 2, case):
        assert re.search(message, error), error


def three_ranks():
    """3 ranks cannot share 64 inputs in blocks, but they can share 6 outputs."""
    mesh = init_device_mesh("cpu", (3,))
    model = nn.Sequential(nn.Linear(64, 6), nn.Linear(64, 96)).requires_grad_(False)
    quantize_(model, NVFP4WeightOnlyConfig())
    parallelize_module(model, mesh, {"0": distributed.NVFP4ColwiseParallel()})
    assert model[0].weight._local_tensor.shape == (2, 64)
    with pytest.raises(ValueError, match="has 64 inputs, which 3 ranks cannot share in complete blocks of 16"):
        parallelize_module(model, mesh, {"1": distributed.NVFP4RowwiseParallel()})
