"""What parameters' names say: which linears a server joins to one, and which weights are no linears."""

from __future__ import annotations

import fnmatch
import functools
import re
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from nvfp4_tensor.checkpoints.architectures import JOINED, NOT_LINEAR
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry

_GROUP = {name: group for group in JOINED for name in group}


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns names a parameter, or the module that it is the weight of.

    A pattern is an exact name, one with wildcards ("*.down_proj", "model.layers.0.*"), or "re:" and a regular
    expression that matches from the start, as compressed-tensors writes them.

    Raises:
        ValueError: what stands behind "re:" is no regular expression.
    """
    module = name.removesuffix(".weight")
    for pattern in patterns:
        if pattern.startswith("re:"):
            if _compiled(pattern[3:]).match(module):
                return True
        elif fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(module, pattern):
            return True
    return False


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise ValueError(f"'re:{expression}' is no regular expression: {error}") from None


def joined_with(name: str, names: Container[str]) -> tuple[str, ...]:
    """The weights that a server joins with this one, itself among them, as far as they are among ``names``."""
    prefix, _, module = name.removesuffix(".weight").rpartition(".")
    if module not in _GROUP or not name.endswith(".weight"):
        return (name,)
    start = f"{prefix}." if prefix else ""
    return tuple(each for each in (f"{start}{sibling}.weight" for sibling in _GROUP[module]) if each in names)


def dense_linears(checkpoint: Checkpoint) -> list[str]:
    """The modules that may be linears and are not quantized: what goes into a list of excluded modules.

    The output layer is among them although no file holds it, where it shares the embedding's weight.
    """
    modules = [
        name.removesuffix(".weight")
        for name, entry in checkpoint.entries.items()
        if name.endswith(".weight")
        and not entry.quantized
        and len(entry.shape) > 1
        and not is_matched(name, NOT_LINEAR)
    ]
    if "lm_head.weight" not in checkpoint.entries:
        modules.append("lm_head")
    return sorted(modules)


def warn_of_mixed_groups(checkpoint: Checkpoint) -> None:
    """Linears that servers join to one are all W4A4, all W4A16 or all dense; so are the experts of a layer."""
    entries = checkpoint.entries
    groups: dict[object, list[str]] = {}
    for name in entries:
        group = joined_with(name, entries)
        groups.setdefault(_layer_of_expert(name) or group, []).append(name)
    mixed = [names for names in groups.values() if any(entries[name].quantized for name in names)]
    dense = [name for names in mixed for name in names if not entries[name].quantized]
    if dense:
        warnings.warn(
            f"{some(dense)} are dense, and what servers join them with is not: vLLM refuses such a checkpoint. "
            "Leave all of q, k and v dense, or none; gate and up alike, and all weights of a layer's experts",
            stacklevel=2,
        )
    uneven = [names for names in mixed if len({entries[name].quantizes_activations for name in names}) > 1]
    weight_only = [name for names in uneven for name in names if not entries[name].quantizes_activations]
    if set(weight_only) - set(dense):
        warnings.warn(
            f"{some(weight_only)} are weight-only (W4A16), and what servers join them with is W4A4: vLLM refuses "
            "such a checkpoint. Calibrate all of q, k and v, or none; gate and up alike, and all of a layer's experts",
            stacklevel=2,
        )


def without_input_scale(entries: Mapping[str, Entry]) -> list[str]:
    """The weights that quantize activations by the amax of each call, where others of the checkpoint have a scale."""
    names = [name for name, entry in entries.items() if entry.quantizes_activations]
    missing = [name for name in names if not entries[name].has_input_scale]
    return missing if len(missing) < len(names) else []


def warn_of_missing_input_scales(path: Path, entries: Mapping[str, Entry]) -> None:
    """A warning where some weights have an input scale, of a format in which each may have one or not."""
    if missing := without_input_scale(entries):
        warnings.warn(
            f"{path}: {some(missing)} have no input scale, as others do: their activations are quantized by the amax "
            "of each call",
            stacklevel=5,
        )


def _layer_of_expert(name: str) -> str | None:
    """ "model.layers.0.mlp.experts" of the weight of one of its experts; None of any other."""
    found = re.match(r"(.*\bexperts)\.\d+\.\w+\.weight$", name)
    return None if found is None else found[1]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
