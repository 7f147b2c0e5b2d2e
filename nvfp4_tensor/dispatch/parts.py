"""Writes of codes into slices: ``t.narrow(...).copy_(other)``, as loaders of sharded checkpoints fill a tensor.

A slice on the tiles of scales shares storage with its tensor. Any other slice is a copy that remembers where it was
cut from: codes are written to the tensor at the bottom of all slices, and the copies above it are then read anew.

The elements that share a per-tensor scale (all of a tensor, those of a matrix or of a row) need one that serves the
codes written and those beside them. Zeros fit under any; where all others are zero, any scale serves; a larger scale
is stored, and the others are rounded to it, once; a smaller one is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvfp4_tensor.dispatch.table import aten, check_writable, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_NAN, TILE_COLUMNS, TILE_ROWS
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor, quantize
from nvfp4_tensor.tensor.protocol import Op


def _nonzero(qdata: Tensor) -> Tensor:
    """Which bytes of codes hold more than zeros, of either sign."""
    return (qdata & 0x77) != 0


class Place(NamedTuple):
    """Where a slice lies in the tensor that it was cut from."""

    whole: _Reference
    dim: int  # of the stored tensor
    start: int
    length: int

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a slice is no part of the original."""


class _Weak:
    """A plain tensor, as long as something else holds its storage.

    No weakref: torch swaps no tensor that has one, and so moves no module.
    """

    def __init__(self, t: Tensor) -> None:
        self._storage = StorageWeakRef(t.untyped_storage())
        self._like = t.dtype, t.device
        self._where = t.storage_offset(), t.shape, t.stride()

    def __call__(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, device = self._like
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *self._where)


class _Reference:
    """An NVFP4Tensor, as long as its storages live, in it or in an alias: ``t.data[3:40]`` finds what t holds."""

    def __init__(self, t: NVFP4Tensor) -> None:
        self._data = {name: _Weak(getattr(t, name)) for name in t.tensor_data_names}
        self._attributes = {name: getattr(t, name) for name in t.tensor_attribute_names}
        self._aliasing, self._place = t.aliasing, t.place

    def __call__(self) -> NVFP4Tensor | None:
        data = {name: weak() for name, weak in self._data.items()}
        if any(part is None for part in data.values()):
            return None
        t = NVFP4Tensor._of_parts(**data, **self._attributes)._marked(self._aliasing)  # type: ignore[arg-type]
        t.place = self._place
        return t


def placed(part: NVFP4Tensor, whole: NVFP4Tensor, dim: int, start: int, length: int) -> NVFP4Tensor:
    """The slice, which knows its place from now on; a copy does not keep the whole alive."""
    if part.aliasing != Aliasing.WHOLE and type(whole.qdata) is Tensor and not torch.compiler.is_compiling():
        part.place = Place(_Reference(whole), dim, start, length)
    return part


def same_place(alias: NVFP4Tensor, of: NVFP4Tensor) -> NVFP4Tensor:
    """The alias, which leads to where ``of`` does."""
    alias.place = of.place
    return alias


def write_codes(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> None:
    """Write codes and scales of source, of the same stored shape, into t and what t was cut from; or raise."""
    if t.aliasing == Aliasing.WHOLE:
        factor = _scales_for(func, t, source)
        t.qdata.copy_(source.qdata)
        t.scale.copy_(source.scale)
        t.per_tensor_scale.copy_(factor)
        return
    if t.numel() == 0 or t.is_meta or source.is_meta:  # nothing to write
        return
    if t.aliasing == Aliasing.PART and _fits(t, source):
        t.qdata.copy_(source.qdata)
        t.scale.copy_(source.scale)
        return
    levels = _levels(t)
    if levels is None:
        check_writable(func, t, new_scale=True)
    assert levels is not None
    _write_region(func, levels[-1], _Region.of(levels), source)
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        if level.aliasing == Aliasing.COPY:
            _, dim, start, length = level.place
            read = aten.slice.Tensor(below._replace(transposed=False), dim, start, start + length)
            for name in t.tensor_data_names:
                getattr(level, name).copy_(getattr(read, name))


def _scales_for(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> Tensor:
    """The per-tensor scales of source in the form of those of t, all of which are replaced."""
    forms = source.per_tensor_scale.dim(), t.per_tensor_scale.dim()
    if forms in ((1, 0), (2, 0), (1, 2)):
        raise _more_scales(func)
    return source.row_scale() if forms == (2, 1) else source.per_tensor_scale


def _more_scales(func: Op) -> Exception:
    return unsupported(
        func,
        "the source has more per-tensor scales (one a row, or one a matrix) than the destination",
        "load_state_dict(..., assign=True) takes it as it is, else dequantize() it first",
    )


def _levels(t: NVFP4Tensor) -> list[NVFP4Tensor] | None:
    """t, what it was cut from, and so on to the tensor that owns its storage; None where a write cannot reach it."""
    levels = [t]
    while levels[-1].aliasing != Aliasing.WHOLE:
        place = levels[-1].place
        below = None if place is None else place.whole()
        if below is None:
            return None
        levels.append(below)
    return levels


def _scale_of_rows(t: NVFP4Tensor) -> Tensor:
    """One per-tensor scale for each row, (rows,)."""
    return t.row_scale().expand(t.qdata.shape[:-1].numel())


def _fits(t: NVFP4Tensor, source: NVFP4Tensor) -> bool:
    """Whether the codes of source mean the same under the scales of t. A trace has no values to tell by."""
    if source.per_tensor_scale is t.per_tensor_scale:
        return True
    if type(t.qdata) is not Tensor or type(source.qdata) is not Tensor:
        return False
    wanted = _scale_of_rows(source).to(t.device)
    return torch.equal(wanted, _scale_of_rows(t)) or not _nonzero(source.qdata).any()


class _Region(NamedTuple):
    """The part of a stored tensor that a slice covers."""

    codes: tuple[slice, ...]  # of qdata
    rows: Tensor  # their numbers, the leading dimensions flattened
    scales: tuple[Tensor, ...]  # where the block scales lie, for an indexing of scale that gives (rows, blocks)

    @staticmethod
    def of(levels: list[NVFP4Tensor]) -> _Region:
        """The part of the last level that the first one covers."""
        shape, whole = levels[0].qdata.shape, levels[-1].qdata
        starts = [0] * len(shape)
        for level in levels[:-1]:
            starts[level.place.dim] += level.place.start
        block, blocks = starts[-1] // BLOCK, shape[-1] * 2 // BLOCK
        starts[-1] //= 2
        codes = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
        leading = whole.shape[:-1]
        rows = torch.arange(leading.numel(), device=whole.device).view(leading)[codes[:-1]].reshape(-1)
        r, c = rows.unsqueeze(1), torch.arange(block, block + blocks, device=whole.device)
        row_in_tile = r % TILE_ROWS // 32 * TILE_COLUMNS + c % TILE_COLUMNS
        return _Region(codes, rows, (r // TILE_ROWS, c // TILE_COLUMNS, r % 32, row_in_tile))


def _write_region(func: Op, whole: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> None:
    source = source._apply_fn_to_data(lambda data: data.to(whole.device))
    if torch.equal(_scale_of_rows(source), _scale_of_rows(whole)[region.rows]):
        _put(whole, region, source)
        return
    new, rounds = _scales_for_both(func, whole, region, source)
    if rounds.any():
        rounded = _rounded_to(new, rounds, whole, region)
        _put(rounded, region, source)  # before the rest: source may share storage with whole
        whole.qdata.copy_(rounded.qdata)
        whole.scale.copy_(rounded.scale)
    else:
        _put(whole, region, source)
    whole.per_tensor_scale.copy_(new)


def _put(whole: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> None:
    scale = source.unswizzled_scale().view(torch.uint8)
    whole.qdata[region.codes].copy_(source.qdata)
    whole.scale.view(torch.uint8)[region.scales] = scale.view(-1, scale.shape[-1])


def _scales_for_both(func: Op, whole: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """The per-tensor scales that whole is stored under with source in it, and which of them the rest is rounded to."""
    old = whole.per_tensor_scale
    wanted = _scale_of_rows(source)
    wanted = torch.where(_nonzero(source.qdata).any(-1).view(-1), wanted, -torch.inf)  # zeros want none
    of_rows = wanted.new_full(whole.qdata.shape[:-1], -torch.inf).view(-1).index_copy(0, region.rows, wanted)
    largest = of_rows.view(*old.shape, -1).amax(-1)
    new = torch.where(largest == -torch.inf, old, largest)
    kept = (wanted == -torch.inf) | (wanted == _scale_of_rows(whole._replace(per_tensor_scale=new))[region.rows])
    if not kept.all():
        raise _more_scales(func)
    others = _nonzero(whole.qdata)
    others[region.codes] = False
    rounds = others.any(-1).view(*old.shape, -1).any(-1) & (largest != -torch.inf) & (new != old)
    if not (~rounds | (new > old)).all():
        raise unsupported(
            func,
            "this is part of a tensor whose other parts share its per-tensor scale, and values of theirs may not fit "
            "under that of the source, which is smaller",
            "clone() it, or copy_ a whole",
        )
    return new, rounds


def _rounded_to(new: Tensor, rounds: Tensor, whole: NVFP4Tensor, region: _Region) -> NVFP4Tensor:
    """A copy of whole with the values under some of its per-tensor scales, region left out, rounded to new ones."""
    spec = whole.spec.replace(
        round_mode="rne", hadamard_sign=None, random_bits=16, hardware_rounding=False, row_scaled=False
    )
    assert spec.scale_ceiling is not None
    leading = whole.qdata.shape[:-1]
    rows = _scale_of_rows(whole._replace(per_tensor_scale=rounds)).view(*leading, 1)
    factor = _scale_of_rows(whole._replace(per_tensor_scale=new)).view(*leading, 1)
    values = whole._decode(torch.float32, whole.row_scale(), columns=whole.qdata.shape[-1] * 2) / factor
    values.unflatten(-1, (-1, 2))[region.codes] = 0
    values = torch.where(rows & ~values.isnan(), values, 0)
    rounded = quantize(values, spec, amax=E2M1_MAX * spec.scale_ceiling)  # under a per-tensor scale of 1
    old, scale = (t.unswizzled_scale().view(torch.uint8) for t in (whole, rounded))
    scale = torch.where(rows & (old < E4M3_NAN), scale, old)  # NaN is NaN under any scale
    return whole._replace(
        qdata=torch.where(rows, rounded.qdata, whole.qdata),
        scale=layout.swizzle(scale.view(-1, scale.shape[-1])).view(torch.float8_e4m3fn),
    )
