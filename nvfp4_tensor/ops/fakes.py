"""Fake implementations of the ops for torch.compile and export. A fake has only the arguments that it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_tensor.numerics.layout import BLOCK, ROTATION, ceil_to, scale_tiles
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite import columns_of_values
from nvfp4_tensor.ops.schemas import fake


def _scalar(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.float32)


def _codes(x: Tensor, leading: Sequence[int], columns: int, spec: int) -> tuple[Tensor, Tensor, Tensor]:
    columns = ceil_to(columns, QuantizeSpec.unpack(spec).column_multiple)
    tiles = scale_tiles(math.prod(leading), columns)
    return (
        x.new_empty((*leading, columns // 2), dtype=torch.uint8),
        x.new_empty((*tiles, 32, 16), dtype=torch.float8_e4m3fn),
        _scalar(x),
    )


@fake("draw_rng_state")
def _(like: Tensor) -> Tensor:
    return like.new_empty((2,), dtype=torch.int64)


@fake("amax", "amax_rotated")
def _(x: Tensor) -> Tensor:
    return _scalar(x)


@fake("amax_pair")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _scalar(x), _scalar(x)


@fake("hadamard")
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], BLOCK)), dtype=torch.bfloat16)


@fake("rotate")
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], ROTATION)), dtype=torch.float32)


@fake("quantize")
def _(x: Tensor, spec: int) -> tuple[Tensor, Tensor, Tensor]:
    return _codes(x, x.shape[:-1], x.shape[-1], spec)


@fake("quantize_rows")
def _(x: Tensor, spec: int) -> tuple[Tensor, Tensor, Tensor]:
    qdata, scale, _ = _codes(x, x.shape[:-1], x.shape[-1], spec)
    return qdata, scale, x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


@fake("quantize_pair")
def _(x: Tensor, spec: int, spec_t: int) -> tuple[Tensor, ...]:
    rows, columns = x.shape
    return *_codes(x, (rows,), columns, spec), *_codes(x, (columns,), rows, spec_t)


@fake("quantize_pair_values")
def _(x: Tensor, spec: int, spec_t: int, codes_t: bool) -> tuple[Tensor, ...]:
    rows, columns = x.shape
    values = x.new_empty((rows, columns_of_values(columns, spec)), dtype=torch.bfloat16)
    if codes_t:
        return values, _scalar(x), *_codes(x, (columns,), rows, spec_t)
    values_t = x.new_empty((columns, columns_of_values(rows, spec_t)), dtype=torch.bfloat16)
    return values, _scalar(x), values_t, x.new_empty((0,), dtype=torch.float8_e4m3fn), _scalar(x)


@fake("transpose_codes")
def _(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = ceil_to(qdata.shape[0], BLOCK), qdata.shape[1] * 2
    tiles = scale_tiles(columns, rows)
    return qdata.new_empty((columns, rows // 2)), qdata.new_empty((*tiles, 32, 16), dtype=torch.float8_e4m3fn)


@fake("dequantize")
def _(qdata: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-1], columns), dtype=dtype)


@fake("fake_quantize", "quantize_activation")
def _(x: Tensor, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype), _scalar(x)


@fake("matmul")
def _(x: Tensor, qdata: Tensor, columns: int, across_blocks: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


@fake("grouped_matmul")
def _(x: Tensor, qdata: Tensor, columns: int, across_blocks: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


@fake("grouped_linear")
def _(x: Tensor, qdata: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], qdata.shape[-2]), dtype=out_dtype)


@fake("grouped_fp4_matmul")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16)


@fake("decode_llama")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@fake("linear_row")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((1, w.shape[0]))
