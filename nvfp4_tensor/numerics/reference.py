"""The numerics contract in plain torch, on any device: the slow and simple reference for all kernels.

Every function states the formula that it computes, in float32 with IEEE rounding to nearest even, in the written order.
Two rules ensure that: a divisor is always a tensor (torch multiplies by the reciprocal of a Python scalar), and no
compiler traces this module (the ops are opaque to it). A third rule makes it capturable in CUDA graphs: constants are
not copied from the host, but filled or computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import eden, layout, philox
from nvfp4_tensor.numerics.choices import FourOverSix, RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.fma import fma
from nvfp4_tensor.numerics.hadamard import hadamard
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX, E4M3_NAN, FLOAT32_MAX, ROTATION
from nvfp4_tensor.numerics.spec import QuantizeSpec

_CHUNK_ELEMENTS = 1 << 17
"""Number of elements that are processed at a time, to keep the intermediates of large layers small."""


def amax(x: Tensor) -> Tensor:
    """Return max |x| over the finite elements of x (any shape): float32, 0-d; 0 if there are none."""
    largest = x.new_zeros((), dtype=torch.float32)
    for chunk in x.reshape(-1).split(_CHUNK_ELEMENTS) if x.numel() else ():
        magnitude = chunk.float().abs()
        largest = torch.maximum(largest, torch.where(magnitude <= FLOAT32_MAX, magnitude, 0.0).amax())
    return largest


def row_amax(x: Tensor, hadamard_sign: int | None = None) -> Tensor:
    """Return max |x| over the finite elements of each row of x (..., K), or of its transform: float32 (rows,)."""
    flat = layout.in_rows(x)
    largest = flat.new_zeros(len(flat), dtype=torch.float32)
    for part in layout.chunks(len(flat), flat.shape[1], _CHUNK_ELEMENTS):
        values = (flat[part] if hadamard_sign is None else hadamard(flat[part], hadamard_sign)).float().abs()
        largest[part] = torch.where(values <= FLOAT32_MAX, values, 0.0).amax(dim=-1)
    return largest


def random16(
    rows: int, columns: int, rng_state: Tensor, *, stream: int = 0, row0: int = 0, col0: int = 0, full_width: int = 0
) -> Tensor:
    """Return 16 random bits per element (contract, section 4): int32 (rows, columns rounded up to 16).

    ``row0``, ``col0``: the offset of this shard in a full tensor of ``full_width`` columns (0: those of the shard).
    """
    device = rng_state.device
    blocks = -(-columns // BLOCK)
    width = -(-(full_width or columns) // BLOCK)
    row = torch.arange(row0, row0 + rows, device=device).unsqueeze(1)
    column = torch.arange(col0 // BLOCK, col0 // BLOCK + blocks, device=device)
    block = row * width + column
    words = philox.words(block, rng_state, stream)
    bytes_ = torch.stack([words >> shift & 0xFF for shift in (0, 8, 16, 24)], dim=-1).flatten(-2).int()
    return (bytes_ | bytes_.roll(-1, dims=-1) << 8).flatten(-2)


def steps_per_unit(magnitude: Tensor) -> Tensor:
    """Return how many steps of the grid of codes a distance of 1 has at magnitudes up to 6: 2, 1 or 1/2, float32."""
    return torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5)).float()  # where's is the default dtype


def round_e2m1(v: Tensor, mode: RoundingMode, r16: Tensor | None = None, random_bits: int = 16) -> Tensor:
    """Round float32 values, divided by their scales, to codes 0..15 (uint8), saturating at 6 (contract, section 3)."""
    a = v.abs().clamp(max=E2M1_MAX)
    if mode == RoundingMode.STOCHASTIC:
        assert r16 is not None
        step = steps_per_unit(a)  # c(a) is a * step + first: exact in float32
        first = torch.where(a < 2, 0, torch.where(a < 4, 2, 4))
        floor = (a * step).floor()
        fraction = ((a * step - floor) * (1 << random_bits)).int()
        random = r16 if random_bits == 16 else r16 >> 8
        code = floor.int() + first + (fraction + random >= 1 << random_bits).int()
    else:
        # Seven midpoints: at a tie, round up if the mode prefers the neighbour above.
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
    """Return the values of the codes of float32 u by RNE: :func:`round_e2m1` in fewer passes, for searches."""
    a = u.abs().clamp(max=E2M1_MAX)
    per_step = steps_per_unit(a)
    return torch.copysign((a * per_step).round() / per_step, u)


def magnitude(amax: Tensor) -> Tensor:
    """Return |amax|; on a CPU outside of traces, raise a ValueError if it is negative."""
    if amax.is_cpu and not torch.compiler.is_compiling() and (amax < 0).any():
        raise ValueError(f"amax is a magnitude, not {amax.min().item()}: give amax.abs()")
    return amax.abs()


def encode_scale(amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return S_enc = min(6 * ceiling / amax, FLT_MAX), and 1 where amax is 0: float32, the shape of amax."""
    s_enc = (amax.new_full((), spec.largest_value) / amax).clamp(max=FLOAT32_MAX)
    return torch.where(amax == 0, 1.0, s_enc)


def per_tensor_scale(amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return amax / (6 * ceiling), and 1 where amax is 0: float32, the shape of amax."""
    return torch.where(amax == 0, 1.0, amax / amax.new_full((), spec.largest_value))


def block_encode(s_b: Tensor, s_enc: Tensor) -> Tensor:
    """Return enc = min(1 / (s_b * S_dec), FLT_MAX), the factor of a block's elements, and 0 where s_b is 0."""
    one = s_b.new_ones(())
    enc = (one / (s_b * (one / s_enc))).clamp(max=FLOAT32_MAX)
    return torch.where(s_b == 0, 0.0, enc)


def to_e4m3(v: Tensor, rounding: ScaleRounding, block_amax: Tensor) -> Tensor:
    """Round nonnegative float32 to e4m3 bytes (uint8), at most 448; UP never returns 0 for a nonzero block."""
    v = v.clamp(max=E4M3_MAX)
    bits = v.to(torch.float8_e4m3fn).view(torch.uint8)
    if rounding == ScaleRounding.UP:
        below = (bits.view(torch.float8_e4m3fn).float() < v) | ((bits == 0) & (block_amax > 0))
        bits = bits + below.to(torch.uint8)
    return torch.where(v.isnan(), E4M3_NAN, bits)


def _four_over_six_error(blocks: Tensor, bits: Tensor, s_enc: Tensor, amax: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return the error of each block (rows, blocks, 16) with scale bits (rows, blocks), summed in order."""
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


def _squared_error(blocks: Tensor, s: Tensor, s_enc: Tensor, weights: Tensor | None) -> Tensor:
    """Return sum(s) of the scale search for blocks (rows, blocks, 16) with scales s (rows, blocks).

    weights: column weights (blocks, 16) of the squares, which are then rounded before they are added.
    """
    u = blocks.abs() * block_encode(s, s_enc).unsqueeze(-1)
    difference = nearest_value(u) - u
    total = torch.zeros_like(s)
    for i in range(BLOCK):
        d = difference[..., i]
        total = fma(d, d, total) if weights is None else total + d * d * weights[..., i]
    return total


def search_steps(spec: QuantizeSpec) -> tuple[int, int]:
    """Return the range of steps that a scale search adds to the usual byte: ``range(*search_steps(spec))``."""
    first = 0 if spec.scale_rounding == ScaleRounding.UP else -1
    return first, first + 7


def _search_scales(
    blocks: Tensor, base: Tensor, s_enc: Tensor, spec: QuantizeSpec, weights: Tensor | None = None
) -> Tensor:
    """Return the e4m3 byte of least squared error among seven around ``base`` (rows, blocks), at a tie the smallest."""
    best = least = None
    for step in range(*search_steps(spec)):
        bits = (base.int() + step).clamp(1, E4M3_NAN - 1).to(torch.uint8)
        s = bits.view(torch.float8_e4m3fn).float()
        total = _squared_error(blocks, s, s_enc, weights)
        if spec.block_rows == BLOCK:
            total = over_tile(total, _add_in_halves)
        error = total * s * s
        if best is None or least is None:
            best, least = bits, error
        else:
            best, least = torch.where(error < least, bits, best), torch.where(error < least, error, least)
    assert best is not None
    return torch.where(base == E4M3_NAN, base, best)


def over_tile(values: Tensor, reduce: Callable[[Tensor], Tensor] = lambda tiles: tiles.amax(dim=1)) -> Tensor:
    """Reduce values (rows, blocks) of 1x16 blocks over each 16 rows, and repeat the result for each of them."""
    rows = values.shape[0]
    tiles = pad(values, (0, 0, 0, -rows % BLOCK)).unflatten(0, (-1, BLOCK))
    return reduce(tiles).repeat_interleave(BLOCK, dim=0)[:rows]


def _add_in_halves(tiles: Tensor) -> Tensor:
    for half in (8, 4, 2, 1):
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


def block_scales(blocks: Tensor, amax: Tensor, spec: QuantizeSpec, weights: Tensor | None = None) -> Tensor:
    """Return the e4m3 bytes (rows, blocks), uint8, of float32 blocks (rows, blocks, 16) (contract, section 2).

    amax: 0-d, or (rows, 1) if the spec is row-scaled. weights: column weights (blocks, 16) for a scale search.
    """
    s_enc = encode_scale(amax, spec)
    block_amax = blocks.abs().amax(dim=-1)
    not_finite = ~(block_amax <= FLOAT32_MAX)
    if spec.block_rows == BLOCK:
        block_amax = over_tile(block_amax)
        not_finite = over_tile(not_finite.to(torch.uint8)).bool()
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
            error6, error4 = over_tile(error6, _add_in_halves), over_tile(error4, _add_in_halves)
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
    """Quantize x (..., K), given its amax, to (qdata, scale, per_tensor_scale) (contract, sections 2 to 5).

    qdata: uint8 (..., K rounded up to 16, halved); scale: e4m3 (row tiles, column tiles, 32, 16), swizzled;
    per_tensor_scale: float32 0-d; it and amax are (rows,) if the spec is row-scaled. A NaN block has the NaN scale
    and codes of zero. EDEN (section 9) rotates x, whose columns are rounded up to 128; amax is that of the rotation.
    column_weights: weights of the columns' squared errors in a scale search, float32 (K,) or one per stored column;
    no op supports them.
    """
    if spec.is_eden and rng_state is None:
        raise ValueError("EDEN needs rng_state, an int64 tensor (seed, offset)")
    amax = magnitude(amax.reshape(-1 if spec.row_scaled else ()))
    columns = layout.ceil_to(x.shape[-1], spec.column_multiple)
    flat = layout.in_rows(x)
    rows = flat.shape[0]
    qdata = flat.new_empty((rows, columns // 2), dtype=torch.uint8)
    scale = flat.new_empty((rows, columns // BLOCK), dtype=torch.uint8)
    s_enc = encode_scale(amax, spec)
    weights = (
        None if column_weights is None else pad(column_weights, (0, columns - len(column_weights))).view(-1, BLOCK)
    )
    for part in layout.chunks(rows, columns, _CHUNK_ELEMENTS, BLOCK):
        chunk, origin = flat[part], (row0 + part.start, col0, full_width or x.shape[-1])
        if spec.is_eden:
            assert rng_state is not None
            codes, bits = _rotated_codes(chunk, s_enc, rng_state, stream, origin)
        else:
            chunk_amax, chunk_enc = (t[part, None] if spec.row_scaled else t for t in (amax, s_enc))
            codes, bits = _codes(chunk, chunk_amax, chunk_enc, rng_state, spec, stream, origin, weights)
        qdata[part] = layout.pack(codes)
        scale[part] = bits
    scale = layout.swizzle(scale).view(torch.float8_e4m3fn)
    return qdata.view(*x.shape[:-1], columns // 2), scale, per_tensor_scale(amax, spec)


def _codes(
    x: Tensor,
    amax: Tensor,
    s_enc: Tensor,
    rng_state: Tensor | None,
    spec: QuantizeSpec,
    stream: int,
    origin: tuple[int, int, int],
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return codes (rows, K rounded up to 16) and block scales, bytes (rows, blocks), of some rows of x (rows, K)."""
    columns = x.shape[1]
    if spec.hadamard_sign is not None:
        x = hadamard(x, spec.hadamard_sign)
    blocks = pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    bits = block_scales(blocks, amax, spec, weights)
    enc = block_encode(bits.view(torch.float8_e4m3fn).float(), s_enc).unsqueeze(-1)
    v = torch.where((bits == E4M3_NAN).unsqueeze(-1), 0.0, blocks * enc)
    r16 = None
    if spec.is_stochastic:
        if rng_state is None:
            raise ValueError("stochastic rounding needs rng_state, an int64 tensor (seed, offset)")
        row0, col0, full_width = origin
        r16 = random16(len(x), columns, rng_state, stream=stream, row0=row0, col0=col0, full_width=full_width).view_as(
            v
        )
    return round_e2m1(v, spec.round_mode, r16, spec.random_bits).flatten(-2), bits


def _rotated_codes(
    x: Tensor, s_enc: Tensor, rng_state: Tensor, stream: int, origin: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Return those of EDEN (section 9), K rounded up to 128: rotate, round to nearest, correct and draw the scales."""
    y = eden.rotate(x, rng_state, col0=origin[1]).unflatten(-1, (-1, ROTATION))
    broken = eden.is_broken(y) | s_enc.isnan()
    y = torch.where(broken, 0.0, y).unflatten(-1, (-1, BLOCK))
    block_amax = y.abs().amax(dim=-1)
    s1 = to_e4m3(block_amax * (s_enc * s_enc.new_full((), eden.ONTO_GRID)), ScaleRounding.NEAREST, block_amax)
    s1 = s1.view(torch.float8_e4m3fn).float()
    codes = round_e2m1(y * block_encode(s1, s_enc).unsqueeze(-1), RoundingMode.RNE)
    t = eden.corrected(s1, y * s_enc, layout.code_values(codes) * s1.unsqueeze(-1))
    bits = eden.round_scales(t, eden.scale_random_bits(len(y), y.shape[1], rng_state, stream, *origin))
    codes = torch.where(broken.unsqueeze(-1), 0, codes)
    return codes.flatten(1), torch.where(broken, E4M3_NAN, bits).flatten(1)


def check_scale(scale: Tensor, rows: int, columns: int) -> None:
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(f"scale must be float8_e4m3fn or its bytes in uint8, not {scale.dtype}")
    expected = (*layout.scale_tiles(rows, columns), 32, 16)
    if scale.shape != expected:
        raise ValueError(
            f"scale must be swizzled, {expected} for {rows} rows of {columns} codes, got {tuple(scale.shape)}: use "
            "nvfp4_tensor.numerics.layout.swizzle"
        )


def dequantize(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return (code * s_b) * per_tensor_scale, rounded once to dtype (contract, section 6): (..., columns).

    scale: e4m3 or its bytes. per_tensor_scale: float32 0-d, or one per row (leading dimensions flattened), or None for
    a factor of 1.
    """
    *leading, half = qdata.shape
    rows = qdata.shape[:-1].numel()
    check_scale(scale, rows, half * 2)
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
    """Return round_once(alpha * sum + bias), the sum over exact products in float32 (contract, section 6).

    x: (..., M, K) floating point. Weight: qdata (N, K/2), or a batch (E, N, K/2) for x (E, M, K). across_blocks False:
    x @ w^T; True: x @ w, a sum across the blocks. x_scale: a factor of x, float32 0-d or one per row of x.
    per_tensor_scale: 0-d or one per row of the weight. bias: anything that broadcasts to the result.
    """
    w = dequantize(qdata, scale, None, columns, torch.float32)
    alpha = x_scale.reshape(*x.shape[:-1], 1) if x_scale is not None and x_scale.dim() else x_scale
    if per_tensor_scale.dim() and across_blocks:  # one per row: a factor of each summand
        w = w * per_tensor_scale.reshape(*qdata.shape[:-1], 1)
    else:
        factor = per_tensor_scale
        if factor.dim():  # one per row of w: broadcast over the rows of y
            factor = factor.reshape(-1) if qdata.dim() == 2 else factor.reshape(len(qdata), 1, -1)
        alpha = factor if alpha is None else factor * alpha
    y = x.float() @ (w if across_blocks else w.mT)
    if alpha is not None:
        y = y * alpha
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)
