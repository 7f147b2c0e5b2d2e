"""Tensor parallelism with quantized linears: DTensors made from shards and by distribute_tensor, and their products."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.quantization import quantize_
from torchao.testing import utils as torchao_tests

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, quantize, quantize_experts

pytestmark = pytest.mark.slow

CONFIGS = {"weight only": NVFP4WeightOnlyConfig(), "w4a4": NVFP4Config()}
TOLERANCES = {"weight only": 0.01, "w4a4": 0.1}
"""bfloat16 sums apart; and activations that each rank quantizes by the amax of its own columns."""


def error(a, b):
    """Return the relative error over the full tensor."""
    return float((a.double() - b.double()).norm() / b.double().norm())


class Linear(nn.Module):
    """What torchao's test shards: a linear by that name."""

    def __init__(self, columns, rows, dtype):
        super().__init__()
        self.linear = nn.Linear(columns, rows, bias=False, dtype=dtype)

    def forward(self, x):
        return self.linear(x)


def shards_as_torchao_tests_them(config, dtype):
    """The steps of TorchAOTensorParallelTestCase.test_tp on a CPU, with its own functions that shard."""
    torch.manual_seed(5)
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    up, down = Linear(1024, 512, dtype).to(here()), Linear(512, 1024, dtype).to(here())
    x = 100 * torch.randn(16, 1024, dtype=dtype).to(here())
    for m in (up, down):
        quantize_(m, CONFIGS[config])
    expected = down(up(x))
    case = torchao_tests.TorchAOTensorParallelTestCase
    up, down = case.colwise_shard(up, mesh), case.rowwise_shard(down, mesh)
    x = DTensor.from_local(x, mesh, [Replicate()])
    y = down(up(x)).full_tensor()
    assert error(y, expected) < TOLERANCES[config]
    compiled = torch.compile(down, backend="aot_eager")(torch.compile(up, backend="aot_eager")(x)).full_tensor()
    assert error(compiled, y) < TOLERANCES["weight only"]


@on_devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS)
def test_shards_as_torchao_tests_them(config, dtype, device):
    run_ranks(shards_as_torchao_tests_them, 2, config, dtype, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_torchaos_own_cases():
    script = Path(__file__).with_name("torchao_cases.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "OK" in done.stderr, done.stderr[-4000:]
    assert "skipped=" not in done.stderr


def distributes(shape, placement):
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    whole = quantize(torch.randn(shape).bfloat16().to(here()))
    mine = whole if dist.get_rank() == 0 else whole.new_zeros(shape)  # rank 0's is the one that counts
    t = distribute_tensor(mine, mesh, [placement])
    assert isinstance(t._local_tensor, NVFP4Tensor)
    full = t.full_tensor()
    assert isinstance(full, NVFP4Tensor) and torch.equal(full.dequantize(), whole.dequantize())
    assert torch.equal(full.qdata, whole.qdata) and torch.equal(full.per_tensor_scale, whole.per_tensor_scale)
    local = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    assert torch.equal(local._local_tensor.dequantize(), t._local_tensor.dequantize())


def distributes_experts():
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    whole = quantize_experts(torch.randn(4, 48, 64).to(here()) * torch.arange(1, 5, device=here()).view(4, 1, 1))
    mine = whole if dist.get_rank() == 0 else torch.empty_like(whole)
    t = distribute_tensor(mine, mesh, [Shard(0)])
    assert t._local_tensor.per_tensor_scale.shape == (2, 1)
    assert torch.equal(t.full_tensor().dequantize(), whole.dequantize())


@on_devices
def test_experts_over_ranks(device):
    run_ranks(distributes_experts, 2, device=device)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize(
    ("shape", "placement"),
    [
        ((256, 128), Shard(0)),
        ((40, 128), Shard(0)),
        ((50, 128), Shard(0)),
        ((64, 256), Shard(1)),
        ((48, 192), Shard(1)),
        ((40, 50), Replicate()),
    ],
)
def test_distribute_tensor(shape, placement, world):
    run_ranks(distributes, world, shape, placement)


def static_activations():
    """With a calibrated amax, each rank's codes of the activations are those of one rank: sums alone differ."""
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(256, 96, bias=False)).to(here()).requires_grad_(False)
    x = torch.randn(64, 256).to(here())
    quantize_(model, NVFP4Config())
    dynamic = model(x)
    weight = model[0].weight._replace(activation_amax=x.abs().amax())
    assert torch.equal(nn.functional.linear(x, weight), dynamic)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    parallelize_module(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    assert error(model(x), dynamic) < 1e-6


def test_static_activations_of_a_rowwise_plan():
    run_ranks(static_activations, 2)


def follows_a_plan(config):
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 96)).bfloat16().to(here()).requires_grad_(False)
    quantize_(model, CONFIGS[config])
    x = torch.randn(5, 64).bfloat16().to(here()).requires_grad_()
    expected = model(x)
    (expected_dx,) = torch.autograd.grad(expected.float().square().sum(), x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    assert model[0].weight._local_tensor.shape == (256 // dist.get_world_size(), 64)
    model.requires_grad_(False)
    y = model(x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    assert error(y, expected) < TOLERANCES[config] and error(dx, expected_dx) < 2 * TOLERANCES[config]


@on_devices
@pytest.mark.parametrize("config", CONFIGS)
def test_parallelize_module(config, device):
    run_ranks(follows_a_plan, 2, config, device=device)


@on_devices
@pytest.mark.parametrize(("shape", "placement"), [((256, 128), Shard(0)), ((48, 192), Shard(1))])
def test_distribute_tensor_on_two(shape, placement, device):
    run_ranks(distributes, 2, shape, placement, device=device)
