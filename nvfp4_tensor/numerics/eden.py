"""The rotation and the scales of EDEN in plain torch (numerics contract, section 9), by the rules of ``reference.py``.

A tensor is rotated and rounded to nearest, and the error is corrected in the block scales, which are drawn at random.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout, philox
from nvfp4_tensor.numerics.fma import fma
from nvfp4_tensor.numerics.hadamard import butterflies
from nvfp4_tensor.numerics.layout import BLOCK, E4M3_MAX, FLOAT32_MAX, ROTATION, ceil_to

SIGN_STREAM, SCALE_STREAM = 256, 257
"""Philox's last counter word for the signs, and for the scales of stream 0; other modes use smaller values."""

ONTO_GRID = 1.0625 * 0.93 / 6
"""Factor that maps a block's largest element to slightly above 6: the constants of Quartet II."""

_CHUNK_ELEMENTS = 1 << 17


def rotation_signs(groups: int, rng_state: Tensor, col0: int = 0) -> Tensor:
    """Return the factor of each element before the butterflies, +-2^-3.5: float32 (groups, 128)."""
    first = col0 // ROTATION
    words = philox.words(torch.arange(first, first + groups, device=rng_state.device), rng_state, SIGN_STREAM)
    bits = words.unsqueeze(-1) >> torch.arange(32, device=words.device) & 1
    return (1 - 2 * bits.flatten(-2)).float() * 2**-3.5


def rotate(x: Tensor, rng_state: Tensor, inverse: bool = False, col0: int = 0) -> Tensor:
    """Rotate each 128 columns of x (..., K) to float32 (..., K rounded up to 128), or invert that rotation.

    col0: the first column of the shard x in the full tensor, a multiple of 128.
    """
    y = pad(x.float(), (0, -x.shape[-1] % ROTATION))
    y = y.unflatten(-1, (y.shape[-1] // ROTATION, ROTATION))
    signs = rotation_signs(y.shape[-2], rng_state, col0)
    return (butterflies(y) * signs if inverse else butterflies(y * signs)).flatten(-2)


def is_broken(y: Tensor) -> Tensor:
    """Return whether a rotation of (..., groups, 128) contains a NaN or an Inf: (..., groups, 1)."""
    return ~(y.abs() <= FLOAT32_MAX).all(dim=-1, keepdim=True)


def amax(x: Tensor, rng_state: Tensor, col0: int = 0) -> Tensor:
    """Return the largest magnitude of the rotated x (..., K), ignoring rotations with NaN or Inf: float32 0-d."""
    flat = layout.in_rows(x)
    largest = flat.new_zeros((), dtype=torch.float32)
    for part in layout.chunks(len(flat), flat.shape[1], _CHUNK_ELEMENTS):
        y = rotate(flat[part], rng_state, col0=col0).unflatten(-1, (-1, ROTATION))
        largest = torch.maximum(largest, torch.where(is_broken(y), 0.0, y).abs().amax())
    return largest


def _rotation_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum a * b (..., 8, 16) in order within a block, then in halves over the eight blocks: (..., 1)."""
    total = torch.zeros_like(a[..., 0])
    for i in range(BLOCK):
        total = fma(a[..., i], b[..., i], total)
    for half in (4, 2, 1):
        total = total[..., :half] + total[..., half:]
    return total


def corrected(scale: Tensor, v: Tensor, rounded: Tensor) -> Tensor:
    """Return the block scales (..., 8), at most 448, with which ``rounded`` (..., 8, 16) keeps its product with v."""
    correction = _rotation_sum(v, v) / _rotation_sum(v, rounded)
    return torch.where(correction.abs() <= FLOAT32_MAX, scale * correction, scale).clamp(max=E4M3_MAX)


def round_scales(t: Tensor, r16: Tensor) -> Tensor:
    """Stochastically round t in [0, 448] to e4m3 bytes (uint8), with 16 random bits each."""
    bits = t.view(torch.int32)
    # In steps of 2^-16 of the distance to the next e4m3: below 2^-6 that distance is 2^-9.
    normal = (bits >> 4) - (120 << 19)
    small = (t.clamp(max=2**-6) * 2**25).int()
    return (torch.where(t < 2**-6, small, normal) + r16 >> 16).to(torch.uint8)


def scale_random_bits(
    rows: int, groups: int, rng_state: Tensor, stream: int, row0: int, col0: int, full_width: int
) -> Tensor:
    """Return 16 random bits per block scale: int32 (rows, groups, 8)."""
    device = rng_state.device
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(1)
    number = row * (ceil_to(full_width, ROTATION) // ROTATION)
    number = number + torch.arange(col0 // ROTATION, col0 // ROTATION + groups, device=device)
    words = philox.words(number, rng_state, SCALE_STREAM + stream)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2).int()
