"""Convert a checkpoint to another format without rounding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Format, format_named, is_fp8_cache, read
from nvfp4_tensor.checkpoints.wrappers import Renamed, WeightOnly
from nvfp4_tensor.quantization.names import joined_with, some


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: str,
    format: str | None = None,
    weight_only: bool = False,
    progress: bool = True,
    **options: Any,
) -> None:
    """Write the checkpoint ``src`` in another format, with the same codes and scales.

    Shards are converted one by one, so little memory is needed. ``dst`` appears when it is complete. If a call is
    interrupted, the same call continues after its last complete shard.

    Args:
        src: a folder or file of any format of :data:`FORMATS`.
        dst: a path that does not exist yet.
        to: the name of the target format in :data:`FORMATS`.
        format: the name of the format of ``src``, which is detected by default.
        weight_only: omit the quantization of activations (W4A4 becomes W4A16).
        progress: show a progress bar.
        options: options of the target format.

    Example::

        checkpoints.convert("Llama-3.1-8B-Instruct-NVFP4", "Llama-ct", to="compressed-tensors")

    Raises:
        ValueError: ``src`` is invalid or a folder of dense weights, or a tensor cannot be stored in the target format;
            the message has its name. Nothing is written.
    """
    target = format_named(to)
    with read(src, format) as source:
        if to not in ("dense", "gguf") and not any(entry.is_coded for entry in source.entries.values()):
            raise ValueError(f"{src} has only dense weights: use checkpoints.quantize")
        checkpoint: Checkpoint = WeightOnly(source) if weight_only else source
        renamed = cache_names(checkpoint, target)
        if omitted := [name for name, new in renamed.items() if not new]:
            warn_user(
                f"the scales of a quantized key-value cache are omitted ({some(omitted)}), because {to} has no place "
                f"for those of {checkpoint.cache or 'a cache that the configuration does not describe'}: servers will "
                "store the cache in 16 bits",
            )
        if renamed:
            checkpoint = Renamed(checkpoint, renamed)
            checkpoint.cache = source.cache if checkpoint.stored else None
        if target.is_served and (different := different_scales(checkpoint)):
            names = some([" and ".join(group) for group in different])
            warn_user(
                f"{len(different)} groups of linears that servers join have different per-tensor scales: {names}. vLLM "
                "uses the largest of a group for all its linears without rescaling, and computes wrong numbers: to "
                "serve the model, quantize the dense model by checkpoints.quantize, which gives each group one scale",
            )
        target.write(checkpoint, Path(dst), progress=progress, **options)


def cache_names(checkpoint: Checkpoint, target: Format) -> dict[str, str]:
    """Return the names in another format of the scales of a key-value cache; "" for all if it has no place for them.

    ModelOpt's and compressed-tensors' scales of an FP8 cache are the same numbers.
    """
    found = [name for name in checkpoint.entries if name.endswith(CACHE_SCALES)]
    if checkpoint.format == target.name:
        return dict(zip(found, found, strict=True))
    renamed = {}
    for name in found:
        attention = re.sub(r"\.(?:[kv]_proj\.)?[kv]_scale$", "", name)
        last = next((each for each in target.cache_scales if each.endswith(name[-len(".k_scale") :].strip("."))), "")
        fits = is_fp8_cache(checkpoint.cache) and checkpoint.entries[name].numbers == 1 and attention != name and last
        renamed[name] = f"{attention}.{last}" if fits else ""
    return renamed if all(renamed.values()) else dict.fromkeys(found, "")


def different_scales(checkpoint: Checkpoint) -> list[tuple[str, ...]]:
    """Return the groups of linears that servers join and whose per-tensor scales differ."""
    quantized = [name for name, entry in checkpoint.entries.items() if entry.quantized and not entry.scales]
    known = set(quantized)
    groups = dict.fromkeys(joined_with(name, known) for name in quantized)
    scales = ((group, [checkpoint.per_tensor_scale(name) for name in group]) for group in groups if len(group) > 1)
    return [group for group, (first, *others) in scales if not all(torch.equal(first, other) for other in others)]
