"""Windows: views of a stored tensor that have no codes of their own.

A view of an NVFP4Tensor has the sizes, strides and offset that torch's operator gives a dense tensor of its values. If
they cover the stored tensor in its order, the view shares its codes. Any other view is a :class:`Window`: the stored
tensor and the region that the strides describe, in blocks of 16. Codes are a strided view of the stored ones. Block
scales are stored in tiles of 128 rows by 4 blocks, so they are gathered whenever they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, TILE_ROWS, ceil_to

_BYTES = BLOCK // 2
_EVERYTHING = 1 << 62
_STARTS = f"a range along the blocks must start at a multiple of {BLOCK}, or a block would be split"

Geometry: TypeAlias = "tuple[Sequence[int], Sequence[int], int | torch.SymInt]"
"""Sizes, strides and offset of a dense tensor."""


class Stored(NamedTuple):
    """The codes of a whole tensor, which its views share."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    columns: int

    @property
    def rows(self) -> int:
        return math.prod(self.qdata.shape[:-1])

    @property
    def blocks(self) -> int:
        """Number of blocks in a row."""
        return self.qdata.shape[-1] // _BYTES

    def codes(self) -> Tensor:
        """Return a view of the codes: (rows, blocks, 8)."""
        return self.qdata.view(self.rows, self.blocks, _BYTES)


class Window(NamedTuple):
    """A region of a stored tensor: leading sizes and strides, and the offset, in blocks; the last size in columns."""

    stored: Stored
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    columns: int
    splits: bool
    """Whether it ends within a block."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in blocks."""
        return *self.size, ceil_to(self.columns, BLOCK) // BLOCK

    def of(self, blocks: Tensor) -> Tensor:
        """Return this region of a contiguous tensor with an element, or a row, for each stored block, as a view."""
        return blocks.as_strided(*self._geometry_in(blocks))

    def assigned(self, blocks: Tensor, values: Tensor | float) -> Tensor:
        """Return such a tensor with values, which broadcast, in this region; a graph of torch.compile can do this."""
        geometry = self._geometry_in(blocks)
        values = values if isinstance(values, Tensor) else blocks.new_full((), values)
        return torch.as_strided_scatter(blocks, values.expand(geometry[0]), *geometry)

    def _geometry_in(self, blocks: Tensor) -> Geometry:
        rest = tuple(blocks.shape[2:])
        unit = math.prod(rest)
        stride = [each * unit for each in self.stride]
        offset = blocks.storage_offset() + self.offset * unit
        return (*self.shape, *rest), (*stride, unit, *contiguous_strides(rest)), offset

    def qdata(self) -> Tensor:
        """Return the codes: a view (..., bytes), or a copy with zeros after the last column if that splits a block."""
        unit, leading = _BYTES, [stride * _BYTES for stride in self.stride]
        flat = self.stored.qdata
        offset = flat.storage_offset() + self.offset * unit
        qdata = flat.as_strided((*self.size, self.shape[-1] * unit), (*leading, 1), offset)
        if not self.splits:
            return qdata
        codes = layout.unpack(qdata)
        codes[..., self.columns :] = 0
        return layout.pack(codes)

    def tiles(self) -> tuple[int, int]:
        """Return the range of tiles of block scales, along the rows, that the region lies in."""
        if type(self.stored.qdata) is not Tensor:  # torch.compile supports no writes into some views of inputs
            return 0, self.stored.scale.shape[0]
        per_tile = TILE_ROWS * self.stored.blocks
        return self.offset // per_tile, (self.end() - 1) // per_tile + 1

    def end(self) -> int:
        """Return the number of stored blocks up to the last one of this region."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + self.shape[-1]

    def unswizzled_tiles(self) -> Tensor:
        """Return the stored block scales of these tiles in the order of rows, as bytes: (rows, blocks)."""
        first, last = self.tiles()
        rows = min(last * TILE_ROWS, self.stored.rows) - first * TILE_ROWS
        return layout.unswizzle(self.stored.scale[first:last].view(torch.uint8), rows, self.stored.blocks)

    def within_tiles(self) -> Window:
        """Return this window with the offset counted from the first of its tiles."""
        return self._replace(offset=self.offset - self.tiles()[0] * TILE_ROWS * self.stored.blocks)

    def unswizzled_scale(self) -> Tensor:
        """Return the block scales, e4m3 (..., blocks)."""
        return self.within_tiles().of(self.unswizzled_tiles()).view(torch.float8_e4m3fn)

    def scale(self) -> Tensor:
        """Return the block scales, swizzled."""
        if (tiles := self.whole_tiles()) is not None:
            return self.stored.scale[tiles]
        scale = self.unswizzled_scale()
        return layout.swizzle(scale.reshape(math.prod(self.size), scale.shape[-1]))

    def whole_tiles(self) -> slice | None:
        """Return the tiles of scales that this window consists of, if it is a range of rows that starts with a tile."""
        rows, each = math.prod(self.size), self.stored.blocks
        compact = [math.prod(self.size[i + 1 :]) * each for i in range(len(self.size))]
        if not is_same(compact, self.stride, self.size) or self.columns != self.stored.columns:
            return None
        start, end = self.offset // each, self.offset // each + rows
        if self.offset % (TILE_ROWS * each) or (end % TILE_ROWS and end != self.stored.rows):
            return None
        return slice(start // TILE_ROWS, -(-end // TILE_ROWS))

    def rows(self) -> Tensor:
        """Return the index of the stored row of each row: int64 (rows,)."""
        start = torch.full((), self.offset, dtype=torch.int64, device=self.stored.qdata.device)
        for n, stride in zip(self.size, self.stride, strict=True):
            start = start.unsqueeze(-1) + torch.arange(n, device=start.device) * stride
        return start.reshape(-1) // self.stored.blocks

    def per_tensor_scale(self) -> Tensor:
        """Return one per-tensor scale, one per matrix (E, 1) or one per row, as the stored tensor has them."""
        factor = self.stored.per_tensor_scale
        if factor.dim() == 0:
            return factor
        rows_each = self.stored.rows // factor.numel()
        if rows_each == 1:
            return factor.view(-1)[self.rows()]
        matrices = self._matrices(rows_each * self.stored.blocks)
        if matrices is None:
            return factor.view(-1)[self.rows() // rows_each]
        first, count, step = matrices
        if count is None:
            return factor[first, 0]
        return factor[first].expand(count, 1) if step == 0 else factor[first : first + (count - 1) * step + 1 : step]

    def _matrices(self, each: int) -> tuple[int, int | None, int] | None:
        """Return the first matrix, the number of matrices (None for a part of one) and their distance, or None."""
        first, start = divmod(self.offset, each)
        extents = [(n - 1) * s for n, s in zip(self.size, self.stride, strict=True)]
        if start + sum(extents) + self.shape[-1] <= each:
            return first, None, 0
        if len(self.size) == 2 and self.stride[0] % each == 0 and start + extents[1] + self.shape[-1] <= each:
            return first, self.size[0], self.stride[0] // each
        return None

    def has_own_scales(self) -> bool:
        """Return whether no element outside of this region, which does not overlap, shares a per-tensor scale with one
        inside: it consists of complete ranges of blocks that share one."""
        each = self.stored.rows // self.stored.per_tensor_scale.numel() * self.stored.blocks
        inner = [(n, s) for n, s in zip(self.size, self.stride, strict=True) if n > 1 and s % each]
        end = self.offset % each + sum((n - 1) * s for n, s in inner) + self.shape[-1]
        return end <= each and math.prod(n for n, _ in inner) * self.shape[-1] == each

    def overlaps(self) -> bool:
        """Return whether two of its elements may be one stored element."""
        reach = self.shape[-1]
        for stride, n in sorted((s, n) for n, s in zip(self.size, self.stride, strict=True) if n > 1):
            if stride < reach:
                return True
            reach += stride * (n - 1)
        return False


STORED = ("stored_qdata", "stored_scale", "stored_per_tensor_scale")
"""Names of the plain tensors of a window in traces."""
OFFSET = "stored_offset"
"""And of an empty tensor (offset, 0), because traces have symbolic sizes of tensors, but no symbolic attributes."""


class OfWindow:
    """An attribute that a window computes. Other tensors have one of that name, which Python finds first."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, t: Any, owner: type) -> Any:
        if t is None or t.window is None:
            raise AttributeError(self.name)
        if self.name == OFFSET:
            with _disable_current_modes():
                return t.window.stored.qdata.new_empty((t.storage_offset(), 0))
        if self.name in STORED:
            return getattr(t.window.stored, self.name.removeprefix("stored_"))
        if isinstance(t.window, Unreadable):
            reason = t.window.reason
            raise RuntimeError(f"a flat view of this NVFP4Tensor cannot be read: {reason}; dequantize() first")
        return getattr(t.window, self.name)()


class SplitsABlock(ValueError):
    """A view for which there are no codes."""


class Unreadable(NamedTuple):
    """A flat view for which there are no codes, because its rows do not consist of complete blocks.

    FSDP2 flattens all parameters, but reads no NVFP4Tensor by its flat view.
    """

    stored: Stored
    columns: int
    reason: str


def find_window(stored: Stored, geometry: Geometry, transposed: bool) -> tuple[Stored | Window | Unreadable, bool]:
    """Return what codes a view with dense ``geometry`` has, and whether its last two dimensions are swapped.

    If the view covers the stored tensor in its order, these are the stored codes, in the shape of the view.

    Args:
        transposed: the order of the last two dimensions to try first.

    Raises:
        SplitsABlock: with the reason.
    """
    size, stride, offset = geometry
    if len(size) == 0:
        raise SplitsABlock(f"a 0-d view would split blocks of {BLOCK}")
    orders = [False] if len(size) == 1 else [transposed, not transposed]
    reasons: list[str] = []  # not errors, whose tracebacks would keep all frames of the callers, and so their tensors
    for swapped in orders:
        ordered = (_swapped(size), _swapped(stride), offset) if swapped else geometry
        if math.prod(size) == 0:
            return _empty(stored, ordered[0]), swapped
        if (whole := _whole(stored, ordered)) is not None:
            return whole, swapped
        try:
            return window(stored, ordered), swapped
        except SplitsABlock as error:
            reasons.append(str(error))
    if len(size) == 1 and stride[0] == 1 and size[0] > stored.columns:
        return Unreadable(stored, size[0], reasons[0]), False
    raise SplitsABlock(reasons[0])


def _swapped(sizes: Sequence[int]) -> tuple[int, ...]:
    return *sizes[:-2], sizes[-1], sizes[-2]


def _whole(stored: Stored, geometry: Geometry) -> Stored | None:
    """Return the stored codes in the shape of a view, or None if it does not cover them in their order."""
    size, stride, offset = geometry
    *leading, columns = size
    if offset != 0 or columns != stored.columns or math.prod(leading) != stored.rows:
        return None
    if not is_same(stride, contiguous_strides(size), size):
        return None
    factor = stored.per_tensor_scale
    if factor.dim() == 2 and not (len(leading) == 2 and leading[0] == len(factor)):
        if factor.numel() not in (1, stored.rows):  # scales per row are gathered
            return None
        factor = factor.view(() if factor.numel() == 1 else -1)
    qdata = stored.qdata
    qdata = qdata if qdata.shape[:-1] == torch.Size(leading) else qdata.view(*leading, qdata.shape[-1])
    return Stored(qdata, stored.scale, factor, columns)


def _empty(stored: Stored, size: Sequence[int]) -> Stored:
    """Return the codes of a tensor without elements, which shares nothing."""
    rows, columns, factor = math.prod(size[:-1]), size[-1], stored.per_tensor_scale
    qdata = stored.qdata.new_empty((*size[:-1], ceil_to(columns, BLOCK) // 2))
    scale = stored.scale.new_empty((*layout.scale_tiles(rows, columns), 32, 16))
    return Stored(qdata, scale, factor.new_ones(rows) if factor.dim() else factor.clone(), columns)


def window(stored: Stored, geometry: Geometry) -> Window:
    """Return the window of dense ``geometry``, whose last dimension is along the blocks.

    Raises:
        SplitsABlock: with the reason.
    """
    size, stride, offset = geometry
    *leading, columns = size
    *strides, step = stride
    width = stored.columns
    strides = [s if n > 1 else 0 for n, s in zip(leading, strides, strict=True)]
    if step != 1 and columns > 1:
        raise SplitsABlock(
            f"the dimension of the blocks of {BLOCK} can only be the last or the second to last, with step 1"
        )
    if width % BLOCK == 0:
        if offset % BLOCK or any(s % BLOCK for s in strides):
            raise SplitsABlock(_STARTS)
        blocks = [s // BLOCK for s in strides]
        result = Window(stored, tuple(leading), tuple(blocks), offset // BLOCK, columns, bool(columns % BLOCK))
    else:
        start, parts = offset % width, [s % width for s in strides]
        last = start + sum((n - 1) * part for n, part in zip(leading, parts, strict=True))
        if last + columns > width:
            raise SplitsABlock(
                f"rows of {width} elements cannot become rows of {columns}, because {width} is not a multiple of "
                f"{BLOCK} and a block would be split"
            )
        if start % BLOCK or any(part % BLOCK for part in parts):
            raise SplitsABlock(_STARTS)
        blocks = [s // width * stored.blocks + part // BLOCK for s, part in zip(strides, parts, strict=True)]
        splits = bool(columns % BLOCK) and (start + columns != width or any(parts))
        start = offset // width * stored.blocks + start // BLOCK
        result = Window(stored, tuple(leading), tuple(blocks), start, columns, splits)
    end = result.end()
    if isinstance(end, int) and end > stored.rows * stored.blocks:  # of symbolic sizes, torch checks the parts
        raise SplitsABlock("it reaches beyond the end of the tensor")
    _check_scales(result)
    return result


def _check_scales(w: Window) -> None:
    """Raise if a row of the window has more than one per-tensor scale."""
    factor, row = w.stored.per_tensor_scale, w.shape[-1]
    if factor.dim() == 0:
        return
    each = w.stored.rows // factor.numel() * w.stored.blocks
    starts = [s for n, s in zip(w.size, w.stride, strict=True) if n > 1]
    within = w.offset % each + sum((n - 1) * (s % each) for n, s in zip(w.size, w.stride, strict=True)) + row <= each
    if not within and (each % row or any(s % row for s in (w.offset, *starts))):
        raise SplitsABlock("a new row would have more than one per-tensor scale")


def is_same(strides: Sequence[int], others: Sequence[int], size: Sequence[int]) -> bool:
    """Return whether two lists of strides give every element the same place."""
    return all(n == 1 or a == b for n, a, b in zip(size, strides, others, strict=True))


def contiguous_strides(size: Sequence[int]) -> list[int]:
    strides = [1]
    for n in reversed(size[1:]):
        strides.insert(0, strides[0] * max(n, 1))
    return strides[: len(size)]


def dense_views(func: Callable[..., Any], t: Tensor, is_traced: bool, *args: Any, **kwargs: Any) -> Any:
    """Return what ``func`` returns for a dense tensor without data that has the sizes, strides and offset of t."""
    if not is_traced:
        return func(_MIRROR.as_strided(t.size(), t.stride(), t.storage_offset()), *args, **kwargs)
    fake_mode = detect_fake_mode()
    assert fake_mode is not None
    with _disable_current_modes(), fake_mode:
        everything = torch.empty(_EVERYTHING, dtype=torch.uint8, device="meta")
        return func(everything.as_strided(t.size(), t.stride(), t.storage_offset()), *args, **kwargs)


_MIRROR = torch.empty(_EVERYTHING, dtype=torch.uint8, device="meta")
