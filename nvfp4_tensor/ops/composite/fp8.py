"""Plain-torch implementations of the ops of FP8 products (numerics contract, section 13)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import fp8
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, ceil_to
from nvfp4_tensor.ops.schemas import op


@op(returns="x_values, x_scale, w_values, w_factor")
def fp8_operands(x: Tensor, qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor) -> tuple[Tensor, ...]:
    """Round rows of x (..., K) and code x block scale of a weight (..., N, K) to e4m3, with a power of two per row.

    qdata, scale, per_tensor_scale: the weight, its per-tensor scale 0-d or one per row.

    Returns:
        x_values: e4m3 (..., K rounded up to 16); x_scale: float32, one per row of x (:func:`fp8.quantize_rows`).
        w_values: e4m3 (..., N, K rounded up to 16); w_factor: float32, one per row of w (:func:`fp8.of_codes`).
    """
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension: x.reshape(1) has")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, not {x.dtype}; cast it")
    if ceil_to(x.shape[-1], BLOCK) != qdata.shape[-1] * 2:
        raise ValueError(f"qdata of {qdata.shape[-1] * 2} columns does not fit x of {x.shape[-1]}")
    return *fp8.quantize_rows(x), *fp8.of_codes(qdata, scale, per_tensor_scale)


@op()
def fp8_matmul(
    x: Tensor, x_scale: Tensor, w: Tensor, w_factor: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return x (M, K) @ w (N, K)^T of e4m3 operands with their factors per row; see :func:`fp8.matmul`.

    For devices whose FP8 tensor cores :mod:`nvfp4_tensor.matmul.backends` does not choose.
    """
    with torch.autocast(x.device.type, enabled=False):  # autocast would multiply in 16 bits
        return fp8.matmul(x, x_scale, w, w_factor, bias, out_dtype)
