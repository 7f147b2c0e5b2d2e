"""Experts that train in NVFP4: rows by groups, each with a trainable matrix of its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.training.linear.function import (
    InputShard,
    Needs,
    Operands,
    autocast,
    check_operands,
    draw,
    fprop,
    gradients,
    input_operands,
    linear,
    needs_of,
    refuse_second_derivative,
    saved_of,
    trains,
    weight_operand,
)
from nvfp4_tensor.training.recipe import OPERANDS, Recipe, WeightForDx, resolve


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    recipe: Recipe | str = "nvidia",
    *,
    rng_state: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Rows ``offs[e-1]..offs[e]`` of x times ``weight[e]^T``: torch._grouped_mm(x, weight.mT, offs), trained.

    Each group is a :func:`linear` of its own, with amaxes of its own: blocks and Hadamard transforms along the tokens
    never mix two experts. Rows behind the last group are zero. offs is read on the host: a GPU is waited for once a
    call, and a CUDA graph does not take it. A compiled graph takes it whole, and keeps x as it is for the backward,
    where it is quantized again, to the same bits: how long its codes are depends on offs.

    Args:
        x: (M, K).
        weight: (E, N, K), of the dtype of x (any of the three under autocast).
        offs: int32 (E,), where each group ends, on the device of x.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits: each expert's follow from it
            and from its number. Without one it is drawn from torch's generator.
        first_expert: the number of weight[0], where ranks have some of the experts each.

    Returns:
        (M, N) in the dtype of x, or of autocast where that is on.

    Raises:
        ValueError: shapes or offsets that do not fit, an unknown recipe.
        TypeError: dtypes that :func:`linear` does not take.

    >>> w = torch.randn(4, 32, 64, requires_grad=True)
    >>> y = grouped_linear(torch.randn(10, 64), w, torch.tensor([3, 3, 8, 10], dtype=torch.int32))
    """
    recipe = resolve(recipe)
    x = autocast(x)
    _check(x, weight, offs)
    needs = needs_of(x, weight, None)
    rng_state = draw(recipe, trains(x, weight, None), x, rng_state)
    if torch.compiler.is_compiling():
        return _Opaque.apply(x, weight, offs, rng_state, recipe, first_expert, needs)
    *groups, behind = x.split(_sizes(x, offs))
    # unbind, and not weight[e]: one gradient of the whole is stacked, where each index would fill a whole one.
    # The first even without rows, so that there always is a gradient.
    pairs = zip(groups, weight.unbind(), strict=True)
    used = [(e, rows, w) for e, (rows, w) in enumerate(pairs) if len(rows) or e == 0]
    outputs = [linear(rows, w, None, recipe, rng_state=_state_of(rng_state, first_expert + e)) for e, rows, w in used]
    return torch.cat([*outputs, outputs[0].new_zeros((len(behind), weight.shape[1]))])


def _state_of(rng_state: Tensor | None, expert: int) -> Tensor | None:
    """A seed of its own for each expert: odd multiples of one number meet no seed of another expert."""
    if rng_state is None:
        return None
    step = expert * 0x9E3779B97F4A7C15 % 2**64
    seed, offset = rng_state.unbind()
    return torch.stack([seed + (step - 2**64 if step >= 2**63 else step), offset])


def _check(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or len(weight) == 0 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_linear takes (M, K) and (E, N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    check_operands(x, weight, "grouped_linear")
    if offs.dtype != torch.int32 or offs.shape != weight.shape[:1]:
        raise ValueError(f"offs is int32 ({len(weight)},), where each group ends, not {offs.dtype} {tuple(offs.shape)}")


def _sizes(x: Tensor, offs: Tensor) -> list[int]:
    """Of the groups, and of what is behind them."""
    ends = [0, *offs.tolist(), len(x)]
    if any(begin > end for begin, end in itertools.pairwise(ends)):
        raise ValueError(f"offs are the ends of groups in order, from 0 to the {len(x)} rows of x, not {ends[1:-1]}")
    return [end - begin for begin, end in itertools.pairwise(ends)]


# --- compiled --------------------------------------------------------------------------------------------------------


class _Opaque(torch.autograd.Function):
    """The same as one op, and one for its derivative: a graph cannot hold groups whose sizes are data."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        rng_state: Tensor | None,
        recipe: Recipe,
        first_expert: int,
        needs: Needs,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offs, rng_state)
        ctx.recipe, ctx.first_expert, ctx.needs = recipe, first_expert, needs
        return torch.ops.nvfp4.train_grouped(x, weight, offs, rng_state, _packed(recipe), first_expert)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        needs = ctx.needs
        dx, dw = torch.ops.nvfp4.train_grouped_backward(
            dy, *ctx.saved_tensors, _packed(ctx.recipe), ctx.first_expert, needs.dx, needs.dw
        )
        return dx if needs.dx else None, dw if needs.dw else None, *[None] * 5


_ARGUMENTS = "Tensor x, Tensor weight, Tensor offs, Tensor? rng_state, int[] recipe, int first_expert"


@torch.library.custom_op("nvfp4::train_grouped", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _train_grouped(
    x: Tensor, weight: Tensor, offs: Tensor, rng_state: Tensor | None, recipe: list[int], first_expert: int
) -> Tensor:
    y = x.new_zeros((len(x), weight.shape[1]))
    how = _unpacked(*recipe)
    for rows, w, state, of_y in _groups(x, weight, offs, rng_state, first_expert, y):
        of_x, _ = input_operands(InputShard(rows), how, Needs(False, False, False), state)
        of_y.copy_(fprop(rows, w, None, Operands(of_x, None, weight_operand(w, how, state))))
    return y


@_train_grouped.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor, *more: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op(
    "nvfp4::train_grouped_backward",
    mutates_args=(),
    schema=f"(Tensor dy, {_ARGUMENTS}, bool needs_dx, bool needs_dw) -> (Tensor, Tensor)",
)
def _train_grouped_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    rng_state: Tensor | None,
    recipe: list[int],
    first_expert: int,
    needs_dx: bool,
    needs_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx, dw = x.new_zeros(x.shape if needs_dx else 0), weight.new_zeros(weight.shape if needs_dw else 0)
    how, needs, dtypes = _unpacked(*recipe), Needs(needs_dx, needs_dw, False), (x.dtype, weight.dtype)
    outputs = (dx if needs_dx else x, dw if needs_dw else weight)
    for rows, w, state, of_dy, of_dx, of_dw in _groups(x, weight, offs, rng_state, first_expert, dy, *outputs):
        operands = Operands(*input_operands(InputShard(rows), how, needs, state), weight_operand(w, how, state))
        saved = saved_of(rows, w, how, operands, needs)
        for out, gradient in zip(
            (of_dx, of_dw), gradients(of_dy, saved, how, needs, state, w.shape, dtypes), strict=True
        ):
            if gradient is not None:
                out.copy_(gradient)
    return dx, dw


@_train_grouped_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    *_, needs_dx, needs_dw = more
    return x.new_empty(x.shape if needs_dx else 0), weight.new_empty(weight.shape if needs_dw else 0)


def _groups(
    x: Tensor, weight: Tensor, offs: Tensor, rng_state: Tensor | None, first_expert: int, *by_rows_or_expert: Tensor
) -> Iterator[tuple]:
    """Rows, weight and state of each group that has rows, and its part of what else has the rows of x, or experts."""
    begin = 0
    for e, size in enumerate(_sizes(x, offs)[:-1]):
        if size:
            part = slice(begin, begin + size)
            more = [t[e] if t.dim() == 3 else t[part] for t in by_rows_or_expert]
            yield x[part], weight[e], _state_of(rng_state, first_expert + e), *more
        begin += size


def _packed(recipe: Recipe) -> list[int]:
    """What an op takes: a spec of each operand, -1 where it is dense, and how dgrad reads w: below -1, or a spec."""
    specs = [getattr(recipe, name) for name in OPERANDS]
    w_for_dx = recipe.w_for_dx
    of_w = w_for_dx.pack() if isinstance(w_for_dx, QuantizeSpec) else -2 - w_for_dx
    return [*(-1 if spec is None else spec.pack() for spec in specs), of_w]


@functools.cache
def _unpacked(*packed: int) -> Recipe:
    *specs, of_w = packed
    operands: dict[str, Any] = {
        name: None if bits == -1 else QuantizeSpec.unpack(bits) for name, bits in zip(OPERANDS, specs, strict=True)
    }
    return Recipe(w_for_dx=WeightForDx(-2 - of_w) if of_w < -1 else QuantizeSpec.unpack(of_w), **operands)
