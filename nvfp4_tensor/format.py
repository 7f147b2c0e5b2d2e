"""The NVFP4 format itself: constants, enums, nibbles, bytes and the order of block scales in memory.

One value is ``code x block scale x per-tensor scale``: an E2M1 nibble, an e4m3 number shared by 16 consecutive elements
of a row, and a float32 shared by the tensor. Nothing here rounds; ``reference.py`` does that.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

BLOCK = 16
"""Elements of the last dimension that share one block scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_NAN = 0x7F
"""The byte of the one NaN that we write as a block scale."""

CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; bit 3 of the nibble is the sign."""

TILE_ROWS, TILE_COLUMNS = 128, 4
"""A tile of block scales, as cuBLASLt lays them out: 128 rows by 4 scales (64 elements), stored as 32 x 16 bytes."""

DEFAULT_HADAMARD_SIGN = 0xD7E8
"""Element i of a block of 16 is negated before the Hadamard transform where bit i is set (NVIDIA's choice)."""

FP4_CAPABILITY = (10, 0)
"""The first compute capability whose tensor cores take FP4 through torch's scaled_mm."""

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Choice(enum.IntEnum):
    """A choice that a checkpoint carries: pickled as its class and value, which torch.load(weights_only=True) takes.

    Enums of Python 3.11.0 to 3.11.3 pickle by ``getattr``, which it does not.
    """

    def __reduce_ex__(self, protocol):
        return type(self), (self.value,)


class RoundingMode(Choice):
    """How a scaled value becomes one of its two E2M1 neighbours (numerics contract, section 3)."""

    RNE = 0
    """To nearest, ties to the even code."""
    AWAY = 1
    """To nearest, ties away from zero."""
    ZERO = 2
    """To nearest, ties toward zero."""
    STOCHASTIC = 3
    """Up with the probability that makes the expectation the value itself (to the random bits' resolution)."""

    @classmethod
    def of(cls, mode: RoundingMode | str) -> RoundingMode:
        """The mode itself, or the one that a string names; ValueError with the list of names for any other."""
        if isinstance(mode, int) and not isinstance(mode, bool) and mode in cls._value2member_map_:
            return cls(mode)  # a traced RoundingMode arrives as its integer
        if isinstance(mode, str) and (name := mode.lower()) in _ROUNDING_NAMES:
            return _ROUNDING_NAMES[name]
        raise ValueError(
            f"unknown round_mode {mode!r}: use a RoundingMode or one of "
            + ", ".join(repr(name) for name in _ROUNDING_NAMES)
        )


_ROUNDING_NAMES = {
    "rne": RoundingMode.RNE,
    "even": RoundingMode.RNE,
    "away": RoundingMode.AWAY,
    "zero": RoundingMode.ZERO,
    "stochastic": RoundingMode.STOCHASTIC,
}


class ScaleRounding(Choice):
    """How a block scale becomes an e4m3 number (numerics contract, section 2)."""

    NEAREST = 0
    """NVIDIA's rule. About half the blocks of a Gaussian tensor clip their largest element."""
    UP = 1
    """The next e4m3 above: nothing clips, so stochastic rounding is unbiased everywhere (to 1/65536 of a step)."""


class FourOverSix(Choice):
    """The error by which four-over-six chooses between mapping a block's largest element to 6 or to 4."""

    MAE = 1
    MSE = 2


class ProductBackend(Choice):
    """What multiplies an NVFP4 weight by quantized activations (W4A4)."""

    AUTO = 0
    """scaled_mm where the device has FP4 tensor cores, decoded operands elsewhere."""
    SCALED_MM = 1
    """cuBLASLt through torch's scaled_mm; an error on a device without FP4 tensor cores."""
    FBGEMM = 2
    """fbgemm's f4f4bf16, bfloat16 models only; an error where it, or a device of compute capability 10, is missing."""

    @classmethod
    def of(cls, backend: ProductBackend | str) -> ProductBackend:
        """The backend itself, or the one that a string names; ValueError with the list of names for any other."""
        if isinstance(backend, int) and not isinstance(backend, bool) and backend in cls._value2member_map_:
            return cls(backend)
        if isinstance(backend, str) and backend.upper() in cls.__members__:
            return cls[backend.upper()]
        names = ", ".join(repr(member.name.lower()) for member in cls)
        raise ValueError(f"unknown product_backend {backend!r}: use a ProductBackend or one of {names}")


def ceil_to(n: int, multiple: int) -> int:
    """n rounded up to a multiple."""
    return (n + multiple - 1) // multiple * multiple


def pack(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 (..., K) with K even, to bytes (..., K/2), the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(qdata: Tensor) -> Tensor:
    """Bytes (..., K/2) to codes 0..15, uint8 (..., K)."""
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


def code_values(codes: Tensor) -> Tensor:
    """Codes 0..15 (...) to float32 values (...); code 8 is -0.0."""
    magnitude = (codes & 7).float()
    # 2, 3 | 4, 5 | 6, 7 stand for 1 and 1.5 times 1, 2, 4. No table: copying one to a GPU would break graph capture.
    magnitude = torch.where(magnitude < 4, magnitude / 2, torch.where(magnitude < 6, magnitude - 2, 2 * magnitude - 8))
    return torch.where(codes >= 8, -magnitude, magnitude)


def scale_tiles(rows: int, columns: int) -> tuple[int, int]:
    """How many 128 x 64-element tiles cover a tensor of so many rows and columns."""
    return (rows + TILE_ROWS - 1) // TILE_ROWS, (columns + BLOCK * TILE_COLUMNS - 1) // (BLOCK * TILE_COLUMNS)


def swizzle(scale: Tensor) -> Tensor:
    """Block scales (rows, K/16), linear, to (row tiles, column tiles, 32, 16), padded with zeros.

    Scale (r, c) lands at flat offset ``((r//128 * C4 + c//4) * 32 + r%32) * 16 + (r%128)//32 * 4 + c%4``, C4 the
    column tiles: the 128x4 layout in which cuBLASLt takes the scales of block-scaled operands.
    """
    rows, columns = scale.shape
    row_tiles, column_tiles = scale_tiles(rows, columns * BLOCK)
    data = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    data = torch.nn.functional.pad(data, (0, column_tiles * TILE_COLUMNS - columns, 0, row_tiles * TILE_ROWS - rows))
    data = data.reshape(row_tiles, 4, 32, column_tiles, 4).permute(0, 3, 2, 1, 4)
    return data.reshape(row_tiles, column_tiles, 32, 16).view(scale.dtype)


def unswizzle(scale: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of :func:`swizzle`: (row tiles, column tiles, 32, 16) to (rows, columns), linear."""
    row_tiles, column_tiles = scale.shape[:2]
    data = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    data = data.reshape(row_tiles, column_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    data = data.reshape(row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    return data[:rows, :columns].contiguous().view(scale.dtype)
