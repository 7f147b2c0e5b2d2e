"""Forward and backward of an unsharded linear in few ops, for the recipes and devices where these compute all of it.

``train_linear_backward`` is the whole backward. In eager mode ``train_linear_forward`` is the whole forward, if the
input is not quantized yet. Otherwise, and in compiled graphs, ``quantize_pair_values`` quantizes x and x^T, and
``train_linear`` quantizes w and multiplies. The bits are the same. A small linear takes as long as the calls of these
ops and the Python around them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.matmul.backends import multiplies_codes, reads_transposed
from nvfp4_tensor.numerics.codes import Codes, Decoded
from nvfp4_tensor.ops.composite.training import X_STREAM, X_T_STREAM
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.recipe import Recipe, WeightForDx


def quantizes_input(recipe: Recipe, device: torch.device) -> bool:
    """Whether these ops compute all of an unsharded linear: from codes of all operands, without FP4 tensor cores."""
    return recipe.packed.has_ops and not multiplies_codes(device)


def fits(recipe: Recipe, x: Codes | Decoded | None, x_t: Codes | None) -> bool:
    """Whether x and x^T are what :func:`quantize_input` returns, for :func:`multiply_operands`."""
    return recipe.packed.has_ops and isinstance(x, Decoded) and x_t is not None


def quantize_input(x_MK: Tensor, recipe: Recipe, rng_state: Tensor | None) -> tuple[Decoded, Codes]:
    """Quantize x (M, K) for fprop and x^T for wgrad. rng_state is None if neither uses random bits."""
    packed = recipe.packed
    values, factor, qdata, scale, per_tensor_scale = torch.ops.nvfp4.quantize_pair_values.default(
        x_MK, None, None, rng_state, packed.x, packed.x_t, True, 0, 0, 0, 0, X_T_STREAM, X_STREAM
    )
    return Decoded(values, factor), Codes(qdata, scale, per_tensor_scale)


class Settings(NamedTuple):
    """What calls have in common that agree in recipe, device and dtypes."""

    forward: tuple[Any, ...]
    """The last arguments of ``train_linear_forward``: specs of x, x^T and w, and the dtype of y."""
    backward: tuple[Any, ...]
    """The last arguments of ``train_linear_backward``: specs and dtypes."""
    saves_codes: bool
    """Whether to save the codes of the weight; if not, the backward quantizes it again."""


def settings_of(
    recipe: Recipe, device: torch.device, dtype: torch.dtype | int, dtype_w: torch.dtype | int, saves_codes: bool
) -> Settings:
    """Return the settings of calls with x of ``dtype`` and a weight of ``dtype_w``: dtypes, or their numbers."""
    packed = recipe.packed
    transposes_w = recipe.w_for_dx == WeightForDx.CODES and reads_transposed(device)
    forward = packed.x, packed.x_t, packed.w, dtype
    return Settings(forward, (packed.dy, packed.dy_t, packed.w, transposes_w, dtype, dtype_w), saves_codes)


def multiply_operands(
    x: Tensor,
    w_NK: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    x_operand: Decoded,
    x_t: Codes,
    w: Codes | None,
    rng_state: Tensor | None,
    needs_db: bool,
) -> Tensor:
    """Compute y (..., N) = x (..., K) @ w^T + bias in the dtype of x, with the recipe's backward.

    w: the codes of the weight, or None to quantize it now. The backward reads these codes, or quantizes the weight
    again without ``recipe.keep_w``.
    """
    saves_codes = recipe.keep_w or isinstance(w_NK, NVFP4Tensor)
    settings = settings_of(recipe, x.device, x.dtype, w_NK.dtype, saves_codes)
    if not torch.compiler.is_compiling():
        return _Products.apply(x, w_NK, bias, (settings, needs_db, rng_state, x_operand, x_t, w))
    w_parts = w or (None, None, None)
    return _TracedProducts.apply(x, w_NK, bias, settings, needs_db, rng_state, *x_operand, *x_t, *w_parts)


class _Products(torch.autograd.Function):
    """As the function of this name in ``function.py``, in eager mode.

    One tuple, ``call``, holds all that autograd does not differentiate, because each argument costs host time: the
    arguments of :func:`_forward` after the bias.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
        return _forward(ctx, x, w_NK, bias, *call)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dy), None


class _Linear(_Products):
    """The same from the dense x on, in eager mode.

    ``call``: settings, needs_db, whether the recipe uses random bits, the (seed, offset) or None to draw it, and a list
    that receives x and x^T.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, call: tuple) -> Tensor:
        settings, needs_db, draws, rng_state, operands = call
        y, state, values, factor, *codes = torch.ops.nvfp4.train_linear_forward.default(
            x, w_NK, bias, rng_state, *settings.forward
        )
        operands += Decoded(values, factor), Codes(*codes[:3])
        saved = state if draws else None  # as other paths save: a checkpoint compares with them
        _save(ctx, x, w_NK, bias, settings, needs_db, saved, codes[:3], codes[3:])
        return y


def _without_func(function: type[torch.autograd.Function]) -> Callable[..., Tensor]:
    """Return ``function.apply`` without what it does for torch.func, which takes half of its time.

    No transform may be active, and no argument be wrapped by one.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


apply_products, apply_linear = _without_func(_Products), _without_func(_Linear)


class _TracedProducts(torch.autograd.Function):
    """The same for torch.compile, which passes tensors one by one."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        settings: Settings,
        needs_db: bool,
        rng_state: Tensor | None,
        values: Tensor,
        factor: Tensor,
        *codes: Tensor | None,
    ) -> Tensor:
        x_t = Codes(*codes[:3])  # type: ignore[arg-type]
        w = None if codes[3] is None else Codes(*codes[3:])  # type: ignore[arg-type]
        return _forward(ctx, x, w_NK, bias, settings, needs_db, rng_state, Decoded(values, factor), x_t, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, dy), *(None,) * 11


def _forward(
    ctx: Any,
    x: Tensor,
    w_NK: Tensor,
    bias: Tensor | None,
    settings: Settings,
    needs_db: bool,
    rng_state: Tensor | None,
    x_operand: Decoded,
    x_t: Codes,
    w: Codes | None,
) -> Tensor:
    """Multiply, and save what the backward reads. Without w, quantize the weight."""
    (values, factor), (*_, spec_w, dtype) = x_operand, settings.forward
    shape = x.shape
    if len(shape) != 2:
        values = values.view(shape)  # the op returns y of that shape: a view could not be written in place
    if w is None:
        y, *w_parts = torch.ops.nvfp4.train_linear.default(values, factor, w_NK, bias, rng_state, spec_w, dtype)
    else:
        y, w_parts = torch.ops.nvfp4.matmul.default(values, factor, *w, bias, shape[-1], False, dtype), w
    _save(ctx, x, w_NK, bias, settings, needs_db, rng_state, x_t, w_parts)
    return y


def _save(
    ctx: Any,
    x: Tensor,
    w_NK: Tensor,
    bias: Tensor | None,
    settings: Settings,
    needs_db: bool,
    rng_state: Tensor | None,
    x_t: Sequence[Tensor],
    w: Sequence[Tensor],
) -> None:
    """Save the backward op's arguments in order: of the weight, its codes or itself."""
    if settings.saves_codes:
        ctx.save_for_backward(rng_state, *x_t, None, *w)
    else:
        ctx.save_for_backward(rng_state, *x_t, w_NK, None, None, None)
    ctx.call = settings.backward, x.shape, bias.dtype if needs_db and bias is not None else None


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dw and db."""
    raise_on_double_backward()
    arguments, shape, bias_dtype = ctx.call
    dy_MN = dy if len(shape) == 2 else dy.reshape(math.prod(shape[:-1]), dy.shape[-1])
    dx, dw = torch.ops.nvfp4.train_linear_backward.default(dy_MN, *ctx.saved_tensors, *arguments)
    db = None if bias_dtype is None else dy_MN.sum(0, dtype=bias_dtype)
    return dx if len(shape) == 2 else dx.view(shape), dw, db


def raise_on_double_backward() -> None:
    """Raise a RuntimeError in a backward that builds a graph (``create_graph=True``)."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "an NVFP4 training linear has no second derivative, so backward(create_graph=True) is not supported: use "
            'set_recipe(model, forward="bf16", backward="bf16") for it'
        )
