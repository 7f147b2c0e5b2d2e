"""From one format into another, without rounding anything."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named, read
from nvfp4_tensor.checkpoints.names import joined_with, some
from nvfp4_tensor.checkpoints.wrappers import WeightOnly, Without


def convert(
    src: str | Path, dst: str | Path, *, to: str, weight_only: bool = False, progress: bool = True, **options: Any
) -> None:
    """Write the checkpoint ``src`` in another format: the same codes and scales, nothing is rounded.

    It goes shard by shard, in little memory. ``dst`` appears when it is whole; the same call takes up an interrupted
    one at its last whole shard.

    Args:
        src: a folder or file of any format that :func:`detect` knows.
        dst: is not there yet.
        to: a name of :data:`FORMATS`.
        weight_only: leave out the quantization of activations (W4A4 becomes W4A16).
        progress: show a bar.
        options: of the format that is written.

    Example::

        checkpoints.convert("Llama-3.1-8B-Instruct-NVFP4", "Llama-ct", to="compressed-tensors")

    Raises:
        ValueError: ``src`` is wrong, or holds what the other format cannot; the message names it. Then nothing is
            written.
    """
    target = format_named(to)
    with read(src) as source:
        checkpoint: Checkpoint = WeightOnly(source) if weight_only else source
        checkpoint = without_cache_scales(checkpoint)
        if target.is_served:
            warn_of_different_scales(checkpoint)
        target.write(checkpoint, Path(dst), progress=progress, **options)


def without_cache_scales(checkpoint: Checkpoint) -> Checkpoint:
    """Without the scales of a quantized key-value cache, which layouts name differently; with a warning."""
    left_out = [name for name in checkpoint.entries if name.endswith(CACHE_SCALES)]
    if not left_out:
        return checkpoint
    warnings.warn(
        f"scales of a quantized key-value cache are left out, {some(left_out)}: servers keep the cache in 16 bits then",
        stacklevel=3,
    )
    return Without(checkpoint, left_out)


def warn_of_different_scales(checkpoint: Checkpoint) -> None:
    """A warning that names linears which servers join and which have different per-tensor scales."""
    if different := different_scales(checkpoint):
        names = some([" and ".join(group) for group in different])
        warnings.warn(
            f"{len(different)} groups of linears that servers join have different per-tensor scales: {names}. vLLM "
            "uses the largest of a group for all its linears without rescaling, and computes wrong numbers: to serve "
            "the model, quantize the dense model by checkpoints.quantize, which gives each group one scale",
            stacklevel=3,
        )


def different_scales(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    """The groups of linears that servers join and that do not have one per-tensor scale."""
    quantized = [name for name, entry in checkpoint.entries.items() if entry.quantized and not entry.scales]
    known = set(quantized)
    groups = dict.fromkeys(joined_with(name, known) for name in quantized)
    return [group for group in groups if len(group) > 1 and not _same_scale(checkpoint, group)]


def _same_scale(checkpoint: Checkpoint, group: tuple[str, ...]) -> bool:
    first, *others = (checkpoint.per_tensor_scale(name) for name in group)
    return all(torch.equal(first, other) for other in others)
