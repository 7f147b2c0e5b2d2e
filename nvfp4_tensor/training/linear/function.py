"""Call a linear that trains in NVFP4: :func:`linear`, and the autograd function of all training linears.

The steps of one call, of :func:`linear`, of a module or of a group of experts:

1. A :class:`LinearPlan` checks the call, or is that of an earlier call that this one is like.
2. :func:`run` draws random bits and quantizes x, or takes the operands that another linear has made of the same x.
3. The autograd function quantizes the weight, multiplies, and saves codes for the backward.

Autograd and torch.compile see plain tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.training.linear.cache import Pair, share_input, shared_input
from nvfp4_tensor.training.linear.plan import Call, LinearPlan
from nvfp4_tensor.training.recipe import Recipe, resolve


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "nvidia",
    *,
    rng_state: Tensor | None = None,
) -> Tensor:
    """``x @ weight^T + bias``, with the three products of training quantized by a recipe.

    Args:
        x: (..., K).
        weight: (N, K), in the dtype of x (under autocast, bfloat16, float16 or float32); its gradient has its dtype.
        bias: (N,), or None.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits. By default, torch's generator
            provides one if the recipe uses random bits.

    Returns:
        (..., N) in the dtype of x, or of autocast if it is enabled.

    Raises:
        ValueError: if the recipe is unknown or the shapes do not fit.
        TypeError: if the dtypes differ or NVFP4 does not support them.

    >>> w = torch.randn(32, 64, requires_grad=True)
    >>> linear(torch.randn(8, 64), w).sum().backward()
    """
    plan = LinearPlan.of_call(resolve(recipe), x, weight)
    return run(plan, x, weight, bias, rng_state, any_requires_grad(x, weight, bias))


def any_requires_grad(*tensors: Tensor | None) -> bool:
    """Whether a call has to sample the random bits of a backward, even under no_grad.

    The first run of a reentrant checkpoint is under no_grad and has to advance the generator as its second run does:
    otherwise a dropout after it would have different masks in the two runs.
    """
    return any([t is not None and t.requires_grad for t in tensors])


def run(
    plan: LinearPlan,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rng_state: Tensor | None,
    trains: bool,
    user: object = None,
    w: Codes | None = None,
) -> Tensor:
    """Return y (..., N) for the input (..., K) of a call that the plan fits.

    Args:
        rng_state: (seed, offset), or None to draw it if the call uses random bits.
        trains: whether the call has to draw the random bits of a backward.
        user: the module, which shares the operands of the input with other modules.
        w: the codes of the weight, if they are known.
    """
    x = input if input.dtype is plan.dtype else input.to(plan.dtype)
    shares = plan.shares and user is not None and not input.is_leaf
    pair = shared_input(input, plan.input_key, user) if shares else None
    if plan.forward_is_one_op and pair is None and w is None:
        state = rng_state if plan.draws else plan.no_state
        made: list[Pair] | None = [] if shares else None
        y = _apply(x, weight, bias, Call(plan, state, None, None, made))
        if made:
            share_input(input, plan.input_key, user, made[0])
        return y
    state = call_rng_state(plan, trains, rng_state)
    if pair is None or plan.gathered is not None:
        x, x_MK = plan.gather(x)
    if pair is None:
        pair = plan.quantize_input(x_MK, state)
        if shares:
            share_input(input, plan.input_key, user, pair)
    call = Call(plan, state, pair, w)
    if plan.needs(bias):
        return (Products.apply if plan.passing else _apply)(x, weight, bias, call)
    return plan.forward(x, weight, bias, call)[0]


def call_rng_state(plan: LinearPlan, trains: bool, given: Tensor | None) -> Tensor | None:
    """Return the (seed, offset) of one call: the given one, or one from torch's generator; None if nothing uses it.

    The forward passes it to its backward, so that a forward recomputed by a checkpoint has the same random bits.
    """
    if not (plan.recipe.is_stochastic_forward or (trains and plan.recipe.is_stochastic_backward)):
        return None
    if given is not None:
        return given.clone()  # its owner counts steps in place
    return torch.ops.nvfp4.draw_rng_state.default(plan.no_state)


class Products(torch.autograd.Function):
    """fprop, whose derivatives are the recipe's dgrad and wgrad.

    torch.func's transforms are not supported: they need ``setup_context``, which torch.compile rejects (2.13).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        plan = call.plan
        y, saved = plan.forward(x, weight, bias, call)
        ctx.save_for_backward(*saved)
        ctx.call = plan, x.shape, bias.dtype if bias is not None and bias.requires_grad else None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "an NVFP4 training linear has no second derivative, so backward(create_graph=True) is not supported: "
                'use set_recipe(model, forward="bf16", backward="bf16") for it'
            )
        plan, shape, bias_dtype = ctx.call
        dy_MN = dy if len(shape) == 2 else dy.reshape(math.prod(shape[:-1]), dy.shape[-1])
        dx, dw = plan.backward(dy_MN, *ctx.saved_tensors)
        db = None if bias_dtype is None else dy_MN.sum(0, dtype=bias_dtype)
        return dx if dx is None or len(shape) == 2 else dx.view(shape), dw, db, None


_apply = super(torch.autograd.Function, Products).apply  # type: ignore[misc]
"""``Products.apply`` without what it does for torch.func, which takes half of its time: for calls that no transform is
active at, and no argument is wrapped by one."""
