"""Fake implementations of the ops for torch.compile and export. A fake has only the arguments that it needs.

Ops that only run others (``is_fake``) need none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from nvfp4_tensor.numerics.layout import BLOCK, ROTATION, ceil_to, scale_tiles
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import columns_of_values
from nvfp4_tensor.ops.schemas import fake

E4M3 = torch.float8_e4m3fn


def _scalar(like: Tensor) -> Tensor:
    return like.new_empty((), dtype=torch.float32)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty((math.prod(x.shape[:-1]),), dtype=torch.float32)


def _codes(x: Tensor, spec: int) -> tuple[Tensor, Tensor, Tensor]:
    columns = ceil_to(x.shape[-1], QuantizeSpec.unpack(spec).column_multiple)
    tiles = scale_tiles(math.prod(x.shape[:-1]), columns)
    return (
        x.new_empty((*x.shape[:-1], columns // 2), dtype=torch.uint8),
        x.new_empty((*tiles, 32, 16), dtype=E4M3),
        _scalar(x),
    )


def _product(x: Tensor, qdata: Tensor, columns: int, across_blocks: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


def _transposed_codes(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = ceil_to(qdata.shape[0], BLOCK), qdata.shape[1] * 2
    return qdata.new_empty((columns, rows // 2)), qdata.new_empty((*scale_tiles(columns, rows), 32, 16), dtype=E4M3)


def _fp8_operands(x: Tensor, qdata: Tensor) -> tuple[Tensor, ...]:
    x_values, w_values = (t.new_empty((*t.shape[:-1], qdata.shape[-1] * 2), dtype=E4M3) for t in (x, qdata))
    return x_values, _per_row(x), w_values, _per_row(qdata)


def _plan(x: Tensor) -> Tensor:
    # Its size depends on the device's number of multiprocessors.
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size,), dtype=torch.uint8)


_FAKES: dict[str, Callable[..., object]] = {
    "draw_rng_state": lambda like: like.new_empty((2,), dtype=torch.int64),
    "amax": lambda x: _scalar(x),
    "amax_rotated": lambda x: _scalar(x),
    "amax_pair": lambda x: (_scalar(x), _scalar(x)),
    "hadamard": lambda x: x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], BLOCK)), dtype=torch.bfloat16),
    "rotate": lambda x: x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], ROTATION)), dtype=torch.float32),
    "rotate_back": lambda x, columns: x.new_empty((*x.shape[:-1], columns), dtype=torch.bfloat16),
    "quantize": _codes,
    "quantize_rows": lambda x, spec: (*_codes(x, spec)[:2], _per_row(x)),
    "quantize_pair": lambda x, spec, spec_t: (*_codes(x, spec), *_codes(x.t(), spec_t)),
    "transpose_codes": _transposed_codes,
    "dequantize": lambda qdata, columns, dtype: qdata.new_empty((*qdata.shape[:-1], columns), dtype=dtype),
    "fake_quantize": lambda x, spec, dtype: (
        x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype),
        _scalar(x),
    ),
    "fp8_operands": _fp8_operands,
    "fp8_matmul": lambda x, w, out_dtype: x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype),
    "matmul": _product,
    "grouped_matmul": _product,
    "grouped_linear": lambda x, qdata, out_dtype: x.new_empty((x.shape[0], qdata.shape[-2]), dtype=out_dtype),
    "grouped_fp4_matmul": lambda x, w: x.new_empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16),
    "decode_layers": lambda x: torch.empty_like(x),
    "decode_step": lambda x: torch.empty_like(x),
    "decode_layers_plan": _plan,
    "attend_one": lambda qkv, keys, heads: qkv.new_empty((qkv.shape[0], heads * keys.shape[3])),
    "place_one": lambda qkv, keys, heads: qkv.new_empty((keys.shape[0], heads, 1, keys.shape[3])),
    "attend_codes": lambda q, latest_values: q.new_empty((*q.shape[:-1], latest_values.shape[-1])),
    "append_codes": lambda: None,
    "decode_fp8": lambda: None,
    "adamw_step": lambda: None,
    "adamw_step_codes": lambda: None,
    "adamw_step_vector": lambda: None,
}
"""The fake of each op, by its name."""

for _name, _fake in _FAKES.items():
    fake(_name)(_fake)
