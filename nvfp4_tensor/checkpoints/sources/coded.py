"""A weight in the codes of another quantization, and a folder with such weights that is read as a dense one."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import chunks_of
from nvfp4_tensor.checkpoints.io.files import naming
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.io.safetensors import CHUNK, Shards
from nvfp4_tensor.checkpoints.io.strips import STRIP, in_parallel
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics.layout import TILE_ROWS
from nvfp4_tensor.tensor.fp8 import FP8Tensor

if TYPE_CHECKING:
    from nvfp4_tensor.checkpoints.formats.table import TableFormat

RAISED = (TypeError, LookupError, RuntimeError, AssertionError, AttributeError, ArithmeticError)
"""What decoders, which may be another library's, raise for damaged tensors, beside ValueErrors."""

_STRIPS = 8
"""Strips whose codes are read at a time."""

Read: TypeAlias = Callable[[str], Tensor]
"""Reads a tensor of a weight, given by what it is ("scale")."""
Rows: TypeAlias = Callable[[int, Tensor, Tensor], object]
"""Decodes rows from this one on into floating-point numbers, given those and the codes of the rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coded:
    """A weight (N, K) in the codes of another quantization.

    Attributes:
        kind: what it is, such as "GPTQ int4".
        shape: (N, K).
        parts: the names of its tensors by what they are. "codes" has the codes of row after row, if the layout has
            that order, and is read in pieces; the others are read at once.
        decoder: reads the parts other than "codes" and returns what decodes rows.
        unit: decoders get multiples of so many rows, or what is left.
        unused: names of the static scales of its activations, which are left out.
        groups: what the values of the part "g_idx" are below.
    """

    kind: str
    shape: tuple[int, int]
    parts: Mapping[str, str]
    decoder: Callable[[Read], Rows]
    unit: int = TILE_ROWS
    unused: tuple[str, ...] = ()
    groups: int = 0

    def stored(self, shards: Shards) -> int:
        """Return the bytes of its tensors in the files."""
        return sum(shards.info[key].nbytes for key in self.parts.values())

    def rows(self, shards: Shards, rows: int, out: Tensor) -> Iterator[Tensor]:
        """Yield all rows in chunks of so many, each written to the first rows of ``out``."""
        count, columns = self.shape
        step = self.unit * max(STRIP // (self.unit * columns), 1)
        batch = min(step * _STRIPS, count)
        if rows < count:
            step, batch = math.gcd(step, rows), math.gcd(batch, rows)
        decode = self.decoder(lambda part: shards[self.parts[part]])
        per_row, codes = 0, itertools.repeat(torch.empty(0, dtype=torch.float32))
        if "codes" in self.parts:
            per_row = math.prod(shards.info[self.parts["codes"]].shape[:-1]) // count
            codes = shards.chunks(self.parts["codes"], batch * per_row)  # type: ignore[assignment]

        for start in range(0, count, rows):
            chunk = out[: min(rows, count - start)]
            for first in range(0, len(chunk), batch):
                strips = chunk[first : first + batch].split(step)
                firsts = [start + first + i * step for i in range(len(strips))]
                of_batch = next(codes)
                of_strips = of_batch.split(step * per_row) if per_row else (of_batch,) * len(strips)
                in_parallel(decode, firsts, strips, of_strips)
            yield chunk


class CodedFolder(FolderCheckpoint):
    """A folder whose weights in the codes of other quantizations are decoded when they are read.

    Attributes:
        coded_weights: those weights, by name.
    """

    def __init__(self, format: TableFormat, path: Path) -> None:
        self.coded_weights: dict[str, Coded] = {}
        super().__init__(format, path)

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        if name not in self.coded_weights:
            return super().value(name)
        entry = self.entries[name]
        (whole,) = self.chunks(name, self.coded_weights[name].shape[0])
        return whole.view(entry.shape)

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        coded, entry = self.coded_weights.get(name), self.entries[name]
        if coded is None:
            yield from super().chunks(name, rows, buffer)
            return
        count, columns = coded.shape
        rows = rows or max(CHUNK // (columns * entry.dtype.itemsize) // coded.unit, 1) * coded.unit
        if rows < count and rows % coded.unit:
            yield from chunks_of(self.dense(name), rows)
            return
        rows = min(rows, count)
        nbytes = rows * columns * entry.dtype.itemsize
        buffer = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer[:nbytes]
        with naming(self._file(name), name, RAISED):
            yield from coded.rows(self.shards, rows, buffer.view(entry.dtype).view(rows, columns))

    def _file(self, name: str) -> Path:
        return self.shards.info[next(iter(self.coded_weights[name].parts.values()))].file

    def check_values(self) -> None:
        """Check what the headers do not say, before anything is written: scales, which are few, and decoders."""
        for name, coded in self.coded_weights.items():
            if "codes" in coded.parts:
                rows = 1 if coded.unit < coded.shape[0] else coded.shape[0]
                with naming(self._file(name), name, RAISED):
                    next(coded.rows(self.shards, rows, torch.empty(rows, coded.shape[1], dtype=torch.float32)))
            for part, key in coded.parts.items():
                info = self.shards.info[key]
                if part != "g_idx" and not (info.dtype.is_floating_point and info.dtype.itemsize > 1):
                    continue
                values = self.shards[key]
                if part != "g_idx" and not values.isfinite().all():
                    raise ValueError(f"{info.file}: tensor {key}: expected finite numbers, found infinity or NaN")
                if part == "g_idx" and values.numel() and not 0 <= values.min() <= values.max() < coded.groups:
                    wanted = f"indices from 0 to {coded.groups - 1}"
                    raise ValueError(f"{info.file}: tensor {key}: expected {wanted}, found {values.max()}")

    def report(self, quantized: Container[str]) -> str:
        """Return what the weights were before, one line for each kind."""
        dtype = str(self.dtype()).removeprefix("torch.")
        kinds = Counter((name in quantized, coded.kind) for name, coded in self.coded_weights.items())
        lines = [
            f"{f'two roundings: {kind} -> NVFP4' if is_quantized else f'decoded: {kind} -> {dtype}'}, {count} weights"
            for (is_quantized, kind), count in kinds.items()
        ]
        if unused := sum(bool(coded.unused) for coded in self.coded_weights.values()):
            lines.append(f"left out: static scales of activations, {unused} weights")
        return "\n".join(lines)


def modules_with(folder: FolderCheckpoint, last: str, beside: str = "", dtype: torch.dtype | None = None) -> list[str]:
    """Return the modules that have a tensor with this last part of its name, and one ``beside`` it, of this dtype."""
    info = folder.shards.info
    modules = [name.removesuffix(f".{last}") for name in info if name.endswith(f".{last}")]
    if not beside:
        return modules
    found = {module: info.get(f"{module}.{beside}") for module in modules}
    return [module for module, each in found.items() if each is not None and (dtype is None or each.dtype == dtype)]
