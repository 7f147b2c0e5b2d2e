"""Writes of codes into tensors and windows: ``t.narrow(...).copy_(other)``, as loaders of sharded checkpoints do.

The elements that share a per-tensor scale (those of a tensor, matrix or row) need one that fits the new codes and the
existing ones. Zeros fit any scale, and if all existing codes are zero, the new scale is stored. A larger new scale is
stored too, and the existing codes are rounded to it, once. A smaller new scale raises an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.dispatch.table import aten, check_writable, unsupported
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_NAN
from nvfp4_tensor.tensor.description import Op
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import requantize
from nvfp4_tensor.tensor.windows import Window

_WRITES = "_nvfp4_writes"
"""An attribute of a storage, whose Python object lives as long as the storage."""


def count_write(t: NVFP4Tensor) -> None:
    """Count a write to the codes of t, of which torch counts none below autograd, for optimizers that keep headroom."""
    qdata = t._stored().qdata
    if type(qdata) is Tensor and not qdata.is_meta:
        count_write_to(qdata.untyped_storage())


def count_write_to(storage: torch.UntypedStorage) -> None:
    """Count a write to a storage."""
    setattr(storage, _WRITES, writes_of(storage) + 1)


def writes_of(storage: torch.UntypedStorage) -> int:
    """Return how many writes to the storage, which all views and aliases share, were counted."""
    count: int = getattr(storage, _WRITES, 0)
    return count


def write_zeros(t: NVFP4Tensor) -> None:
    """Set all values of t to zero, which any per-tensor scale fits."""
    count_write(t)
    if t.window is None:
        t.qdata.zero_()
        t.scale.view(torch.uint8).zero_()
        return
    assert isinstance(t.window, Window)
    _put(t.window, t._apply_fn_to_data(torch.zeros_like))


def write_codes(func: Op, t: NVFP4Tensor, source: NVFP4Tensor) -> None:
    """Write the codes and scales of ``source``, of the same stored shape, into t, or raise an error."""
    if source.is_meta or t.is_meta:
        return
    check_writable(func, t, new_scale=False)
    if t.window is None:
        factor = _scales_for(func, t, source)
        count_write(t)
        t.qdata.copy_(source.qdata)
        t.scale.copy_(source.scale)
        t.per_tensor_scale.copy_(factor)
        return
    window = t.window
    assert isinstance(window, Window)
    if source.device != t.device:
        source = aten._to_copy.default(source, device=t.device)
    is_traced = type(window.stored.qdata) is not Tensor
    if source._stored().qdata.untyped_storage()._cdata == window.stored.qdata.untyped_storage()._cdata:
        source = source.clone()  # it may overlap the window
    if source.per_tensor_scale is not t.per_tensor_scale and is_traced and not window.has_own_scales():
        raise unsupported(
            func,
            "a graph cannot compare the source's per-tensor scale with the one that this slice shares with its tensor",
            "write outside of the compiled function, or copy_ the full tensor",
        )
    count_write(t)
    if source.per_tensor_scale is t.per_tensor_scale or (
        not is_traced and torch.equal(_row_scale(t), _row_scale(source))
    ):
        _put(window, source)
        return
    new, rounds = _scales_for_both(func, window, source)
    if not is_traced and rounds.any():
        _round_to(new, rounds, t)
    _put(window, source)
    window.stored.per_tensor_scale.copy_(new)


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


def _row_scale(t: NVFP4Tensor) -> Tensor:
    """Return one per-tensor scale per row: (rows,)."""
    return t.row_scale().expand(t.qdata.shape[:-1].numel())


def _nonzero(qdata: Tensor) -> Tensor:
    """Return which rows of codes (..., bytes) contain a value other than 0 and -0."""
    return ((qdata & 0x77) != 0).any(-1)


def _put(window: Window, source: NVFP4Tensor) -> None:
    stored, codes = window.stored, source.qdata.unflatten(-1, (-1, BLOCK // 2))
    if type(stored.qdata) is not Tensor:  # torch.compile supports no writes into views of inputs
        scale = window.assigned(window.unswizzled_tiles(), source.unswizzled_scale().view(torch.uint8))
        stored.qdata.copy_(window.assigned(stored.codes(), codes).view(stored.qdata.shape))
        stored.scale.copy_(layout.swizzle(scale).view(stored.scale.dtype))
        return
    window.of(stored.codes()).copy_(codes)
    if (tiles := window.whole_tiles()) is not None:
        stored.scale[tiles].copy_(source.scale)
        return
    scale = window.unswizzled_tiles()
    window.within_tiles().of(scale).copy_(source.unswizzled_scale().view(torch.uint8))
    stored.scale.view(torch.uint8)[slice(*window.tiles())].copy_(layout.swizzle(scale))


def _scales_for_both(func: Op, window: Window, source: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored per-tensor scales after the write, and which of them existing codes must be rounded to."""
    stored = window.stored
    old, wanted = stored.per_tensor_scale, _row_scale(source)
    wanted = torch.where(_nonzero(source.qdata).view(-1), wanted, -torch.inf)  # zeros need none
    of_blocks = wanted.new_full((stored.rows, stored.blocks), -torch.inf)
    of_blocks = window.assigned(of_blocks, wanted.view(*window.size, 1))
    largest = of_blocks.view(*old.shape, -1).amax(-1)
    new = torch.where(largest == -torch.inf, old, largest)
    if type(new) is not Tensor:  # a trace has no values, and this region has scales of its own
        return new, torch.zeros_like(new, dtype=torch.bool)
    given = window._replace(stored=stored._replace(per_tensor_scale=new)).per_tensor_scale()
    given = given.expand(window.size).reshape(-1) if given.dim() == 2 else given
    if not ((wanted == -torch.inf) | (wanted == given)).all():
        raise _too_many_scales(func)
    others = window.assigned(_nonzero(stored.codes()), False)
    rounds = others.view(*old.shape, -1).any(-1) & (largest != -torch.inf) & (new != old)
    if not (~rounds | (new > old)).all():
        raise unsupported(
            func,
            "this slice shares its per-tensor scale with the rest of its tensor, whose values may not be representable "
            "with the smaller scale of the source",
            "clone() the slice, or copy_ the full tensor",
        )
    return new, rounds


def _round_to(new: Tensor, rounds: Tensor, t: NVFP4Tensor) -> None:
    """Round the stored values outside of the window t to new per-tensor scales where ``rounds``."""
    plainly = {"hadamard_sign": None, "random_bits": 16, "hardware_rounding": False, "row_scaled": False}
    stored, spec = t._stored(), t.spec.replace(round_mode="rne", **plainly)
    assert spec.scale_ceiling is not None and isinstance(t.window, Window)
    columns = stored.blocks * BLOCK
    whole = NVFP4Tensor._of_parts(*stored[:3], columns, torch.float32, spec)
    leading = stored.qdata.shape[:-1]
    rows, factor = (_row_scale(whole._replace(per_tensor_scale=each)).view(*leading, 1) for each in (rounds, new))
    values = whole.dequantize() / factor
    t.window.of(values.view(stored.rows, stored.blocks, BLOCK)).zero_()
    values = torch.where(rows & ~values.isnan(), values, 0)
    plain = whole._replace(per_tensor_scale=new.new_ones(()))
    rounded = requantize(plain, values, spec, amax=E2M1_MAX * spec.scale_ceiling)  # with a per-tensor scale of 1
    old, scale = (each.unswizzled_scale().view(torch.uint8) for each in (whole, rounded))
    scale = torch.where(rows & (old < E4M3_NAN), scale, old)  # a NaN scale stays NaN
    stored.qdata.copy_(torch.where(rows, rounded.qdata, stored.qdata))
    stored.scale.view(torch.uint8).copy_(layout.swizzle(scale.view(-1, scale.shape[-1])))
