"""Gathers and joins of NVFP4Tensors: index_select, index, embedding, cat and stack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchao.utils import fill_defaults

from nvfp4_tensor.dispatch.table import aten, implements, unsupported
from nvfp4_tensor.dispatch.views import on_leading, parts_of, rebuilt, stored_dim
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types


@implements(aten.index_select.default)
def _index_select(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dim, index = args
    if not isinstance(t, NVFP4Tensor) or isinstance(index, NVFP4Tensor):
        raise IndexError("tensors used as indices are integers, not NVFP4")
    stored = stored_dim(t, dim)
    if stored == t.dim() - 1:
        raise unsupported(func, "it would cut blocks of 16 apart")
    return on_leading(t, lambda part: part.index_select(stored, index))


@implements(aten.index.Tensor)
def _index(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, indices = args
    if not isinstance(t, NVFP4Tensor) or any(isinstance(index, NVFP4Tensor) for index in indices):
        raise IndexError("tensors used as indices are integers or booleans, not NVFP4")
    covered = sum(max(index.dim(), 1) if index is not None and index.dtype == torch.bool else 1 for index in indices)
    if t.transposed or covered >= t.dim():
        raise unsupported(func, "it would cut blocks of 16 apart")
    return on_leading(t, lambda part: aten.index.Tensor(part, indices))


@implements(aten.embedding.default)
def _embedding(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    weight, indices = args[:2]
    if not isinstance(weight, NVFP4Tensor) or weight.transposed or weight.dim() != 2:
        raise unsupported(func, "the weight has to be a matrix, not transposed")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices of an embedding are int32 or int64, not {indices.dtype}")
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
        raise RuntimeError(f"sizes {[tuple(t.shape) for t in tensors]} differ outside the dimension joined, {dim}")
    one_scale = _have_one_scale(tensors, along_blocks=stored == first.dim() - 1)
    if stored == first.dim() - 1:
        if not one_scale:
            raise unsupported(
                func, "tensors joined along the blocks need one per-tensor scale (quantize them with one amax)"
            )
        if any(t.columns % BLOCK for t in tensors[:-1]):
            raise unsupported(func, "only the last of tensors joined along the blocks may end within a block of 16")
    qdata, scale, row_scale = zip(*(parts_of(t, per_row=not one_scale) for t in tensors), strict=True)
    joined = torch.cat(qdata, stored), torch.cat(scale, stored), None if one_scale else torch.cat(row_scale, stored)
    columns = sum(t.columns for t in tensors) if stored == first.dim() - 1 else first.columns
    result = rebuilt(first, joined, columns=columns, activation_amax=_joined_amax(tensors))
    if not one_scale and stored == 0 and first.dim() == 3 and all(t.per_tensor_scale.dim() != 1 for t in tensors):
        return result._replace(per_tensor_scale=torch.cat([t.per_tensor_scale.expand(len(t), 1) for t in tensors]))
    return result


def _have_one_scale(tensors: Sequence[NVFP4Tensor], along_blocks: bool) -> bool:
    """Whether one 0-d per-tensor scale serves them all.

    Scales of equal values do. They are compared where nothing has to wait for it, or where there is no other way to
    join; a graph that is traced has no values, and knows only one storage from another.
    """
    first, *others = (t.per_tensor_scale for t in tensors)
    if first.dim() or any(scale.dim() for scale in others):
        return False
    values = type(first) is Tensor and (first.is_cpu or (along_blocks and first.is_cuda))
    return all(_is_one_storage(first, scale) or (values and torch.equal(first, scale)) for scale in others)


def _is_one_storage(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata and a.storage_offset() == b.storage_offset()
    )


def _check_joins(func: Op, first: NVFP4Tensor, t: Tensor) -> None:
    if not isinstance(t, NVFP4Tensor) or not isinstance(first, NVFP4Tensor):
        raise unsupported(func, "NVFP4 tensors do not join dense ones")
    if t.dtype != first.dtype or t.transposed != first.transposed or t.dim() != first.dim():
        raise unsupported(func, "the tensors joined differ in dtype, number of dimensions or transposition")
    if t.spec.hadamard_sign != first.spec.hadamard_sign:
        raise unsupported(func, "the tensors joined differ in their Hadamard transforms")
    if (t.activation_spec, t.product_backend) != (first.activation_spec, first.product_backend):
        raise unsupported(func, "the tensors joined want their activations quantized or multiplied differently")


def _joined_amax(tensors: Sequence[NVFP4Tensor]) -> Tensor | None:
    """The largest, which clips nothing that any of them lets through; none where one of them has none."""
    amax = [t.activation_amax for t in tensors if t.activation_amax is not None]
    return torch.stack(amax).amax() if len(amax) == len(tensors) else None


@implements(aten.constant_pad_nd.default)
def _pad(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Rows of zeros, as DTensor gives them to the last of shards that do not divide."""
    t, pad, value = fill_defaults(args, 3, [0])
    if value or t.transposed or any(pad[:2]):
        raise unsupported(func, "it is padded by zeros, behind or before its rows, and not along the blocks")
    return on_leading(t, lambda part: torch.nn.functional.pad(part, pad))


@implements(aten.stack.default)
def _stack(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    tensors, dim = fill_defaults(args, 2, [0])
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim=dim)
