"""Experts that train in NVFP4: rows by groups, each with a trainable matrix of its own."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.training.autograd import linear
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
    """Rows ``offs[e-1]..offs[e]`` of x times ``weight[e]^T``: torch._grouped_mm(x, weight.mT, offs), trained.

    Each group is a :func:`linear` of its own, with amaxes of its own: blocks and Hadamard transforms along the tokens
    never mix two experts. Rows behind the last group are zero. offs is read on the host: a GPU is waited for once a
    call, and neither torch.compile(fullgraph=True) nor a CUDA graph takes it.

    Args:
        x: (M, K).
        weight: (E, N, K), of the dtype of x (any of the three under autocast).
        offs: int32 (E,), where each group ends, on the device of x.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits: each expert's follow from it
            and from its number. Without one they are drawn from torch's generator.
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
    ends = _group_ends(x, weight, offs)
    sizes = [end - begin for begin, end in itertools.pairwise([0, *ends, len(x)])]
    *groups, behind = x.split(sizes)
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


def _group_ends(x: Tensor, weight: Tensor, offs: Tensor) -> list[int]:
    if x.dim() != 2 or weight.dim() != 3 or len(weight) == 0 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped_linear takes (M, K) and (E, N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if weight.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"NVFP4 takes experts of bfloat16, float16 or float32, not {weight.dtype}: cast them first")
    if offs.dtype != torch.int32 or offs.shape != weight.shape[:1]:
        raise ValueError(f"offs is int32 ({len(weight)},), where each group ends, not {offs.dtype} {tuple(offs.shape)}")
    ends = offs.tolist()
    if any(begin > end for begin, end in itertools.pairwise([0, *ends, len(x)])):
        raise ValueError(f"offs are the ends of groups in order, from 0 to the {len(x)} rows of x, not {ends}")
    return ends
