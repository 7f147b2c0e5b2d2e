"""``nvfp4 convert``: one format to another, without rounding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nvfp4_cli import options
from nvfp4_cli.options import CHECKPOINT, FORMATS, NEW
from nvfp4_cli.results import megabytes, number, prints_to_stderr, show, size_of, writes

if TYPE_CHECKING:
    from nvfp4_tensor.quantization.accuracy.sensitivity import Budget


@click.command(short_help="Write an NVFP4 checkpoint in another format.")
@click.argument("src", type=CHECKPOINT)
@click.argument("dst", type=NEW)
@options.to
@click.option("--from", "format", type=click.Choice(FORMATS), help="The format of SRC, if no configuration says it.")
@click.option("--w4a16", is_flag=True, help="Leave out the quantization of activations.")
@options.of_format
@options.quiet
@options.as_json
def convert(src: Path, dst: Path, to: str, json_: bool, **given: Any) -> None:
    """Write the NVFP4 checkpoint SRC in another format, with the same codes and scales.

    \b
    nvfp4 convert SmolLM2-NVFP4 SmolLM2.gguf --to gguf
    nvfp4 convert nvidia-NVFP4 for-mlx --to mlx --w4a16 --lossy
    nvfp4 convert flux-NVFP4 flux.safetensors --to comfy --quantize-activations
    """
    of_format = options.take_options_of_format(given, to, dst)
    with prints_to_stderr(json_), writes(dst):
        result = run(src, dst, to=to, of_format=of_format, **given)
    show(result, json_)


def run(
    src: Path, dst: Path, *, to: str, format: str | None, w4a16: bool, progress: bool, of_format: Mapping[str, Any]
) -> Written:
    """Convert ``src`` into ``dst``."""
    from nvfp4_tensor import checkpoints

    start = time.perf_counter()
    checkpoints.convert(src, dst, to=to, format=format, weight_only=w4a16, progress=progress, **of_format)
    return Written.of(src, dst, time.perf_counter() - start)


@dataclasses.dataclass(frozen=True)
class Written:
    """A checkpoint that ``quantize`` or ``convert`` wrote.

    Attributes:
        quantized, fp8: how many weights are NVFP4, and FP8; dense: how many tensors are neither.
        w4a4: whether activations are quantized.
        bits_per_weight: stored bits per element of the quantized weights, scales included.
        source_bytes, bytes: sizes of the files of weights.
        budget: what was left dense for ``--bits``.
        divergence: with ``--distill``, KL(dense || written) in nats per token, of the file that was read back.
        routed_tokens: how many tokens of ``--calibrate`` the router sent to each expert, by experts' module.
    """

    src: Path
    dst: Path
    format: str
    quantized: int
    fp8: int
    dense: int
    w4a4: bool
    bits_per_weight: float
    source_bytes: int
    bytes: int
    seconds: float
    budget: Budget | None = None
    routed_tokens: Mapping[str, list[int]] | None = None
    divergence: float | None = None

    @classmethod
    def of(
        cls, src: Path, dst: Path, seconds: float, budget: Budget | None = None,
        routed_tokens: Mapping[str, list[int]] | None = None,
    ) -> Written:  # fmt: skip
        """Read the sizes and entries of ``dst``."""
        from nvfp4_tensor import checkpoints

        with checkpoints.read(dst) as checkpoint:
            quantized = [entry for entry in checkpoint.entries.values() if entry.quantized]
            fp8 = sum(entry.fp8 is not None for entry in checkpoint.entries.values())
            bits = sum(entry.bits * entry.numbers for entry in quantized)
            return cls(
                src, dst, checkpoint.format, len(quantized), fp8, len(checkpoint.entries) - len(quantized) - fp8,
                any(entry.quantizes_activations for entry in quantized),
                bits / max(sum(entry.numbers for entry in quantized), 1), size_of(src), size_of(dst), seconds, budget,
                routed_tokens or None,
            )  # fmt: skip

    def __str__(self) -> str:
        kind = "W4A4" if self.w4a4 else "W4A16"
        fp8 = f"{self.fp8} FP8, " if self.fp8 else ""
        text = (
            f"{self.dst}: {self.format}, {self.quantized} weights {kind} of {self.bits_per_weight:.2f} bits, "
            f"{fp8}{self.dense} tensors dense; {megabytes(self.source_bytes)} -> {megabytes(self.bytes)} in "
            f"{self.seconds:.1f} s"
        )
        if self.divergence is not None:
            text += (
                f"\nread back, its logits diverge by {number(self.divergence, 2)} nats per token from the dense ones"
            )
        if self.budget is None:
            return text
        from nvfp4_tensor.quantization.names import some

        dense = [f"{some(cost.weights)} ({number(cost.loss, 2)} nats)" for cost in self.budget.costs if cost.dense]
        return f"{text}\n{self.budget.bits:.2f} bits over all linears; left dense: {some(dense) or 'none'}"
