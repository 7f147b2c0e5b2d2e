"""Fake quantization: quantize and decode in one pass, with a straight-through gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.hadamard import float_hadamard, inverse_hadamard
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import columns_of_values
from nvfp4_tensor.tensor.arguments import checked_spec, resolve_amax, resolve_arguments
from nvfp4_tensor.tensor.nvfp4 import check_dense


def fake_quantize(
    x: Tensor,
    spec: QuantizeSpec | None = None,
    *,
    amax: Tensor | float | None = None,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
    origin: tuple[int, int] = (0, 0),
    full_width: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``quantize(x, ...).dequantize(dtype)`` in one pass, with a straight-through gradient to x.

    The result is (..., K). If the spec has a Hadamard transform, the result is the transformed tensor, with K rounded
    up to 16. EDEN's rotation is inverted, so that the result is an unbiased estimate of x.

    Raises:
        TypeError, ValueError: as :func:`quantize`; also a TypeError if dtype is not bfloat16, float16 or float32.
    """
    check_dense(x)
    spec = checked_spec(spec)
    amax, rng_state, offsets = resolve_arguments(x, spec, amax, rng_state, generator, origin, full_width)
    if amax is None and not spec.row_scaled:
        amax = resolve_amax(x, spec, None, rng_state, offsets[1])
    dtype = x.dtype if dtype is None else dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}: cast the result instead")
    arguments = amax, rng_state, spec, dtype, *offsets
    if is_transformed():
        values = _values(x.detach(), *arguments)
        smooth = x.float() if spec.hadamard_sign is None else float_hadamard(x, spec.hadamard_sign)
        return with_derivative_of(values, smooth)
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, *arguments)
    return _values(x, *arguments)


def _values(
    x: Tensor, amax: Tensor | None, rng_state: Tensor | None, spec: QuantizeSpec, dtype: torch.dtype, *offsets: int
) -> Tensor:
    if spec.row_scaled:
        qdata, scale, factor = torch.ops.nvfp4.quantize_rows(x, amax, rng_state, spec.pack(), *offsets)
        columns = columns_of_values(x.shape[-1], spec.pack())
        values = torch.ops.nvfp4.dequantize(qdata, scale, None, columns, torch.float32)
        return (values * factor.view(*x.shape[:-1], 1)).to(dtype)
    if not spec.is_eden:
        return torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec.pack(), dtype, True, *offsets)[0]
    rotated = torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec.pack(), torch.float32, True, *offsets)[0]
    return torch.ops.nvfp4.rotate(rotated, rng_state, True, offsets[1])[..., : x.shape[-1]].to(dtype)


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode AD is active, which ``requires_grad`` does not show."""
    functorch = torch._C._functorch
    # isinstance, because under torch.compile the result is not None where it should be
    return isinstance(functorch.peek_interpreter_stack(), functorch.CInterpreter) or (
        torch.autograd.forward_ad._current_level >= 0
    )


def with_derivative_of(values: Tensor, smooth: Tensor) -> Tensor:
    """Return ``values`` with the derivatives of ``smooth``."""
    # Subtracts zero, because adding it would turn -0.0 into 0.0.
    return (values - (smooth.detach() - smooth).nan_to_num()).to(values.dtype)


class _StraightThrough(torch.autograd.Function):
    """Fake quantization with the gradient of the function that it approximates: identity or Hadamard transform.

    It does not support torch.func transforms, which need ``setup_context``; torch.compile (2.13) does not support that.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, amax: Tensor | None, rng_state: Tensor | None, spec: QuantizeSpec, *arguments: Any
    ) -> Tensor:
        ctx.hadamard_sign, ctx.columns, ctx.dtype = spec.hadamard_sign, x.shape[-1], x.dtype
        return _values(x, amax, rng_state, spec, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.float() if ctx.hadamard_sign is None else inverse_hadamard(grad, ctx.hadamard_sign)
        return grad[..., : ctx.columns].to(ctx.dtype), *[None] * 7
