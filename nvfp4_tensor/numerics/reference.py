"""The numerics contract in plain torch, on any device: slow, obvious, and the oracle of every kernel.

Every function states the formula it computes; float32 throughout, IEEE round to nearest even, in the order written.
Two habits keep torch to that: a divisor is always a tensor (a Python scalar would be turned into a multiplication by
its reciprocal), and nothing here is traced by a compiler (the ops are opaque to it). A third keeps it capturable in a
CUDA graph: no constant is copied from the host, all are filled or computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import FourOverSix, RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.fma import fma
from nvfp4_tensor.numerics.hadamard import hadamard
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX, E4M3_NAN, FLOAT32_MAX
from nvfp4_tensor.numerics.spec import QuantizeSpec

_CHUNK_ELEMENTS = 1 << 17
"""Taken about this many elements at a time, so that the intermediates of a large layer stay small."""


def amax(x: Tensor) -> Tensor:
    """max |x| over the finite elements of x (any shape): float32, 0-d; 0 where there is none."""
    largest = x.new_zeros((), dtype=torch.float32)
    for piece in x.reshape(-1).split(_CHUNK_ELEMENTS) if x.numel() else ():
        magnitude = piece.float().abs()
        largest = torch.maximum(largest, torch.where(magnitude <= FLOAT32_MAX, magnitude, 0.0).amax())
    return largest


def row_amax(x: Tensor, hadamard_sign: int | None = None) -> Tensor:
    """max |x| over the finite elements of each row of x (..., K), or of its transform: float32 (rows,)."""
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    largest = flat.new_zeros(len(flat), dtype=torch.float32)
    step = max(_CHUNK_ELEMENTS // max(x.shape[-1], 1), 1)
    for start in range(0, len(flat) if x.numel() else 0, step):
        piece = flat[start : start + step]
        values = (piece if hadamard_sign is None else hadamard(piece, hadamard_sign)).float().abs()
        largest[start : start + step] = torch.where(values <= FLOAT32_MAX, values, 0.0).amax(dim=-1)
    return largest


def philox4x32_7(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Philox-4x32 with 7 rounds (Salmon et al., SC11): 32-bit words in int64 tensors, in and out."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps, but the low 64 bits are right
        c0, c1, c2, c3 = (
            (product1 >> 32 & mask) ^ c1 ^ k0,
            product1 & mask,
            (product0 >> 32 & mask) ^ c3 ^ k1,
            product0 & mask,
        )
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return [c0, c1, c2, c3]


def random16(
    rows: int, columns: int, rng_state: Tensor, *, stream: int = 0, row0: int = 0, col0: int = 0, full_width: int = 0
) -> Tensor:
    """The 16 random bits of each element (contract, section 4): int32 (rows, columns rounded up to 16).

    ``row0``, ``col0`` say where this piece lies in a logical tensor of ``full_width`` columns (0: of its own width).
    """
    device = rng_state.device
    blocks = -(-columns // BLOCK)
    width = -(-(full_width or columns) // BLOCK)
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(1)
    column = torch.arange(col0 // BLOCK, col0 // BLOCK + blocks, device=device)
    block = row * width + column
    seed, offset = rng_state.unbind()
    mask = 0xFFFFFFFF
    counter = (block & mask, block >> 32 & mask, (offset & mask).expand_as(block), torch.full_like(block, stream))
    words = torch.stack(philox4x32_7(counter, (seed & mask, seed >> 32 & mask)), dim=-1)
    bytes_ = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2).int()
    return (bytes_ | bytes_.roll(-1, dims=-1) << 8).flatten(-2)


def round_e2m1(v: Tensor, mode: RoundingMode, r16: Tensor | None = None, random_bits: int = 16) -> Tensor:
    """Codes 0..15 (uint8) of float32 values already divided by their scales (contract, section 3); saturates at 6."""
    a = v.abs().clamp(max=E2M1_MAX)
    if mode == RoundingMode.STOCHASTIC:
        assert r16 is not None
        step = torch.where(a < 2, 2.0, torch.where(a < 4, 1.0, 0.5))  # c(a) is a * step + first: exact in float32
        first = torch.where(a < 2, 0, torch.where(a < 4, 2, 4))
        floor = (a * step).floor()
        fraction = ((a * step - floor) * (1 << random_bits)).int()
        draw = r16 if random_bits == 16 else r16 >> 8
        code = floor.int() + first + (fraction + draw >= 1 << random_bits).int()
    else:
        # Seven midpoints; a tie goes up where the neighbour above is the one the mode prefers.
        up_at_tie = {
            RoundingMode.RNE: (False, True, False, True, False, True, False),
            RoundingMode.AWAY: (True,) * 7,
            RoundingMode.ZERO: (False,) * 7,
        }[mode]
        midpoints = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
        code = torch.zeros_like(a, dtype=torch.int32)
        for midpoint, up in zip(midpoints, up_at_tie, strict=True):
            code += (a >= midpoint) if up else (a > midpoint)
    return (code | torch.signbit(v).int() << 3).to(torch.uint8)


def nearest_value(u: Tensor) -> Tensor:
    """The values of the codes that float32 u has by RNE: :func:`round_e2m1` in fewer passes, for searches."""
    a = u.abs().clamp(max=E2M1_MAX)
    per_step = torch.where(a < 2, 2.0, torch.where(a < 4, 1.0, 0.5))
    return torch.copysign((a * per_step).round() / per_step, u)


def magnitude(amax: Tensor) -> Tensor:
    """|amax|; one below zero is refused where looking at it neither waits for a device nor cuts a graph in two."""
    if amax.is_cpu and not torch.compiler.is_compiling() and (amax < 0).any():
        raise ValueError(f"amax is a magnitude, not {amax.min().item()}: give amax.abs()")
    return amax.abs()


def encode_scale(amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """S_enc = min(6 * ceiling / amax, FLT_MAX), and 1 where amax is 0: float32, the shape of amax."""
    s_enc = (amax.new_full((), spec.largest_value) / amax).clamp(max=FLOAT32_MAX)
    return torch.where(amax == 0, 1.0, s_enc)


def per_tensor_scale(amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """amax / (6 * ceiling), and 1 where amax is 0: float32, the shape of amax."""
    return torch.where(amax == 0, 1.0, amax / amax.new_full((), spec.largest_value))


def block_encode(s_b: Tensor, s_enc: Tensor) -> Tensor:
    """enc = min(1 / (s_b * S_dec), FLT_MAX), and 0 where s_b is 0: what an element of the block is multiplied by."""
    one = s_b.new_ones(())
    enc = (one / (s_b * (one / s_enc))).clamp(max=FLOAT32_MAX)
    return torch.where(s_b == 0, 0.0, enc)


def to_e4m3(v: Tensor, rounding: ScaleRounding, block_amax: Tensor) -> Tensor:
    """Nonnegative float32 values to e4m3 bytes (uint8), at most 448; UP never gives 0 for a block that is not zero."""
    v = v.clamp(max=E4M3_MAX)
    bits = v.to(torch.float8_e4m3fn).view(torch.uint8)
    if rounding == ScaleRounding.UP:
        below = (bits.view(torch.float8_e4m3fn).float() < v) | ((bits == 0) & (block_amax > 0))
        bits = bits + below.to(torch.uint8)
    return torch.where(v.isnan(), E4M3_NAN, bits)


def _four_over_six_error(blocks: Tensor, bits: Tensor, s_enc: Tensor, amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """The error of each row's block, (rows, blocks, 16) with scale bits (rows, blocks), elements added in order."""
    s = bits.view(torch.float8_e4m3fn).float().unsqueeze(-1)
    s_enc, amax = s_enc.unsqueeze(-1), amax.unsqueeze(-1)
    code = round_e2m1(blocks * block_encode(s, s_enc), RoundingMode.RNE)
    decoded = layout.code_values(code) * s * amax / amax.new_full((), spec.largest_value)
    difference = (decoded - blocks).abs()
    if spec.four_over_six == FourOverSix.MSE:
        difference = difference * difference
    total = difference[..., 0]
    for i in range(1, BLOCK):
        total = total + difference[..., i]
    return total


def _squared_error(blocks: Tensor, s: Tensor, s_enc: Tensor) -> Tensor:
    """sum(s) of the scale search: (rows, blocks) of (rows, blocks, 16) with scales s (rows, blocks)."""
    u = blocks.abs() * block_encode(s, s_enc).unsqueeze(-1)
    difference = layout.code_values(round_e2m1(u, RoundingMode.RNE)) - u
    total = torch.zeros_like(s)
    for i in range(BLOCK):
        total = fma(difference[..., i], difference[..., i], total)
    return total


def _weighted_error(blocks: Tensor, s: Tensor, s_enc: Tensor, weights: Tensor) -> Tensor:
    """sum(s) of the weighted search: as :func:`_squared_error`, the columns' weights (blocks, 16) in it."""
    u = blocks.abs() * block_encode(s, s_enc).unsqueeze(-1)
    difference = nearest_value(u) - u
    square = difference * difference * weights
    total = torch.zeros_like(s)
    for i in range(BLOCK):
        total = total + square[..., i]
    return total


def search_steps(spec: QuantizeSpec) -> tuple[int, int]:
    """The candidates of a scale search: the usual byte plus each of ``range(*search_steps(spec))``."""
    first = 0 if spec.scale_rounding == ScaleRounding.UP else -1
    return first, first + 7


def _search_scales(
    blocks: Tensor, base: Tensor, s_enc: Tensor, spec: QuantizeSpec, weights: Tensor | None = None
) -> Tensor:
    """Of the seven e4m3 bytes around ``base`` (rows, blocks), the one of least squared error; the smallest of equal."""
    best = least = None
    for step in range(*search_steps(spec)):
        bits = (base.int() + step).clamp(1, E4M3_NAN - 1).to(torch.uint8)
        s = bits.view(torch.float8_e4m3fn).float()
        total = _squared_error(blocks, s, s_enc) if weights is None else _weighted_error(blocks, s, s_enc, weights)
        if spec.block_rows == BLOCK:
            total = _over_tile(total, _add_in_halves)
        error = total * s * s
        if best is None or least is None:
            best, least = bits, error
        else:
            best, least = torch.where(error < least, bits, best), torch.where(error < least, error, least)
    assert best is not None
    return torch.where(base == E4M3_NAN, base, best)


def _over_tile(values: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """(rows, blocks) values of 1x16 blocks reduced over each 16 rows and given back to each of them."""
    rows = values.shape[0]
    tiles = pad(values, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK))
    return reduce(tiles).repeat_interleave(BLOCK, dim=0)[:rows]


def _add_in_halves(tiles: Tensor) -> Tensor:
    for half in (8, 4, 2, 1):
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def block_scales(blocks: Tensor, amax: Tensor, spec: QuantizeSpec, weights: Tensor | None = None) -> Tensor:
    """The e4m3 bytes (rows, blocks), uint8, of float32 blocks (rows, blocks, 16) (contract, section 2).

    amax: 0-d, or (rows, 1) where the spec is row-scaled. weights: of the columns in a scale search, (blocks, 16).
    """
    s_enc = encode_scale(amax, spec)
    block_amax = blocks.abs().amax(dim=-1)
    not_finite = ~(block_amax <= FLOAT32_MAX)
    if spec.block_rows == BLOCK:
        block_amax = _over_tile(block_amax, lambda tiles: tiles.amax(dim=1))
        not_finite = _over_tile(not_finite.to(torch.uint8), lambda tiles: tiles.amax(dim=1)).bool()
    if spec.four_over_six is None:
        sixth = amax.new_full((), 1 / 6)
        bits = to_e4m3(block_amax * (s_enc * sixth), spec.scale_rounding, block_amax)
        if spec.scale_search is not None:
            bits = torch.where(block_amax == 0, 0, _search_scales(blocks, bits, s_enc, spec, weights))
    else:
        base = block_amax / amax.new_full((), E2M1_MAX) * s_enc
        bits6 = to_e4m3(base, spec.scale_rounding, block_amax)
        bits4 = to_e4m3(base * 1.5, spec.scale_rounding, block_amax)
        error6, error4 = (_four_over_six_error(blocks, bits, s_enc, amax, spec) for bits in (bits6, bits4))
        if spec.block_rows == BLOCK:
            error6, error4 = _over_tile(error6, _add_in_halves), _over_tile(error4, _add_in_halves)
        bits = torch.where(error4 < error6, bits4, bits6)
    return torch.where(not_finite, E4M3_NAN, bits)


def quantize(
    x: Tensor,
    amax: Tensor,
    rng_state: Tensor | None,
    spec: QuantizeSpec,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
    stream: int = 0,
    column_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., K), at least 1-D, and its amax to (qdata, scale, per_tensor_scale) (contract, sections 2 to 5).

    qdata: uint8 (..., K rounded up to 16, halved); scale: e4m3 (row tiles, column tiles, 32, 16), swizzled;
    per_tensor_scale: float32 0-d; it and amax are (rows,) where the spec is row-scaled. A NaN block has the NaN scale
    and codes of zero. EDEN: see :func:`eden.quantize`.
    column_weights: float32 (K,), or as many as are stored, how much the squared error of each column counts in a scale
    search; only here, for no op takes them.
    """
    if spec.is_eden:
        from nvfp4_tensor.numerics import eden  # which is built on this module

        return eden.quantize(x, amax, rng_state, spec, row0, col0, full_width, stream)
    amax = magnitude(amax.reshape(-1 if spec.row_scaled else ()))
    columns = layout.ceil_to(x.shape[-1], BLOCK)
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    rows = flat.shape[0]
    qdata = flat.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = flat.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    s_enc = encode_scale(amax, spec)
    weights = (
        None if column_weights is None else pad(column_weights, (0, columns - len(column_weights))).view(-1, BLOCK)
    )
    step = max(_CHUNK_ELEMENTS // max(columns, 1) // BLOCK, 1) * BLOCK
    for start in range(0, rows if columns else 0, step):
        piece = flat[start : start + step]
        if spec.hadamard_sign is not None:
            piece = hadamard(piece, spec.hadamard_sign)
        blocks = pad(piece.float(), (0, -piece.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        own = slice(start, start + step)
        piece_amax, piece_enc = (t[own, None] if spec.row_scaled else t for t in (amax, s_enc))
        bits = block_scales(blocks, piece_amax, spec, weights)
        enc = block_encode(bits.view(torch.float8_e4m3fn).float(), piece_enc).unsqueeze(-1)
        v = torch.where((bits == E4M3_NAN).unsqueeze(-1), 0.0, blocks * enc)
        r16 = None
        if spec.is_stochastic:
            if rng_state is None:
                raise ValueError("stochastic rounding needs rng_state, an int64 tensor (seed, offset)")
            r16 = random16(
                len(piece), x.shape[-1], rng_state, stream=stream, row0=row0 + start, col0=col0, full_width=full_width
            ).view_as(v)
        qdata[start : start + step] = layout.pack(round_e2m1(v, spec.round_mode, r16, spec.random_bits).flatten(-2))
        scale[start : start + step] = bits
    scale = layout.swizzle(scale).view(torch.float8_e4m3fn)
    return qdata.view(*x.shape[:-1], columns // 2), scale, per_tensor_scale(amax, spec)


def _check_scale(scale: Tensor, rows: int, columns: int) -> None:
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"scale is float8_e4m3fn or its bytes in uint8, not {scale.dtype}")
    expected = (*layout.scale_tiles(rows, columns), 32, 16)
    if scale.shape != expected:
        raise ValueError(
            f"scale is swizzled, {expected} for {rows} rows of {columns} codes, not {tuple(scale.shape)}: "
            "nvfp4_tensor.numerics.layout.swizzle does it"
        )


def dequantize(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    """(code * s_b) * per_tensor_scale, rounded once to dtype (contract, section 6): (..., columns).

    scale: e4m3 or its bytes. per_tensor_scale: float32 0-d, or one per row (leading dimensions flattened), or None to
    leave the factor out.
    """
    *leading, half = qdata.shape
    rows = qdata.shape[:-1].numel()
    _check_scale(scale, rows, half * 2)
    pairs = layout.code_values(layout.unpack(torch.arange(256, device=qdata.device, dtype=torch.uint8).unsqueeze(-1)))
    blocks = layout.scale_values(layout.unswizzle(scale, rows, half * 2 // BLOCK))
    values = pairs[qdata.reshape(rows, half).long()].reshape(rows, half * 2 // BLOCK, BLOCK) * blocks.unsqueeze(-1)
    values = values.reshape(rows, half * 2)
    if per_tensor_scale is not None:
        values = values * per_tensor_scale.reshape(-1, 1)
    return values[:, :columns].to(dtype).contiguous().view(*leading, columns)


def matmul(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    columns: int,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """round_once(alpha * sum + bias), the sum over exact products in float32 (contract, section 6).

    x: (..., M, K) floating point. Weight: qdata (N, K/2) or a batch of them (E, N, K/2) against x (E, M, K).
    across_blocks False: x @ w^T, True: x @ w, a sum across the blocks. x_scale: float32 0-d or one per row of x, the
    factor left out of x.
    per_tensor_scale: 0-d or one per row of the weight. bias: anything that broadcasts to the result.
    """
    w = dequantize(qdata, scale, None, columns, torch.float32)
    alpha = x_scale.reshape(*x.shape[:-1], 1) if x_scale is not None and x_scale.dim() else x_scale
    if per_tensor_scale.dim() and across_blocks:  # one a row: a factor of each summand
        w = w * per_tensor_scale.reshape(*qdata.shape[:-1], 1)
    else:
        factor = per_tensor_scale
        if factor.dim():  # one a row of w: beside the columns of y
            factor = factor.reshape(-1) if qdata.dim() == 2 else factor.reshape(len(qdata), 1, -1)
        alpha = factor if alpha is None else factor * alpha
    y = x.float() @ (w if across_blocks else w.mT)
    if alpha is not None:
        y = y * alpha
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)
