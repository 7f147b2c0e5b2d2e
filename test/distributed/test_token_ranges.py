"""Tokens of which a rank has several ranges, and sequences gathered as codes: bits are those of one process."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, on_devices, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, distributed
from nvfp4_tensor.matmul.product import decode_values
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, set_recipe
from nvfp4_tensor.training.linear import function, fused

pytestmark = pytest.mark.slow

_NVIDIA = RECIPES["nvidia"]
ALL = {
    **RECIPES,
    "row scaled": _NVIDIA.replace(x=_NVIDIA.x.replace(row_scaled=True), dy=_NVIDIA.dy.replace(row_scaled=True)),
    "stochastic x": _NVIDIA.replace(x=_NVIDIA.x.replace(round_mode="stochastic")),
    "dense forward": _NVIDIA.dense_forward(),
}
K, N = 64, 512


def linear(recipe):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(K, N, bias=False)).bfloat16().to(here())
    quantize_(model, NVFP4TrainingConfig(recipe))
    distributed.seed_rounding(model, seed=5, step=3)
    return model


def whole_step(batch, sequence):
    generator = torch.Generator().manual_seed(8)
    x, dy = (torch.randn(batch, sequence, size, generator=generator).bfloat16() for size in (K, N))
    x[0, 5, 7], dy[-1, -1, 3] = 30.0, -40.0  # amaxes that one rank alone has
    return x.to(here()), dy.to(here())


class Recorded:
    """The operands of a step in the order in which they are made: factors, and values without them.

    All linears quantize each operand by its own op here, as sharded ones do.
    """

    def __enter__(self):
        self._patched = pytest.MonkeyPatch()
        for name in ("quantizes_input", "fits"):
            self._patched.setattr(fused, name, lambda *arguments: False)
        self.found, self._real = [], (function.quantize_left_operands, function.gather_operands)
        function.quantize_left_operands = lambda *args, **how: self._record(self._real[0](*args, **how))
        function.gather_operands = lambda *args: self._record(self._real[1](*args), instead=True)
        return self

    def __exit__(self, *error):
        function.quantize_left_operands, function.gather_operands = self._real
        self._patched.undo()

    def _record(self, pair, instead=False):
        if instead:
            self.found.pop()
        self.found.append([operand and self._values(operand) for operand in pair])
        return pair

    def _values(self, operand):
        values, factor = decode_values(operand)
        return factor, values.float()


def step(model, x, dy):
    x = x.clone().requires_grad_()
    with Recorded() as recorded:
        y = model(x)
        y.backward(dy)
    grad = model[0].weight.grad
    return recorded.found, y.detach(), x.grad, getattr(grad, "_local_tensor", grad)


def equal_at(found, expected, tokens, name):
    """Compare the operands of x, dy and their transposes at global token offsets."""
    assert len(found) == len(expected) > 0, name
    for i, (mine, whole) in enumerate(zip(found, expected, strict=True)):
        for dim, (part, of_whole) in enumerate(zip(mine, whole, strict=True)):
            assert (part is None) == (of_whole is None), (name, i, dim)
            if part is None:
                continue
            factor = of_whole[0][tokens] if of_whole[0].dim() and dim == 0 else of_whole[0]
            assert torch.equal(part[0], factor), (name, i, dim)
            assert torch.equal(part[1], of_whole[1].index_select(dim, tokens)), (name, i, dim)


def close(mine, theirs, name):
    assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm(), name


def head_tail(sequence, rank, world):
    """The tokens of a rank as torch's own load balancer has them, and their chunks."""
    balancer = _load_balancer._HeadTailLoadBalancer(sequence, world, "cpu")
    return balancer._generate_indices().view(world, -1)[rank].long().to(here()), (rank, 2 * world - 1 - rank)


def context_parallel():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    batch, sequence = 2, 2 * world * 128
    of_sequence, chunks = head_tail(sequence, rank, world)
    tokens = (torch.arange(batch, device=here())[:, None] * sequence + of_sequence).flatten()
    for name, recipe in ALL.items():
        x, dy = whole_step(batch, sequence)
        alone, model = linear(recipe), linear(recipe)
        expected, y, dx, dw = step(alone, x, dy)
        distributed.set_token_sharding(model, mesh, dim=1, chunks=chunks)
        found, y_, dx_, dw_ = step(model, x[:, of_sequence], dy[:, of_sequence])
        equal_at(found, expected, tokens, name)
        dist.all_reduce(dw_)
        for mine, theirs in ((y_, y[:, of_sequence]), (dx_, dx[:, of_sequence]), (dw_, dw)):
            close(mine, theirs, name)
    return len(model[0].sharding.for_input((batch, sequence // world)).tokens.ranges)


@on_devices
def test_head_and_tail_of_each_sequence(device):
    """Rank 0 has the first and the last chunk: 2 sequences' are 3 ranges. Rank 1 has two that lie together."""
    assert run_ranks(context_parallel, 2, device=device) == [3, 2]


def batch_and_sequence():
    """Four ranks: the batch over two, and chunks of the sequence over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    of_sequence, chunks = head_tail(64, cp, 2)
    rows = torch.arange(4).chunk(2)[dp]
    tokens = (rows[:, None] * 64 + of_sequence).flatten()
    x, dy = whole_step(4, 64)
    alone, model = linear("nvidia"), linear("nvidia")
    expected, *_ = step(alone, x, dy)
    distributed.set_token_sharding(model, mesh["cp"], dim=1, chunks=chunks)
    distributed.set_token_sharding(model, mesh["dp"])
    found, *_ = step(model, x[rows][:, of_sequence], dy[rows][:, of_sequence])
    equal_at(found, expected, tokens, "nvidia")
    return model[0].sharding.for_input((2, 32)).tokens.ranges


def test_a_batch_and_its_sequences():
    found = run_ranks(batch_and_sequence, 4)
    assert found[0] == ((0, 16), (48, 32), (112, 16)) and found[3] == ((128 + 16, 32), (192 + 16, 32))


# --- sequence parallelism --------------------------------------------------------------------------------------------


def plan():
    return {"0": distributed.NVFP4ColwiseParallel(input_layouts=Shard(1))}


def gather_sequences_as_codes():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    batch, sequence = 2, 128 * world
    everything = torch.arange(batch * sequence, device=here())
    for name, recipe in ALL.items():
        x, dy = whole_step(batch, sequence)
        alone, model = linear(recipe), linear(recipe)
        expected, y, dx, dw = step(alone, x, dy)
        parallelize_module(model, mesh, plan())
        found, y_, dx_, dw_ = step(model, x.chunk(world, 1)[rank], dy.chunk(world, 2)[rank].contiguous())
        equal_at(found[:1], expected[:1], everything, name)
        close(y_, y.chunk(world, 2)[rank], name)
        close(dx_, dx.chunk(world, 1)[rank], name)
        close(dw_, dw.chunk(world, 0)[rank], name)


@on_devices
@pytest.mark.parametrize("world", [2, 4])
def test_a_sequence_gathered_as_codes_equals_one_process(world, device):
    if device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    run_ranks(gather_sequences_as_codes, world, device=device)


class Sent(TorchDispatchMode):
    """Bytes of what a rank gives to all-gathers."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "_c10d_functional::all_gather_into_tensor":
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def bytes_sent():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x = torch.randn(2, 64, K).bfloat16().chunk(world, 1)[rank]
    found = {}
    trained, frozen = linear("nvidia"), nn.Sequential(nn.Linear(K, N)).bfloat16().requires_grad_(False)
    quantize_(frozen, NVFP4Config())
    for model in (trained, frozen):
        parallelize_module(model, mesh, plan())
    cases = {"trained": (trained, x), "a forward": (trained, x), "frozen": (frozen, x), "uneven": (trained, x[:, :24])}
    for case, (model, given) in cases.items():
        with Sent() as sent, torch.set_grad_enabled(case != "a forward"):
            model(given.contiguous())
        found[case] = sent.bytes / given.numel()
    qkv = nn.ModuleList(linear("nvidia")[0] for _ in range(3))
    parallelize_module(qkv, mesh, {"*": plan()["0"]})
    shared = x.clone().requires_grad_() * 1  # linears share operands of tensors that an autograd graph computed
    with Sent() as sent:
        for each in qkv:
            each(shared)
    found["q, k and v"] = sent.bytes / x.numel()
    set_recipe(trained, forward="bf16")
    with Sent() as sent:
        trained(x)
    return {**found, "bf16": sent.bytes / x.numel()}


def test_bytes_sent():
    """0.28 of bfloat16's for x, twice that with x^T; 24 tokens per rank are incomplete blocks of x^T, sent dense."""
    expected = {"trained": 1.125, "a forward": 0.5625, "frozen": 0.5625, "uneven": 2.0, "bf16": 2.0}
    expected["q, k and v"] = 1.125
    assert run_ranks(bytes_sent, 2) == [expected] * 2


def frozen_codes(config):
    """W4A4 on a gathered sequence: y and dx are those of one process, up to bfloat16 sums."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(K, N)).bfloat16().to(here()).requires_grad_(False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        quantize_(model, config)
    parallelize_module(models[1], mesh, plan())
    x, _ = whole_step(2, 6 * world)
    x.requires_grad_()
    y = models[0](x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    mine = x.detach().chunk(world, 1)[rank].contiguous().requires_grad_()
    y_ = models[1](mine)
    (dx_,) = torch.autograd.grad(y_.float().square().sum(), mine)
    assert torch.equal(y_, y.chunk(world, 2)[rank])
    close(dx_, dx.chunk(world, 1)[rank], "dx")


@on_devices
@pytest.mark.parametrize("row_scaled", [False, True])
def test_frozen_linears(row_scaled, device):
    run_ranks(frozen_codes, 2, NVFP4Config(row_scaled=row_scaled), device=device)


def compiled():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    x, dy = whole_step(2, 32)
    results = []
    for compiles in (False, True):
        model = linear("nvidia")
        parallelize_module(model, mesh, plan())
        apply = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        mine = x.chunk(world, 1)[rank].contiguous().requires_grad_()
        y = apply(mine)
        y.backward(dy.chunk(world, 2)[rank])
        results.append((y.detach(), mine.grad, model[0].weight.grad.to_local()))
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


def test_compiled():
    run_ranks(compiled, 2)


# --- errors ----------------------------------------------------------------------------------------------------------


def error_of(case):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = linear("accurate_eden" if case == "blocks" else "nvidia")
    x = torch.randn(2, 64, K).bfloat16().requires_grad_()
    try:
        if case == "chunks":
            distributed.set_token_sharding(model, mesh, dim=1, chunks=(0, 3))
        else:
            distributed.set_token_sharding(model, mesh, dim=1, chunks=(rank, 2 * world - 1 - rank))
        model(x[0] if case == "rows" else x[:, :63] if case == "odd" else x).sum().backward()
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("chunks", r"the ranks have the chunks \[\(0, 3\), \(0, 3\)\], which do not contain each of the 4 chunks once"),
        ("rows", r"dim=1, but an input has tokens of shape \(64,\)"),
        ("odd", "has 63 tokens on this rank, which is not a multiple of its 2 chunks"),
        ("blocks", r"x\^T has (32|64) columns in a range of one of 2 ranks.* 128"),
    ],
)
def test_errors_are_raised_on_every_rank(case, message):
    for error in run_ranks(error_of, 2, case):
        assert re.search(message, error), error
