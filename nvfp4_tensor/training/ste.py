"""Straight-through estimation by itself: a tensor rounded to NVFP4, with the gradient of the identity."""

from __future__ import annotations

from torch import Tensor

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.fake_quantize import fake_quantize


def ste(w: Tensor, spec: QuantizeSpec | None = None, *, rng_state: Tensor | None = None) -> Tensor:
    """w (..., K) rounded to the values that NVFP4 holds; backward passes the gradient through unchanged.

    :func:`nvfp4_tensor.fake_quantize` in the words of quantization-aware training, for parameters that no linear
    holds. bfloat16, float16 or float32 in and out.

    Args:
        w: any shape but 0-d.
        spec: how; to nearest even in 1x16 blocks by default.
        rng_state: of a stochastic spec, int64 (seed, offset); drawn from torch's generator by default.

    Raises:
        TypeError, ValueError: as :func:`nvfp4_tensor.quantize` does.

    >>> w = torch.randn(32, 64, requires_grad=True)
    >>> ste(w).square().sum().backward()
    """
    return fake_quantize(w, spec, rng_state=rng_state)
