"""Views of NVFP4Tensors, and copies in another order of rows.

A view has the sizes, strides and offset of the same view of a dense tensor, which torch computes for a tensor without
data. What those strides show is the view: all codes of its tensor, or a window of them (``tensor/windows.py``). The
stored last dimension consists of blocks of 16 that share a scale; a view that would split one raises a RuntimeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from nvfp4_tensor.dispatch.table import aten, contiguous_clone, implements, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.methods import OFFLOAD
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, view_of
from nvfp4_tensor.tensor.windows import SplitsABlock, Window, dense_views


@implements([
    aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default,
    aten._reshape_alias.default, aten.as_strided.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.unbind.int, aten.unfold.default, aten.diagonal.default,
])  # fmt: skip
def _view(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Any:
    t, *rest = args
    if func is aten.t.default and t.window is None and t.dim() == 2:  # 17 us instead of 42, in each training linear
        return return_and_correct_aliasing(func, args, kwargs, t._replace(transposed=not t.transposed))
    is_traced = type(t._stored().qdata) is not Tensor
    try:
        dense = dense_views(func, t, is_traced, *rest, **kwargs)
    except RuntimeError as error:
        if t.transposed and func in (aten.view.default, aten._unsafe_view.default):
            raise unsupported(
                func, "the codes of a transposed tensor cannot be copied to the order of its rows"
            ) from error
        raise
    views = tree_map(lambda like: _viewed(func, t, like), dense)
    return return_and_correct_aliasing(func, args, kwargs, views)


def _viewed(func: Op, t: NVFP4Tensor, like: Tensor) -> NVFP4Tensor:
    """Return the view of t with the sizes, strides and offset of ``like``."""
    try:
        view = view_of(t._stored(), (like.size(), like.stride(), like.storage_offset()), t.transposed, t.__dict__)
    except SplitsABlock as error:
        raise unsupported(func, str(error)) from None
    if isinstance(view.window, Window) and view.window.splits and t.spec.hadamard_sign is not None:
        raise unsupported(func, "a Hadamard-transformed block cannot be split")
    return view


@implements(aten.view.dtype)
def _view_dtype(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    if args[1] == args[0].dtype:
        return return_and_correct_aliasing(func, args, kwargs, args[0]._replace())
    raise unsupported(func, f"its codes cannot be viewed as another dtype. {OFFLOAD}")


# --- copies in another order of rows ---------------------------------------------------------------------------------


def rebuilt(t: NVFP4Tensor, parts: tuple[Tensor, Tensor, Tensor | None], **changes: Any) -> NVFP4Tensor:
    """Return t with new codes (..., bytes), unswizzled scales (..., blocks) and scales per row (..., 1) or None.

    The result shares no storage with t.
    """
    qdata, scale, row_scale = parts
    scale = scale.reshape(math.prod(scale.shape[:-1]), scale.shape[-1]).contiguous()
    owned = {
        "qdata": contiguous_clone(qdata),
        "scale": layout.swizzle(scale).view(torch.float8_e4m3fn),
        "per_tensor_scale": contiguous_clone(t.per_tensor_scale if row_scale is None else row_scale.reshape(-1)),
        "activation_amax": None if t.activation_amax is None else t.activation_amax.clone(),
    }
    return t._replace(**{**owned, **changes})


def parts_of(t: NVFP4Tensor, per_row: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes, unswizzled scales as bytes, and scales per row (*leading, 1), or None for one per-tensor scale."""
    leading = t.qdata.shape[:-1]
    row_scale = None
    if t.per_tensor_scale.dim():
        row_scale = t.row_scale().view(*leading, 1)
    elif per_row:
        row_scale = t.per_tensor_scale.expand(*leading, 1)
    return t.qdata, t.unswizzled_scale().view(torch.uint8), row_scale


def on_leading(t: NVFP4Tensor, function: Callable[[Tensor], Tensor], **changes: Any) -> NVFP4Tensor:
    """Return a copy with ``function`` applied to the leading dimensions."""
    qdata, scale, row_scale = parts_of(t)
    return rebuilt(t, (function(qdata), function(scale), None if row_scale is None else function(row_scale)), **changes)


def stored_dim(t: NVFP4Tensor, dim: int) -> int:
    """Return the stored dimension of a logical one."""
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"dimension {dim} out of range for a tensor of {t.dim()} dimensions")
    dim %= t.dim()
    if t.transposed and dim >= t.dim() - 2:
        return 2 * t.dim() - 3 - dim
    return dim
