"""One linear that trains in NVFP4: three products, each operand quantized as a recipe says.

What is quantized comes first (:func:`operands_of`), then the product with its derivative (:class:`_Products`): autograd
and torch.compile see plain tensors, and codes are what is saved for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding.layout import Place
from nvfp4_tensor.sharding.sequence import Whole, gathered, gathered_operands, whole_in_name
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.operands import (
    Left,
    Operand,
    Values,
    decoded,
    multipliable,
    product,
    product_across,
    quantized,
    reads_transposed,
    rotated_back,
    transposed,
)
from nvfp4_tensor.training.linear.sharded_operands import compare_tokens, multipliable_at, quantized_at
from nvfp4_tensor.training.recipe import Recipe, WeightForDx, draws, resolve

DY_T_STREAM, W_FOR_DX_STREAM, X_T_STREAM, W_STREAM = 1, 2, 3, 4
"""Streams of random bits (contract, section 4) beside 0, which x and dy have. A call has one rng_state, because EDEN's
rotations have to be alike to cancel; no product has two operands of one stream."""


class Needs(NamedTuple):
    """Which gradients the backward will be asked for."""

    dx: bool
    dw: bool
    db: bool


class Operands(NamedTuple):
    """What the forward quantizes; None where the recipe leaves it dense, or nobody needs it."""

    x: Operand | Values | None
    x_t: Operand | None
    w: Operand | None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "nvidia",
    *,
    rng_state: Tensor | None = None,
) -> Tensor:
    """``x @ weight^T + bias`` with the three products of training quantized by a recipe.

    Args:
        x: (..., K).
        weight: (N, K), of the dtype of x (any of the three under autocast); its gradient has its dtype.
        bias: (N,), or None.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits; drawn from torch's generator
            where a recipe takes some.

    Returns:
        (..., N) in the dtype of x, or of autocast where that is on.

    Raises:
        ValueError: an unknown recipe, shapes that do not fit.
        TypeError: dtypes that do not go together, or that NVFP4 does not take.

    >>> w = torch.randn(32, 64, requires_grad=True)
    >>> linear(torch.randn(8, 64), w).sum().backward()
    """
    recipe = resolve(recipe)
    x = autocast(x)
    check_operands(x, weight, "linear")
    needs = needs_of(x, weight, bias)
    rows = flat(x)
    rng_state = draw(recipe, trains(x, weight, bias), x, rng_state)
    of_x = input_operands(Taken(rows), recipe, needs, rng_state)
    operands = Operands(*of_x, weight_operand(weight, recipe, rng_state))
    y = multiply(rows, weight, bias, recipe, operands, needs, rng_state)
    return y.view(*x.shape[:-1], weight.shape[0])


# --- arguments -------------------------------------------------------------------------------------------------------


def autocast(x: Tensor) -> Tensor:
    """x in the dtype of autocast, where that is on for its device."""
    device = x.device.type
    if not x.is_floating_point() or device == "meta" or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_operands(x: Tensor, weight: Tensor, name: object) -> None:
    """Raises what :func:`linear` says, in the name of a function or module."""
    for kind, dtype in (("an input", x.dtype), ("a weight", weight.dtype)):
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"{name} takes bfloat16, float16 or float32, not {kind} of {dtype}: cast it first")
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_functorch_wrapped_tensor, (x, weight))):
        raise RuntimeError(
            f"{name} takes no tensors of torch.func (vmap, grad, jvp, ...), whose transforms do not know NVFP4: take "
            'plain tensors, or set_recipe(model, forward="bf16", backward="bf16")'
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
    """Whether a call draws for a backward: under no_grad too, which the first run of a reentrant checkpoint has.

    It draws as its second run does, or a dropout that follows would have another mask there.
    """
    return any(t is not None and t.requires_grad for t in (x, weight, bias))


# --- quantize --------------------------------------------------------------------------------------------------------


def draw(recipe: Recipe, backward: bool, like: Tensor, given: Tensor | None = None) -> Tensor | None:
    """A fresh (seed, offset) from torch's generator for one call, or the one given, where it takes random bits.

    The backward's are drawn here too, so that a forward recomputed by a checkpoint draws the same.
    """
    if not (recipe.draws_in_forward or (backward and recipe.draws_in_backward)):
        return None
    if given is not None:
        return given.clone()  # it counts the steps in place
    # A tensor of its own for each draw: no compiler pass folds two ops with different arguments.
    return torch.ops.nvfp4.draw_rng_state(torch.empty((2,), dtype=torch.int64, device=like.device))


class Taken(NamedTuple):
    """What a call quantizes of its input."""

    rows: Tensor  # (M, K)
    place: Place | None = None
    """Of what they are a piece."""
    whole: Whole | None = None
    """What their codes are gathered to."""


def flat(x: Tensor) -> Tensor:
    """x (..., K) as rows (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def take(x: Tensor, recipe: Recipe, needs: Needs, place: Place) -> tuple[Tensor, Taken]:
    """x as the products take it, and what is quantized: of one piece of a sequence the whole, and that piece.

    Pieces travel as codes where these are all that the recipe's products read of x; elsewhere as they are.
    """
    sequence = place.sequence_of(x)
    if sequence is not None:
        piece = Taken(flat(x), place.at(x.shape[:-1], piece=True), Whole.of(x, sequence))
        if _is_read_as_codes(piece, recipe, needs):
            return whole_in_name(x, sequence), piece
        assert piece.place is not None
        compare_tokens(piece.place.x, piece.rows, *_input_specs(recipe, needs))
        x = gathered(x, sequence)
    return x, Taken(flat(x), place.at(x.shape[:-1]))


def _input_specs(recipe: Recipe, needs: Needs) -> tuple[QuantizeSpec | None, QuantizeSpec | None]:
    """Of x and, if it is needed, of x^T."""
    return recipe.x, recipe.x_t if needs.dw else None


def _is_read_as_codes(piece: Taken, recipe: Recipe, needs: Needs) -> bool:
    assert piece.place is not None
    at, (x, x_t) = piece.place.x, _input_specs(recipe, needs)
    if x is None or (needs.dw and x_t is None):
        return False
    return at.fits(piece.rows, x) and (x_t is None or at.t.fits(piece.rows.t(), x_t))


def input_operands(
    taken: Taken, recipe: Recipe, needs: Needs, rng_state: Tensor | None
) -> tuple[Operand | Values | None, Operand | None]:
    """x (M, K) for fprop and, if it is needed, x^T for wgrad: in one pass over x.

    rng_state goes in only where it decides something, so that a compiled graph folds equal ones of one x.
    """
    x, place, whole = taken
    specs = _input_specs(recipe, needs)
    rng_state = rng_state if draws(*specs) else None
    operands, codes = (x.detach(), *specs, rng_state, X_T_STREAM), recipe.w is None or whole is not None
    if whole is not None and any(spec is not None and spec.row_scaled for spec in specs):
        assert place is not None
        compare_tokens(place.x, x, *specs)  # others compare with their amaxes
    if place is None:
        of_x, x_t = multipliable(*operands, codes_t=True, codes=codes)
    else:
        of_x, x_t = multipliable_at(place.x, "x", *operands, codes_t=True, codes=codes)
    assert not isinstance(x_t, Values)
    if whole is not None:
        assert isinstance(of_x, Operand)
        return gathered_operands(of_x, x_t, whole)
    return of_x, x_t


def weight_operand(
    weight: Tensor, recipe: Recipe, rng_state: Tensor | None, place: Place | None = None
) -> Operand | None:
    """The weight's codes, for fprop and for dgrad.

    rng_state goes into the op even where it decides nothing there: so a compiled graph cannot put its draw off until
    the backward, where the layers come in the other order and would get other bits than in eager mode.
    """
    if recipe.w is None:
        return None
    operand = weight.detach(), recipe.w, rng_state, W_STREAM
    return quantized(*operand) if place is None else quantized_at(place.w, "w", *operand)


# --- multiply --------------------------------------------------------------------------------------------------------


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    operands: Operands,
    needs: Needs,
    rng_state: Tensor | None,
    place: Place | None = None,
) -> Tensor:
    """x (M, K) @ weight (N, K)^T + bias, differentiable by the recipe's backward: (M, N) of the dtype of x."""
    if not any(needs):
        return fprop(x, weight, bias, operands)
    flat = [part for operand in operands for part in _parts(operand)]
    return _Products.apply(x, weight, bias, recipe, needs, rng_state, place, *flat)


def fprop(x: Tensor, weight: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """x (M, K) @ weight (N, K)^T + bias of what is quantized of them."""
    return product(operands.x or x, operands.w or weight, x.dtype, bias)


def _drawn_with(y: Tensor, rng_state: Tensor) -> Tensor:
    """y, which a compiled graph takes for a function of the draw: so it draws in the forward, as eager mode does.

    A draw that only the backward reads would move there, where the layers come in the other order (as in
    :func:`weight_operand`).
    """
    return torch.where(rng_state[0] == rng_state[0], y, y) if torch.compiler.is_compiling() else y


class _Products(torch.autograd.Function):
    """fprop, whose derivative is the recipe's dgrad and wgrad.

    Not for torch.func's transforms: they want a ``setup_context``, which torch.compile does not take (2.13).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        needs: Needs,
        rng_state: Tensor | None,
        place: Place | None,
        *flat: Tensor | None,
    ) -> Tensor:
        x_t, w = _operand(flat[3:6]), _operand(flat[6:])
        assert not isinstance(x_t, Values) and not isinstance(w, Values)
        operands = Operands(_operand(flat[:3]), x_t, w)
        saved = saved_of(x, weight, recipe, operands, needs)
        ctx.save_for_backward(rng_state, saved.x, saved.weight, *_parts(saved.x_t), *_parts(saved.w))
        ctx.recipe, ctx.needs, ctx.place = recipe, needs, place
        ctx.shape, ctx.dtypes = weight.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = fprop(x, weight, bias, operands)
        return y if operands.w is not None or rng_state is None else _drawn_with(y, rng_state)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        rng_state, x, weight, *flat = ctx.saved_tensors
        x_t, w = _operand(flat[:3]), _operand(flat[3:])
        assert not isinstance(x_t, Values) and not isinstance(w, Values)
        saved = Saved(x, weight, x_t, w)
        dx, dw = gradients(dy, saved, ctx.recipe, ctx.needs, rng_state, ctx.shape, ctx.dtypes[:2], ctx.place)
        db = dy.sum(0, dtype=ctx.dtypes[2]) if ctx.needs.db else None
        return dx, dw, db, None, None, None, None, *[None] * 9


class Saved(NamedTuple):
    """What a backward reads of its forward; None where it reads another."""

    x: Tensor | None
    weight: Tensor | None
    x_t: Operand | None
    w: Operand | None


def saved_of(x: Tensor, weight: Tensor, recipe: Recipe, operands: Operands, needs: Needs) -> Saved:
    """Codes wherever the recipe's backward reads them."""
    again = operands.w is not None and not recipe.keep_w and not isinstance(weight, NVFP4Tensor)
    reads_weight = needs.dx and (again or not _reads_codes(recipe))
    return Saved(
        x if needs.dw and operands.x_t is None else None,
        weight if reads_weight else None,
        operands.x_t,
        operands.w if needs.dx and not reads_weight else None,
    )


def gradients(
    dy: Tensor,
    saved: Saved,
    recipe: Recipe,
    needs: Needs,
    rng_state: Tensor | None,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype],
    place: Place | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx (M, K) and dw (N, K) of a linear whose output's gradient is dy (M, N), in these two dtypes; shape: (N, K)."""
    specs = recipe.dy if needs.dx else None, recipe.dy_t if needs.dw else None
    beside_dense = (recipe.w_for_dx == WeightForDx.DENSE and not recipe.rotates_dy_back) or recipe.x_t is None
    operands = dy, *specs, rng_state, DY_T_STREAM
    if place is None:
        dy_q, dy_t = multipliable(*operands, codes=beside_dense)
    else:
        dy_q, dy_t = multipliable_at(place.dy, "dy", *operands, codes=beside_dense)
    dx = dw = None
    if needs.dx:
        w = _weight_for_dx(saved, recipe, rng_state, place, dy)
        dx = _dgrad(dy if dy_q is None else dy_q, w, recipe, rng_state, place, shape, dtypes[0])
    if needs.dw:
        x_t = saved.x.t() if saved.x is not None else saved.x_t
        assert x_t is not None
        dw = product(dy.t() if dy_t is None else dy_t, x_t, dtypes[1])
    return dx, dw


def _weight_for_dx(
    saved: Saved, recipe: Recipe, rng_state: Tensor | None, place: Place | None, dy: Tensor
) -> Operand | Tensor:
    """What dgrad reads: the weight, the codes saved, or codes made of the weight again."""
    if saved.weight is not None and not _reads_codes(recipe):
        return saved.weight
    w = saved.w
    if saved.weight is not None:
        w = weight_operand(saved.weight, recipe, _read_after(rng_state, dy), place)
    assert w is not None
    return w


def _read_after(rng_state: Tensor | None, dy: Tensor) -> Tensor | None:
    """The state, which a compiled graph takes for a function of dy, even where there is none.

    A weight that is quantized again by it is so in the backward; else it would be folded with the forward's call, or
    moved there, and its codes saved after all.
    """
    if not torch.compiler.is_compiling():
        return rng_state
    state = torch.zeros((2,), dtype=torch.int64, device=dy.device) if rng_state is None else rng_state
    return torch.where(dy.reshape(-1)[:1].sum() == 0, state, state)


def _reads_codes(recipe: Recipe) -> bool:
    return recipe.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT)


def _parts(operand: Operand | Values | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if operand is None:
        return None, None, None
    return (operand.values, None, operand.per_tensor_scale) if isinstance(operand, Values) else operand


def _operand(parts: Sequence[Tensor | None]) -> Operand | Values | None:
    data, scale, per_tensor_scale = parts
    if data is None or per_tensor_scale is None:
        return None
    return Values(data, per_tensor_scale) if scale is None else Operand(data, scale, per_tensor_scale)


def _dgrad(
    dy: Left,
    w: Operand | Tensor,
    recipe: Recipe,
    rng_state: Tensor | None,
    place: Place | None,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """dy (M, N) times w of shape (N, K), read as the recipe says: (M, K)."""
    rows, columns = shape
    if isinstance(recipe.w_for_dx, QuantizeSpec):
        assert isinstance(w, Tensor)
        operand = w.t().contiguous(), recipe.w_for_dx, rng_state, W_FOR_DX_STREAM
        of_w = quantized(*operand) if place is None else quantized_at(place.w.t, "w", *operand)
        return product(dy, of_w, dtype)
    if recipe.rotates_dy_back:
        assert not isinstance(dy, Tensor)
        col0 = 0 if place is None else place.outputs.rank * rows
        dy = rotated_back(dy, rows, rng_state, w.dtype if isinstance(w, Tensor) else None, col0)
    if isinstance(w, Tensor):
        return product(dy, w.t(), dtype)
    if recipe.w_for_dx == WeightForDx.CODES and not isinstance(dy, Tensor) and reads_transposed(w.qdata.device):
        return product(dy, transposed(w), dtype)[:, :columns]
    return product_across(*decoded(dy, rows), w, columns, dtype)


def refuse_second_derivative() -> None:
    """For a backward to begin with."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "an NVFP4 training linear has no second derivative, so backward(create_graph=True) stops here: take it "
            'with set_recipe(model, forward="bf16", backward="bf16")'
        )
