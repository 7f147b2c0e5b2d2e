"""The random Hadamard transform in plain torch (numerics contract, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics.layout import BLOCK


def hadamard(x: Tensor, sign: int) -> Tensor:
    """Apply the random Hadamard transform to each 16 elements of the last dimension (contract, section 7).

    x (..., K) becomes bfloat16 (..., K rounded up to 16): ``x @ (diag(sign) @ H16 * 0.25)``, summed in the order of the
    fast transform, with butterflies over distances 1, 2, 4, 8, in float32.
    """
    return float_hadamard(x, sign).bfloat16()


def float_hadamard(x: Tensor, sign: int) -> Tensor:
    """Return :func:`hadamard` before rounding: float32."""
    x = pad(x.float(), (0, -x.shape[-1] % BLOCK))
    return butterflies(x.unflatten(-1, (-1, BLOCK)) * _hadamard_signs(sign, x.device)).flatten(-2)


def inverse_hadamard(y: Tensor, sign: int) -> Tensor:
    """Invert :func:`hadamard`, except for its rounding: y (..., K), K a multiple of 16, to float32 (..., K)."""
    return (butterflies(y.float().unflatten(-1, (-1, BLOCK))) * _hadamard_signs(sign, y.device)).flatten(-2)


def _hadamard_signs(sign: int, device: torch.device) -> Tensor:
    if not 0 <= sign <= 0xFFFF:
        raise ValueError(f"the sign of a Hadamard transform must be a mask from 0 to 0xFFFF, not {sign}")
    return 0.25 - 0.5 * (sign >> torch.arange(BLOCK, device=device) & 1).float()


def butterflies(y: Tensor) -> Tensor:
    """Apply the fast Walsh-Hadamard transform to the last dimension, a power of two: distances 1, 2, 4, ..."""
    for distance in (1 << i for i in range((y.shape[-1] - 1).bit_length())):
        low, high = y.unflatten(-1, (-1, 2, distance)).unbind(-2)
        y = torch.stack((low + high, low - high), dim=-2).flatten(-3)
    return y


# --- keys of a cache (contract, section 11) ---------------------------------------------------------------------------


def rotation_size(size: int) -> int:
    """Return over how many elements of a head of so many keys are rotated: the largest power of two that divides it."""
    return size & -size


def rotate_heads(x: Tensor) -> Tensor:
    """Return ``x @ H / n``, float32, over each n = :func:`rotation_size` elements of the last dimension."""
    n = rotation_size(x.shape[-1])
    return butterflies((x.float() * (1 / n)).unflatten(-1, (-1, n))).flatten(-2)


def rotate_heads_back(y: Tensor) -> Tensor:
    """Invert :func:`rotate_heads` for float32 y: ``y @ H``."""
    return butterflies(y.unflatten(-1, (-1, rotation_size(y.shape[-1])))).flatten(-2)
