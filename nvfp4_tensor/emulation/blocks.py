"""BlockTensor: the codes and scales of a cast tensor, with access to single elements and blocks."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.emulation.formats import BlockFormat
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes (..., K), uint8, to bytes (..., K * bits / 8) without gaps, the first code in the lowest bits."""
    if bits == 8:
        return codes
    if bits == 4:
        return layout.pack(codes)
    return _regrouped(codes, bits, 8)


def unpack(data: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack`."""
    if bits == 8:
        return data
    if bits == 4:
        return layout.unpack(data)
    return _regrouped(data, 8, bits)


def _regrouped(data: Tensor, bits: int, into: int) -> Tensor:
    """Convert a bit stream, lowest bits first, from fields of ``bits`` bits to fields of ``into`` bits, both uint8."""
    length = math.lcm(bits, into)  # at most 56: a word with an integer number of both fields
    old_shifts, new_shifts = (torch.arange(0, length, step, device=data.device) for step in (bits, into))
    word = (data.long().unflatten(-1, (-1, len(old_shifts))) << old_shifts).sum(dim=-1, keepdim=True)
    return (word >> new_shifts & ((1 << into) - 1)).flatten(-2).to(torch.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """One block.

    Attributes:
        format: the format of the tensor.
        codes: uint8 (elements,), without padding if it is the last block of a row.
        scale: the scale of the block, 0-d.
        tensor_scale: float32 0-d, or None in a format without one.
    """

    format: BlockFormat
    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None

    def values(self) -> Tensor:
        """Return the decoded values, float32 (elements,)."""
        values = self.format.element.values(self.codes) * self.scale.float()
        return values if self.tensor_scale is None else values * self.tensor_scale


@dataclasses.dataclass(frozen=True, eq=False)
class BlockTensor:
    """A tensor in a block format: value = element x block scale (x tensor scale).

    ``t[i, j]`` is one element, float32 0-d, and ``t.block(i, b)`` is one block. Neither decodes the rest of the tensor.

    Attributes:
        format: the block format.
        data: uint8. One code per element, in the shape of the tensor. If ``is_packed``, codes without gaps, each row
            padded to a multiple of the block size: (..., blocks * block_size * bits / 8).
        scale: the scales (..., blocks), in the scale dtype of the format.
        tensor_scale: float32 0-d, or None in a format without one.
        shape, dtype: the shape and dtype of the original tensor.
        is_packed: whether codes are packed.
    """

    format: BlockFormat
    data: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    is_packed: bool

    @classmethod
    def of_codes(
        cls,
        format: BlockFormat,
        codes: Tensor,
        scale: Tensor,
        tensor_scale: Tensor | None,
        dtype: torch.dtype,
        *,
        packed: bool,
    ) -> BlockTensor:
        """Create a BlockTensor from one code per element (..., K) and the scales (..., blocks)."""
        shape = codes.shape
        if packed:
            codes = pack(pad(codes, (0, -shape[-1] % format.block_size)), format.element.bits)
        return cls(format, codes, scale, tensor_scale, shape, dtype, packed)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """The size of codes and scales in bytes, as stored."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.tensor_scale) if t is not None)

    def codes(self) -> Tensor:
        """Return one code per element, uint8, in the shape of the tensor."""
        return unpack(self.data, self.format.element.bits)[..., : self.shape[-1]] if self.is_packed else self.data

    def elements(self) -> Tensor:
        """Return the elements without scales, padded with zeros: float32 (..., blocks, block_size)."""
        values = self.format.element.values(self.codes().contiguous())
        values = pad(values, (0, -self.shape[-1] % self.format.block_size))
        return values.unflatten(-1, (-1, self.format.block_size)) if values.shape[-1] else values.unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return (element x block scale) x tensor scale, rounded once to dtype (by default, the original dtype).

        Raises:
            TypeError: dtype is not bfloat16, float16 or float32.
        """
        dtype = self.dtype if dtype is None else dtype
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"a BlockTensor decodes to bfloat16, float16 or float32, not {dtype}: cast the result")
        values = (self.elements() * self.scale.float().unsqueeze(-1)).flatten(-2)
        if self.tensor_scale is not None:
            values = values * self.tensor_scale
        return values[..., : self.shape[-1]].to(dtype)

    def block(self, *index: SupportsIndex) -> Block:
        """Return the block at (*leading indices, index of the block in its row). Negative indices count from the end.

        Raises:
            IndexError: the index is out of range.
        """
        *leading, number = _checked(index, self.scale.shape, "block")
        size = self.format.block_size
        count = min(size, self.shape[-1] - number * size)
        if self.is_packed:
            each = size * self.format.element.bits // 8
            codes = unpack(self.data[tuple(leading)][number * each : (number + 1) * each], self.format.element.bits)
        else:
            codes = self.data[tuple(leading)][number * size : (number + 1) * size]
        return Block(self.format, codes[:count], self.scale[tuple(leading)][number], self.tensor_scale)

    def __getitem__(self, index: SupportsIndex | tuple[SupportsIndex, ...]) -> Tensor:
        """Return one element, float32 0-d.

        Raises:
            IndexError: the index is not one integer per dimension, or is out of range.
        """
        *leading, column = _checked(index if isinstance(index, tuple) else (index,), self.shape, "element")
        number, offset = divmod(column, self.format.block_size)
        return self.block(*leading, number).values()[offset]

    def __repr__(self) -> str:
        kind = "packed" if self.is_packed else "one code per byte"
        return f"BlockTensor({self.format.name}, shape={tuple(self.shape)}, dtype={self.dtype}, {kind})"


def _checked(index: tuple[SupportsIndex, ...], shape: torch.Size, what: str) -> list[int]:
    """Return the index with negative numbers resolved; raise an IndexError if it does not fit the shape."""
    try:
        integers = [operator.index(i) for i in index]
    except TypeError:
        integers = []
    if len(integers) != len(shape) or not all(-n <= i < n for i, n in zip(integers, shape, strict=True)):
        raise IndexError(f"the index of one {what} must be {len(shape)} integers within {tuple(shape)}, not {index}")
    return [i % n for i, n in zip(integers, shape, strict=True)]
