"""``nvfp4 compare``: how far one checkpoint is from another, weight by weight, and in what the models say."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.common import Checkpoint, LinearParts, tensor_of
from nvfp4_tensor.cli.quality import Quality, compare_models
from nvfp4_tensor.cli.results import number, plain, size_of, table
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX

_ROWS = 1 << 24
"""Elements of a weight that are compared at once."""


@dataclasses.dataclass(frozen=True)
class Block:
    """16 neighbours of a row, or the rest of it: where they begin, their error (root of the sum of squares) and that
    over their own size."""

    error: float
    relative: float
    name: str
    row: int
    column: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """One tensor of both.

    Attributes:
        kinds: "NVFP4" or the dtype, in a and in b.
        bits: stored bits a number in b.
        relative: ``norm(b - a) / norm(a)``; snr: the same in dB, None where they are identical.
        largest: the largest ``|b - a|``.
        clipped: elements of a beyond what their block of b holds (6 x scale); 0 where b is dense.
        bad: elements that are NaN or infinite in one of them; they are left out of the rest.
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
    def numbers(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        return "NVFP4" in self.kinds

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        kinds = " / ".join(self.kinds)
        snr = "identical" if self.snr is None else f"{self.snr:.2f}"
        return (
            self.name, kinds, f"{self.bits:.2f}", number(self.relative), snr, number(self.largest), str(self.clipped),
            str(self.bad),
        )  # fmt: skip


HEAD = ("tensor", "a / b", "bits of b", "error", "SNR dB", "largest", "clipped", "not finite")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two checkpoints. ``relative`` and ``snr`` are of all quantized numbers together."""

    a: Path
    b: Path
    formats: tuple[str, str]
    bytes: tuple[int, int]
    layers: tuple[Layer, ...]
    relative: float
    snr: float | None
    worst: tuple[Block, ...]
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    quality: Quality | None

    @property
    def changed(self) -> tuple[Layer, ...]:
        """What is quantized in one of them, or differs."""
        return tuple(layer for layer in self.layers if layer.quantized or layer.snr is not None or layer.bad)

    def as_json(self) -> Any:
        return plain(self)

    def __str__(self) -> str:
        lines = [table(HEAD, [layer.cells() for layer in self.changed]), ""] if self.changed else []
        if self.worst:
            lines.append("worst blocks (error, over the block's size):")
            lines += [f"  {b.error:.4g}  {b.relative:.3f}  {b.name} [{b.row}, {b.column}:]" for b in self.worst]
            lines.append("")
        for here, names in (("a", self.only_in_a), ("b", self.only_in_b)):
            if names:
                lines.append(f"only in {here}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}")
        snr = "identical" if self.snr is None else f"SNR {self.snr:.2f} dB"
        same = len(self.layers) - len(self.changed)
        lines.append(f"{len(self.changed)} tensors: error {number(self.relative)}, {snr}; {same} others are identical")
        return "\n".join([*lines, *([str(self.quality)] if self.quality else [])])


def compare(
    a: Path, b: Path, *, text: Path | None = None, tokens: int = 4096, window: int = 512, sweep: int = 0,
    worst: int = 5, config_from: Path | None = None, progress: bool = False,
) -> Comparison:  # fmt: skip
    """Compare two checkpoints of any formats, and with a ``text`` what their models make of it.

    Raises:
        ValueError: they share no tensor, or one has another shape in b.
    """
    with checkpoints.read(a) as first, checkpoints.read(b) as second:
        names = [name for name in first.entries if name in second.entries]
        _check_comparable(first, second, names)
        tallies = {}
        for name in tqdm(names, desc="comparing", unit="tensor", disable=not progress):
            tallies[name] = _tally(name, first, second, worst)
        only_in_a, only_in_b = _missing(first, second), _missing(second, first)
        formats = first.format, second.format
    quality = None
    if text is not None:
        quality = compare_models(a, b, text, tokens, window, sweep, config_from, progress)
    quantized = [tally for tally in tallies.values() if tally.kinds != tally.kinds[:1] * 2 or "NVFP4" in tally.kinds]
    relative, snr = _ratio(sum(t.error for t in quantized), sum(t.signal for t in quantized))
    return Comparison(
        a, b, formats, (size_of(a), size_of(b)), tuple(tally.layer() for tally in tallies.values()), relative, snr,
        tuple(heapq.nlargest(worst, (block for t in tallies.values() for block in t.worst), key=lambda b: b.error)),
        only_in_a, only_in_b, quality,
    )  # fmt: skip


def _missing(one: Checkpoint, other: Checkpoint) -> tuple[str, ...]:
    return tuple(name for name in one.entries if name not in other.entries)


def _check_comparable(a: Checkpoint, b: Checkpoint, names: list[str]) -> None:
    if not names:
        raise ValueError(f"{a.path} and {b.path} have no tensor in common: they are not of one model")
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
    """(norm of the error over that of the signal, the same as dB: None for no error)."""
    if not error:
        return 0.0, None
    return (math.sqrt(error / signal), 10 * math.log10(signal / error)) if signal else (math.inf, -math.inf)


def _tally(name: str, a: Checkpoint, b: Checkpoint, worst: int) -> _Tally:
    entry = b.entries[name]
    kinds = tuple("NVFP4" if e.quantized else str(e.dtype).removeprefix("torch.") for e in (a.entries[name], entry))
    parts = b.linear(name) if entry.quantized else None
    bits = 8.0 * entry.dtype.itemsize
    if parts is not None:
        bits = 8 * (parts.qdata.nbytes + parts.scale.nbytes + parts.per_tensor_scale.nbytes) / math.prod(entry.shape)
    tally = _Tally(name, entry.shape, (kinds[0], kinds[1]), bits)
    others = _pieces(b, name) if parts is None else _decoded(parts)
    first = 0
    for (x, _), (y, limit) in zip(_pieces(a, name), others, strict=True):
        _add(tally, x, y, limit, first, worst)
        first += len(x)
    return tally


def _add(tally: _Tally, x: Tensor, y: Tensor, limit: Tensor | None, first: int, worst: int) -> None:
    """Rows of both, float32 (rows, columns), and the most that the blocks of the second hold (rows, blocks)."""
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
    """(rows, columns) as (rows, blocks, 16), zeros at the end."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))


def _pieces(checkpoint: Checkpoint, name: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Some rows of a weight at a time, float32 (rows, columns); the leading dimensions flattened."""
    entry = checkpoint.entries[name]
    if entry.quantized:
        yield from _decoded(checkpoint.linear(name))
        return
    if len(entry.shape) < 2:
        yield checkpoint.dense(name).float().reshape(1, -1), None
        return
    rows, step = math.prod(entry.shape[:-1]), _step(entry.shape[-1])
    for first in range(0, rows, step):
        yield checkpoint.rows(name, first, min(first + step, rows)).float(), None


def _decoded(parts: LinearParts) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The same of a quantized weight, with the largest number that each block can hold."""
    rows = math.prod(parts.shape[:-1])
    qdata, scale = parts.qdata.reshape(rows, -1), parts.scale.reshape(rows, -1)
    per_row = parts.per_tensor_scale
    if per_row.dim() == 2:  # one an expert
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
    return max(_ROWS // max(columns, 1), 1)
