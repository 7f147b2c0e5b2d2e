"""Writes of codes into slices: ``t.narrow(...).copy_(other)``, as loaders of sharded checkpoints fill a tensor.

A slice on the tiles of scales shares storage with its tensor. Any other slice is a copy with a SliceOrigin: codes are
written to the tensor that owns the storage, from which the copies between are then read again.

The elements that share a per-tensor scale (those of a tensor, matrix or row) need one that fits the new codes and the
existing ones. Zeros fit any scale, and if all existing codes are zero, the new scale is stored. A larger new scale is
stored too, and the existing codes are rounded to it, once. A smaller new scale raises an error.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvfp4_tensor.dispatch.table import aten, check_writable, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_NAN, TILE_COLUMNS, TILE_ROWS
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Op
from nvfp4_tensor.tensor.tiles import requantize

_WRITES = "_nvfp4_writes"
"""An attribute of a storage, whose Python object lives as long as the storage."""


def _nonzero(qdata: Tensor) -> Tensor:
    """Return which bytes of codes contain a value other than 0 and -0."""
    return (qdata & 0x77) != 0


class SliceOrigin(NamedTuple):
    """The tensor that a slice comes from, and the range that the slice covers."""

    source: _WeakTensor
    dim: int  # of the stored tensor
    start: int
    length: int

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a slice has no origin."""


class _WeakData:
    """A reference to a plain tensor that does not keep its storage alive.

    Nor the tensor, which it gives while that lives, so that a write counts as one to it: two tensors with one storage
    have different versions.
    """

    def __init__(self, t: Tensor) -> None:
        self._tensor = weakref.ref(t)
        self._storage = StorageWeakRef(t.untyped_storage())
        self._dtype_and_device = t.dtype, t.device
        self._geometry = t.storage_offset(), t.shape, t.stride()

    def __call__(self) -> Tensor | None:
        if (t := self._tensor()) is not None:
            return t
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        dtype, device = self._dtype_and_device
        return torch.empty(0, dtype=dtype, device=device).set_(storage, *self._geometry)


class _WeakTensor:
    """A reference to an NVFP4Tensor that lasts as long as the storages, so that ``t.data[3:40]`` finds those of t."""

    def __init__(self, t: NVFP4Tensor) -> None:
        self._data = {name: _WeakData(getattr(t, name)) for name in t.tensor_data_names}
        self._attributes = {name: getattr(t, name) for name in t.tensor_attribute_names}
        self._aliasing, self._origin = t.aliasing, t.slice_origin

    def __call__(self) -> NVFP4Tensor | None:
        data = {name: weak() for name, weak in self._data.items()}
        if any(tensor is None for tensor in data.values()):
            return None
        t = NVFP4Tensor._of_parts(**data, **self._attributes)._marked(self._aliasing)  # type: ignore[arg-type]
        t.slice_origin = self._origin
        return t


def with_origin(t: NVFP4Tensor, source: NVFP4Tensor, dim: int, start: int, length: int) -> NVFP4Tensor:
    """Return the slice t of ``source`` with its origin set. A copy does not keep ``source`` alive."""
    if t.aliasing != Aliasing.WHOLE and type(source.qdata) is Tensor and not torch.compiler.is_compiling():
        t.slice_origin = SliceOrigin(_WeakTensor(source), dim, start, length)
    return t


def with_origin_of(alias: NVFP4Tensor, t: NVFP4Tensor) -> NVFP4Tensor:
    """Return ``alias`` with the origin of ``t``."""
    alias.slice_origin = t.slice_origin
    return alias


def write_codes(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> None:
    """Write the codes and scales of ``source``, of the same stored shape, into t and its origin, or raise an error."""
    if t.aliasing == Aliasing.WHOLE:
        factor = _scales_for(func, t, source)
        count_write(t)
        t.qdata.copy_(source.qdata)
        t.scale.copy_(source.scale)
        t.per_tensor_scale.copy_(factor)
        return
    if t.numel() == 0 or t.is_meta or source.is_meta:  # nothing to write
        return
    if t.aliasing == Aliasing.PART and _fits(t, source):
        count_write(t)
        t.qdata.copy_(source.qdata)
        t.scale.copy_(source.scale)
        return
    levels = levels_of(t)
    if levels is None:
        check_writable(func, t, new_scale=True)
    assert levels is not None
    _write_region(func, levels[-1], _Region.of(levels), source)
    count_write(levels[-1])
    read_again(t, levels)


def count_write(t: NVFP4Tensor) -> None:
    """Count a write to the codes of t, for the copies that were read from them (see ``stale.py``)."""
    if type(t.qdata) is Tensor and not t.qdata.is_meta:
        storage = t.qdata.untyped_storage()
        setattr(storage, _WRITES, writes_of(storage) + 1)


def writes_of(storage: torch.UntypedStorage) -> int:
    """Return how often this library has written codes to the storage, which all views and aliases share."""
    count: int = getattr(storage, _WRITES, 0)
    return count


def read_again(t: NVFP4Tensor, levels: list[NVFP4Tensor]) -> None:
    """Give the copies between the slice t and the tensor that owns the storage the values of that tensor."""
    for level, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        if level.aliasing == Aliasing.COPY:
            _, dim, start, length = level.slice_origin
            read = aten.slice.Tensor(below._replace(transposed=False), dim, start, start + length)
            for name in t.tensor_data_names:
                getattr(level, name).copy_(getattr(read, name))


def _scales_for(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> Tensor:
    """Return the per-tensor scales of ``source`` in the shape of those of t, all of which they replace."""
    forms = source.per_tensor_scale.dim(), t.per_tensor_scale.dim()
    if forms in ((1, 0), (2, 0), (1, 2)):
        raise _too_many_scales(func)
    return source.row_scale() if forms == (2, 1) else source.per_tensor_scale


def _too_many_scales(func: Op) -> Exception:
    return unsupported(
        func,
        "the source has more per-tensor scales (one per row or matrix) than the destination",
        "use load_state_dict(..., assign=True), or dequantize() the source first",
    )


def levels_of(t: NVFP4Tensor) -> list[NVFP4Tensor] | None:
    """Return t, its origin and so on, up to the tensor that owns the storage; None if that cannot be reached."""
    levels = [t]
    while levels[-1].aliasing != Aliasing.WHOLE:
        origin = levels[-1].slice_origin
        below = None if origin is None else origin.source()
        if below is None:
            return None
        levels.append(below)
    return levels


def _scale_of_rows(t: NVFP4Tensor) -> Tensor:
    """Return one per-tensor scale per row: (rows,)."""
    return t.row_scale().expand(t.qdata.shape[:-1].numel())


def _fits(t: NVFP4Tensor, source: NVFP4Tensor) -> bool:
    """Return whether the codes of ``source`` are right with the scales of t; False in a trace, which has no values."""
    if source.per_tensor_scale is t.per_tensor_scale:
        return True
    if type(t.qdata) is not Tensor or type(source.qdata) is not Tensor:
        return False
    wanted = _scale_of_rows(source).to(t.device)
    return torch.equal(wanted, _scale_of_rows(t)) or not _nonzero(source.qdata).any()


class _Region(NamedTuple):
    """The region of a stored tensor that a slice covers."""

    codes: tuple[slice, ...]  # of qdata
    rows: Tensor  # row indices, with the leading dimensions flattened
    scales: tuple[Tensor, ...]  # indices into scale, which select (rows, blocks)

    @staticmethod
    def of(levels: list[NVFP4Tensor]) -> _Region:
        """Return the region of the last level that the first one covers."""
        shape, base = levels[0].qdata.shape, levels[-1].qdata
        starts = [0] * len(shape)
        for level in levels[:-1]:
            starts[level.slice_origin.dim] += level.slice_origin.start
        block, blocks = starts[-1] // BLOCK, shape[-1] * 2 // BLOCK
        starts[-1] //= 2
        codes = tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
        leading = base.shape[:-1]
        rows = torch.arange(leading.numel(), device=base.device).view(leading)[codes[:-1]].reshape(-1)
        r, c = rows.unsqueeze(1), torch.arange(block, block + blocks, device=base.device)
        row_in_tile = r % TILE_ROWS // 32 * TILE_COLUMNS + c % TILE_COLUMNS
        return _Region(codes, rows, (r // TILE_ROWS, c // TILE_COLUMNS, r % 32, row_in_tile))


def _write_region(func: Op, base: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> None:
    source = source._apply_fn_to_data(lambda data: data.to(base.device))
    if torch.equal(_scale_of_rows(source), _scale_of_rows(base)[region.rows]):
        _put(base, region, source)
        return
    new, rounds = _scales_for_both(func, base, region, source)
    if rounds.any():
        rounded = _rounded_to(new, rounds, base, region)
        _put(rounded, region, source)  # before the copies below, because source may share storage with base
        base.qdata.copy_(rounded.qdata)
        base.scale.copy_(rounded.scale)
    else:
        _put(base, region, source)
    base.per_tensor_scale.copy_(new)


def _put(base: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> None:
    scale = source.unswizzled_scale().view(torch.uint8)
    base.qdata[region.codes].copy_(source.qdata)
    base.scale.view(torch.uint8)[region.scales] = scale.view(-1, scale.shape[-1])


def _scales_for_both(func: Op, base: NVFP4Tensor, region: _Region, source: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """Return the per-tensor scales of base after the write, and which of them the existing codes must be rounded to."""
    old = base.per_tensor_scale
    wanted = _scale_of_rows(source)
    wanted = torch.where(_nonzero(source.qdata).any(-1).view(-1), wanted, -torch.inf)  # zeros need none
    of_rows = wanted.new_full(base.qdata.shape[:-1], -torch.inf).view(-1).index_copy(0, region.rows, wanted)
    largest = of_rows.view(*old.shape, -1).amax(-1)
    new = torch.where(largest == -torch.inf, old, largest)
    kept = (wanted == -torch.inf) | (wanted == _scale_of_rows(base._replace(per_tensor_scale=new))[region.rows])
    if not kept.all():
        raise _too_many_scales(func)
    others = _nonzero(base.qdata)
    others[region.codes] = False
    rounds = others.any(-1).view(*old.shape, -1).any(-1) & (largest != -torch.inf) & (new != old)
    if not (~rounds | (new > old)).all():
        raise unsupported(
            func,
            "this slice shares its per-tensor scale with the rest of its tensor, whose values may not be representable "
            "with the smaller scale of the source",
            "clone() the slice, or copy_ the full tensor",
        )
    return new, rounds


def _rounded_to(new: Tensor, rounds: Tensor, base: NVFP4Tensor, region: _Region) -> NVFP4Tensor:
    """Return a copy of base with the values outside of ``region`` rounded to new per-tensor scales where ``rounds``."""
    spec = base.spec.replace(
        round_mode="rne", hadamard_sign=None, random_bits=16, hardware_rounding=False, row_scaled=False
    )
    assert spec.scale_ceiling is not None
    leading = base.qdata.shape[:-1]
    rows = _scale_of_rows(base._replace(per_tensor_scale=rounds)).view(*leading, 1)
    factor = _scale_of_rows(base._replace(per_tensor_scale=new)).view(*leading, 1)
    values = base._decode(torch.float32, base.row_scale(), columns=base.qdata.shape[-1] * 2) / factor
    values.unflatten(-1, (-1, 2))[region.codes] = 0
    values = torch.where(rows & ~values.isnan(), values, 0)
    plain = base._replace(per_tensor_scale=new.new_ones(()), transposed=False)
    rounded = requantize(plain, values, spec, amax=E2M1_MAX * spec.scale_ceiling)  # with a per-tensor scale of 1
    old, scale = (t.unswizzled_scale().view(torch.uint8) for t in (base, rounded))
    scale = torch.where(rows & (old < E4M3_NAN), scale, old)  # a NaN scale stays NaN
    return base._replace(
        qdata=torch.where(rows, rounded.qdata, base.qdata),
        scale=layout.swizzle(scale.view(-1, scale.shape[-1])).view(torch.float8_e4m3fn),
    )
