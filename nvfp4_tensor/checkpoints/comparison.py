"""Compare two checkpoints weight by weight: errors, signal-to-noise ratios, and the blocks with the largest errors."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
from nvfp4_tensor.checkpoints.sources.reading import open_any
from nvfp4_tensor.checkpoints.understood import has_pre_scale, pre_scale_of
from nvfp4_tensor.checkpoints.wrappers import RowsApart
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX

_ELEMENTS = 1 << 24
"""Elements of a weight that are compared at a time."""


@dataclasses.dataclass(frozen=True)
class Block:
    """16 neighbours of a row, or fewer at its end: the norm of their error, its ratio to their norm, and their
    position."""

    error: float
    relative: float
    name: str
    row: int
    column: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """A tensor that both checkpoints have.

    Attributes:
        kinds: "NVFP4", "FP8" or the dtype, in a and in b.
        bits: stored bits per element in b.
        relative: ``norm(b - a) / norm(a)``; snr: the same in dB, None if they are identical.
        largest: the largest ``|b - a|``.
        clipped: elements of a that exceed the largest value of their block in b (6 x scale); 0 if b is dense.
        bad: elements that are NaN or infinite in a or b; the other fields leave them out.
    """

    name: str
    shape: tuple[int, ...]
    kinds: tuple[str, str]
    bits: float
    relative: float
    snr: float | None
    largest: float
    clipped: int
    bad: int

    @property
    def quantized(self) -> bool:
        return "NVFP4" in self.kinds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two checkpoints. ``relative`` and ``snr`` are over all quantized elements together."""

    formats: tuple[str, str]
    layers: tuple[Layer, ...]
    relative: float
    snr: float | None
    worst: tuple[Block, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]

    @property
    def changed(self) -> tuple[Layer, ...]:
        """The tensors that are quantized in a or b, or differ."""
        return tuple(layer for layer in self.layers if layer.quantized or layer.snr is not None or layer.bad)


def compare(a: str | Path, b: str | Path, *, worst: int = 5, progress: bool = True) -> Comparison:
    """Compare two checkpoints of any formats, or of other codes that :func:`quantize` reads. Some rows of a weight are
    in memory at a time.

    Args:
        worst: how many blocks to list, from the largest error on.

    Raises:
        ValueError: they have no tensor in common, or a tensor has another shape in b.
    """
    with RowsApart(open_any(Path(a))) as first, RowsApart(open_any(Path(b))) as second:
        names = [name for name in first.entries if name in second.entries]
        if not names:
            raise ValueError(f"{a} and {b} have no tensor in common: they belong to different models")
        shapes = {name: (first.entries[name].shape, second.entries[name].shape) for name in names}
        if different := [name for name, (one, other) in shapes.items() if one != other]:
            name, (one, other) = different[0], shapes[different[0]]
            raise ValueError(f"{name} is {one} in {a} and {other} in {b}")
        bar = tqdm(names, desc="comparing", unit="tensor", disable=not progress)
        found = [_compared(name, first, second, worst) for name in bar]
        quantized = [sums for layer, sums in found if layer.quantized or layer.kinds[0] != layer.kinds[1]]
        return Comparison(
            (first.format, second.format),
            tuple(layer for layer, _ in found),
            *_ratio(sum(sums.error for sums in quantized), sum(sums.signal for sums in quantized)),
            tuple(_largest(worst, [block for _, sums in found for block in sums.worst])),
            tuple(name for name in first.entries if name not in second.entries),
            tuple(name for name in second.entries if name not in first.entries),
        )


@dataclasses.dataclass
class _Sums:
    """Sums over one tensor, in float64, and its worst blocks."""

    error: float = 0.0
    signal: float = 0.0
    largest: float = 0.0
    clipped: int = 0
    bad: int = 0
    worst: list[Block] = dataclasses.field(default_factory=list)


def _ratio(error: float, signal: float) -> tuple[float, float | None]:
    """Return the norm of the error over the norm of the signal, from their squares, and in dB (None for no error)."""
    if not error:
        return 0.0, None
    return (math.sqrt(error / signal), 10 * math.log10(signal / error)) if signal else (math.inf, -math.inf)


def _largest(count: int, blocks: list[Block]) -> list[Block]:
    return heapq.nlargest(count, blocks, key=lambda block: block.error)


def _compared(name: str, a: Checkpoint, b: Checkpoint, worst: int) -> tuple[Layer, _Sums]:
    entry, kinds = b.entries[name], (a.entries[name].kind, b.entries[name].kind)
    parts = b.linear(name) if entry.quantized else None
    sums, first, scale = _Sums(), 0, _pre_scale(b, name)
    others = _rows(b, name) if parts is None else _decoded_rows(parts, scale)
    for (x, _), (y, limit) in zip(_rows(a, name), others, strict=True):
        bad = ~(x.isfinite() & y.isfinite())
        if bad.any():
            sums.bad += int(bad.sum())
            x, y = x.masked_fill(bad, 0.0), y.masked_fill(bad, 0.0)
        difference = y - x
        sums.error += difference.square().sum(dtype=torch.float64).item()
        sums.signal += x.square().sum(dtype=torch.float64).item()
        sums.largest = max(sums.largest, difference.abs().amax().item())
        if limit is not None:
            sums.clipped += int((_blocks(x / scale).abs() > limit.unsqueeze(-1)).sum())
        if worst and sums.error and "NVFP4" in kinds:
            sums.worst = _largest(worst, [*sums.worst, *_worst_blocks(name, x, difference, first, worst)])
        first += len(x)
    bits, ratio = entry.bits if parts is None else parts.bits, _ratio(sums.error, sums.signal)
    return Layer(name, entry.shape, kinds, bits, *ratio, sums.largest, sums.clipped, sums.bad), sums


def _worst_blocks(name: str, x: Tensor, difference: Tensor, first: int, count: int) -> Iterator[Block]:
    """Yield the blocks with the largest errors among some rows of a weight, from row ``first`` on."""
    errors, sizes = _blocks(difference).norm(dim=-1), _blocks(x).norm(dim=-1)
    top = errors.flatten().topk(min(count, errors.numel()))
    for error, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
        row, block = divmod(index, errors.shape[1])
        size = sizes[row, block].item()
        yield Block(error, error / size if size else math.inf, name, first + row, block * BLOCK)


def _blocks(x: Tensor) -> Tensor:
    """Reshape (rows, columns) to (rows, blocks, 16), padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _step(columns: int) -> int:
    return max(_ELEMENTS // columns, 1)


def _rows(checkpoint: Checkpoint, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield chunks of rows of a weight, float32 (rows, columns), with leading dimensions flattened."""
    entry = checkpoint.entries[name]
    if entry.quantized:
        yield from _decoded_rows(checkpoint.linear(name), _pre_scale(checkpoint, name))
    elif entry.numbers:
        for chunk in checkpoint.chunks(name, _step(entry.shape[-1] if entry.shape else 1)):
            yield chunk.float(), None


def _pre_scale(checkpoint: Checkpoint, name: str) -> Tensor:
    """Return what AWQ multiplies the inputs of a weight by, and thus its columns, float32 (K,); else 1."""
    if has_pre_scale(name, checkpoint.entries):
        return checkpoint.dense(pre_scale_of(name)).float().reshape(-1)
    return torch.ones((), dtype=torch.float32)


def _decoded_rows(parts: LinearParts, pre_scale: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield chunks of decoded rows of a quantized weight, with the largest value that each block can represent.

    pre_scale: of columns, which the largest values do not have.
    """
    qdata, scale, step = parts.qdata.flatten(0, -2), parts.scale.flatten(0, -2), _step(parts.columns)
    rows = zip(qdata.split(step), scale.split(step), parts.factors.reshape(-1).split(step), strict=True)
    for codes, blocks, factor in rows:
        some = LinearParts(qdata=codes, scale=blocks, per_tensor_scale=factor, columns=parts.columns)
        limit = E2M1_MAX * blocks.float() * factor.unsqueeze(-1)
        yield tensor_of(some, torch.float32).dequantize() * pre_scale, limit
