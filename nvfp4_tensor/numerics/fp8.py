"""Operands of FP8 products in plain torch (numerics contract, section 13): e4m3 times a power of two per row.

The rules of :mod:`nvfp4_tensor.numerics.reference` hold: float32 in the written order, nothing copied from the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_NAN, FLOAT32_MAX

_CHUNK_ELEMENTS = 1 << 22
"""Number of elements that are rounded, or float32 elements of a weight that are multiplied, at a time."""


def exponent(a: Tensor) -> Tensor:
    """Return the least p >= -126 with a <= 448 * 2^p, and 0 where a is 0, of float32 a >= 0: int32, the shape of a."""
    mantissa, power = torch.frexp(a)  # a = mantissa * 2^power, mantissa in [0.5, 1); 448 = 0.875 * 2^9
    p = (power - 9 + (mantissa > 0.875)).clamp(min=-126)
    return torch.where(a == 0, 0, p)


def power_of_two(p: Tensor) -> Tensor:
    """Return 2^p as float32, for int32 p from -126 to 127."""
    return (p + 127 << 23).to(torch.int32).view(torch.float32)


def decode(codes: Tensor, scale: Tensor, block: tuple[int, int], first: int = 0) -> Tensor:
    """Return code x scale, float32, of rows of FP8 weights.

    Args:
        codes: e4m3 (*leading, rows, K), the rows from row ``first`` on.
        scale: float32 (*leading, blocks of all rows, blocks of columns).
        block: the rows and columns that share a scale, 0 for all.
    """
    if codes.numel() == 0:
        return codes.float()
    rows, columns = codes.shape[-2:]
    height, width = block[0] or rows, block[1] or columns
    skipped = first % height if block[0] else 0
    if block[0]:
        scale = scale[..., first // height : -(-(first + rows) // height), :]
    values = codes.float()
    if (skipped + rows) % height or skipped or columns % width:
        values = pad(values, (0, -columns % width, skipped, -(skipped + rows) % height))
    # Indices of a spread scale would be wrong in torch 2.13's compiled CPU code.
    blocks = values.unflatten(-1, (scale.shape[-1], width)).unflatten(-3, (scale.shape[-2], height))
    values = blocks.mul_(scale[..., :, None, :, None]).flatten(-2).flatten(-3, -2)
    return values[..., skipped : skipped + rows, :columns]


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows of x (..., K) to e4m3, each with its own power of two.

    Returns:
        values, e4m3 (..., K rounded up to 16), zero in the padding and NaN where x is not finite; and scale,
        float32 (rows,): x is about values * scale.
    """
    columns = x.shape[-1]
    flat = layout.in_rows(x)
    scale = flat.new_ones(len(flat), dtype=torch.float32)
    values = flat.new_empty((len(flat), layout.ceil_to(columns, BLOCK)), dtype=torch.uint8)
    for part in layout.chunks(len(flat), flat.shape[1], _CHUNK_ELEMENTS):
        chunk = flat[part].float()
        finite = chunk.abs() <= FLOAT32_MAX
        p = exponent(torch.where(finite, chunk.abs(), 0.0).amax(dim=1))
        bits = (chunk * power_of_two(-p).unsqueeze(1)).to(torch.float8_e4m3fn).view(torch.uint8)
        values[part] = pad(torch.where(finite, bits, E4M3_NAN), (0, -columns % BLOCK))
        scale[part] = power_of_two(p)
    return values.view(torch.float8_e4m3fn).view(*x.shape[:-1], -1 if x.numel() else values.shape[1]), scale


def of_codes(qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Round code x block scale of a weight to e4m3, with a power of two per row that depends on its block scales only.

    qdata: uint8 (..., N, K/2); scale: e4m3, swizzled; per_tensor_scale: float32 0-d or one per row.

    Returns:
        values, e4m3 (..., N, K), NaN in blocks of a NaN scale, with the sign of the code; and factor, float32 (rows,):
        the power of two times the per-tensor scale.
    """
    *leading, half = qdata.shape
    rows, columns = qdata.shape[:-1].numel(), half * 2
    reference.check_scale(scale, rows, columns)
    scales = layout.scale_values(layout.unswizzle(scale, rows, columns // BLOCK))
    largest = torch.where(scales.isnan(), 0.0, scales).amax(dim=1) if columns else scales.new_zeros(rows)
    p = exponent(largest * E2M1_MAX)
    inverse = power_of_two(-p).unsqueeze(1)
    codes = qdata.reshape(rows, half)
    values = codes.new_empty((rows, columns))
    for part in layout.chunks(rows, columns, _CHUNK_ELEMENTS):
        code = layout.unpack(codes[part])
        s = (scales[part] * inverse[part]).repeat_interleave(BLOCK, dim=1)
        magnitude = layout.code_values(code & 7) * s
        bits = magnitude.to(torch.float8_e4m3fn).view(torch.uint8)
        values[part] = torch.where(magnitude.isnan(), E4M3_NAN, bits) | (code & 8) << 4
    factor = (per_tensor_scale.float() * power_of_two(p)).reshape(-1)
    return values.view(torch.float8_e4m3fn).view(*leading, columns), factor


def matmul(
    x: Tensor, x_scale: Tensor, w: Tensor, w_factor: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return round_once(alpha * sum + bias), alpha = x_scale * w_factor, the sum of exact products in float32: (M, N).

    x: e4m3 (M, K); w: e4m3 (N, K); x_scale: float32 (M,); w_factor: float32 (N,); bias broadcasts to the result. x and
    w may be the bytes in uint8.
    """
    x, w = x.view(torch.float8_e4m3fn), w.view(torch.float8_e4m3fn)
    y = x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
    values, rows = x.float(), x_scale.unsqueeze(1)
    bias = None if bias is None else bias.expand(y.shape)
    for part in layout.chunks(w.shape[0], max(w.shape[1], 1), _CHUNK_ELEMENTS):
        total = values @ w[part].float().mT * (rows * w_factor[part])
        y[:, part] = total if bias is None else total + bias[:, part].float()
    return y
