"""Steps of AdamW by an operator, on copies, and comparisons of what they give."""

import itertools
import math

import torch

from helpers.bits import assert_same_bits
from nvfp4_tensor import QuantizeSpec, quantize

SEED = 5


def moments(rows, columns, device="cpu"):
    blocks = -(-columns // 16)
    widths = (8 * blocks, blocks, 8 * blocks, blocks)
    r, r_scale, v, v_exponent = (torch.zeros(rows, width, dtype=torch.uint8, device=device) for width in widths)
    return [r, r_scale.view(torch.float8_e4m3fn), v, v_exponent]


def hyper(step, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, grad_scale=0.7, least=74.0):
    beta1, beta2 = betas
    size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return torch.tensor([grad_scale, beta1, 1 - beta1, beta2, 1 - beta2, size, 1 - lr * weight_decay, least])


def weight_of(kind, rows, columns):
    values = torch.randn(rows, columns) * 0.05
    if kind != "codes":
        return [values.to(kind)]
    w = quantize(values, QuantizeSpec())
    return [w.qdata, w.scale, w.per_tensor_scale]


def run(ops, weight, grad, state, step, device="cpu", row0=0, lr=1e-3, **options):
    """Run a step on copies on the device, and return the new weight and moments on the CPU."""
    op = ops.adamw_step if len(weight) == 1 else ops.adamw_step_codes
    weight, state = ([t.to(device, copy=True) for t in tensors] for tensors in (weight, state))
    numbers = hyper(step, lr, **options).to(device)
    op(*weight, grad.to(device), *state, numbers, torch.tensor([SEED, step], device=device), row0)
    return [t.cpu() for t in weight], [t.cpu() for t in state]


def vector_step(ops, weight, grad, moments, step, device, element0=0, lr=1e-3):
    weight, moments = weight.to(device, copy=True), [m.to(device, copy=True) for m in moments]
    numbers, rng_state = hyper(step, lr).to(device), torch.tensor([SEED, step], device=device)
    ops.adamw_step_vector(weight, grad.to(device), *moments, numbers, rng_state, element0)
    return [weight.cpu()], [m.cpu() for m in moments]


def assert_same(got, expected, rows=slice(None)):
    """Of (weight, state), each a list of tensors; the expected ones' rows."""
    right = [each[rows] if each.dim() else each for each in itertools.chain(*expected)]
    assert_same_bits(itertools.chain(*got), right)
