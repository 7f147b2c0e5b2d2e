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

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, read
from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
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
        kinds: "NVFP4" or the dtype, in a and in b.
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
    """Compare two checkpoints of any formats. Some rows of a weight are in memory at a time.

    Args:
        worst: how many blocks to list, from the largest error on.

    Raises:
        ValueError: they have no tensor in common, or a tensor has another shape in b.
    """
    with read(a) as first, read(b) as second:
        names = [name for name in first.entries if name in second.entries]
        _check_comparable(first, second, names)
        bar = tqdm(names, desc="comparing", unit="tensor", disable=not progress)
        tallies = [_tally(name, first, second, worst) for name in bar]
        formats, only_in_a, only_in_b = (first.format, second.format), _missing(first, second), _missing(second, first)
    quantized = [tally for tally in tallies if tally.kinds[0] != tally.kinds[1] or "NVFP4" in tally.kinds]
    relative, snr = _ratio(sum(t.error for t in quantized), sum(t.signal for t in quantized))
    blocks = heapq.nlargest(worst, (block for t in tallies for block in t.worst), key=lambda block: block.error)
    return Comparison(
        formats, tuple(tally.layer() for tally in tallies), relative, snr, tuple(blocks), only_in_a, only_in_b
    )


def _missing(one: Checkpoint, other: Checkpoint) -> tuple[str, ...]:
    return tuple(name for name in one.entries if name not in other.entries)


def _check_comparable(a: Checkpoint, b: Checkpoint, names: list[str]) -> None:
    if not names:
        raise ValueError(f"{a.path} and {b.path} have no tensor in common: they belong to different models")
    for name in names:
        if a.entries[name].shape != b.entries[name].shape:
            raise ValueError(f"{name} is {a.entries[name].shape} in {a.path} and {b.entries[name].shape} in {b.path}")


@dataclasses.dataclass
class _Tally:
    """Sums over one tensor, in float64."""

    name: str
    shape: tuple[int, ...]
    kinds: tuple[str, str]
    bits: float
    error: float = 0.0
    signal: float = 0.0
    largest: float = 0.0
    clipped: int = 0
    bad: int = 0
    worst: list[Block] = dataclasses.field(default_factory=list)

    def layer(self) -> Layer:
        relative, snr = _ratio(self.error, self.signal)
        return Layer(self.name, self.shape, self.kinds, self.bits, relative, snr, self.largest, self.clipped, self.bad)


def _ratio(error: float, signal: float) -> tuple[float, float | None]:
    """Return the norm of the error over the norm of the signal, from their squares, and in dB (None for no error)."""
    if not error:
        return 0.0, None
    return (math.sqrt(error / signal), 10 * math.log10(signal / error)) if signal else (math.inf, -math.inf)


def _tally(name: str, a: Checkpoint, b: Checkpoint, worst: int) -> _Tally:
    entry = b.entries[name]
    kinds = tuple("NVFP4" if e.quantized else str(e.dtype).removeprefix("torch.") for e in (a.entries[name], entry))
    parts = b.linear(name) if entry.quantized else None
    bits = 8.0 * entry.dtype.itemsize if parts is None else parts.bits
    tally = _Tally(name, entry.shape, (kinds[0], kinds[1]), bits)
    others = _rows(b, name) if parts is None else _decoded_rows(parts)
    first = 0
    for (x, _), (y, limit) in zip(_rows(a, name), others, strict=True):
        _add(tally, x, y, limit, first, worst)
        first += len(x)
    return tally


def _add(tally: _Tally, x: Tensor, y: Tensor, limit: Tensor | None, first: int, worst: int) -> None:
    """Add rows of a and b, float32 (rows, columns), with the largest value of each block of b (rows, blocks)."""
    bad = ~(x.isfinite() & y.isfinite())
    if bad.any():
        tally.bad += int(bad.sum())
        x, y = x.masked_fill(bad, 0.0), y.masked_fill(bad, 0.0)
    difference = y - x
    tally.error += difference.square().sum(dtype=torch.float64).item()
    tally.signal += x.square().sum(dtype=torch.float64).item()
    tally.largest = max(tally.largest, difference.abs().amax().item() if difference.numel() else 0.0)
    if limit is not None:
        blocks = _blocks(x)
        tally.clipped += int((blocks.abs() > limit.unsqueeze(-1)).sum())
    if worst and tally.error and "NVFP4" in tally.kinds:
        errors, sizes = _blocks(difference).norm(dim=-1), _blocks(x).norm(dim=-1)
        top = errors.flatten().topk(min(worst, errors.numel()))
        for error, index in zip(top.values.tolist(), top.indices.tolist(), strict=True):
            row, block = divmod(index, errors.shape[1])
            size = sizes[row, block].item()
            relative = error / size if size else math.inf
            tally.worst.append(Block(error, relative, tally.name, first + row, block * BLOCK))
        tally.worst = heapq.nlargest(worst, tally.worst, key=lambda block: block.error)


def _blocks(x: Tensor) -> Tensor:
    """Reshape (rows, columns) to (rows, blocks, 16), padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _rows(checkpoint: Checkpoint, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield chunks of rows of a weight, float32 (rows, columns), with leading dimensions flattened."""
    entry = checkpoint.entries[name]
    if entry.quantized:
        yield from _decoded_rows(checkpoint.linear(name))
        return
    if len(entry.shape) < 2:
        yield checkpoint.dense(name).float().reshape(1, -1), None
        return
    rows, step = math.prod(entry.shape[:-1]), _step(entry.shape[-1])
    for first in range(0, rows, step):
        yield checkpoint.rows(name, first, min(first + step, rows)).float(), None


def _decoded_rows(parts: LinearParts) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield chunks of decoded rows of a quantized weight, with the largest value that each block can represent."""
    rows = math.prod(parts.shape[:-1])
    qdata, scale = parts.qdata.reshape(rows, -1), parts.scale.reshape(rows, -1)
    per_row = parts.per_tensor_scale
    if per_row.dim() == 2:  # one per expert
        per_row = per_row.expand(parts.shape[0], rows // parts.shape[0]).reshape(-1)
    step = _step(parts.columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        factor = per_row[first:last] if per_row.dim() else per_row
        some = LinearParts(
            qdata=qdata[first:last], scale=scale[first:last], per_tensor_scale=factor, columns=parts.columns
        )
        limit = E2M1_MAX * some.scale.float() * (factor.unsqueeze(-1) if factor.dim() else factor)
        yield tensor_of(some, torch.float32).dequantize(), limit


def _step(columns: int) -> int:
    return max(_ELEMENTS // max(columns, 1), 1)
