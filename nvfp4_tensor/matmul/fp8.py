"""Products of e4m3 operands: rows of activations times a weight decoded to e4m3 (numerics contract, section 13).

The weight is decoded as a whole, one byte per element, for each product: on an H200 that takes less time than FP8
tensor cores save from some hundred rows on. torch's scaled_mm then multiplies by the factors of rows and columns in
float32, before the one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics.codes import Codes

_N_ALIGNMENT = 16
"""cuBLASLt needs rows of the result that begin on 16 bytes."""


def product(
    x: Tensor, w: Codes, bias: Tensor | None, alpha: float, out_dtype: torch.dtype, on_tensor_cores: bool
) -> Tensor:
    """Return alpha * x (M, K) @ w (N, K)^T + bias, rounded once, of operands rounded to e4m3."""
    values, x_scale, w_values, w_factor = torch.ops.nvfp4.fp8_operands(x, *w)
    if alpha != 1:
        x_scale = x_scale * alpha
    multiply = scaled_mm if on_tensor_cores else torch.ops.nvfp4.fp8_matmul
    y: Tensor = multiply(values, x_scale, w_values, w_factor, bias, out_dtype)
    return y


def products(x: Tensor, weights: Sequence[Codes], biases: Sequence[Tensor | None], on_tensor_cores: bool) -> Tensor:
    """Return the products (M, sum of N) of x (M, K) and each w (N, K), side by side. x is rounded once."""
    sizes = [w.qdata.shape[0] for w in weights]
    y = x.new_empty((len(x), sum(sizes)))
    is_aligned = x.dtype != torch.float32 and not any(size % _N_ALIGNMENT for size in sizes)
    values, x_scale, w_values, w_factor = torch.ops.nvfp4.fp8_operands(x, *weights[0])
    for i, (bias, part) in enumerate(zip(biases, y.split(sizes, 1), strict=True)):
        if i:
            _, _, w_values, w_factor = torch.ops.nvfp4.fp8_operands(x[:0], *weights[i])
        if on_tensor_cores and is_aligned and bias is None:
            scaled_mm(values, x_scale, w_values, w_factor, None, y.dtype, out=part)
        else:
            multiply = scaled_mm if on_tensor_cores else torch.ops.nvfp4.fp8_matmul
            part.copy_(multiply(values, x_scale, w_values, w_factor, bias, y.dtype))
    return y


def scaled_mm(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_factor: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return x (M, K) @ w (N, K)^T of e4m3 operands with their factors per row, plus bias, on FP8 tensor cores.

    out: where the result goes, columns of a matrix; without a bias, and if 16 divides all N.
    """
    rows = w.shape[0]
    if padding := -rows % _N_ALIGNMENT:
        w = pad(w.view(torch.uint8), (0, 0, 0, padding)).view(torch.float8_e4m3fn)
        w_factor = pad(w_factor, (0, padding))
    fused = None
    if bias is not None and bias.dim() == 1 and bias.dtype == out_dtype != torch.float32:
        fused, bias = pad(bias, (0, padding)), None
    scales = x_scale.unsqueeze(1), w_factor.unsqueeze(0)
    place = {} if out is None else {"out": out}
    once = out_dtype if bias is None else torch.float32
    # use_fast_accum would leave all sums to the tensor cores, which cut off every addition.
    y = torch._scaled_mm(x, w.t(), *scales, bias=fused, out_dtype=once, use_fast_accum=False, **place)
    if out is not None:
        return out
    y = y[:, :rows]
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype).contiguous()
