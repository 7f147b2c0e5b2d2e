"""Which weights of a checkpoint stay dense, or have no input scale: lists and warnings for writers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.model_families import NOT_LINEAR
from nvfp4_tensor.quantization.names import is_matched, joined_with, some


def dense_linears(checkpoint: Checkpoint) -> list[str]:
    """Return the modules that may be linears and are not quantized, for a list of excluded modules.

    It includes the output layer even if the checkpoint has none because it shares the embedding's weight.
    """
    modules = [
        name.removesuffix(".weight")
        for name, entry in checkpoint.entries.items()
        if name.endswith(".weight") and not entry.is_coded and len(entry.shape) > 1 and not is_matched(name, NOT_LINEAR)
    ]
    if "lm_head.weight" not in checkpoint.entries:
        modules.append("lm_head")
    return sorted(modules)


def warn_of_mixed_groups(checkpoint: Checkpoint) -> None:
    """Warn unless linears that servers join are all W4A4, all W4A16 or all dense, and the experts of a layer too."""
    entries = checkpoint.entries
    groups: dict[object, list[str]] = {}
    for name in entries:
        expert = re.match(r"(.*\bexperts)\.\d+\.\w+\.weight$", name)  # those of a layer are one group
        groups.setdefault(expert[1] if expert else joined_with(name, entries), []).append(name)
    mixed = [names for names in groups.values() if any(entries[name].is_coded for name in names)]
    dense = [name for names in mixed for name in names if not entries[name].is_coded]
    if dense:
        warn_user(
            f"{some(dense)} are dense, but linears that servers join them with are quantized, and vLLM raises an "
            "error: leave all of q, k and v dense, or none; likewise gate and up, and all experts of a layer",
        )
    coded = [[name for name in names if entries[name].is_coded] for names in mixed]
    uneven = [each for each in coded if len({(entries[n].fp8, entries[n].quantizes_activations) for n in each}) > 1]
    if fp8 := [name for names in uneven for name in names if entries[name].fp8]:
        warn_user(
            f"{some(fp8)} are FP8, and linears that servers join them with are quantized otherwise, so vLLM raises an "
            "error: quantize all of q, k and v alike; likewise gate and up, and all experts of a layer",
        )
    w4 = [name for names in uneven if not set(names) & set(fp8) for name in names]
    if weight_only := [name for name in w4 if not entries[name].quantizes_activations]:
        warn_user(
            f"{some(weight_only)} are weight-only (W4A16), but linears that servers join them with are W4A4, and vLLM "
            "raises an error: calibrate all of q, k and v, or none; likewise gate and up, and all experts of a layer",
        )


def warn_of_activations(entries: Mapping[str, Entry]) -> None:
    """Warn of activations in memory that are not rounded as readers of files, which do not say how, round them."""
    plain = QuantizeSpec()
    others = [n for n, e in entries.items() if e.quantizes_activations and (e.activation or plain) != plain]
    if others:
        warn_user(
            f"the activations of {some(others)} are quantized by ({entries[others[0]].activation}), which files do not "
            f"say: their readers quantize by ({plain}), with another error. To measure what is deployed, give the "
            "NVFP4Config a QuantizeSpec() as activation_spec",
        )


def without_input_scale(entries: Mapping[str, Entry]) -> list[str]:
    """Return the W4A4 weights without an input scale, if some of the W4A4 weights have one."""
    names = [name for name, entry in entries.items() if entry.quantizes_activations]
    missing = [name for name in names if not entries[name].has_input_scale]
    return missing if len(missing) < len(names) else []


def warn_of_missing_input_scales(path: Path, entries: Mapping[str, Entry]) -> None:
    """Warn if some W4A4 weights have an input scale and others do not, in formats that allow this."""
    if missing := without_input_scale(entries):
        warn_user(
            f"{path}: {some(missing)} have no input scale, but other weights do: their activations are quantized by "
            "the amax of each call",
        )
