"""Forward and backward of one linear that trains in NVFP4: three products, each operand quantized by a recipe.

    y_MN  = x_MK    @ w_NK^T   fprop
    dx_MK = dy_MN   @ w_NK     dgrad
    dw_NK = dy_MN^T @ x_MK     wgrad

The forward's operands are quantized first (:func:`input_operands`, :func:`weight_operand`), outside of autograd.
:class:`_Products` then multiplies them, saves codes, and quantizes dy in its backward: autograd and torch.compile see
plain tensors. ``operands.py`` has how one operand is quantized, on one rank or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.matmul.backends import reads_transposed
from nvfp4_tensor.matmul.product import Left, decode_values, multiply, multiply_across_blocks
from nvfp4_tensor.numerics.codes import Codes, Decoded
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding.layout import UNSHARDED_LINEAR, LinearSharding, compare_token_counts
from nvfp4_tensor.sharding.sequence import GatheredShape, gather_operands, gather_shape_only, gather_tokens
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.operands import (
    Quantized,
    quantize_left_operands,
    quantize_operand,
    rotate_back,
    transpose,
)
from nvfp4_tensor.training.recipe import Recipe, WeightForDx, draws, resolve

DY_T_STREAM, W_FOR_DX_STREAM, X_T_STREAM, W_STREAM = 1, 2, 3, 4
"""Streams of random bits (contract, section 4); x and dy use stream 0. All operands of a call share one rng_state,
because EDEN's rotations must be equal to cancel; no product has two operands of one stream."""


class Needs(NamedTuple):
    """Which gradients the backward will be asked for."""

    dx: bool
    dw: bool
    db: bool


class Operands(NamedTuple):
    """What the forward quantizes; None where the recipe leaves an operand dense, or nothing reads it."""

    x: Quantized | None
    x_t: Codes | None
    w: Codes | None


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
    recipe = resolve(recipe)
    x = autocast(x)
    check_operands(x, weight, "linear")
    needs = needs_of(x, weight, bias)
    x_MK = flat(x)
    rng_state = draw(recipe, trains(x, weight, bias), x, rng_state)
    of_x, x_t = input_operands(InputShard(x_MK), recipe, needs, rng_state)
    operands = Operands(of_x, x_t, weight_operand(weight, recipe, rng_state))
    y_MN = multiply_operands(x_MK, weight, bias, recipe, operands, needs, rng_state)
    return y_MN.view(*x.shape[:-1], weight.shape[0])


# --- arguments -------------------------------------------------------------------------------------------------------


def autocast(x: Tensor) -> Tensor:
    """x in autocast's dtype, if autocast is enabled for its device."""
    device = x.device.type
    if not x.is_floating_point() or device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_operands(x: Tensor, weight: Tensor, name: object) -> None:
    """Raise the errors that :func:`linear` documents, in the name of a function or module."""
    for kind, dtype in (("an input", x.dtype), ("a weight", weight.dtype)):
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{name} takes bfloat16, float16 or float32, not {kind} of {dtype}: cast it first")
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, (x, weight))):
        raise RuntimeError(
            f"{name} does not support transforms of torch.func (vmap, grad, jvp, ...): call it with plain tensors, or "
            'use set_recipe(model, forward="bf16", backward="bf16")'
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"{name} takes an input (..., {weight.shape[-1]}), got {tuple(x.shape)}")
    if x.dtype != weight.dtype and not _autocasts(x.device):
        raise TypeError(
            f"the input of {name} is {x.dtype} and its weight {weight.dtype}: cast one of them, or use torch.autocast"
        )


def needs_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """Which gradients can be asked for: none under no_grad."""
    grad = torch.is_grad_enabled()
    of_bias = bias is not None and bias.requires_grad
    return Needs(grad and x.requires_grad, grad and weight.requires_grad, grad and of_bias)


def trains(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call draws random bits for a backward, under no_grad too.

    The first run of a reentrant checkpoint is under no_grad, and must draw as its second run does: otherwise a dropout
    that follows would have another mask there.
    """
    return any(t is not None and t.requires_grad for t in (x, weight, bias))


def flat(x: Tensor) -> Tensor:
    """x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def draw(recipe: Recipe, backward: bool, like: Tensor, given: Tensor | None = None) -> Tensor | None:
    """A fresh (seed, offset) from torch's generator for one call, or the given one; None if no random bits are used.

    It serves the backward too, so that a forward recomputed by a checkpoint draws the same bits.
    """
    if not (recipe.draws_in_forward or (backward and recipe.draws_in_backward)):
        return None
    if given is not None:
        return given.clone()  # its owner counts steps in place
    # A new tensor for each draw: no compiler pass merges two ops with different arguments.
    return torch.ops.nvfp4.draw_rng_state(torch.empty((2,), dtype=torch.int64, device=like.device))


# --- quantize --------------------------------------------------------------------------------------------------------


class InputShard(NamedTuple):
    """What a call quantizes of its input."""

    x_MK: Tensor
    sharding: LinearSharding = UNSHARDED_LINEAR
    gathered: GatheredShape | None = None
    """The shape that the codes of a sequence shard are gathered to."""


def prepare_input(x: Tensor, recipe: Recipe, needs: Needs, sharding: LinearSharding) -> tuple[Tensor, InputShard]:
    """x as the products take it, and what is quantized of it.

    A sequence shard is gathered as codes if the recipe's products read nothing else of x, and dense otherwise.
    """
    sequence = sharding.sequence_of(x)
    if sequence is not None:
        local = sharding.for_input(x.shape[:-1], local=True)
        specs = _input_specs(recipe, needs)
        if _is_read_as_codes(flat(x), local, needs, *specs):
            return gather_shape_only(x, sequence), InputShard(flat(x), local, GatheredShape.of(x, sequence))
        compare_token_counts(local.x, flat(x), *specs)
        x = gather_tokens(x, sequence)
    return x, InputShard(flat(x), sharding.for_input(x.shape[:-1]))


def _input_specs(recipe: Recipe, needs: Needs) -> tuple[QuantizeSpec | None, QuantizeSpec | None]:
    """The specs of x and, if it is needed, of x^T."""
    return recipe.x, recipe.x_t if needs.dw else None


def _is_read_as_codes(
    x_MK: Tensor, sharding: LinearSharding, needs: Needs, spec: QuantizeSpec | None, spec_t: QuantizeSpec | None
) -> bool:
    if spec is None or (needs.dw and spec_t is None):
        return False
    return sharding.x.fits(x_MK, spec) and (spec_t is None or sharding.x.t.fits(x_MK.t(), spec_t))


def input_operands(
    shard: InputShard, recipe: Recipe, needs: Needs, rng_state: Tensor | None
) -> tuple[Quantized | None, Codes | None]:
    """x (M, K) for fprop and, if it is needed, x^T (K, M) for wgrad, in one pass over x.

    rng_state is passed on only where it matters, so that a compiled graph merges equal quantizations of one x.
    """
    x_MK, sharding, gathered = shard
    spec, spec_t = _input_specs(recipe, needs)
    rng_state = rng_state if draws(spec, spec_t) else None
    if gathered is not None and any([each is not None and each.row_scaled for each in (spec, spec_t)]):
        compare_token_counts(sharding.x, x_MK, spec, spec_t)  # other specs compare with their amaxes
    of_x, x_t = quantize_left_operands(
        x_MK.detach(), spec, spec_t, rng_state, X_T_STREAM, sharding.x, name="x", codes_t=True,
        codes=recipe.w is None or gathered is not None,
    )  # fmt: skip
    assert not isinstance(x_t, Decoded)
    if gathered is not None:
        assert isinstance(of_x, Codes)
        return gather_operands(of_x, x_t, gathered)
    return of_x, x_t


def weight_operand(
    w_NK: Tensor, recipe: Recipe, rng_state: Tensor | None, sharding: LinearSharding = UNSHARDED_LINEAR
) -> Codes | None:
    """The weight's codes, for fprop and for dgrad.

    rng_state is an argument of the op even where it does not matter. Otherwise a compiled graph could move its draw to
    the backward, where layers run in reverse order and would get other random bits than in eager mode.
    """
    if recipe.w is None:
        return None
    return quantize_operand(w_NK.detach(), recipe.w, rng_state, W_STREAM, sharding.w, name="w")


# --- multiply --------------------------------------------------------------------------------------------------------


def multiply_operands(
    x_MK: Tensor,
    w_NK: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    operands: Operands,
    needs: Needs,
    rng_state: Tensor | None,
    sharding: LinearSharding = UNSHARDED_LINEAR,
) -> Tensor:
    """y (M, N) = x @ w^T + bias in the dtype of x; its backward is the recipe's."""
    if not any(needs):
        return fprop(x_MK, w_NK, bias, operands)
    flattened = [part for operand in operands for part in _flatten(operand)]
    return _Products.apply(x_MK, w_NK, bias, recipe, needs, rng_state, sharding, *flattened)


def fprop(x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """y (M, N) = x @ w^T + bias, of the quantized operands where there are any."""
    return multiply(operands.x or x_MK, operands.w or w_NK, x_MK.dtype, bias)


class _Products(torch.autograd.Function):
    """fprop, with the recipe's dgrad and wgrad as its derivative.

    It does not support torch.func's transforms, which need ``setup_context``; torch.compile rejects that (2.13).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        needs: Needs,
        rng_state: Tensor | None,
        sharding: LinearSharding,
        *flattened: Tensor | None,
    ) -> Tensor:
        x_t, w = _unflatten(flattened[3:6]), _unflatten(flattened[6:])
        assert not isinstance(x_t, Decoded) and not isinstance(w, Decoded)
        operands = Operands(_unflatten(flattened[:3]), x_t, w)
        saved = saved_of(x_MK, w_NK, recipe, operands, needs)
        ctx.save_for_backward(rng_state, saved.x, saved.weight, *_flatten(saved.x_t), *_flatten(saved.w))
        ctx.recipe, ctx.needs, ctx.sharding = recipe, needs, sharding
        ctx.shape, ctx.dtypes = w_NK.shape, (x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype)
        y_MN = fprop(x_MK, w_NK, bias, operands)
        return y_MN if operands.w is not None or rng_state is None else _keep_draw_in_forward(y_MN, rng_state)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        rng_state, x, weight, *flattened = ctx.saved_tensors
        x_t, w = _unflatten(flattened[:3]), _unflatten(flattened[3:])
        assert not isinstance(x_t, Decoded) and not isinstance(w, Decoded)
        saved = Saved(x, weight, x_t, w)
        dx, dw = gradients(dy_MN, saved, ctx.recipe, ctx.needs, rng_state, ctx.shape, ctx.dtypes[:2], ctx.sharding)
        db = dy_MN.sum(0, dtype=ctx.dtypes[2]) if ctx.needs.db else None
        return dx, dw, db, None, None, None, None, *[None] * 9


def _keep_draw_in_forward(y: Tensor, rng_state: Tensor) -> Tensor:
    """y, made to depend on the draw in a compiled graph.

    A draw that only the backward reads would move there, where layers run in reverse order (:func:`weight_operand`).
    """
    return torch.where(rng_state[0] == rng_state[0], y, y) if torch.compiler.is_compiling() else y


class Saved(NamedTuple):
    """What a backward reads of its forward; None where it reads something else."""

    x: Tensor | None
    weight: Tensor | None
    x_t: Codes | None
    w: Codes | None


def saved_of(x_MK: Tensor, w_NK: Tensor, recipe: Recipe, operands: Operands, needs: Needs) -> Saved:
    """Codes wherever the recipe's backward reads codes, dense tensors elsewhere."""
    quantizes_again = operands.w is not None and not recipe.keep_w and not isinstance(w_NK, NVFP4Tensor)
    reads_weight = needs.dx and (quantizes_again or not _reads_codes(recipe))
    return Saved(
        x_MK if needs.dw and operands.x_t is None else None,
        w_NK if reads_weight else None,
        operands.x_t,
        operands.w if needs.dx and not reads_weight else None,
    )


def _flatten(operand: Quantized | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if operand is None:
        return None, None, None
    return (operand.values, None, operand.per_tensor_scale) if isinstance(operand, Decoded) else operand


def _unflatten(parts: Sequence[Tensor | None]) -> Quantized | None:
    data, scale, per_tensor_scale = parts
    if data is None or per_tensor_scale is None:
        return None
    return Decoded(data, per_tensor_scale) if scale is None else Codes(data, scale, per_tensor_scale)


# --- backward --------------------------------------------------------------------------------------------------------


def gradients(
    dy_MN: Tensor,
    saved: Saved,
    recipe: Recipe,
    needs: Needs,
    rng_state: Tensor | None,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype],
    sharding: LinearSharding = UNSHARDED_LINEAR,
) -> tuple[Tensor | None, Tensor | None]:
    """dx (M, K) and dw (N, K), in these two dtypes, of dy (M, N); ``shape`` is (N, K)."""
    spec, spec_t = recipe.dy if needs.dx else None, recipe.dy_t if needs.dw else None
    beside_dense = (recipe.w_for_dx == WeightForDx.DENSE and not recipe.rotates_dy_back) or recipe.x_t is None
    dy, dy_t = quantize_left_operands(
        dy_MN, spec, spec_t, rng_state, DY_T_STREAM, sharding.dy, name="dy", codes=beside_dense
    )
    dx = dw = None
    if needs.dx:
        w = _weight_for_dx(saved, recipe, rng_state, sharding, dy_MN)
        dx = _dgrad(dy_MN if dy is None else dy, w, recipe, rng_state, sharding, shape, dtypes[0])
    if needs.dw:
        x_KM = saved.x.t() if saved.x is not None else saved.x_t
        assert x_KM is not None
        dw = multiply(dy_MN.t() if dy_t is None else dy_t, x_KM, dtypes[1])
    return dx, dw


def _weight_for_dx(
    saved: Saved, recipe: Recipe, rng_state: Tensor | None, sharding: LinearSharding, dy_MN: Tensor
) -> Codes | Tensor:
    """What dgrad reads: the dense weight, the saved codes, or codes quantized again."""
    if saved.weight is not None and not _reads_codes(recipe):
        return saved.weight
    w = saved.w
    if saved.weight is not None:
        w = weight_operand(saved.weight, recipe, _read_after(rng_state, dy_MN), sharding)
    assert w is not None
    return w


def _read_after(rng_state: Tensor | None, dy: Tensor) -> Tensor | None:
    """rng_state, made to depend on dy in a compiled graph, even where there is none.

    This keeps the second quantization of a weight in the backward: otherwise the compiler would merge it with the
    forward's, and save its codes after all.
    """
    if not torch.compiler.is_compiling():
        return rng_state
    state = torch.zeros((2,), dtype=torch.int64, device=dy.device) if rng_state is None else rng_state
    return torch.where(dy.reshape(-1)[:1].sum() == 0, state, state)


def _reads_codes(recipe: Recipe) -> bool:
    return recipe.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT)


def _dgrad(
    dy: Left,
    w: Codes | Tensor,
    recipe: Recipe,
    rng_state: Tensor | None,
    sharding: LinearSharding,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """dx (M, K) = dy (M, N) @ w (N, K), with w read as the recipe says; ``shape`` is (N, K)."""
    rows, columns = shape
    if isinstance(recipe.w_for_dx, QuantizeSpec):
        assert isinstance(w, Tensor)
        w_KN = w.t().contiguous()
        return multiply(
            dy, quantize_operand(w_KN, recipe.w_for_dx, rng_state, W_FOR_DX_STREAM, sharding.w.t, name="w"), dtype
        )
    if recipe.rotates_dy_back:
        assert not isinstance(dy, Tensor)
        dy = rotate_back(dy, rows, rng_state, w.dtype if isinstance(w, Tensor) else None, sharding.outputs.rank * rows)
    if isinstance(w, Tensor):
        return multiply(dy, w.t(), dtype)
    if recipe.w_for_dx == WeightForDx.CODES and not isinstance(dy, Tensor) and reads_transposed(w.qdata.device):
        return multiply(dy, transpose(w), dtype)[:, :columns]
    values, factor = (dy, None) if isinstance(dy, Tensor) else decode_values(dy, rows)
    return multiply_across_blocks(values, factor, w, columns, dtype)


def refuse_second_derivative() -> None:
    """Raise in a backward that builds a graph of its own."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "an NVFP4 training linear has no second derivative, so backward(create_graph=True) is not supported: use "
            'set_recipe(model, forward="bf16", backward="bf16") for it'
        )
