"""Random steps of coded moments against float64: a stored number is one of the two neighbours of the exact one."""

import copy
import random

import pytest
import torch
from helpers.files import saved
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize
from nvfp4_tensor.numerics import optimizer_step
from nvfp4_tensor.numerics.optimizer_step import Moments
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


def decoded(p, state):
    """m, v and the weight in float64, as matrices of whole blocks."""
    w = (p.detach().dequantize(torch.float32) if isinstance(p, NVFP4Tensor) else p.detach()).double()
    if not state:
        return None, None, w
    if not adamw.is_coded(p):
        return state["exp_avg"].double(), state["exp_avg_sq"].double(), w
    codes, scale, *rest = (state[name] for name in adamw.CODES)
    moments = Moments(codes, scale.view(torch.float8_e4m3fn), *rest)
    m, v = (f(moments).double().flatten(1) for f in (optimizer_step.first_moment, optimizer_step.second_moment))
    columns = p.numel() // max(len(p), 1)
    return m[:, :columns].reshape(p.shape), v[:, :columns].reshape(p.shape), w


def check(p, group, before, after, grad, count):
    """The update of ``before`` by ``grad`` in float64, against what is stored after it."""
    (m0, v0, w0), (m1, v1, w1) = before, after
    beta1, beta2 = group["betas"]
    g = grad.double()
    zeros = torch.zeros_like(w0)
    m = beta1 * (zeros if m0 is None else m0) + (1 - beta1) * g
    v = beta2 * (zeros if v0 is None else v0) + (1 - beta2) * g * g
    size = group["lr"] * (1 - beta2**count) ** 0.5 / (1 - beta1**count)
    decay = 1 - group["lr"] * group["weight_decay"]
    least = 2.0 ** (least_exponent(group["eps"]) - 127)
    if not adamw.is_coded(p):
        parts = g.abs() if m0 is None else g.abs() + m0.abs()  # which may cancel
        assert ((m1 - m).abs() <= 1e-6 * parts + 1e-37).all() and torch.allclose(v1, v, rtol=1e-5, atol=1e-37)
        new = decay * w0 - size * m / v.clamp(min=least).sqrt()
        step = torch.maximum(w0.abs(), w1.abs()) * (2.0**-7 if p.dtype == torch.bfloat16 else 2.0**-20) + 1e-30
        assert ((w1 - new).abs() <= step + size * 1e-5 * parts / v.clamp(min=least).sqrt()).all()
        return
    columns = p[0].numel()

    def blocks(t):
        return nn.functional.pad(t.reshape(len(t), columns), (0, -columns % 16)).unflatten(-1, (-1, 16))

    m, v, m1, v1, w0, w1 = map(blocks, (m, v, m1, v1, w0, w1))
    inside = blocks(torch.ones_like(g)) > 0
    floor = torch.maximum(v1.amax(dim=-1, keepdim=True) * 2.0**-15, torch.tensor(least, dtype=torch.float64))
    exact = torch.maximum(v, floor)
    assert torch.equal(v1[inside], 2.0 ** v1[inside].log2().round())
    assert ((v1 < 2.0001 * exact) & (v1 > 0.4999 * exact))[inside].all()
    r, stored = ((t / v1.sqrt()).masked_fill(~inside, 0.0) for t in (m, m1))
    limit = r.abs().amax(dim=-1, keepdim=True).clamp(max=21) / 6 * 1.15 + 2.0**-16  # the scale is at most 1/8 more
    assert ((stored - r.clamp(-21, 21)).abs() <= 2.01 * limit + 1e-5 * r.abs())[inside].all()
    new = decay * w0 - optimizer_step.UNBIASED * size * r
    if isinstance(p, NVFP4Tensor):
        scales = p.unswizzled_scale().float().double().unsqueeze(-1) * p.per_tensor_scale.double()
        largest = torch.maximum(new.abs().amax(dim=-1, keepdim=True), w0.abs().amax(dim=-1, keepdim=True))
        step = torch.maximum(2 * scales, largest / 6 * 1.2 * 2)  # two steps: an excess that is kept may be doubled
        clipped = new.clamp(-2688 * p.per_tensor_scale.item(), 2688 * p.per_tensor_scale.item())
        assert ((w1 - clipped).abs() <= 2 * step + 1e-5 * new.abs())[inside].all()
    else:
        precision = 2.0**-7 if p.dtype == torch.bfloat16 else 2.0**-21
        slack = precision * torch.maximum(new.abs(), w0.abs()) + 2e-6 * size * (1 + r.abs())
        assert ((w1 - new).abs() <= slack + 1e-38)[inside].all()


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
        before = [copy.deepcopy(decoded(p, optimizer.state.get(p, {}))) for p in parameters]
        for p in parameters:
            p.grad = gradient(rng, generator, p)
        optimizer.step()
        where = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for p, old in zip(parameters, before, strict=True):
            state = optimizer.state.get(p, {})
            if p.grad is None:
                assert torch.equal(decoded(p, state)[2], old[2])
            elif p.numel():
                check(p, where[id(p)], old, decoded(p, state), p.grad, int(state["step"]))


@pytest.mark.parametrize("seed", range(60))
def test_stored_numbers_are_neighbours_of_exact_ones(seed):
    trial(seed)
