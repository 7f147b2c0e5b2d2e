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


@fake("amax_pair", "amax_pair_by_spec")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return _scalar(x), _scalar(x)


@fake("hadamard")
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], BLOCK)), dtype=torch.bfloat16)


@fake("rotate")
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], ROTATION)), dtype=torch.float32)


@fake("rotate_back")
def _(x: Tensor, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.bfloat16)


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


@fake("quantize_activation")
def _(x: Tensor, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    factor = _scalar(x)
    if QuantizeSpec.unpack(spec).row_scaled:
        factor = x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)
    return x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype), factor


@fake("fake_quantize")
def _(x: Tensor, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype), _scalar(x)


@fake("fp8_operands")
def _(x: Tensor, qdata: Tensor) -> tuple[Tensor, ...]:
    columns = qdata.shape[-1] * 2
    return (
        x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn),
        x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32),
        x.new_empty((*qdata.shape[:-1], columns), dtype=torch.float8_e4m3fn),
        x.new_empty((math.prod(qdata.shape[:-1]),), dtype=torch.float32),
    )


@fake("fp8_matmul")
def _(x: Tensor, w: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


@fake("matmul")
def _(x: Tensor, qdata: Tensor, columns: int, across_blocks: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


@fake("train_linear")
def _(x: Tensor, w: Tensor, spec: int, out_dtype: torch.dtype) -> tuple[Tensor, ...]:
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype), *_codes(w, (w.shape[0],), w.shape[1], spec)


@fake("train_linear_forward")
def _(x: Tensor, w: Tensor, spec: int, spec_t: int, spec_w: int, out_dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    values = x.new_empty((rows, columns_of_values(columns, spec)), dtype=torch.bfloat16)
    state, y = x.new_empty((2,), dtype=torch.int64), x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype)
    of_x_t = _codes(x, (columns,), rows, spec_t)
    return y, state, values, _scalar(x), *of_x_t, *_codes(w, (w.shape[0],), columns, spec_w)


@fake("train_linear_backward")
def _(dy: Tensor, x_qdata: Tensor, dx_dtype: torch.dtype, dw_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    (rows, outputs), columns = dy.shape, x_qdata.shape[0]
    return dy.new_empty((rows, columns), dtype=dx_dtype), dy.new_empty((outputs, columns), dtype=dw_dtype)


@fake("grouped_matmul")
def _(x: Tensor, qdata: Tensor, columns: int, across_blocks: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


@fake("grouped_linear")
def _(x: Tensor, qdata: Tensor, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[0], qdata.shape[-2]), dtype=out_dtype)


@fake("grouped_fp4_matmul")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16)


@fake("decode_layers", "decode_step")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@fake("decode_layers_plan")
def _(x: Tensor) -> Tensor:
    # Its size depends on the device's number of multiprocessors.
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size,), dtype=torch.uint8)


@fake("linear_row")
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[0]))


@fake("rms_norm")
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, multiplier: float, first_weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    unchanged = residual is None and first_weight is None and multiplier == 1.0
    return x.new_empty((0,) if weight is None else x.shape), x.new_empty((0,) if unchanged else x.shape)


@fake("attend_one")
def _(qkv: Tensor, keys: Tensor, heads: int) -> Tensor:
    return qkv.new_empty((qkv.shape[0], heads * keys.shape[3]))


@fake("place_one")
def _(qkv: Tensor, keys: Tensor, heads: int) -> Tensor:
    return qkv.new_empty((keys.shape[0], heads, 1, keys.shape[3]))


@fake("gated")
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@fake("linears")
def _(x: Tensor, qdata: Sequence[Tensor]) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(each.shape[-2] for each in qdata)))


@fake("norm_linears")
def _(
    x: Tensor,
    residual: Tensor | None,
    multiplier: float,
    first_norm: Tensor | None,
    qdata: Sequence[Tensor],
    activation: int,
) -> tuple[Tensor, Tensor]:
    columns = qdata[0].shape[-2] if activation >= 0 else sum(each.shape[-2] for each in qdata)
    unchanged = residual is None and first_norm is None and multiplier == 1.0
    return x.new_empty((*x.shape[:-1], columns)), x.new_empty((0,) if unchanged else x.shape)


@fake("attend_codes")
def _(q: Tensor, latest_values: Tensor) -> Tensor:
    return q.new_empty((*q.shape[:-1], latest_values.shape[-1]))


@fake("append_codes", "adamw_step", "adamw_step_codes", "adamw_step_vector")
def _() -> None:
    return None
