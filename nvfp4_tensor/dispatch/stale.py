"""Keeps copies up to date that stand in for views.

Where the layout allows no view (rows that do not start at a tile of scales, a single row, every second row), a view
operator returns a copy. A view would have the values that its tensor is given later, so a copy remembers how often what
it was read from had been written to. If that has changed, a slice is read again before its next use; any other copy
raises an error.

Three counts are needed. This library counts its writes to the codes at their storage, which all views and aliases
share; below autograd torch counts none. Autograd counts in a version that a tensor and its views share, for compiled
graphs. The versions of codes, scales and amax count operators that are given these themselves. A write through the
``.data`` of one of them counts nowhere, nor one to the codes of t for a slice of another view of all of t.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nvfp4_tensor.dispatch.slice_writes import levels_of, read_again, writes_of
from nvfp4_tensor.dispatch.table import UnsupportedError, register_freshness
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor


class Origin:
    """What a copy was read from, which it does not keep alive, and the counts then."""

    def __init__(self, t: NVFP4Tensor, shared_version: int) -> None:
        storage = t.qdata.untyped_storage()
        self.storage, self.writes = StorageWeakRef(storage), writes_of(storage)
        data = [getattr(level, name) for level in levels_of(t) or [t] for name in level.tensor_data_names]
        self.versions = [(weakref.ref(each), _version(each)) for each in data]
        self.shared_version = shared_version

    def has_changed(self, shared_version: int) -> bool:
        """Return whether the tensor was written to. ``shared_version``: of the copy, that of its tensor or its own.

        A copy made within another operator, or by ``.data``, has a version of its own, which is smaller.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return False
        if writes_of(storage) != self.writes or shared_version > self.shared_version:
            return True
        return any((data := weak()) is not None and _version(data) != version for weak, version in self.versions)

    def __deepcopy__(self, memo: dict) -> None:
        """A copy of a copy is independent."""


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def remember(result: Any, source: NVFP4Tensor) -> None:
    """Let each copy among the results of a view operator know what it was read from."""
    if type(source) is not NVFP4Tensor or type(source.qdata) is not Tensor or source.qdata.is_meta:
        return  # a FlatView, which is read when it is used; a trace; nothing to read
    copies = [
        each
        for each in (result if isinstance(result, (list, tuple)) else (result,))
        if type(each) is NVFP4Tensor and each.aliasing == Aliasing.COPY and each.read_from is None
    ]
    if copies:
        origin = source.read_from if source.aliasing == Aliasing.COPY else Origin(source, _version(source))
        for each in copies:
            each.read_from = origin


def refresh(t: NVFP4Tensor) -> None:
    """Read t again if the tensor that it was read from has changed.

    Raises:
        UnsupportedError: t is no slice.
    """
    origin: Origin = t.read_from
    if t.numel() == 0 or not origin.has_changed(_version(t)):
        return
    levels = levels_of(t)
    if levels is None:
        raise UnsupportedError(
            "this is a copy, because the layout allows no such view, and its tensor was written since: take the view "
            "again, or clone() it before the write"
        )
    read_again(t, levels)
    t.read_from = Origin(levels[-1], max(_version(t), origin.shared_version))


register_freshness(remember, refresh)
