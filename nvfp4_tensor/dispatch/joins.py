"""Gather and join NVFP4Tensors: index_select, index, embedding, cat, stack and padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torchao.utils import fill_defaults

from nvfp4_tensor.dispatch.table import IN_DDP, UnsupportedError, aten, implements, unsupported
from nvfp4_tensor.dispatch.views import on_leading, parts_of, rebuilt, stored_dim
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@implements(aten.index_select.default)
def _index_select(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dim, index = args
    if not isinstance(t, NVFP4Tensor) or isinstance(index, NVFP4Tensor):
        raise IndexError("indices must be integers, not NVFP4")
    stored = stored_dim(t, dim)
    if stored == t.dim() - 1:
        raise unsupported(func, "it would split blocks of 16")
    qdata = t.qdata.index_select(stored, index)
    places = [torch.arange(n, device=index.device) for n in qdata.shape[:-1]]
    places[stored] = index.view(-1)
    rows = torch.zeros((), dtype=torch.int64, device=index.device)
    for n, at in zip(t.qdata.shape[:-1], places, strict=True):
        rows = rows.unsqueeze(-1) * n + at
    return _of_rows(t, qdata, rows)


@implements(aten.index.Tensor)
def _index(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, indices = args
    if not isinstance(t, NVFP4Tensor) or any(isinstance(index, NVFP4Tensor) for index in indices):
        raise IndexError("indices must be integers or booleans, not NVFP4")
    covered = sum(max(index.dim(), 1) if index is not None and index.dtype == torch.bool else 1 for index in indices)
    if covered >= t.dim() - t.transposed:  # a transpose has the blocks in the dimension before the last
        raise unsupported(func, "it would split blocks of 16")
    *leading, half = t.qdata.shape
    if all(index is not None and index.dtype in (torch.int32, torch.int64) for index in indices):
        qdata = aten.index.Tensor(t.qdata, indices)  # raises torch's errors of indices
        rows = torch.zeros((), dtype=torch.int64, device=qdata.device)
        for n, index in zip(leading, indices, strict=False):
            index = index.to(rows.device)  # torch takes indices on the CPU for any tensor
            rows = rows * n + torch.where(index < 0, index + n, index)
        rest = math.prod(leading[len(indices) :])
        rows = rows.unsqueeze(-1) * rest + torch.arange(rest, device=qdata.device)
    else:
        every = torch.arange(math.prod(leading), device=t.qdata.device).view(leading)
        rows = aten.index.Tensor(every, indices)
        qdata = t.qdata.reshape(every.numel(), half)[rows]
    return _of_rows(t, qdata, rows)


def _of_rows(t: NVFP4Tensor, qdata: Tensor, rows: Tensor) -> NVFP4Tensor:
    """Return a copy of some rows, with codes (*leading, bytes), at a cost by these rows; of a view, by its rows.

    rows: int64, of each row of ``qdata`` the index among the rows of t.
    """
    rows, factor = rows.reshape(-1), t.per_tensor_scale
    if factor.dim() == 2:  # of each matrix
        factor = factor.view(-1)[rows // max(math.prod(t.qdata.shape[1:-1]), 1)]
    elif factor.dim() == 1:
        factor = factor[rows]
    if t.window is None:
        scale = layout.unswizzle_rows(t.scale.view(torch.uint8), rows, t.qdata.shape[-1] * 2 // BLOCK)
    else:
        scale = t.unswizzled_scale().view(torch.uint8).flatten(0, -2)[rows]
    return rebuilt(t, (qdata, scale, factor if factor.dim() else None))


@implements(aten.embedding.default)
def _embedding(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    weight, indices = args[:2]
    if not isinstance(weight, NVFP4Tensor) or weight.transposed or weight.dim() != 2:
        raise unsupported(func, "the weight must be a matrix that is not transposed")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices of an embedding must be int32 or int64, got {indices.dtype}")
    rows = aten.index_select.default(weight, 0, indices.flatten()).dequantize()
    return rows.view(*indices.shape, weight.shape[1])


@implements(aten.cat.default)
def _cat(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    tensors, dim = fill_defaults(args, 2, [0])
    first = tensors[0]
    for t in tensors:
        _check_joins(func, first, t)
    stored = stored_dim(first, dim)
    if stored != first.dim() - 1 and any(t.columns != first.columns for t in tensors):
        raise RuntimeError(f"sizes {[tuple(t.shape) for t in tensors]} differ outside of dimension {dim}")
    one_scale = _have_one_scale(tensors, along_blocks=stored == first.dim() - 1)
    if stored == first.dim() - 1:
        if not one_scale:
            raise _unjoined(func, "joining along the blocks needs one per-tensor scale (quantize with one amax)")
        if any(t.columns % BLOCK for t in tensors[:-1]):
            raise _unjoined(func, "tensors joined along the blocks need multiples of 16 columns, except the last")
    qdata, scale, row_scale = zip(*(parts_of(t, per_row=not one_scale) for t in tensors), strict=True)
    joined = torch.cat(qdata, stored), torch.cat(scale, stored), None if one_scale else torch.cat(row_scale, stored)
    columns = sum(t.columns for t in tensors) if stored == first.dim() - 1 else first.columns
    result = rebuilt(first, joined, columns=columns, activation_amax=_joined_amax(tensors))
    if not one_scale and stored == 0 and first.dim() == 3 and all(t.per_tensor_scale.dim() != 1 for t in tensors):
        return result._replace(per_tensor_scale=torch.cat([t.per_tensor_scale.expand(len(t), 1) for t in tensors]))
    return result


def _have_one_scale(tensors: Sequence[NVFP4Tensor], along_blocks: bool) -> bool:
    """Return whether all tensors have the same 0-d per-tensor scale.

    Values are compared on a CPU, and on CUDA (which synchronizes) only where a join is impossible otherwise. A traced
    graph has no values, so only the storages are compared.
    """
    first, *others = (t.per_tensor_scale for t in tensors)
    if first.dim() or any(scale.dim() for scale in others):
        return False
    place = first.untyped_storage()._cdata, first.storage_offset()
    others = [scale for scale in others if (scale.untyped_storage()._cdata, scale.storage_offset()) != place]
    has_values = type(first) is Tensor and (first.is_cpu or (along_blocks and first.is_cuda))
    return all(has_values and torch.equal(first, scale) for scale in others)


def _check_joins(func: Op, first: NVFP4Tensor, t: Tensor) -> None:
    if not isinstance(t, NVFP4Tensor) or not isinstance(first, NVFP4Tensor):
        raise _unjoined(func, "NVFP4 tensors cannot be joined with dense ones")
    if t.dtype != first.dtype or t.transposed != first.transposed or t.dim() != first.dim():
        raise _unjoined(func, "the tensors differ in dtype, number of dimensions or transposition")
    if t.spec.hadamard_sign != first.spec.hadamard_sign:
        raise _unjoined(func, "the tensors have different Hadamard transforms")
    if (t.activation_spec, t.product_backend) != (first.activation_spec, first.product_backend):
        raise _unjoined(func, "the tensors have different activation specs or product backends")


def _unjoined(func: Op, why: str) -> UnsupportedError:
    return unsupported(func, why, f"dequantize() first{IN_DDP}")


def _joined_amax(tensors: Sequence[NVFP4Tensor]) -> Tensor | None:
    """Return the largest activation amax, or None if any tensor has none."""
    amax = [t.activation_amax for t in tensors if t.activation_amax is not None]
    return torch.stack(amax).amax() if len(amax) == len(tensors) else None


@implements(aten.constant_pad_nd.default)
def _pad(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Append or prepend rows of zeros, as DTensor pads uneven shards."""
    t, pad, value = fill_defaults(args, 3, [0])
    if value or t.transposed or any(pad[:2]):
        raise unsupported(func, "it can be padded only with zeros and along the rows")
    return on_leading(t, lambda part: torch.nn.functional.pad(part, pad))


@implements(aten.stack.default)
def _stack(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    tensors, dim = fill_defaults(args, 2, [0])
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim=dim)
