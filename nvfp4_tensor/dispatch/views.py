"""Views and slices of NVFP4Tensors.

The leading dimensions behave as those of any tensor. The stored last dimension consists of blocks of 16 that share a
scale, and scales are stored in tiles of 128 rows by 64 columns. An operator on leading dimensions is applied to the
codes, to the unswizzled scales and to the scales per row. If the result can share the tiles, it is a view. Otherwise
it is a copy, and writing to it raises an error because the write would not reach the original; only codes of another
NVFP4Tensor can be written, which ``slice_writes.py`` also writes to the original. An operator that would split a block
raises a RuntimeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import fill_defaults

from nvfp4_tensor.dispatch.flat import FlatView, is_lazy
from nvfp4_tensor.dispatch.slice_writes import with_origin, with_origin_of
from nvfp4_tensor.dispatch.table import aten, implements, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, TILE_COLUMNS, TILE_ROWS
from nvfp4_tensor.tensor.methods import OFFLOAD
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types

TILE_ELEMENTS = TILE_COLUMNS * BLOCK


# --- building blocks -------------------------------------------------------------------------------------------------


def _share(func: Op, args: Args, kwargs: Kwargs, t: NVFP4Tensor, aliasing: Aliasing | None = None) -> NVFP4Tensor:
    """Return t as the view that ``func`` returns of its first argument."""
    t._marked(max(args[0].aliasing, aliasing or Aliasing.WHOLE))
    return return_and_correct_aliasing(func, args, kwargs, t)


def rebuilt(t: NVFP4Tensor, parts: tuple[Tensor, Tensor, Tensor | None], **changes: Any) -> NVFP4Tensor:
    """Return t with new codes (..., bytes), unswizzled scales (..., blocks) and scales per row (..., 1) or None.

    The result shares no storage with t.
    """
    qdata, scale, row_scale = parts
    scale = scale.reshape(math.prod(scale.shape[:-1]), scale.shape[-1]).contiguous()
    owned = {
        "qdata": _copied(qdata),
        "scale": layout.swizzle(scale).view(torch.float8_e4m3fn),
        "per_tensor_scale": _copied(t.per_tensor_scale if row_scale is None else row_scale.reshape(-1)),
        "activation_amax": None if t.activation_amax is None else t.activation_amax.clone(),
    }
    return t._replace(**{**owned, **changes})


def _copied(data: Tensor) -> Tensor:
    return data.clone(memory_format=torch.contiguous_format)


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


def checked_dim(t: NVFP4Tensor, dim: int) -> int:
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"dimension {dim} out of range for a tensor of {t.dim()} dimensions")
    return dim % t.dim()


def stored_dim(t: NVFP4Tensor, dim: int) -> int:
    """Return the stored dimension of a logical one."""
    dim = checked_dim(t, dim)
    if t.transposed and dim >= t.dim() - 2:
        return 2 * t.dim() - 3 - dim
    return dim


# --- transposes and shapes -------------------------------------------------------------------------------------------


@implements([aten.t.default, aten.transpose.int, aten.permute.default])
def _permute(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    order = list(range(t.dim()))
    if func is aten.permute.default:
        order = [checked_dim(t, dim) for dim in args[1]]
        if sorted(order) != list(range(t.dim())):
            raise RuntimeError(f"{list(args[1])} is not a permutation of the {t.dim()} dimensions")
    elif func is aten.transpose.int:
        i, j = (checked_dim(t, dim) for dim in args[1:])
        order[i], order[j] = order[j], order[i]
    elif t.dim() > 2:
        raise RuntimeError(f"t() expects a tensor of at most 2 dimensions, got {t.dim()}")
    else:
        order.reverse()
    stored = [stored_dim(t, dim) for dim in order]
    last = t.dim() - 1
    if last not in stored[-2:]:
        raise unsupported(func, "the dimension of the blocks can only become the last or the second to last")
    transposed = stored[-1] != last
    leading = [dim for dim in stored if dim != last]
    if leading == sorted(leading):
        return _share(func, args, kwargs, t._replace(transposed=transposed))
    return on_leading(t, lambda data: data.permute(*leading, last), transposed=transposed)._marked(Aliasing.COPY)


def _with_shape(func: Op, args: Args, kwargs: Kwargs, t: NVFP4Tensor, shape: Sequence[int]) -> NVFP4Tensor:
    """Return t with another logical shape of as many elements."""
    shape = list(shape)
    if shape == list(t.shape):
        return _share(func, args, kwargs, with_origin_of(t._replace(), t))
    if t.transposed:
        if shape[-2:] != list(t.shape[-2:]):
            raise unsupported(func, "the last two dimensions of a transposed NVFP4Tensor cannot change")
        shape[-2:] = shape[:-3:-1]
    if t.numel() == 0 and shape:
        return _empty(t, shape)
    if shape and shape[-1] == t.columns:
        qdata = t.qdata.view(*shape[:-1], t.qdata.shape[-1])
        factor = _scale_of_shape(t, shape)
        view = t._replace(qdata=qdata, per_tensor_scale=factor)
        if factor.dim() < t.per_tensor_scale.dim() and factor.numel() > 1:  # the scales per row are copies
            return view.clone()._marked(Aliasing.COPY)
        return _share(func, args, kwargs, view)
    return FlatView(t, _in_other_rows) if is_lazy(t, shape) else _in_other_rows(t, shape)


def _empty(t: NVFP4Tensor, shape: Sequence[int]) -> NVFP4Tensor:
    """Return a tensor without elements, whose number of rows may differ from that of t."""
    rows, columns, factor = math.prod(shape[:-1]), shape[-1], t.per_tensor_scale
    return t._replace(
        qdata=t.qdata.new_empty((*shape[:-1], layout.ceil_to(columns, BLOCK) // 2)),
        scale=t.scale.new_empty((*layout.scale_tiles(rows, columns), 32, 16)),
        per_tensor_scale=factor.new_ones(rows) if factor.dim() else factor.clone(),
        columns=columns,
    )._marked(Aliasing.COPY)


def _in_other_rows(t: NVFP4Tensor, shape: Sequence[int]) -> NVFP4Tensor:
    """Return a copy with the same blocks in rows of another length, not transposed."""
    columns = shape[-1] if shape else 0
    if columns % BLOCK or t.columns % BLOCK:
        ragged = t.columns if t.columns % BLOCK else columns
        raise unsupported(
            aten.view.default,
            f"rows of {t.columns} elements cannot become rows of {columns}, because {ragged} is not a multiple of "
            f"{BLOCK} and a block would be split",
        )
    if t.per_tensor_scale.dim() and t.columns % columns:
        raise unsupported(aten.view.default, "a new row would have more than one per-tensor scale")
    qdata, scale, row_scale = parts_of(t)
    if row_scale is not None:
        row_scale = row_scale.expand(*row_scale.shape[:-1], t.columns // columns)
    parts = qdata.reshape(*shape[:-1], columns // 2), scale.reshape(*shape[:-1], columns // BLOCK), row_scale
    return rebuilt(t, parts, columns=columns)._marked(Aliasing.COPY)


def _scale_of_shape(t: NVFP4Tensor, shape: Sequence[int]) -> Tensor:
    """Return the per-tensor scales for the same rows in other leading dimensions: per matrix only if those stay."""
    if t.per_tensor_scale.dim() < 2 or (len(shape) == 3 and shape[0] == t.per_tensor_scale.shape[0]):
        return t.per_tensor_scale
    return t.per_tensor_scale.view(()) if t.per_tensor_scale.numel() == 1 else t.row_scale()


@implements(aten.as_strided.default)
def _as_strided(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Support only the tensor itself and its transpose, which compiled graphs return as views of an input."""
    t, size, stride = args[:3]
    for candidate in (t, t.mT) if t.dim() > 1 else (t,):
        if (tuple(size), tuple(stride)) == (candidate.shape, candidate.stride()):
            return _share(func, args, kwargs, candidate._replace())
    raise unsupported(func, "its elements have no strides")


def _inferred(shape: Sequence[int], numel: int) -> list[int]:
    shape = list(shape)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = numel // max(known, 1)
    if math.prod(shape) != numel:
        raise RuntimeError(f"shape {shape} is invalid for a tensor of {numel} elements")
    return shape


@implements([aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten._reshape_alias.default])
def _view(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    return _with_shape(aten.view.default, args[:2], {}, t, _inferred(args[1], t.numel()))


@implements(aten.view.dtype)
def _view_dtype(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    if args[1] == args[0].dtype:
        return _share(func, args, kwargs, args[0]._replace())
    raise unsupported(func, f"its codes cannot be viewed as another dtype. {OFFLOAD}")


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dim = args
    shape = list(t.shape)
    if not -t.dim() - 1 <= dim <= t.dim():
        raise IndexError(f"dimension {dim} out of range for unsqueeze on a tensor of {t.dim()} dimensions")
    shape.insert(dim % (t.dim() + 1), 1)
    return _with_shape(func, args, kwargs, t, shape)


@implements([aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims])
def _squeeze(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    dims = range(t.dim()) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    drop = {dim % t.dim() for dim in dims if t.shape[dim] == 1}
    if t.columns == 1 and stored_dim(t, t.dim() - 1) in drop and len(drop) == t.dim():
        raise unsupported(func, "an NVFP4Tensor cannot be 0-d")
    return _with_shape(func, args, kwargs, t, [size for dim, size in enumerate(t.shape) if dim not in drop])


@implements(aten.expand.default)
def _expand(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, shape = args[0], list(args[1])
    added = len(shape) - t.dim()
    shape = [t.shape[i - added] if size == -1 else size for i, size in enumerate(shape)]
    if shape == list(t.shape):
        return _share(func, args, kwargs, t._replace())
    stored = shape[:-2] + shape[:-3:-1] if t.transposed else shape
    if stored[-1] != t.columns:
        raise unsupported(func, "the dimension of the blocks cannot be expanded")
    return on_leading(t, lambda data: data.expand(*stored[:-1], data.shape[-1]))._marked(Aliasing.COPY)


# --- slices ----------------------------------------------------------------------------------------------------------


@implements(aten.slice.Tensor)
def _slice(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dim, start, end, step = fill_defaults(args, 5, [0, None, None, 1])
    stored = stored_dim(t, dim)
    size = t.shape[dim]
    start = _clamped(start, size, 0)
    end = max(start, _clamped(end, size, size))
    if (start, end, step) == (0, size, 1):
        return _share(func, args, kwargs, with_origin_of(t._replace(), t))
    if stored == t.dim() - 1:
        return _slice_columns(func, args, kwargs, t, start, end, step)
    if step == 1 and math.prod(t.qdata.shape[:stored]) == 1:
        view = _slice_of_tiles(t, stored, start, end)
        if view is not None:
            own_scales = view.per_tensor_scale.dim() > 0
            view = _share(func, args, kwargs, view, Aliasing.WHOLE if own_scales else Aliasing.PART)
            return with_origin(view, t, stored, start, end - start)
    copy = on_leading(t, lambda data: data[(slice(None),) * stored + (slice(start, end, step),)])
    if stored == 0 and t.per_tensor_scale.dim() == 2:
        copy = copy._replace(per_tensor_scale=t.per_tensor_scale[start:end:step].clone())
    copy._marked(Aliasing.COPY)
    return with_origin(copy, t, stored, start, end - start) if step == 1 else copy


def _clamped(index: int | None, size: int, default: int) -> int:
    """Clamp as slice.indices does, which would specialize symbolic sizes."""
    if index is None:
        return default
    return min(max(index + size, 0) if index < 0 else index, size)


def _slice_of_tiles(t: NVFP4Tensor, stored: int, start: int, end: int) -> NVFP4Tensor | None:
    """Return a contiguous range of rows as a view, or None if it does not start and end at tiles of scales."""
    rows, rows_each = math.prod(t.qdata.shape[:-1]), math.prod(t.qdata.shape[stored + 1 : -1])
    first, last = start * rows_each, end * rows_each
    if first % TILE_ROWS or (last % TILE_ROWS and last != rows):
        return None
    per_tensor_scale = t.per_tensor_scale
    if per_tensor_scale.dim() == 2:  # a slice of another dimension selects rows of a single matrix
        per_tensor_scale = per_tensor_scale[start:end] if stored == 0 else per_tensor_scale.view(())
    elif per_tensor_scale.dim():
        per_tensor_scale = per_tensor_scale[first:last]
    return t._replace(
        qdata=t.qdata.narrow(stored, start, end - start),
        scale=t.scale[first // TILE_ROWS : -(-last // TILE_ROWS)],
        per_tensor_scale=per_tensor_scale,
    )


def _slice_columns(
    func: Op, args: Args, kwargs: Kwargs, t: NVFP4Tensor, start: int, end: int, step: int
) -> NVFP4Tensor:
    if step != 1 or start % BLOCK:
        raise unsupported(func, f"a slice along the blocks must start at a multiple of {BLOCK} and have step 1")
    columns = end - start
    if end % BLOCK and end != t.columns and t.spec.hadamard_sign is not None:
        raise unsupported(func, "a Hadamard-transformed block cannot be split")
    stop = layout.ceil_to(end, BLOCK)
    qdata = t.qdata[..., start // 2 : stop // 2]
    if start % TILE_ELEMENTS == 0 and (end % TILE_ELEMENTS == 0 or end == t.columns):
        scale = t.scale[:, start // TILE_ELEMENTS : -(-end // TILE_ELEMENTS)]
        view = _share(func, args, kwargs, t._replace(qdata=qdata, scale=scale, columns=columns), Aliasing.PART)
        return with_origin(view, t, t.dim() - 1, start, columns)
    if end % BLOCK and end != t.columns:
        codes = layout.unpack(qdata)
        codes[..., columns:] = 0
        qdata = layout.pack(codes)
    _, scale, row_scale = parts_of(t)
    parts = qdata, scale[..., start // BLOCK : stop // BLOCK], row_scale
    copy = rebuilt(t, parts, columns=columns)._marked(Aliasing.COPY)
    splits_a_block = end % BLOCK and end != t.columns
    return copy if splits_a_block else with_origin(copy, t, t.dim() - 1, start, columns)


@implements(aten.select.int)
def _select(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dim, index = args
    stored = stored_dim(t, dim)
    if stored == t.dim() - 1:
        raise unsupported(func, "it would split blocks of 16")
    if t.transposed and stored == t.dim() - 2:
        t = t._replace(transposed=False)._marked(t.aliasing)  # one row of the stored matrix is left
        dim = stored
    size = t.shape[dim]
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {size}")
    index %= size
    selected = aten.slice.Tensor(t, dim, index, index + 1)
    shape = [size for i, size in enumerate(selected.shape) if i != dim % t.dim()]
    return _with_shape(aten.view.default, (selected, shape), {}, selected, shape)


@implements([aten.split.Tensor, aten.split_with_sizes.default])
def _split(func: Op, types: Types, args: Args, kwargs: Kwargs) -> list[NVFP4Tensor]:
    t, sizes, dim = fill_defaults(args, 3, [0])
    length = t.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, max(sizes, 1))] or [length]
    chunks, start = [], 0
    for size in sizes:
        chunks.append(aten.slice.Tensor(t, dim, start, start + size))
        start += size
    if start != length:
        raise RuntimeError(f"sizes {list(sizes)} do not add up to {length}, the size of dimension {dim}")
    return _with_one_scale(t, chunks)


@implements(aten.unbind.int)
def _unbind(func: Op, types: Types, args: Args, kwargs: Kwargs) -> list[NVFP4Tensor]:
    t, dim = fill_defaults(args, 2, [0])
    return _with_one_scale(t, [aten.select.int(t, dim, index) for index in range(t.shape[dim])])


def _with_one_scale(t: NVFP4Tensor, chunks: list[NVFP4Tensor]) -> list[NVFP4Tensor]:
    """Return the chunks of t; copies without an origin, as in a trace, share one copy of the per-tensor scale.

    A later join then detects that the scales are equal.
    """
    copies = [chunk for chunk in chunks if chunk.aliasing == Aliasing.COPY and chunk.slice_origin is None]
    if t.per_tensor_scale.dim() == 0:
        for copy in copies:
            copy.per_tensor_scale = copies[0].per_tensor_scale
    return chunks
