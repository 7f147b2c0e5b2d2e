"""BlockTensor: codes and scales of a cast, with access to any element or block without decoding the rest."""

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
    """Codes (..., K), uint8, to bytes without gaps (..., K * bits / 8); the first code in the lowest bits."""
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
    """The same stream of bits, lowest first: from fields of ``bits`` bits each to fields of ``into``; uint8 both."""
    length = math.lcm(bits, into)  # up to 56: a word that holds whole fields of both
    places, others = (torch.arange(0, length, step, device=data.device) for step in (bits, into))
    word = (data.long().unflatten(-1, (-1, len(places))) << places).sum(dim=-1, keepdim=True)
    return (word >> others & ((1 << into) - 1)).flatten(-2).to(torch.uint8)


@dataclasses.dataclass(frozen=True, eq=False)
class Block:
    """One block: its codes (elements,), uint8, the last block's without padding, and the scales that it has."""

    format: BlockFormat
    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None

    def values(self) -> Tensor:
        """What it decodes to: float32 (elements,)."""
        values = self.format.element.values(self.codes) * self.scale.float()
        return values if self.tensor_scale is None else values * self.tensor_scale


@dataclasses.dataclass(frozen=True, eq=False)
class BlockTensor:
    """A tensor in a block format: value = element x block scale (x tensor scale).

    ``t[i, j]`` is one element, float32 0-d; ``t.block(i, b)`` one block; neither decodes the rest.

    Attributes:
        data: uint8. One code an element, in the shape of the tensor; or, where ``is_packed``, codes without gaps, each
            row padded to whole blocks: (..., blocks * block_size * bits / 8).
        scale: the format's scale dtype (..., blocks).
        tensor_scale: float32 0-d, or None in a format of one level.
        shape, dtype: of the tensor that was cast.
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
        """Of one code an element (..., K) and the scales (..., blocks)."""
        shape = codes.shape
        if packed:
            codes = pack(pad(codes, (0, -shape[-1] % format.block_size)), format.element.bits)
        return cls(format, codes, scale, tensor_scale, shape, dtype, packed)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, as they are stored here."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.tensor_scale) if t is not None)

    def codes(self) -> Tensor:
        """One code an element, uint8, in the shape of the tensor."""
        return unpack(self.data, self.format.element.bits)[..., : self.shape[-1]] if self.is_packed else self.data

    def elements(self) -> Tensor:
        """The elements without any scale, padded with zeros: float32 (..., blocks, block_size)."""
        values = self.format.element.values(self.codes().contiguous())
        values = pad(values, (0, -self.shape[-1] % self.format.block_size))
        return values.unflatten(-1, (-1, self.format.block_size)) if values.shape[-1] else values.unsqueeze(-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """(element x block scale) x tensor scale, rounded once to dtype, by default that of the tensor that was cast.

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
        """The block at (*leading dimensions, number of the block in its row); negative ones count from the end.

        Raises:
            IndexError: no such block.
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
        """One element: float32 0-d.

        Raises:
            IndexError: not one whole number a dimension, or out of range.
        """
        *leading, column = _checked(index if isinstance(index, tuple) else (index,), self.shape, "element")
        number, place = divmod(column, self.format.block_size)
        return self.block(*leading, number).values()[place]

    def __repr__(self) -> str:
        kind = "packed" if self.is_packed else "one code a byte"
        return f"BlockTensor({self.format.name}, shape={tuple(self.shape)}, dtype={self.dtype}, {kind})"


def _checked(index: tuple[SupportsIndex, ...], shape: torch.Size, what: str) -> list[int]:
    """The index with negative numbers counted from the end; an IndexError for one that does not fit the shape."""
    try:
        whole = [operator.index(i) for i in index]
    except TypeError:
        whole = []
    if len(whole) != len(shape) or not all(-n <= i < n for i, n in zip(whole, shape, strict=True)):
        raise IndexError(f"an index of one {what} is {len(shape)} whole numbers within {tuple(shape)}, not {index}")
    return [i % n for i, n in zip(whole, shape, strict=True)]
