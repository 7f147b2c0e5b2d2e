"""Random parameters, groups, gradients and reloads: each step has the bits of the plain operator on the same state."""

import math
import random

import pytest
import torch
from helpers.bits import assert_same_bits
from helpers.files import saved
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize
from nvfp4_tensor.numerics.optimizer_step import UNBIASED
from nvfp4_tensor.numerics.random_state import rng_state_row
from nvfp4_tensor.ops.schemas import plain
from nvfp4_tensor.training import NVFP4AdamW
from nvfp4_tensor.training.weights import adamw
from nvfp4_tensor.training.weights.headroom import make_headroom
from nvfp4_tensor.training.weights.step_tensors import least_exponent

pytestmark = pytest.mark.slow

SHAPES = [(1, 16), (3, 40), (7, 17), (2, 3, 16), (4, 2, 3, 3), (33, 64), (5,), (16, 8), (130, 48), (0, 32), ()]


def parameter(rng, generator):
    """A dense or an NVFP4 parameter, and whether it is a view of a larger tensor."""
    shape = rng.choice(SHAPES)
    values, dtype = torch.randn(shape, generator=generator), rng.choice([torch.bfloat16, torch.float32])
    values = values * 10.0 ** rng.uniform(-3, 1)
    if rng.random() < 0.4 and len(shape) == 2 and values.numel():
        return nn.Parameter(quantize(values.to(dtype), QuantizeSpec()))
    values = values.to(dtype)
    if rng.random() < 0.3 and values.dim() == 2 and values.numel():  # rows of a larger tensor
        larger = torch.cat((values, values, values))
        values = larger[len(values) : 2 * len(values)]
    return nn.Parameter(values)


def gradient(rng, generator, p):
    kind = rng.choice(["normal", "normal", "sparse", "zero", "none", "huge", "tiny", "decades"])
    if kind == "none":
        return None
    grad = torch.randn(p.shape, generator=generator)
    scale = {"huge": 1e15, "tiny": 1e-18, "zero": 0.0}.get(kind, 10.0 ** rng.uniform(-6, 2))
    grad = grad * scale
    if kind == "sparse":
        grad = grad * (torch.rand(p.shape, generator=generator) < 0.1)
    if kind == "decades":
        grad = grad * 10 ** (torch.rand(p.shape, generator=generator) * 12 - 6)
    return grad.to(p.dtype)


def parts(p, state):
    """Copies of the weight and the moments of a parameter, as the operators take them."""
    weight = p.detach()
    weight = [weight.qdata, weight.scale, weight.per_tensor_scale] if isinstance(p, NVFP4Tensor) else [weight]
    rows, columns = (len(p), math.prod(p.shape[1:])) if adamw.is_coded(p) else (1, p.numel())
    if not adamw.is_coded(p):
        moments = [state[name].flatten() if state else torch.zeros(columns) for name in adamw.DENSE]
        return [t.clone() for t in (weight[0].flatten(), *moments)]
    blocks = -(-columns // 16)
    widths = [8 * blocks, blocks] * 2
    zeros = [torch.zeros(rows, width, dtype=torch.uint8) for width in widths]
    moments = [state[name] for name in adamw.CODES] if state else zeros
    weight = weight if len(weight) > 1 else [weight[0].reshape(rows, columns)]
    return [t.clone() for t in (*weight, moments[0], moments[1].view(torch.float8_e4m3fn), *moments[2:])]


def stepped(p, old, group, index, count, seed):
    """The parts after a step by the numbers and the random state that the contract has."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    size = UNBIASED * lr * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    least = least_exponent(group["eps"])
    numbers = torch.tensor([1, beta1, 1 - beta1, beta2, 1 - beta2, size, 1 - lr * decay, least], dtype=torch.float32)
    rng_state = torch.tensor(rng_state_row("adamw", seed, str(index), count))
    weight, moments = (old[:3], old[3:]) if isinstance(p, NVFP4Tensor) else (old[:1], old[1:])
    grad = p.grad.flatten() if len(moments) == 2 else p.grad.reshape(len(p), -1)
    op = plain.adamw_step_vector if len(moments) == 2 else plain.adamw_step
    (plain.adamw_step_codes if len(weight) == 3 else op)(*weight, grad, *moments, numbers, rng_state, 0)
    return old


def options(rng):
    return {
        "lr": 10.0 ** rng.uniform(-6, -1), "betas": rng.choice([(0.9, 0.999), (0.0, 0.9), (0.9, 0.95), (0.5, 0.0)]),
        "weight_decay": rng.choice([0.0, 0.1]), "eps": rng.choice([1e-8, 0.0, 1e-3]),
    }  # fmt: skip


def trial(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parameters = [parameter(rng, generator) for _ in range(rng.randint(1, 5))]
    cut = rng.randint(0, len(parameters))
    groups = [{"params": part, **options(rng)} for part in (parameters[:cut], parameters[cut:]) if part]

    def new():
        return NVFP4AdamW([{**group, "params": list(group["params"])} for group in groups], seed=seed)

    optimizer = new()
    for p in parameters:
        if isinstance(p, NVFP4Tensor) and p.numel():
            make_headroom(p)  # as the first step would
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.3:
            state, optimizer = saved(optimizer.state_dict()), new()
            optimizer.load_state_dict(state)
        for group in optimizer.param_groups:  # as a scheduler does
            group["lr"] *= rng.choice([1.0, 1.0, 0.5])
        before = [parts(p, optimizer.state.get(p, {})) for p in parameters]
        for p in parameters:
            p.grad = gradient(rng, generator, p)
        optimizer.step()
        where = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for index, (p, old) in enumerate(zip(parameters, before, strict=True)):
            state = optimizer.state.get(p, {})
            if p.grad is not None and p.numel():
                old = stepped(p, old, where[id(p)], index, int(state["step"]), seed)
            assert_same_bits(parts(p, state), old)


@pytest.mark.parametrize("seed", range(60))
def test_steps_of_any_parameters(seed):
    trial(seed)
