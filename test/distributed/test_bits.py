"""Codes and random bits are independent of the number of ranks, for every recipe."""

import re

import pytest
import torch
import torch.distributed as dist
from helpers.run_ranks import here, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import quantize_

from nvfp4_tensor import distributed
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.ops import composite
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig

pytestmark = pytest.mark.slow

_NVIDIA = RECIPES["nvidia"]
ALL = {
    **RECIPES,
    "row scaled": _NVIDIA.replace(x=_NVIDIA.x.replace(row_scaled=True), dy=_NVIDIA.dy.replace(row_scaled=True)),
    "dense forward": _NVIDIA.dense_forward(),
    "w again": _NVIDIA.replace(keep_w=False),
    "stochastic forward": _NVIDIA.replace(x=_NVIDIA.dy, w=_NVIDIA.w.replace(round_mode="stochastic"), x_t=_NVIDIA.dy_t),
}


def linear(recipe, columns, rows):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(columns, rows, bias=False)).bfloat16().to(here())
    quantize_(model, NVFP4TrainingConfig(ALL[recipe]))
    distributed.seed_rounding(model, seed=5, step=3)
    return model


def batch(tokens, columns, rows):
    generator = torch.Generator().manual_seed(8)
    x, dy = (torch.randn(tokens, size, generator=generator).bfloat16() for size in (columns, rows))
    x[5, 7], dy[-1, 3] = 30.0, -40.0  # amaxes that one rank alone has
    return x.to(here()), dy.to(here())


class Quantized(TorchDispatchMode):
    """What the ops that quantize give, in the order of the calls: per-tensor scales, and codes times block scales."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("nvfp4::train_linear"):
            with self:  # by the ops that it is made of
                return getattr(composite, func._opname)(*args)
        result = func(*args, **(kwargs or {}))
        if name in ("nvfp4::quantize", "nvfp4::quantize_rows"):
            self._codes(*result)
        elif name == "nvfp4::quantize_pair":
            self._codes(*result[:3])
            self._codes(*result[3:])
        elif name in ("nvfp4::fake_quantize", "nvfp4::quantize_activation"):
            self.found.append((result[1], result[0]))
        elif name == "nvfp4::quantize_pair_values":
            values, factor, t, scale_t, factor_t = result
            self.found.append((factor, values))
            self._codes(t, scale_t, factor_t) if scale_t.numel() else self.found.append((factor_t, t))
        return result

    def _codes(self, qdata, scale, factor):
        blocks = layout.unswizzle(scale, qdata.shape[0], qdata.shape[1] // 8).float().repeat_interleave(16, dim=1)
        self.found.append((factor, layout.code_values(layout.unpack(qdata)) * blocks))


def step(model, x, dy):
    x = x.clone().requires_grad_()
    with Quantized() as quantized:
        y = model(x)
        y.backward(dy)
    grad = model[0].weight.grad
    return quantized.found, y.detach(), x.grad, grad.to_local() if isinstance(grad, DTensor) else grad


def piece(t, dim, rank, world):
    return t.chunk(world, dim)[rank]


def codes_are_those_of_one_rank(how):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    sizes = {"tokens": 128, "inputs": 128, "outputs": 256}
    sizes[how] = 128 * world  # whole rotations of 128 for each rank
    tokens, columns, rows = sizes.values()
    for name in ALL:
        x, dy = batch(tokens, columns, rows)
        alone = linear(name, columns, rows)
        expected, y, dx, dw = step(alone, x, dy)
        model = linear(name, columns, rows)
        if how == "tokens":
            distributed.set_token_sharding(model, mesh)
            x, dy, y, dx = (piece(t, 0, rank, world) for t in (x, dy, y, dx))
        else:
            plan = distributed.NVFP4ColwiseParallel() if how == "outputs" else distributed.NVFP4RowwiseParallel()
            parallelize_module(model, mesh, {"0": plan})
            if how == "outputs":
                dy, y, dw = piece(dy, 1, rank, world), piece(y, 1, rank, world), piece(dw, 0, rank, world)
            else:
                x, dx, dw = piece(x, 1, rank, world), piece(dx, 1, rank, world), piece(dw, 1, rank, world)
        found, y_, dx_, dw_ = step(model, x, dy)
        assert len(found) == len(expected) > 0, name
        for i, ((factor, values), (whole_factor, whole)) in enumerate(zip(found, expected, strict=True)):
            of_rows = factor.numel() < whole_factor.numel()
            assert torch.equal(factor, piece(whole_factor, 0, rank, world) if of_rows else whole_factor), (name, i)
            dim = next((d for d in (0, 1) if values.shape[d] != whole.shape[d]), None)
            part = whole if dim is None else piece(whole, dim, rank, world)
            assert torch.equal(values.float(), part.float()), (name, i, tuple(values.shape))
        if how == "tokens":
            dist.all_reduce(dw_)
        for mine, theirs in ((y_, y), (dx_, dx), (dw_, dw)):
            assert (mine.float() - theirs.float()).norm() <= 0.02 * theirs.float().norm(), name


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("how", ["tokens", "outputs", "inputs"])
def test_codes_equal_those_of_one_rank(how, world):
    """Every operand of every product, bit for bit; y, dx and dw up to the order of sums."""
    run_ranks(codes_are_those_of_one_rank, world, how)


class Pair(nn.Module):
    """Two linears of one input, computed in the graph: eager mode on one rank shares it."""

    def __init__(self, columns, rows):
        super().__init__()
        self.q, self.k = nn.Linear(columns, rows, bias=False), nn.Linear(columns, rows, bias=False)

    def forward(self, x):
        x = x * 1
        return torch.cat([self.q(x), self.k(x)], -1)


def pair_of(recipe, seeded):
    torch.manual_seed(7)
    model = Pair(256, 256)
    quantize_(model, NVFP4TrainingConfig(ALL[recipe]))
    if seeded:
        distributed.seed_rounding(model, seed=5, step=3)
    return model


def gradients_of(model, x, dy):
    torch.manual_seed(9)
    x = x.clone().requires_grad_()
    model(x).backward(dy)
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return x.grad, *grads


def gradients_of_a_shared_input(how, seeded):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    x, dy = torch.randn(256, 256), torch.randn(256, 512)
    x, dy = (t.to(here()) for t in (x, dy))
    dist.broadcast(x, 0)
    dist.broadcast(dy, 0)
    for name in ALL:
        dx, *dw = gradients_of(pair_of(name, seeded), x, dy)
        model = pair_of(name, seeded)
        x_, dy_ = x, dy
        if how == "tokens":
            distributed.set_token_sharding(model, mesh)
            x_, dy_, dx = (piece(t, 0, rank, world) for t in (x, dy, dx))
        else:
            plan = distributed.NVFP4ColwiseParallel(output_layouts=Replicate())
            plan = plan if how == "outputs" else distributed.NVFP4RowwiseParallel(input_layouts=Replicate())
            parallelize_module(model, mesh, {"q": plan, "k": plan})
            dw = [piece(t, 0 if how == "outputs" else 1, rank, world) for t in dw]
        dx_, *dw_ = gradients_of(model, x_, dy_)
        for t in dw_ if how == "tokens" else ():
            dist.all_reduce(t)
        for mine, theirs in zip((dx_, *dw_), (dx, *dw), strict=True):
            assert (mine - theirs).norm() <= 0.01 * theirs.norm(), (name, how)


@pytest.mark.parametrize("how, seeded", [("outputs", True), ("outputs", False), ("inputs", True), ("tokens", True)])
def test_linears_with_one_input_have_the_random_bits_of_one_rank(how, seeded):
    run_ranks(gradients_of_a_shared_input, 2, how, seeded)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", ["tokens", "outputs", "inputs"])
def test_codes_on_two_gpus_equal_those_of_one(how):
    run_ranks(codes_are_those_of_one_rank, 2, how, device="cuda")


# --- a run -----------------------------------------------------------------------------------------------------------


def model_of(recipe, seed=7):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).bfloat16()
    quantize_(model, NVFP4TrainingConfig(recipe))
    return model


def losses(recipe, engine, total):
    """Return the losses of a few steps, whose tokens are divided among the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(here().type, (world,))
    model = model_of(recipe).to(here())
    if engine == "FSDP2":
        distributed.enable_nvfp4_all_gather(model)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (model[0], model[2], model):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale a sum
    else:
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, summed)
    distributed.set_token_sharding(model, mesh)
    distributed.seed_rounding(model, seed=11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(4):
        x = torch.randn(total, 64, generator=torch.Generator().manual_seed(step)).bfloat16().to(here())
        distributed.set_step(model, step)
        loss = model(piece(x, 0, rank, world)).float().square().sum() / (total * 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if engine == "FSDP2":
            distributed.precompute_amaxes(model)
        dist.all_reduce(loss)
        found.append(loss.item())
    return found


def summed(state, bucket):
    """DDP's gradients without the division by the ranks."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [("nvidia", "FSDP2"), pytest.param("accurate_eden", "FSDP2", marks=pytest.mark.slow), ("nvidia", "DDP")],
)
def test_losses_agree_on_any_number_of_ranks(recipe, engine):
    """To the order of float32 sums, which moves weights by a bfloat16 step here and there."""
    one, two, four = (run_ranks(losses, world, recipe, engine, 512)[0] for world in (1, 2, 4))
    assert one[-1] < 0.7 * one[0]
    for several in (two, four):
        assert max(abs(a / b - 1) for a, b in zip(several, one, strict=True)) < 2e-3


def a_draw_is_a_seed_a_name_and_a_step():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
    quantize_(model, NVFP4TrainingConfig())
    x = torch.randn(32, 64).bfloat16()
    grads = []
    for step in (0, 1, 0):
        torch.manual_seed(dist.get_rank() + step)  # means nothing here
        distributed.seed_rounding(model, seed=1) if step == 0 else distributed.set_step(model, step)
        model.zero_grad()
        model(x).float().sin().sum().backward()
        grads.append(model[0].weight.grad.clone())
    assert torch.equal(grads[0], grads[2]) and not torch.equal(grads[0], grads[1])
    assert "rounding_state" not in model.state_dict() and not torch.equal(
        model[0].rounding_state, model[1].rounding_state
    )
    return x, grads[0]


def test_random_bits_depend_on_seed_name_and_step():
    (x, one), (_, other) = run_ranks(a_draw_is_a_seed_a_name_and_a_step, 2)
    assert torch.equal(one, other) and x.shape == (32, 64)


# --- errors ----------------------------------------------------------------------------------------------------------


def error_of(case):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    model = model_of(
        "unbiased" if case == "recipes" and rank == 1 else "accurate_eden" if case == "tokens" else "nvidia"
    )
    try:
        if case == "mesh":
            distributed.set_token_sharding(model, init_device_mesh("cpu", (1, dist.get_world_size())))
        elif case == "twice":
            both = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
            for _ in range(2):  # the same ranks again
                distributed.set_token_sharding(model, both["a"])
            distributed.set_token_sharding(model, both["b"], dim=1)
            distributed.set_token_sharding(model, both["b"])
        elif case == "features":
            plan = {"2": distributed.NVFP4ColwiseParallel()}
            model[2] = quantized_linear(64, 48)
            parallelize_module(model, mesh, plan)
        elif case == "plan":
            parallelize_module(nn.Sequential(nn.Linear(32, 32)), mesh, {"0": distributed.NVFP4RowwiseParallel()})
        elif case == "step":
            distributed.set_step(model, 1)
        else:
            distributed.set_token_sharding(model, mesh)
            model(torch.randn(48 + 16 * rank if case == "unequal" else 40, 64).bfloat16()).sum().backward()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def quantized_linear(columns, rows):
    model = nn.Sequential(nn.Linear(columns, rows)).bfloat16()
    quantize_(model, NVFP4TrainingConfig())
    return model[0]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("recipes", "ValueError: the recipe of '0' is nvidia.*on rank 0 and unbiased.*on rank 1"),
        ("mesh", "ValueError: a mesh of one dimension"),
        ("twice", r"ValueError: ranks \[0, 1\] share dimension 0 of 0's tokens already: give one mesh of all"),
        ("tokens", r"ValueError: x\^T has 40 columns in a range of one of 2 ranks.* 128"),
        ("unequal", "RuntimeError: .*ranks have unequal numbers of tokens"),
        ("features", "ValueError: NVFP4TrainingLinear.* has 48 outputs, which 2 ranks"),
        ("plan", "TypeError: NVFP4RowwiseParallel supports linears that train in NVFP4 or have .*, not Linear"),
        ("step", "RuntimeError: 0 has no seed: call distributed.seed_rounding"),
    ],
)
def test_errors_are_raised_on_every_rank(case, message):
    for error in run_ranks(error_of, 2, case):
        assert re.match(message, error), error
