"""The NVFP4 format: constants, packing of codes, and the order of block scales in memory.

A value is ``code x block scale x per-tensor scale``: a 4-bit E2M1 code, an e4m3 number shared by 16 consecutive
elements of a row, and a float32 shared by the tensor. This module does no rounding; ``reference.py`` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
"""Elements of the last dimension that share one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_NAN = 0x7F
"""The byte that we write for a NaN block scale. Larger bytes, which other software may write, are NaN too."""

CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of codes 0..7; bit 3 of a code is the sign."""

TILE_ROWS, TILE_COLUMNS = 128, 4
"""A tile of block scales in cuBLASLt's layout: 128 rows by 4 scales (64 elements), stored as 32 x 16 bytes."""

DEFAULT_HADAMARD_SIGN = 0xD7E8
"""Element i of a block of 16 is negated before the Hadamard transform if bit i is set (NVIDIA's mask)."""

ROTATION = 128
"""Number of columns that EDEN rotates together (contract, section 9): eight blocks."""

FP4_CAPABILITY = (10, 0)
"""The first compute capability whose tensor cores support FP4 in torch's scaled_mm."""

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def ceil_to(n: int, multiple: int) -> int:
    """Round n up to a multiple."""
    return (n + multiple - 1) // multiple * multiple


def in_rows(x: Tensor) -> Tensor:
    """Flatten the leading dimensions of x (..., K): (rows, K), also of no elements."""
    return x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])


def chunks(rows: int, columns: int, elements: int, multiple: int = 1) -> list[slice]:
    """Split rows into slices of about ``elements`` elements, so that intermediates stay small; none of no elements."""
    step = max(elements // max(columns, 1) // multiple, 1) * multiple
    return [slice(start, min(start + step, rows)) for start in range(0, rows if columns else 0, step)]


def pack(codes: Tensor) -> Tensor:
    """Pack codes 0..15, uint8 (..., K) with K even, to bytes (..., K/2), the even element in the low four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(qdata: Tensor) -> Tensor:
    """Unpack bytes (..., K/2) to codes 0..15, uint8 (..., K)."""
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


def code_values(codes: Tensor) -> Tensor:
    """Convert codes 0..15 to float32 values of the same shape; code 8 is -0.0."""
    magnitude = (codes & 7).float()
    # Codes 2, 3 | 4, 5 | 6, 7 are 1 and 1.5 times 1, 2, 4. Copying a table to a GPU would break CUDA graph capture.
    magnitude = torch.where(magnitude < 4, magnitude / 2, torch.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


def scale_values(scale: Tensor) -> Tensor:
    """Convert block scales, e4m3 or their bytes, to float32: NaN for all bytes from :data:`E4M3_NAN`."""
    data = scale.view(torch.uint8).clamp(max=E4M3_NAN)
    return data.view(torch.float8_e4m3fn).float()


def scale_tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of tiles of 128 x 64 elements, (down, across), that cover rows x columns elements."""
    return (rows + TILE_ROWS - 1) // TILE_ROWS, (columns + BLOCK * TILE_COLUMNS - 1) // (BLOCK * TILE_COLUMNS)


def swizzle(scale: Tensor) -> Tensor:
    """Swizzle block scales (rows, K/16) to (row tiles, column tiles, 32, 16), padded with zeros.

    Scale (r, c) is at flat offset ``((r//128 * C4 + c//4) * 32 + r%32) * 16 + (r%128)//32 * 4 + c%4``, where C4 is the
    number of column tiles: the 128x4 layout that cuBLASLt requires for the scales of block-scaled operands.
    """
    rows, columns = scale.shape
    row_tiles, column_tiles = scale_tiles(rows, columns * BLOCK)
    data = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    data = torch.nn.functional.pad(data, (0, column_tiles * TILE_COLUMNS - columns, 0, row_tiles * TILE_ROWS - rows))
    data, unit = _four_at_once(data)
    data = data.view(row_tiles, 4, 32, column_tiles, unit).permute(0, 3, 2, 1, 4).contiguous()
    return data.view(scale.dtype).view(row_tiles, column_tiles, 32, 16)


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Invert :func:`swizzle`: (row tiles, column tiles, 32, 16) to (rows, columns)."""
    row_tiles, column_tiles = scale.shape[:2]
    data, unit = _four_at_once(scale)
    data = data.view(row_tiles, column_tiles, 32, 4, unit).permute(0, 3, 2, 1, 4)
    data = data.contiguous().view(torch.uint8 if scale.element_size() == 1 else scale.dtype)
    data = data.view(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    return data[:rows, :columns].contiguous().view(scale.dtype)


def unswizzle_rows(scale: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Return the rows (R,) of what :func:`unswizzle` returns: (R, columns). Others are not read."""
    row_tiles, column_tiles = scale.shape[:2]
    data, unit = _four_at_once(scale)
    data = data.view(row_tiles, column_tiles, 32, 4, unit).permute(0, 3, 2, 1, 4)
    data = data[rows // TILE_ROWS, rows % TILE_ROWS // 32, rows % 32]
    data = data.flatten().view(torch.uint8 if scale.element_size() == 1 else scale.dtype)
    return data.view(rows.shape[0], column_tiles * TILE_COLUMNS)[:, :columns].contiguous().view(scale.dtype)


def _four_at_once(scale: Tensor) -> tuple[Tensor, int]:
    """View four block scales of a row, which both layouts keep together, as one number: 40 times as fast on a CPU.

    Also returns the number of elements that four scales then are. They stay single at an odd address, and in a trace:
    Inductor of torch 2.11 cannot view a permuted int32 as bytes.
    """
    flat = scale.reshape(-1)
    traced = torch.compiler.is_compiling() or type(flat) is not Tensor
    if scale.element_size() == 1 and not traced and flat.storage_offset() % 4 == flat.data_ptr() % 4 == 0:
        return flat.view(torch.int32), 1
    return flat, 4
