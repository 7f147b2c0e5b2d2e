"""``nvfp4 inspect``: what a checkpoint holds, read one weight at a time."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.common import Entry, LinearParts
from nvfp4_tensor.cli.results import megabytes, number, plain, size_of, table
from nvfp4_tensor.numerics.layout import E4M3_NAN

CODES = tuple(f"{sign}{value:g}" for sign in ("", "-") for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6))
"""The 16 codes, by what they stand for."""
_LARGEST_SCALE = 0x7E  # 448
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint; what is None or empty belongs to NVFP4 alone.

    Attributes:
        kind: "W4A4", "W4A16", or the dtype of a dense tensor.
        bits: stored bits a number, scales among them.
        per_tensor_scale: its smallest and largest, which are one number unless there is one a row or an expert.
        input_scale: the static scale of what it is multiplied by.
        scales: the smallest block scale above zero and the largest.
        blocks, clipped, zero, nan: how many blocks there are, how many have the scale 448, decode to zeros, are NaN.
        codes: how often each of :data:`CODES` occurs.
        scale_bytes: how often each of the 256 bytes of a block scale occurs.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    bits: float
    per_tensor_scale: tuple[float, float] | None = None
    input_scale: float | None = None
    scales: tuple[float, float] | None = None
    blocks: int = 0
    clipped: int = 0
    zero: int = 0
    nan: int = 0
    codes: tuple[int, ...] = ()
    scale_bytes: tuple[int, ...] = ()

    @property
    def quantized(self) -> bool:
        return bool(self.codes)

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        shape = "x".join(map(str, self.shape))
        if not self.quantized:
            return self.name, shape, self.kind, f"{self.bits:.2f}", "", "", "", "", ""
        assert self.per_tensor_scale is not None
        low, high = self.per_tensor_scale
        per_tensor = number(low, 3) if low == high else f"{number(low, 3)} - {number(high, 3)}"
        span = "-" if self.scales is None else f"{self.scales[0]:g} - {self.scales[1]:g}"
        counts = map(str, (self.clipped, self.zero, self.nan))
        return self.name, shape, self.kind, f"{self.bits:.2f}", per_tensor, span, *counts


HEAD = ("tensor", "shape", "kind", "bits", "per-tensor scale", "block scales", "clipped", "zero", "NaN")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """A checkpoint, and its tensors."""

    path: Path
    format: str
    architecture: str | None
    bytes: int
    every: bool
    tensors: tuple[Weight, ...]

    @property
    def quantized(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.tensors if weight.quantized)

    def total(self) -> dict[str, Any]:
        """In sum: of the quantized tensors, and of all."""
        quantized, numbers = self.quantized, sum(weight.numbers for weight in self.tensors)
        inside = sum(weight.numbers for weight in quantized)
        spans = [weight.scales for weight in quantized if weight.scales is not None]
        per_tensor = [weight.per_tensor_scale for weight in quantized if weight.per_tensor_scale is not None]
        return {
            "tensors": len(self.tensors),
            "quantized_tensors": len(quantized),
            "numbers": numbers,
            "quantized_numbers": inside,
            "bits": sum(weight.bits * weight.numbers for weight in self.tensors) / max(numbers, 1),
            "bits_of_quantized": sum(weight.bits * weight.numbers for weight in quantized) / max(inside, 1),
            "scales": [min(low for low, _ in spans), max(high for _, high in spans)] if spans else None,
            "per_tensor_scales": [min(p[0] for p in per_tensor), max(p[1] for p in per_tensor)] if per_tensor else None,
            **{key: sum(getattr(weight, key) for weight in quantized) for key in ("blocks", "clipped", "zero", "nan")},
            "codes": dict(zip(CODES, self.counts("codes", 16), strict=True)),
        }

    def counts(self, field: str, size: int) -> list[int]:
        """The histogram ``field`` of all quantized tensors together."""
        return [sum(getattr(weight, field)[i] for weight in self.quantized) for i in range(size)]

    def as_json(self) -> Any:
        tensors = [
            {key: value for key, value in plain(weight).items() if key != "scale_bytes" and value is not None}
            for weight in self.tensors
            if self.every or weight.quantized
        ]
        head = {"path": self.path, "format": self.format, "architecture": self.architecture, "bytes": self.bytes}
        return plain({**head, "total": self.total(), "tensors": tensors})

    def __str__(self) -> str:
        total = self.total()
        listed = self.tensors if self.every else self.quantized
        lines = [table(HEAD, [weight.cells() for weight in listed]), ""] if listed else []
        lines.append(
            f"{self.path}: {self.format}, {self.architecture or 'unknown architecture'}, {megabytes(self.bytes)}"
        )
        lines.append(
            f"{total['quantized_tensors']} of {total['tensors']} tensors are NVFP4, {total['quantized_numbers']:,} of "
            f"{total['numbers']:,} numbers; {total['bits_of_quantized']:.2f} bits a quantized weight, "
            f"{total['bits']:.2f} over all"
        )
        if total["scales"]:
            low, high = total["scales"]
            lines.append(
                f"{total['blocks']:,} blocks, scales {low:g} to {high:g}: {total['clipped']:,} clipped (scale 448), "
                f"{total['zero']:,} zero, {total['nan']:,} NaN"
            )
        return "\n".join(lines)


def inspect(path: Path, *, every: bool = False, progress: bool = False) -> Inspection:
    """Look at all tensors of a checkpoint; one weight is in memory at a time.

    Args:
        every: list dense tensors too.
    """
    with checkpoints.read(path) as checkpoint:
        bar = tqdm(checkpoint.entries.items(), desc=f"reading {path.name}", unit="tensor", disable=not progress)
        tensors = tuple(_weight(name, entry, checkpoint) for name, entry in bar)
        architecture = (checkpoint.config.get("architectures") or [checkpoint.config.get("model_type")])[0]
        return Inspection(path, checkpoint.format, architecture, size_of(path), every, tensors)


def _weight(name: str, entry: Entry, checkpoint: checkpoints.Checkpoint) -> Weight:
    if not entry.quantized:
        return Weight(name, entry.shape, str(entry.dtype).removeprefix("torch."), 8.0 * entry.dtype.itemsize)
    return weight_of(name, checkpoint.linear(name))


def weight_of(name: str, parts: LinearParts) -> Weight:
    """What there is to say of one quantized weight."""
    scales = histogram(parts.scale.view(torch.uint8))
    present = [byte for byte in range(1, E4M3_NAN) if scales[byte]]
    values = torch.tensor(present, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    stored = parts.qdata.nbytes + parts.scale.nbytes + parts.per_tensor_scale.nbytes
    per_tensor = parts.per_tensor_scale.float()
    return Weight(
        name=name,
        shape=parts.shape,
        kind="W4A4" if parts.quantizes_activations else "W4A16",
        bits=8 * stored / math.prod(parts.shape),
        per_tensor_scale=(per_tensor.min().item(), per_tensor.max().item()),
        input_scale=None if parts.input_scale is None else parts.input_scale.item(),
        scales=(values[0], values[-1]) if values else None,
        blocks=parts.scale.numel(),
        clipped=scales[_LARGEST_SCALE],
        zero=zero_blocks(parts),
        nan=sum(scales[E4M3_NAN:]),
        codes=_codes(histogram(parts.qdata)),
        scale_bytes=tuple(scales),
    )


def zero_blocks(parts: LinearParts) -> int:
    """Blocks that decode to zeros: by their scale, or by all their codes."""
    codes = parts.qdata.contiguous().view(-1).view(torch.int64)  # 8 bytes a block
    no_magnitude = (codes & 0x7777777777777777) == 0
    scale = parts.scale.reshape(-1).view(torch.uint8)
    return int(((scale == 0) | (no_magnitude & (scale < E4M3_NAN))).sum())


def histogram(values: Tensor) -> list[int]:
    """How often each byte occurs in a tensor of uint8: 256 counts."""
    flat = values.reshape(-1)
    counts = torch.zeros(256, dtype=torch.int64)
    for chunk in flat.split(_CHUNK):
        counts += torch.bincount(chunk, minlength=256)
    return [int(count) for count in counts]


def _codes(pairs: list[int]) -> tuple[int, ...]:
    """Of bytes that hold two codes each."""
    return tuple(sum(pairs[code | other << 4] + pairs[other | code << 4] for other in range(16)) for code in range(16))
