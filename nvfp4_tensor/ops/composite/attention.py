"""Plain-torch implementations of the ops of a key-value cache in NVFP4: attention to codes, and appending to them.

Keys and values are each three tensors of bytes, row by row, a row being one token of one head: codes (batch, heads,
capacity, size / 2), block scales in e4m3 (batch, heads, capacity, size / 16), not swizzled, and factors in e8m0 (batch,
heads, capacity). Sizes are rounded up to whole blocks. A value is code x block scale x factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.fp8 import power_of_two
from nvfp4_tensor.numerics.hadamard import rotate_heads, rotate_heads_back
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.schemas import SymInt, op

E8M0_BIAS = 127


def decode_heads(codes: Tensor, scale: Tensor, factor: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Decode bytes (..., tokens, bytes per row) as of this module to (..., tokens, size) of dtype."""
    rows = math.prod(codes.shape[:-1])
    swizzled = layout.swizzle(scale.reshape(rows, scale.shape[-1])).view(torch.float8_e4m3fn)
    factors = power_of_two(factor.reshape(rows).int() - E8M0_BIAS)
    values = torch.ops.nvfp4.dequantize(codes.reshape(rows, codes.shape[-1]), swizzled, factors, size, dtype)
    return values.view(*codes.shape[:-1], size)


@op()
def attend_codes(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_factor: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_factor: Tensor,
    lengths: Tensor,
    first: Tensor | None,
    front_keys: Tensor | None,
    front_values: Tensor | None,
    latest_keys: Tensor,
    latest_values: Tensor,
    scale: float,
    softcap: float = 0.0,
    window: SymInt = 0,
    rotated: bool = False,
    settled: bool = False,
) -> Tensor:
    """Return the attention of new tokens to a context that is dense, then coded, then dense.

    The context of sequence b is the ``front`` tokens, the first ``lengths[b]`` tokens of the codes, and the ``latest``
    tokens. The new tokens are the last ones of it. A token sees its own position and earlier ones.

    Args:
        q: (batch, heads, tokens, size), bfloat16, float16 or float32. ``heads`` is a multiple of the keys' heads.
        key_codes, key_scale, key_factor, value_codes, value_scale, value_factor: bytes, see this module; the capacity
            is a multiple of 16.
        lengths: int64 (batch,), tokens of the codes that are in use.
        first: int64 (batch,), the first position that is seen (left padding); None: 0.
        front_keys, front_values: (batch, heads, tokens, size) of q's dtype, or None.
        latest_keys, latest_values: the same.
        scale: what products of queries and keys are multiplied by.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: no cap.
        window: how many positions a token sees, with its own; 0: all.
        rotated: the codes are those of rotated keys (``append_codes``). Dense keys are as they are.
        settled: no kernel that is still under way writes ``lengths``, or codes before them, so that CUDA may read them
            before the kernel before this one ends. For graphs.

    Returns:
        (batch, heads, tokens, size of values) of q's dtype; 0 where a token sees nothing. Sums are float32.
    """
    batch, heads, tokens, size = q.shape
    group, value_size = heads // key_codes.shape[1], latest_values.shape[-1]
    keys = decode_heads(key_codes, key_scale, key_factor, size, torch.float32)
    keys = rotate_heads_back(keys) if rotated else keys
    values = decode_heads(value_codes, value_scale, value_factor, value_size, torch.float32)
    front_k, front_v = ([] if front is None else [front.float()] for front in (front_keys, front_values))
    keys = torch.cat((*front_k, keys, latest_keys.float()), dim=2)
    values = torch.cat((*front_v, values, latest_values.float()), dim=2)
    front_size = 0 if front_keys is None else front_keys.shape[2]
    seen = _seen(lengths, first, tokens, front_size, key_codes.shape[2], latest_keys.shape[2], window)
    rows = q.reshape(batch, -1, group * tokens, size)
    attended = attention(rows, keys, values, seen.repeat(1, group, 1).unsqueeze(1), scale, softcap)
    return attended.reshape(batch, heads, tokens, value_size).to(q.dtype)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, softcap: float, sinks: Tensor | None = None
) -> Tensor:
    """Return the float32 attention of q (batch, heads, rows, size) to keys and values (batch, heads, length, ...).

    Args:
        seen: bool, broadcasts to (batch, heads, rows, length). Of a row that sees nothing the result is 0.
        sinks: a further score of each row (heads * rows,).
    """
    scores = q.float() @ keys.float().mT * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.float().view(1, *q.shape[1:3], 1).expand(q.shape[0], -1, -1, -1)
        scores = torch.cat([scores, sink], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[2]].masked_fill(~seen.any(-1, keepdim=True), 0.0)
    # What no row of the sequence sees may hold anything, NaN too.
    return weights @ values.float().masked_fill(~seen.any(-2).unsqueeze(-1), 0.0)


def _seen(
    lengths: Tensor, first: Tensor | None, tokens: int, front: int, capacity: int, latest: int, window: int
) -> Tensor:
    """Return which tokens of front, codes and latest each new token sees: bool (batch, tokens, all of them)."""
    device, length = lengths.device, lengths[:, None]
    batch = lengths.shape[0]
    at_front = torch.arange(front, device=device).expand(batch, -1)
    coded = torch.arange(capacity, device=device).expand(batch, -1)
    end = front + length + torch.arange(latest, device=device)
    position = torch.cat((at_front, coded + front, end), dim=1)[:, None]
    is_token = torch.cat((at_front >= 0, coded < length, end >= 0), dim=1)[:, None]
    own = (front + length + torch.arange(latest - tokens, latest, device=device))[:, :, None]
    seen = is_token & (position <= own)
    if window:
        seen = seen & (position > own - window)
    return seen if first is None else seen & (position >= first[:, None, None])


@op(mutates_args=("key_codes", "key_scale", "key_factor", "value_codes", "value_scale", "value_factor"))
def append_codes(
    keys: Tensor,
    values: Tensor,
    spec: int,
    key_codes: Tensor,
    key_scale: Tensor,
    key_factor: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_factor: Tensor,
    starts: Tensor,
    rotate: bool = False,
) -> None:
    """Quantize keys and values (batch, heads, tokens, size), and write them into codes from tokens ``starts`` on.

    Each row is first multiplied by the power of two that moves its largest finite magnitude into the binade below the
    top of the block scales' range, so that the codes of a token do not depend on other tokens.

    Args:
        keys, values: bfloat16, float16 or float32.
        spec: ``QuantizeSpec.pack()`` of a spec that rounds to nearest, in 1x16 blocks, without a transform.
        key_codes, key_scale, key_factor, value_codes, value_scale, value_factor: bytes, see this module; written.
        starts: int64 (batch,), where each sequence's first new token goes.
        rotate: whether keys are rotated first, by a Hadamard transform over the head dimension (contract, section 11).
    """
    tokens = keys.shape[2]
    at = starts[:, None] + torch.arange(tokens, device=starts.device)
    batch = torch.arange(keys.shape[0], device=starts.device)[:, None].expand_as(at)
    keys = rotate_heads(keys.detach()) if rotate else keys
    both = ((keys, (key_codes, key_scale, key_factor)), (values, (value_codes, value_scale, value_factor)))
    for x, stored in both:
        for into, new in zip(stored, _quantize_heads(x, spec), strict=True):
            into.transpose(1, 2).index_put_((batch, at), new.transpose(1, 2))


def _quantize_heads(x: Tensor, spec: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, block scales and factors of x (batch, heads, tokens, size), as bytes."""
    unpacked = QuantizeSpec.unpack(spec)
    rows = x.detach().reshape(-1, x.shape[-1])
    exponent = _exponents(rows, unpacked)
    scaled = rows.float() * power_of_two(-exponent).unsqueeze(-1)
    # With this amax the per-tensor scale is 1, so that each row has only its own factor.
    amax = scaled.new_full((), unpacked.largest_value)
    codes, scale, _ = torch.ops.nvfp4.quantize(scaled, amax, None, spec)
    blocks = codes.shape[-1] * 2 // BLOCK
    linear = layout.unswizzle(scale, len(rows), blocks).view(torch.uint8)
    factor = (exponent + E8M0_BIAS).to(torch.uint8)
    return codes.view(*x.shape[:-1], codes.shape[-1]), linear.reshape(*x.shape[:-1], blocks), factor.view(x.shape[:-1])


def _exponents(x: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return the exponents of the rows' factors, int32 (n,). NaN and Inf do not count for the amax of a row."""
    # One below the exponent of the largest representable value, so that mantissas need not be compared.
    top = int(spec.largest_value).bit_length() - 2
    return (torch.frexp(reference.row_amax(x)).exponent - 1 - top).clamp(-126, 126)
