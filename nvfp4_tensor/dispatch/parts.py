"""Writes into slices: ``t.narrow(...).copy_(piece)``, as loaders of sharded checkpoints fill a tensor.

A slice on the tiles of scales is a view, and the write goes to the storage of the whole. Another slice is a copy; the
write goes to it and to the tensor that it was cut from, as long as that lives.

One per-tensor scale serves all parts. A piece that comes with another is taken where nothing else is in the tensor yet,
or where the new scale is the larger: the other parts are then rounded to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvfp4_tensor.dispatch.table import check_writable, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, ceil_to
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor, quantize
from nvfp4_tensor.tensor.protocol import Op


class Place(NamedTuple):
    """Where a slice lies."""

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


def make_room(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> None:
    """Let t be written from the codes of source, or raise: for want of a storage, or of one per-tensor scale."""
    if t.aliasing == Aliasing.WHOLE:
        return
    whole, fits = _whole(t), source.per_tensor_scale is t.per_tensor_scale or _equal_scales(t, source)
    if whole is None:
        check_writable(func, t, new_scale=not fits)
    elif not fits:
        _change_scale(func, t, whole, source.per_tensor_scale)


def write_through(t: NVFP4Tensor) -> None:
    """What a copy now holds, into the tensor that it was cut from."""
    whole = _whole(t) if t.aliasing == Aliasing.COPY else None
    if whole is None:
        return
    _, dim, start, length = t.place
    along_blocks = dim == t.dim() - 1
    codes = (start // 2, t.qdata.shape[dim]) if along_blocks else (start, length)
    whole.qdata.narrow(dim, *codes).copy_(t.qdata)
    blocks = (start // BLOCK, ceil_to(length, BLOCK) // BLOCK) if along_blocks else (start, length)
    scale, new = (x.unswizzled_scale().view(torch.uint8) for x in (whole, t))
    scale.narrow(dim, *blocks).copy_(new)
    whole.scale.copy_(layout.swizzle(scale.view(-1, scale.shape[-1])).view(torch.float8_e4m3fn))
    if not along_blocks and whole.per_tensor_scale.dim() == t.per_tensor_scale.dim() > 0:
        rows = t.per_tensor_scale.shape[0] // max(length, 1)
        whole.per_tensor_scale.narrow(0, start * rows, length * rows).copy_(t.per_tensor_scale)
    write_through(whole)


def _whole(t: NVFP4Tensor) -> NVFP4Tensor | None:
    """The tensor that a slice was cut from, if a write can reach it."""
    if t.aliasing == Aliasing.WHOLE or t.place is None:
        return None
    whole = t.place.whole()
    return None if whole is None or (whole.aliasing != Aliasing.WHOLE and _whole(whole) is None) else whole


def _equal_scales(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    one, other = a.per_tensor_scale, b.per_tensor_scale
    if one.dim() or other.dim():
        return one.dim() == other.dim() == 1 or one.dim() == other.dim() == 2  # each part of them has its own
    return type(one) is Tensor and torch.equal(one, other.to(one.device))


def _change_scale(func: Op, t: NVFP4Tensor, whole: NVFP4Tensor, new: Tensor) -> None:
    """Store all that t is a part of under another per-tensor scale."""
    while whole.aliasing != Aliasing.WHOLE:
        nearer = _whole(whole)
        assert nearer is not None
        whole = nearer
    new = new.to(whole.device)
    if whole.per_tensor_scale.dim() or new.dim():
        check_writable(func, t, new_scale=True)
    if whole.qdata.count_nonzero():
        if bool(new < whole.per_tensor_scale):
            raise unsupported(
                func,
                "this is part of a tensor whose other parts share its per-tensor scale, and values of theirs may not "
                "fit under that of the source, which is smaller",
                "clone() it, or copy_ a whole",
            )
        _round_to_scale(whole, new)
    whole.per_tensor_scale.copy_(new)
    t.per_tensor_scale.copy_(new)


def _round_to_scale(whole: NVFP4Tensor, new: Tensor) -> None:
    spec = whole.spec.replace(round_mode="rne", hadamard_sign=None, random_bits=16, hardware_rounding=False)
    assert spec.scale_ceiling is not None
    values = whole._decode(torch.float32, whole.row_scale())
    rounded = quantize(values, spec, amax=new * (E2M1_MAX * spec.scale_ceiling))
    whole.qdata.copy_(rounded.qdata)
    whole.scale.copy_(rounded.scale)
