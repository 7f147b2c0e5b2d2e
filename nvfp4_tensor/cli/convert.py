"""``nvfp4 convert``: one format to another, nothing rounded."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_tensor import checkpoints
from nvfp4_tensor.cli.budget import Budget
from nvfp4_tensor.cli.results import megabytes, plain, size_of


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint that was written.

    Attributes:
        quantized: how many weights are NVFP4; dense: how many tensors are not.
        w4a4: whether products quantize activations.
        bits_per_weight: of the quantized weights, scales among them.
        source_bytes, bytes: of the weights' files.
        budget: what was left dense for a budget of bits, where one was given.
    """

    src: Path
    dst: Path
    format: str
    quantized: int
    dense: int
    w4a4: bool
    bits_per_weight: float
    source_bytes: int
    bytes: int
    seconds: float
    budget: Budget | None = None

    @classmethod
    def of(cls, src: Path, dst: Path, seconds: float, budget: Budget | None = None) -> Written:
        """What lies at ``dst`` now."""
        with checkpoints.read(dst) as checkpoint:
            quantized = [entry for entry in checkpoint.entries.values() if entry.quantized]
            metas = [entry.meta() for entry in quantized]
            stored = sum(meta.qdata.nbytes + meta.scale.nbytes + meta.per_tensor_scale.nbytes for meta in metas)
            numbers = sum(meta.qdata.shape[:-1].numel() * meta.columns for meta in metas)
            return cls(
                src, dst, checkpoint.format, len(quantized), len(checkpoint.entries) - len(quantized),
                any(entry.quantizes_activations for entry in quantized), 8 * stored / max(numbers, 1), size_of(src),
                size_of(dst), seconds, budget,
            )  # fmt: skip

    def as_json(self) -> Any:
        return plain(self)

    def __str__(self) -> str:
        kind = "W4A4" if self.w4a4 else "W4A16"
        return (
            f"{self.dst}: {self.format}, {self.quantized} weights {kind} of {self.bits_per_weight:.2f} bits, "
            f"{self.dense} tensors dense; {megabytes(self.source_bytes)} -> {megabytes(self.bytes)} in "
            f"{self.seconds:.1f} s" + (f"\n{self.budget}" if self.budget else "")
        )


def convert(src: Path, dst: Path, *, to: str, weight_only: bool, progress: bool, options: Mapping[str, Any]) -> Written:
    """As :func:`checkpoints.convert`; ``options`` of the format that is written.

    Raises:
        ValueError: as there, and where ``src`` holds no NVFP4.
    """
    start = time.perf_counter()
    with checkpoints.read(src) as checkpoint:
        if not any(entry.quantized for entry in checkpoint.entries.values()):
            raise ValueError(f"{src} holds no NVFP4 weights, only dense ones: `nvfp4 quantize` makes them")
    checkpoints.convert(src, dst, to=to, weight_only=weight_only, progress=progress, **options)
    return Written.of(src, dst, time.perf_counter() - start)
