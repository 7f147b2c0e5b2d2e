"""An AdamW step on moments in four bits, in plain torch: the reference of the contract's section 12.

Per block of 16 elements of a row: the second moment v is a power of two per element, of which four bits say how far it
lies below the block's largest; the first moment is stored as its ratio r to sqrt(v), in NVFP4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.choices import RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX, E4M3_NAN
from nvfp4_tensor.numerics.spec import QuantizeSpec

RATIO_SCALE = 1 / 128
"""The per-tensor scale of r: block scales reach 448 / 128, so |r| up to 21 is stored. Adam's is at most 7.3 for
(0.9, 0.999)."""
RATIO_AMAX = 6 * E4M3_MAX * RATIO_SCALE
RATIO_SPEC = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, scale_rounding=ScaleRounding.UP)

MOMENT_STREAM, SECOND_MOMENT_STREAM, GROWTH_STREAM = 1, 2, 3
"""The streams of random bits: of r, as in quantize, and of the weight, by :func:`rotated_bits`; of v, likewise; and of
the bits, those of element 0, that decide whether a block of codes grows. The scales of r and of codes depend on all
draws of v and on growth: what is rounded by the same bits would not keep its mean. r and the weight decide no scale of
their step, so one stream has bits for both."""
WEIGHT_WORD = 1
"""A weight's bits come from the word (of four elements) so many further on, since r uses the element's own."""
UNIT = 2.0**-60
"""Weights in codes are updated in units of their per-tensor scale, times this."""

UNBIASED = 0.87
"""1 / 1.15, 1.15 the mean of 1 / sqrt(v) relative to that of an exact v, from the noise of v's powers of two. It was
measured on normal gradients for beta2 of 0.95, 0.99 and 0.999 (1.151, 1.149, 1.147). Step sizes have this factor."""

HYPER = ("grad_scale", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "step_size", "decay", "least_exponent")
"""The numbers of a step, float32, in this order."""

NOT_FINITE, LARGEST_EXPONENT, SMALLEST_LEAST_EXPONENT = 255, 254, 16
_SQRT2_MANTISSA = 0x3504F3  # of f32(sqrt 2)


class Moments(NamedTuple):
    """Both moments of a matrix (R, K) of B = ceil(K / 16) blocks per row.

    r: uint8 (R, 8 B), E2M1; r_scale: e4m3 (R, B), in rows; v: uint8 (R, 8 B), distances below the largest exponent of a
    block, packed like codes; v_exponent: uint8 (R, B), that exponent.
    """

    r: Tensor
    r_scale: Tensor
    v: Tensor
    v_exponent: Tensor


def half_power(t: Tensor) -> Tensor:
    """Return 2^((t - 254) / 2) as float32, with f32(sqrt 2) for odd t: int32 t from 2 to 508."""
    return ((t >> 1 << 23) | (t & 1) * _SQRT2_MANTISSA).view(torch.float32)


def exponents(moments: Moments) -> Tensor:
    """Return the exponent field of each v, int32 (R, B, 16): 0 where v is 0, 255 where it is not finite."""
    top = moments.v_exponent.int().unsqueeze(-1)
    below = layout.unpack(moments.v).int().unflatten(-1, (-1, BLOCK))
    return torch.where(top == NOT_FINITE, top, (top - below).clamp(min=0))


def second_moment(moments: Moments) -> Tensor:
    """Decode v to float32 (R, B, 16)."""
    return (exponents(moments) << 23).view(torch.float32)


def first_moment(moments: Moments) -> Tensor:
    """Decode m = (code * scale) * (root(v) * 2^-7) to float32 (R, B, 16)."""
    codes = layout.code_values(layout.unpack(moments.r)).unflatten(-1, (-1, BLOCK))
    root = half_power(exponents(moments) + 127) * RATIO_SCALE
    return codes * layout.scale_values(moments.r_scale).unsqueeze(-1) * root


def rotated_bits(rows: int, columns: int, rng_state: Tensor, row0: int, stream: int, further: int = 0) -> Tensor:
    """Return 24 random bits for each element, int64 (R, B, 16).

    Of element e, those are the lower ones of word floor(e / 4) + further (modulo 4) of its block's four, rotated right
    by 8 (e % 4 + 1).
    """
    r16 = reference.random16(rows, columns, rng_state, stream=stream, row0=row0).long().unflatten(-1, (-1, BLOCK))
    words = (r16 | r16.roll(-2, dims=-1) << 16)[..., ::4].roll(-further, dims=-1)
    shift = 8 * (torch.arange(BLOCK, device=words.device) % 4 + 1)
    words = words.repeat_interleave(4, dim=-1)
    return (words >> shift | words << (32 - shift)) & 0xFFFFFF


def ratio(grad: Tensor, moments: Moments, hyper: Tensor, rng_state: Tensor, row0: int) -> tuple[Tensor, Moments]:
    """Return the new m / root(v), float32 (R, B, 16), and the new moments, for a gradient (R, K)."""
    scale, beta1, rest1, beta2, rest2, _, _, least = hyper.unbind()
    rows, columns = grad.shape
    g = pad(grad.float(), (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK)) * scale
    m = beta1 * first_moment(moments) + rest1 * g
    v = beta2 * second_moment(moments) + rest2 * g * g
    random = rotated_bits(rows, columns, rng_state, row0, SECOND_MOMENT_STREAM) >> 1
    bits = v.view(torch.int32).long() & 0x7FFFFFFF
    exponent = torch.maximum((bits + random >> 23).int(), least.int())
    exponent = exponent.clamp(max=LARGEST_EXPONENT)
    top = exponent.amax(dim=-1, keepdim=True)
    below = (top - exponent).clamp(max=15)
    r = m * half_power(381 - (top - below))
    r = torch.where(exponent == LARGEST_EXPONENT, r * 0.0, r)
    not_finite = ~m.isfinite().all(dim=-1, keepdim=True)
    r, below = torch.where(not_finite, torch.nan, r), torch.where(not_finite, 0, below)
    top = torch.where(not_finite, NOT_FINITE, top)
    amax = torch.full((), RATIO_AMAX, dtype=torch.float32, device=grad.device)
    qdata, r_scale, _ = reference.quantize(r.flatten(1), amax, rng_state, RATIO_SPEC, row0=row0, stream=MOMENT_STREAM)
    blocks = r.shape[1]
    new = Moments(
        qdata,
        layout.unswizzle(r_scale, rows, blocks),
        layout.pack(below.to(torch.uint8).flatten(1)),
        top.squeeze(-1).to(torch.uint8),
    )
    return r, new


def dense_weight(weight: Tensor, r: Tensor, hyper: Tensor, rng_state: Tensor, row0: int) -> Tensor:
    """Return the new weight (R, K): float32; or bfloat16, rounded stochastically."""
    step_size, decay = hyper[5], hyper[6]
    rows, columns = weight.shape
    r = r.flatten(1)[:, :columns]
    new = decay * weight.float() - step_size * r
    if weight.dtype == torch.float32:
        return new
    random = rotated_bits(rows, columns, rng_state, row0, MOMENT_STREAM, WEIGHT_WORD)
    return to_bfloat16(new, random.flatten(1)[:, :columns] >> 8)


def to_bfloat16(x: Tensor, r16: Tensor) -> Tensor:
    """Round float32 to bfloat16 with 16 random bits for each element; infinity stays, and NaN is 0x7FC0."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    rounded = torch.where(x.isfinite(), bits + r16 >> 16, torch.where(x.isnan(), 0x7FC0, bits >> 16))
    return rounded.to(torch.int32).to(torch.int16).view(torch.bfloat16)


def step_vector(
    weight: Tensor, grad: Tensor, m: Tensor, v: Tensor, hyper: Tensor, rng_state: Tensor, element0: int
) -> None:
    """Update a weight (N,), bfloat16 or float32, and its float32 moments in place.

    The random bits of an element are those of the first element of a block of its own.
    """
    scale, beta1, rest1, beta2, rest2, step_size, decay, least = hyper.unbind()
    g = grad.float() * scale
    m.copy_(beta1 * m + rest1 * g)
    v.copy_(beta2 * v + rest2 * g * g)
    overflows = v.isinf() & m.isfinite()
    m.masked_fill_(overflows, 0.0)
    v.masked_fill_(overflows, layout.FLOAT32_MAX)
    floor = (least.int() << 23).view(torch.float32)
    exact = step_size / step_size.new_full((), UNBIASED)  # by a tensor: a number's reciprocal would be multiplied
    root = torch.maximum(v, floor).double().sqrt().float()  # torch's root of float32 is an ulp off on a CPU, by MKL
    new = decay * weight.float() - exact * (m / root)
    if weight.dtype == torch.bfloat16:
        new = to_bfloat16(new, reference.random16(weight.numel(), 1, rng_state, row0=element0)[:, 0])
    weight.copy_(new)


def coded_weight(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor, r: Tensor, hyper: Tensor, rng_state: Tensor, row0: int
) -> tuple[Tensor, Tensor]:
    """Return the new codes (R, 8 B) and block scales (R, B), e4m3, of a weight with codes and scales in rows."""
    step_size, decay = hyper[5], hyper[6]
    rows, blocks = scale.shape
    old = layout.scale_values(scale)
    w = layout.code_values(layout.unpack(qdata)).unflatten(-1, (-1, BLOCK)) * old.unsqueeze(-1)
    new = decay * (w * UNIT) - (step_size / per_tensor_scale * UNIT) * r
    magnitude = new.abs() / UNIT
    largest = magnitude.amax(dim=-1)
    r16 = reference.random16(rows, blocks * BLOCK, rng_state, stream=GROWTH_STREAM, row0=row0)
    s, bound, kept = _grid(old, largest, r16[:, ::BLOCK])
    bound, kept = bound.unsqueeze(-1), kept.unsqueeze(-1)
    magnitude = torch.minimum(magnitude, bound) + (magnitude - bound).clamp(min=0) * kept
    s = torch.where(largest <= layout.FLOAT32_MAX, s, torch.nan)
    s_bytes = torch.where(s.isnan(), E4M3_NAN, s.to(torch.float8_e4m3fn).view(torch.uint8))
    random = rotated_bits(rows, blocks * BLOCK, rng_state, row0, MOMENT_STREAM, WEIGHT_WORD)
    codes = round24(magnitude, torch.where(s > 0, 1 / s, 0.0).unsqueeze(-1), random)
    codes = torch.where(s.isnan().unsqueeze(-1), 0, codes | torch.signbit(new).long() << 3)
    return layout.pack(codes.to(torch.uint8).flatten(1)), s_bytes.view(torch.float8_e4m3fn)


def round24(magnitude: Tensor, inverse: Tensor, random: Tensor) -> Tensor:
    """Round y = magnitude * inverse, exactly multiplied and at most 6, to codes 0..7 (int64).

    The code's fraction is cut off at 2^-22, and rounded up with 24 random bits.
    """
    y = (magnitude.double() * inverse.double()).nan_to_num(0.0).clamp(max=E2M1_MAX)
    code = torch.where(y < 2, 2 * y, torch.where(y < 4, y + 2, y / 2 + 4))
    return 4 * (code * 2.0**22).floor().long() + random >> 24


def _grid(old: Tensor, largest: Tensor, r16: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new scales of blocks, what their elements may reach unchanged, and what is kept of the excess."""
    full, half = E2M1_MAX * old, 0.5 * old
    need = (largest - full) * (0.5 * (1 / old))
    chances = (need.nan_to_num(0.0, posinf=1.0).clamp(0, 1) * 65536.0).ceil()
    outgrown = largest > 12.0 * old
    grown = (r16 < chances) & (2.0 * old <= E4M3_MAX) & ~outgrown
    kept = torch.where(grown, largest.new_full((), 65536.0) / chances, 0.0)
    exact = (half.to(torch.float8_e4m3fn).float() == half) & (half > 0)
    shrunk = (largest <= E2M1_MAX * half) & (largest > 0) & exact
    fresh = reference.to_e4m3(largest / largest.new_full((), E2M1_MAX), RATIO_SPEC.scale_rounding, largest)
    s = torch.where(grown, 2.0 * old, torch.where(shrunk, half, old))
    s = torch.where(outgrown, fresh.view(torch.float8_e4m3fn).float(), s)
    return s, torch.where(outgrown, torch.inf, full), kept
