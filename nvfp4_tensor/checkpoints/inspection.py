"""Count the codes, block scales and unusual blocks of a checkpoint, one weight at a time."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.checkpoints.sources.coded import CodedFolder
from nvfp4_tensor.checkpoints.sources.reading import open_any
from nvfp4_tensor.numerics.layout import CODE_VALUES, E4M3_NAN

CODES = tuple(f"{sign}{value:g}" for sign in ("", "-") for value in CODE_VALUES)
"""The values of the 16 codes."""
SCALES = tuple(torch.arange(E4M3_NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
"""The values of the bytes of a block scale. The last one is 448; the bytes after it are NaN or negative."""
_CHUNK = 1 << 22


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint. In a dense one, the fields from ``per_tensor_scale`` on are None, 0 or empty.

    Attributes:
        kind: "W4A4", "W4A16", "FP8", another quantization such as "GPTQ int4", or the dtype of a dense tensor.
        bits: stored bits per element, scales included.
        per_tensor_scale: the smallest and the largest; they differ if each row or expert has its own.
        input_scale: the static scale of the activations.
        scales: the smallest block scale above zero and the largest.
        blocks, clipped, zero, nan: how many blocks there are, have the scale 448, decode to zeros, decode to NaN.
        codes: how often each of :data:`CODES` occurs.
        scale_bytes: how often each of the 256 bytes occurs as a block scale.
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


@dataclasses.dataclass(frozen=True)
class Inspection:
    """The format of a checkpoint, its architecture if config.json has one, and its tensors.

    ``coded`` has the number of weights of each other quantization, which only ``checkpoints.quantize`` reads.
    """

    format: str
    architecture: str | None
    tensors: tuple[Weight, ...]
    coded: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def quantized(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.tensors if weight.quantized)

    @property
    def listed(self) -> tuple[Weight, ...]:
        """The tensors that are not dense."""
        return tuple(weight for weight in self.tensors if weight.quantized or weight.kind in ("FP8", *self.coded))

    def total(self) -> dict[str, Any]:
        """Sums over the quantized tensors, and over all."""
        quantized, numbers = self.quantized, sum(weight.numbers for weight in self.tensors)
        inside = sum(weight.numbers for weight in quantized)
        spans = [weight.scales for weight in quantized if weight.scales is not None]
        per_tensor = [weight.per_tensor_scale for weight in quantized if weight.per_tensor_scale is not None]
        return {
            "tensors": len(self.tensors),
            "quantized_tensors": len(quantized),
            "fp8_tensors": sum(weight.kind == "FP8" for weight in self.tensors),
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


def inspect(path: str | Path, *, progress: bool = True) -> Inspection:
    """Inspect all tensors of a checkpoint. One weight is in memory at a time.

    Raises:
        ValueError: it is not a checkpoint, or is damaged.
    """
    with open_any(Path(path)) as checkpoint:
        bar = tqdm(checkpoint.entries.items(), desc=f"reading {Path(path).name}", unit="tensor", disable=not progress)
        tensors = tuple(_weight(name, entry, checkpoint) for name, entry in bar)
        architecture = (checkpoint.config.get("architectures") or [checkpoint.config.get("model_type")])[0]
        coded = checkpoint.coded_weights.values() if isinstance(checkpoint, CodedFolder) else ()
        return Inspection(checkpoint.format, architecture, tensors, Counter(each.kind for each in coded))


def _weight(name: str, entry: Entry, checkpoint: Checkpoint) -> Weight:
    if isinstance(checkpoint, CodedFolder) and (coded := checkpoint.coded_weights.get(name)):
        return Weight(name, entry.shape, coded.kind, 8 * coded.stored(checkpoint.shards) / entry.numbers)
    if not entry.quantized:
        return Weight(name, entry.shape, entry.kind, entry.bits)
    return weight_of(name, checkpoint.linear(name))


def weight_of(name: str, parts: LinearParts) -> Weight:
    """Count the codes and scales of one quantized weight."""
    scales = histogram(parts.scale.view(torch.uint8))
    values = [value for value, count in zip(SCALES, scales, strict=False) if value and count]
    per_tensor = parts.per_tensor_scale.float()
    stored, codes = parts.scale.reshape(-1).view(torch.uint8), parts.qdata.contiguous().view(-1).view(torch.int64)
    zero = (stored == 0) | ((codes & 0x7777777777777777 == 0) & (stored < E4M3_NAN))  # a block has 8 bytes of codes
    return Weight(
        name=name,
        shape=parts.shape,
        kind="W4A4" if parts.quantizes_activations else "W4A16",
        bits=parts.bits,
        per_tensor_scale=(per_tensor.min().item(), per_tensor.max().item()),
        input_scale=None if parts.input_scale is None else parts.input_scale.item(),
        scales=(values[0], values[-1]) if values else None,
        blocks=parts.scale.numel(),
        clipped=scales[E4M3_NAN - 1],
        zero=int(zero.sum()),
        nan=sum(scales[E4M3_NAN:]),
        codes=_codes(histogram(parts.qdata)),
        scale_bytes=tuple(scales),
    )


def histogram(values: Tensor) -> list[int]:
    """How often each byte occurs in a uint8 tensor: 256 counts."""
    flat = values.reshape(-1)
    counts = torch.zeros(256, dtype=torch.int64)
    for chunk in flat.split(_CHUNK):
        counts += torch.bincount(chunk, minlength=256)
    return [int(count) for count in counts]


def _codes(pairs: list[int]) -> tuple[int, ...]:
    """How often each code occurs, from the counts of bytes, which hold two codes each."""
    return tuple(sum(pairs[code | other << 4] + pairs[other | code << 4] for other in range(16)) for code in range(16))
