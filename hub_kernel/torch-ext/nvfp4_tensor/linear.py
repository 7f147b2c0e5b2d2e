"""A linear with NVFP4 weights: quantize once, multiply by the codes, and differentiate as if nothing was rounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ._ops import ops
from .numerics.spec import QuantizeSpec

_WEIGHT = QuantizeSpec(four_over_six=True).pack()
_ACTIVATION = QuantizeSpec().pack()


class NVFP4Weight(NamedTuple):
    """A quantized weight (N, K): codes, block scales in cuBLASLt's order, the per-tensor scale, and K."""

    qdata: Tensor  # uint8 (N, K / 2)
    scale: Tensor  # e4m3 (row tiles, column tiles, 32, 16)
    per_tensor_scale: Tensor  # float32 0-d
    columns: int


def quantize(weight: Tensor) -> NVFP4Weight:
    """Quantize a weight (N, K) in bfloat16, float16 or float32, to nearest with four-over-six."""
    weight = weight.detach()
    return NVFP4Weight(*ops.quantize(weight.contiguous(), None, None, _WEIGHT), weight.shape[-1])


def dequantize(weight: NVFP4Weight, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the values of a quantized weight, (N, K)."""
    return ops.dequantize(weight.qdata, weight.scale, weight.per_tensor_scale, weight.columns, dtype)


def linear(x: Tensor, weight: NVFP4Weight, bias: Tensor | None = None, *, quantize_activations: bool = False) -> Tensor:
    """Return x (..., K) @ weight^T + bias in the dtype of x. The gradient of x is that of the decoded weight.

    quantize_activations: round x to NVFP4 too, by the amax of this call (W4A4).
    """
    *leading, columns = x.shape
    if columns != weight.columns:
        raise ValueError(f"x has {columns} columns, but the weight has {weight.columns}")
    y = _Linear.apply(x.reshape(-1, columns), None, weight, bias, quantize_activations)
    return y.view(*leading, y.shape[-1])


def linear_of_dense(x: Tensor, weight: Tensor, bias: Tensor | None, quantize_activations: bool) -> Tensor:
    """Return :func:`linear` of a dense weight, which gets the gradient of its quantized values (straight-through)."""
    *leading, columns = x.shape
    y = _Linear.apply(x.reshape(-1, columns), weight, _quantized(weight), bias, quantize_activations)
    return y.view(*leading, y.shape[-1])


_cache = WeakIdKeyDictionary()
"""The codes of dense weights, with the version of the weight that they were made of."""


def _quantized(weight: Tensor) -> NVFP4Weight:
    version = weight.data_ptr(), None if weight.is_inference() else weight._version
    known = _cache.get(weight)
    if known is None or known[0] != version or weight.is_inference():
        known = _cache[weight] = version, quantize(weight)
    return known[1]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dense, weight, bias, quantize_activations):
        ctx.save_for_backward(x if dense is not None else None, *weight[:3])
        ctx.columns, ctx.bias_dtype = weight.columns, None if bias is None else bias.dtype
        ctx.dense_dtype = None if dense is None else dense.dtype
        values, scale = x, None
        if quantize_activations:
            values, scale = ops.quantize_activation(x.contiguous(), None, _ACTIVATION, x.dtype)
        return ops.matmul(values.contiguous(), scale, *weight[:3], bias, weight.columns, False, x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, qdata, scale, per_tensor_scale = ctx.saved_tensors
        dx = dw = db = None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            dx = ops.matmul(dy, None, qdata, scale, per_tensor_scale, None, ctx.columns, True, dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = (dy.T @ x).to(ctx.dense_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[3]:
            db = dy.sum(0).to(ctx.bias_dtype)
        return dx, dw, None, db, None
