"""Gradients of the unbiased recipes: the mean of many draws is the gradient taken with unquantized dy.

N draws give each element's mean and its standard error. An unbiased element lies within z standard errors of what is
expected; with z = 6.5 and 1,536 elements the chance of one outside is below 1536 * 8e-11 = 1.3e-7 a test.
"""

import functools

import pytest
import torch
from helpers.reference_operands import quantized

from nvfp4_tensor import training
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.training import RECIPES

pytestmark = pytest.mark.slow

M, N, K = 32, 16, 32
DRAWS = 1024
Z = 6.5


def case():
    generator = torch.Generator().manual_seed(5)
    x, w, dy = (torch.randn(s, generator=generator) for s in ((M, K), (N, K), (M, N)))
    return x.requires_grad_(), w.requires_grad_(), dy


@functools.cache
def gradients(recipe, draws=DRAWS):
    """(draws, ...) of dx and of dw in float64, and both as they are with dy unquantized."""
    x, w, dy = case()
    torch.manual_seed(11)
    # A fresh forward for each: x^T may be drawn, too.
    seen = [torch.autograd.grad(training.linear(x, w, None, recipe), (x, w), dy) for _ in range(draws)]
    dx, dw = (torch.stack(of_all).double() for of_all in zip(*seen, strict=True))
    return (dx, dw), expected(x.detach(), w.detach(), dy, recipe)


def expected(x, w, dy, recipe):
    of_w = quantized(w, recipe.w, None, 0)
    dx = dy.double() @ (of_w.values(K) * of_w.per_tensor_scale.double())
    if recipe.x_t.is_eden:  # drawn itself, so that its expectation is x
        return dx, dy.double().t() @ x.double()
    sign = recipe.x_t.hadamard_sign
    x_t = quantized(x.t(), recipe.x_t, None, 0)
    dy_t = reference.hadamard(dy.t(), sign).double()  # rounded to bfloat16 before anything is drawn
    return dx, dy_t @ (x_t.values() * x_t.per_tensor_scale.double()).t()


def standard_errors(drawn, mean):
    """How many of its own standard errors each element's mean is off."""
    error = drawn.std(dim=0) / len(drawn) ** 0.5
    # What one draw cannot move: half an ulp of the float32 result, and 2^-16 of a step that 16 bits cut off.
    exact = mean.abs() * 2.0**-22 + drawn.std(dim=0) * 2.0**-12
    return ((drawn.mean(dim=0) - mean).abs() - exact).clamp(min=0) / error


@pytest.mark.parametrize("which", [0, 1], ids=["dx", "dw"])
def test_unbiased_gradients_have_the_exact_expectation(which):
    """NVIDIA's scales clip the largest element of about half the blocks: a bias that the same check finds."""
    of_unbiased, of_nvidia = (
        standard_errors(*(t[which] for t in gradients(RECIPES[r]))) for r in ("unbiased", "nvidia")
    )
    assert of_unbiased.max() < Z < of_nvidia.max()


@pytest.mark.parametrize("which", [0, 1], ids=["dx", "dw"])
def test_eden_is_unbiased_and_its_error_is_less(which):
    """Its values of dy are rounded to bfloat16 behind the rotation back: that much dx may be off."""
    drawn, mean = gradients(RECIPES["accurate_eden"])
    slack = 2.0**-9 * mean[which].abs().max()
    error = drawn[which].std(dim=0) / DRAWS**0.5
    assert ((drawn[which].mean(dim=0) - mean[which]).abs() < Z * error + slack).all()
    of_sr, of_sr_mean = gradients(RECIPES["unbiased"], draws=64)
    mse = (drawn[which] - mean[which]).square().mean()
    mse_sr = (of_sr[which] - of_sr_mean[which]).square().mean()
    assert mse < 0.6 * mse_sr if which == 0 else mse < mse_sr
