"""The check that a reader understood a checkpoint: no tensor is left that gives another one a different meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES, ROUTER_SCALE
from nvfp4_tensor.checkpoints.checkpoint import Entry
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.quantization.model_families import JOINED_AS
from nvfp4_tensor.quantization.names import some

_CODES = (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32)
"""Dtypes of packed or scaled weights."""
_CODED = re.compile(r"weight|packed|blocks|codes|W_q|Qidxs|qdata")
"""In the last part of names of weights. Integers of other names are masks, indices and tables of a model."""
_RESCALES = re.compile(r"weight_(scale|zero_point|zeros|g_idx|shape|packed|global_scale)(_\d|_inv)?|q(weight|zeros)")
"""The last part of names that only quantized weights have."""
_BESIDE = re.compile(
    r"((input|output|activation|act|pre_quant|smooth|smoothing|channel|global)_)?"
    r"(scales?|scaler|scale_inv|scale_weight|scale_input|zeros?|zero_points?|g_idx)|input_global_scale|biases|perm|absmax"
    r"|comfy_quant|svdquant_\w+|smooth_?(factor|quant)\w*|SCB|SU|SV"
)
"""The last part of names that rescale or permute a weight if it is in the same module, and are parameters otherwise."""
_FIX = "Decode the weights to bfloat16 first, or use a checkpoint whose other weights are dense"


_TRANSFORMS = re.compile(r".*(rotat|hadamard|spinquant|quarot|svd|low_?rank|lora_rank).*|transform(s|_config)?", re.I)
"""Settings by which readers rotate inputs and weights, or add a product of two small matrices."""


def check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise a ValueError if a quantization's settings, or those of its groups, change what a linear computes.

    The tensors of such a checkpoint may look like those of another one.
    """
    groups = settings.get("config_groups")
    inner = [each for each in (groups.values() if isinstance(groups, dict) else ()) if isinstance(each, dict)]
    for each in (settings, *inner):
        for name, value in each.items():
            if _TRANSFORMS.fullmatch(name) and value and value != {"config_groups": {}}:
                raise ValueError(
                    f"{file}: {name} {str(value)[:80]} rotates inputs, or adds low-rank products, which is not "
                    "supported. Use a checkpoint without it, or quantize the dense model"
                )


def pre_scale_of(name: str) -> str:
    """Return the name of the scale of the inputs of a weight, which is ModelOpt's for AWQ."""
    return f"{name.removesuffix('weight')}{PRE_SCALE}"


def has_pre_scale(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a weight is NVFP4, and has a scale of its inputs."""
    return entries[name].quantized and name.endswith("weight") and pre_scale_of(name) in entries


def check_no_pre_scales(entries: Mapping[str, Entry], format: str) -> None:
    """Raise a ValueError if a weight has a scale of its inputs, for a format that has no place for them."""
    if scaled := [pre_scale_of(name) for name in entries if has_pre_scale(name, entries)]:
        raise ValueError(
            f"{format} has no place for {some(scaled)}, which multiply the inputs of weights (AWQ): choose modelopt, "
            "or quantize the dense model"
        )


def check_understood(entries: Mapping[str, Entry], path: Path | None, pre_scales: bool = False) -> None:
    """Raise a ValueError if entries that are not quantized belong to a quantization that the reader does not know.

    Such are weights in codes (FP8, integers), and tensors that rescale or permute a weight, whose values would be used
    without. A linear in NVFP4 has nothing but its own tensors, a bias, and scales of a key-value cache.

    path: where the entries are, None for a model in memory.
    pre_scales: whether a linear in NVFP4 may have a scale of its inputs too.
    """
    known = {pre_scale_of(name) for name in entries if pre_scales and has_pre_scale(name, entries)}
    for name in known:
        shape, wanted = entries[name].shape, entries[f"{name.removesuffix(PRE_SCALE)}weight"].shape[-1:]
        if shape not in (wanted, (1, *wanted)) or not entries[name].dtype.is_floating_point:
            raise ValueError(
                f"{_file(path, entries[name])}: tensor {name}: expected floats {list(wanted)}, found "
                f"{entries[name].kind} {list(shape)}"
            )
    coded = [name for name, entry in entries.items() if not entry.is_coded and _is_coded(name, entry)]
    if coded:
        found = some([f"{name} ({entries[name].kind})" for name in coded])
        raise ValueError(
            f"{_file(path, entries[coded[0]])}: {found} are weights of another quantization than NVFP4, which is not "
            f"supported here: checkpoints.quantize reads some, and `nvfp4 inspect` tells which. {_FIX}"
        )
    foreign = [
        name
        for name, entry in entries.items()
        if not entry.is_coded and name not in known and _is_foreign(name, entries)
    ]
    if foreign:
        raise ValueError(
            f"{_file(path, entries[foreign[0]])}: {some(foreign)} change the meaning of a weight in a way that is not "
            f"supported, such as another quantization does. {_FIX}"
        )


def _file(path: Path | None, entry: Entry) -> Path | str:
    if path is None:
        return "the model"
    return path / entry.shard if entry.shard is not None and path.is_dir() else path


def _is_coded(name: str, entry: Entry) -> bool:
    """Return whether a tensor holds FP8, or integers by the name of a weight."""
    last = name.rpartition(".")[2]
    if entry.dtype.is_floating_point or last == "weight":
        return entry.dtype.itemsize == 1 or not entry.dtype.is_floating_point
    return entry.dtype in _CODES and len(entry.shape) > 1 and (last in JOINED_AS or _CODED.search(last) is not None)


def _is_foreign(name: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether a tensor says how to read a weight."""
    module, _, last = name.rpartition(".")
    if name.endswith((*CACHE_SCALES, ROUTER_SCALE)):
        return False
    owner = entries.get(f"{module}.weight" if module else "weight")
    if owner is not None and owner.is_coded:
        return not last.endswith("bias")
    if _RESCALES.fullmatch(last) or (owner is not None and len(owner.shape) > 1 and _BESIDE.fullmatch(last)):
        return True
    ends = [found.start() for found in re.finditer(r"[._]", name)][1:]
    return any(_follows(name, name[:end], entries) for end in ends)  # of "m.w" and "m.w_a" for "m.w_a_b"


def _follows(name: str, stem: str, entries: Mapping[str, Entry]) -> bool:
    """Return whether ``name`` is the parameter ``stem`` with a suffix that says how to read it."""
    entry, suffix = entries.get(stem), name[len(stem) + 1 :]
    if entry is None or len(entry.shape) < 2:
        return False
    if entry.is_coded:
        return not suffix.endswith("bias")
    return (_RESCALES.fullmatch(suffix) or _BESIDE.fullmatch(suffix)) is not None
