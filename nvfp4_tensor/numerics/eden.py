"""EDEN in plain torch (numerics contract, section 9): rotate, round to nearest, correct the error in the block scales.

This is the reference for the kernels, as ``reference.py`` is for the other modes, and it follows the same rules.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.fma import fma
from nvfp4_tensor.numerics.hadamard import butterflies
from nvfp4_tensor.numerics.layout import BLOCK, E4M3_MAX, E4M3_NAN, FLOAT32_MAX, ROTATION, ceil_to
from nvfp4_tensor.numerics.reference import (
    _CHUNK_ELEMENTS,
    block_encode,
    encode_scale,
    magnitude,
    per_tensor_scale,
    philox4x32_7,
    round_e2m1,
    to_e4m3,
)
from nvfp4_tensor.numerics.spec import QuantizeSpec

SIGN_STREAM, SCALE_STREAM = 256, 257
"""Philox's last counter word for the signs, and for the scales of stream 0; other modes use smaller values."""

BLOCKS = ROTATION // BLOCK
ONTO_GRID = 1.0625 * 0.93 / 6
"""Factor that maps a block's largest element to slightly above 6: the constants of Quartet II."""


def _words(number: Tensor, rng_state: Tensor, stream: int) -> Tensor:
    """Return the four 32-bit words of Philox for rotation numbers (...): int64 (..., 4)."""
    seed, offset = rng_state.unbind()
    mask = 0xFFFFFFFF
    counter = number & mask, number >> 32 & mask, (offset & mask).expand_as(number), torch.full_like(number, stream)
    return torch.stack(philox4x32_7(counter, (seed & mask, seed >> 32 & mask)), dim=-1)


def rotation_signs(groups: int, rng_state: Tensor, col0: int = 0) -> Tensor:
    """Return the factor of each element before the butterflies, +-2^-3.5: float32 (groups, 128)."""
    first = col0 // ROTATION
    words = _words(torch.arange(first, first + groups, device=rng_state.device), rng_state, SIGN_STREAM)
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


def _is_broken(y: Tensor) -> Tensor:
    """Return whether a rotation of (..., groups, 128) contains a NaN or an Inf: (..., groups, 1)."""
    return ~(y.abs() <= FLOAT32_MAX).all(dim=-1, keepdim=True)


def _chunk_starts(flat: Tensor) -> range:
    """Return the first rows of chunks of about ``_CHUNK_ELEMENTS`` elements."""
    return range(0, flat.shape[0] if flat.shape[1] else 0, max(_CHUNK_ELEMENTS // max(flat.shape[1], 1), 1))


def _flattened(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])


def amax(x: Tensor, rng_state: Tensor, col0: int = 0) -> Tensor:
    """Return the largest magnitude of the rotated x (..., K), ignoring rotations with NaN or Inf: float32 0-d."""
    flat = _flattened(x)
    largest = flat.new_zeros((), dtype=torch.float32)
    starts = _chunk_starts(flat)
    for start in starts:
        y = rotate(flat[start : start + starts.step], rng_state, col0=col0)
        y = y.unflatten(-1, (-1, ROTATION))
        largest = torch.maximum(largest, torch.where(_is_broken(y), 0.0, y).abs().amax())
    return largest


def _rotation_sum(a: Tensor, b: Tensor) -> Tensor:
    """Sum a * b (..., 8, 16) in order within a block, then in halves over the eight blocks: (..., 1)."""
    total = torch.zeros_like(a[..., 0])
    for i in range(BLOCK):
        total = fma(a[..., i], b[..., i], total)
    for half in (4, 2, 1):
        total = total[..., :half] + total[..., half:]
    return total


def round_scales(t: Tensor, r16: Tensor) -> Tensor:
    """Stochastically round t in [0, 448] to e4m3 bytes (uint8), with 16 random bits each."""
    bits = t.view(torch.int32)
    # In steps of 2^-16 of the distance to the next e4m3: below 2^-6 that distance is 2^-9.
    normal = (bits >> 4) - (120 << 19)
    small = (t.clamp(max=2**-6) * 2**25).int()
    return (torch.where(t < 2**-6, small, normal) + r16 >> 16).to(torch.uint8)


def _scale_random_bits(
    rows: int, groups: int, rng_state: Tensor, stream: int, row0: int, col0: int, full_width: int
) -> Tensor:
    """Return 16 random bits per block scale: int32 (rows, groups, 8)."""
    device = rng_state.device
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(1)
    number = row * (ceil_to(full_width, ROTATION) // ROTATION)
    number = number + torch.arange(col0 // ROTATION, col0 // ROTATION + groups, device=device)
    words = _words(number, rng_state, SCALE_STREAM + stream)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-2).int()


def _codes_and_scales(y: Tensor, s_enc: Tensor, r16: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes, uint8 (rows, groups, 8, 16), and e4m3 bytes, uint8 (rows, groups, 8), of rotated blocks y."""
    block_amax = y.abs().amax(dim=-1)
    s1 = to_e4m3(block_amax * (s_enc * s_enc.new_full((), ONTO_GRID)), ScaleRounding.NEAREST, block_amax)
    s1 = s1.view(torch.float8_e4m3fn).float()
    codes = round_e2m1(y * block_encode(s1, s_enc).unsqueeze(-1), RoundingMode.RNE)
    v, w = y * s_enc, layout.code_values(codes) * s1.unsqueeze(-1)
    correction = _rotation_sum(v, v) / _rotation_sum(v, w)
    t = torch.where(correction.abs() <= FLOAT32_MAX, s1 * correction, s1).clamp(max=E4M3_MAX)
    return codes, round_scales(t, r16)


def quantize(
    x: Tensor,
    amax: Tensor,
    rng_state: Tensor | None,
    spec: QuantizeSpec,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize the rotated x (..., K), given the amax of the rotation, to (qdata, scale, per_tensor_scale).

    qdata: uint8 (..., K rounded up to 128, halved); scale: e4m3 (row tiles, column tiles, 32, 16), swizzled;
    per_tensor_scale: float32 0-d. Rotations that contain a NaN or an Inf have NaN scales and codes of zero.
    """
    if rng_state is None:
        raise ValueError("EDEN needs rng_state, an int64 tensor (seed, offset)")
    amax = magnitude(amax.reshape(()))
    flat = _flattened(x)
    rows, groups = flat.shape[0], ceil_to(x.shape[-1], ROTATION) // ROTATION
    qdata = flat.new_empty((rows, groups * ROTATION // 2), dtype=torch.uint8)
    scale = flat.new_empty((rows, groups * BLOCKS), dtype=torch.uint8)
    s_enc = encode_scale(amax, spec)
    starts = _chunk_starts(flat)
    for start in starts:
        y = rotate(flat[start : start + starts.step], rng_state, col0=col0).unflatten(-1, (groups, ROTATION))
        broken = _is_broken(y) | s_enc.isnan()
        y = torch.where(broken, 0.0, y).unflatten(-1, (BLOCKS, BLOCK))
        r16 = _scale_random_bits(len(y), groups, rng_state, stream, row0 + start, col0, full_width or x.shape[-1])
        codes, bits = _codes_and_scales(y, s_enc, r16)
        codes = torch.where(broken.unsqueeze(-1), 0, codes)
        qdata[start : start + starts.step] = layout.pack(codes.flatten(1))
        scale[start : start + starts.step] = torch.where(broken, E4M3_NAN, bits).flatten(1)
    scale = layout.swizzle(scale).view(torch.float8_e4m3fn)
    return qdata.view(*x.shape[:-1], groups * ROTATION // 2), scale, per_tensor_scale(amax, spec)
