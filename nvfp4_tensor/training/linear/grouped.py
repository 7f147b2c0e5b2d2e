"""Grouped linears that train in NVFP4: each group of rows is multiplied by its own expert's matrix."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.random_state import rng_state_of_expert
from nvfp4_tensor.training.linear.function import any_requires_grad, call_rng_state, run
from nvfp4_tensor.training.linear.plan import Call, LinearPlan
from nvfp4_tensor.training.recipe import Recipe, resolve


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    recipe: Recipe | str = "nvidia",
    *,
    rng_state: Tensor | None = None,
    first_expert: int = 0,
) -> Tensor:
    """Multiply rows ``offs[e-1]..offs[e]`` of x by ``weight[e]^T``, with the three products quantized by a recipe.

    This is torch._grouped_mm(x, weight.mT, offs) for training. Each group is a :func:`linear` with its own amaxes:
    blocks and Hadamard transforms along the tokens never mix two experts. Rows of the result after the last group are
    zero. offs is read on the host, so each call waits for the GPU, and a CUDA graph does not support it. In a compiled
    graph the call is one op, which saves x unquantized and quantizes it again in the backward, to the same codes,
    because the size of the codes depends on offs.

    Args:
        x: (M, K).
        weight: (E, N, K), in the dtype of x (under autocast, bfloat16, float16 or float32).
        offs: int32 (E,), the end of each group, on the device of x.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits. Each expert derives its own
            from it and from its number. By default, rng_state is sampled from torch's generator.
        first_expert: the number of weight[0] among all experts, if experts are sharded over ranks.

    Returns:
        (M, N) in the dtype of x, or of autocast if it is enabled.

    Raises:
        ValueError: if shapes or offsets do not fit, or the recipe is unknown.
        TypeError: if :func:`linear` does not support the dtypes.

    >>> w = torch.randn(4, 32, 64, requires_grad=True)
    >>> y = grouped_linear(torch.randn(10, 64), w, torch.tensor([3, 3, 8, 10], dtype=torch.int32))
    """
    recipe = resolve(recipe)
    _check(x, weight, offs)
    plan, trains = LinearPlan.of_call(recipe, x, weight, name="grouped_linear"), any_requires_grad(x, weight)
    x = x.to(plan.dtype)
    state = call_rng_state(plan, trains, rng_state)
    if torch.compiler.is_compiling():  # one op: graphs do not support data-dependent sizes of groups
        return torch.ops.nvfp4.train_grouped.default(x, weight, offs, state, recipe.packed, first_expert)
    *groups, remainder = x.split(_sizes(x, offs))
    # unbind stacks one gradient for all experts; weight[e] would allocate a gradient of the full size for each.
    # The first expert is used even without rows, so that there always is a gradient.
    pairs = zip(groups, weight.unbind(), strict=True)
    used = [(e, rows, w) for e, (rows, w) in enumerate(pairs) if len(rows) or e == 0]
    outputs = [run(plan, rows, w, None, rng_state_of_expert(state, first_expert + e), trains) for e, rows, w in used]
    return torch.cat([*outputs, outputs[0].new_zeros((len(remainder), weight.shape[1]))])


def _check(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or len(weight) == 0 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_linear takes (M, K) and (E, N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if offs.dtype != torch.int32 or offs.shape != weight.shape[:1]:
        raise ValueError(f"offs is int32 ({len(weight)},), the end of each group, not {offs.dtype} {tuple(offs.shape)}")


def _sizes(x: Tensor, offs: Tensor) -> list[int]:
    """Return the number of rows of each group, and of the rows after the last group."""
    ends = [0, *offs.tolist(), len(x)]
    if any(begin > end for begin, end in itertools.pairwise(ends)):
        raise ValueError(f"offs are the ends of groups in order, from 0 to the {len(x)} rows of x, not {ends[1:-1]}")
    return [end - begin for begin, end in itertools.pairwise(ends)]


# --- compiled --------------------------------------------------------------------------------------------------------


_ARGUMENTS = "Tensor x, Tensor weight, Tensor offs, Tensor? rng_state, int[] recipe, int first_expert"


@torch.library.custom_op("nvfp4::train_grouped", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def _train_grouped(
    x: Tensor, weight: Tensor, offs: Tensor, rng_state: Tensor | None, recipe: list[int], first_expert: int
) -> Tensor:
    y, plan = x.new_zeros((len(x), weight.shape[1])), LinearPlan(_unpacked(*recipe), x, weight, (False, False))
    for x_MK, w_NK, state, y_MN in _groups(x, weight, offs, rng_state, first_expert, y):
        y_MN.copy_(plan.forward(x_MK, w_NK, None, Call(plan, state, plan.quantize_input(x_MK, state)))[0])
    return y


@_train_grouped.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor, *more: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, recipe, first_expert = inputs
    ctx.save_for_backward(*tensors)
    ctx.more = recipe, first_expert, *ctx.needs_input_grad[:2]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw = torch.ops.nvfp4.train_grouped_backward.default(dy, *ctx.saved_tensors, *ctx.more)
    _, _, needs_dx, needs_dw = ctx.more
    return dx if needs_dx else None, dw if needs_dw else None, None, None, None, None


_train_grouped.register_autograd(_backward, setup_context=_save)


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
    plan = LinearPlan(_unpacked(*recipe), x, weight, (needs_dx, needs_dw))
    outputs = (dx if needs_dx else x, dw if needs_dw else weight)
    for x_MK, w_NK, state, dy_MN, *out in _groups(x, weight, offs, rng_state, first_expert, dy, *outputs):
        _, x_t = plan.quantize_input(x_MK, state)
        found = plan.backward(dy_MN, *plan.to_save(state, x_MK, x_t, w_NK, None))
        for target, gradient in zip(out, found, strict=True):
            if gradient is not None:
                target.copy_(gradient)
    return dx, dw


@_train_grouped_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
    *_, needs_dx, needs_dw = more
    return x.new_empty(x.shape if needs_dx else 0), weight.new_empty(weight.shape if needs_dw else 0)


def _groups(
    x: Tensor, weight: Tensor, offs: Tensor, rng_state: Tensor | None, first_expert: int, *by_rows_or_expert: Tensor
) -> Iterator[tuple]:
    """Yield x, weight and rng_state of each group that has rows, and its slice of each further tensor.

    A further tensor has the rows of x (two dimensions) or the experts (three).
    """
    begin = 0
    for e, size in enumerate(_sizes(x, offs)[:-1]):
        if size:
            rows = slice(begin, begin + size)
            more = [t[e] if t.dim() == 3 else t[rows] for t in by_rows_or_expert]
            yield x[rows], weight[e], rng_state_of_expert(rng_state, first_expert + e), *more
        begin += size


@functools.cache
def _unpacked(*packed: int) -> Recipe:
    return Recipe.unpack(packed, keep_w=False)  # the backward quantizes the weight again
