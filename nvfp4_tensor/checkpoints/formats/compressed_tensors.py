"""compressed-tensors' format "nvfp4-pack-quantized": llm-compressor writes it; vLLM, SGLang and transformers read it.

========================  ==============================================================
``weight_packed``         uint8 (N, K / 2), the even element in the low nibble
``weight_scale``          float8_e4m3fn (N, K / 16), in the order of the weight
``weight_global_scale``   float32 (1,), 2688 / amax, a divisor
``input_global_scale``    float32 (1,), 2688 / the activation's amax; W4A4 only
========================  ==============================================================

The configuration is config.json's ``quantization_config``: groups of linears, each with a scheme and targets. Groups of
"mxfp4-pack-quantized", whose ``weight_scale`` is uint8 (N, K / 32) and which have no other scales, are read too,
without the quantization of their activations. Weights of "float-quantized" groups are FP8 (see :mod:`.fp8`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from nvfp4_tensor.checkpoints.checkpoint import FP8_CACHE, Checkpoint, Entry, is_fp8_cache
from nvfp4_tensor.checkpoints.formats import fp8
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.formats.table import Layout, Number, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.names import dense_linears
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import is_matched
from nvfp4_tensor.tensor.fp8 import FP8Spec

PACKED = "nvfp4-pack-quantized"
_CACHE = {**FP8_CACHE, "strategy": "tensor", "symmetric": True}


class CompressedTensors(TableFormat):
    """compressed-tensors' format."""

    name = "compressed-tensors"
    layout = Layout(
        keys={
            "qdata": "{stem}weight_packed",
            "scale": "{stem}weight_scale",
            "per_tensor_scale": "{stem}weight_global_scale",
            "input_scale": "{stem}input_global_scale",
        },
        number=Number.DIVISOR,
        number_shape=(1,),
        ranks=(2,),
        names=r".*\.weight",
    )
    config_keys: ClassVar[tuple[str, ...]] = ("quantization_config", "compression_config")  # the second one is older
    is_static = True
    cache_scales = ("k_scale", "v_scale")
    reserved = (
        ".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale", ".input_scale",
        ".weight_zero_point", ".input_zero_point", ".weight_shape",
    )  # fmt: skip

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        return _checked(folder / "config.json", super().quantization(folder, config))

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        has_fp8 = any(map(is_fp8, checkpoint.quantization.get("config_groups", {}).values()))
        in_fp8 = [name for name in checkpoint.shards.info if has_fp8 and fp8.is_stored(checkpoint, name)]
        return {
            **{name: _scheme(checkpoint, f"{name}_packed") for name in packed_weights(checkpoint)},
            **{name: _scheme_of_fp8(checkpoint, name) for name in in_fp8},
        }

    def fp8_name(self, entry: Entry) -> object:
        return entry.fp8

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return config.json's quantization_config: one group of all linears, or one for each kind."""
        modules: dict[str, list[str]] = {}
        groups: dict[str, dict[str, Any]] = {}
        for name, entry in sorted(checkpoint.entries.items(), key=lambda item: not item[1].quantizes_activations):
            if entry.is_coded:
                group = _group(entry.quantizes_activations) if entry.fp8 is None else _fp8_group(entry)
                key = str(group)
                groups[key] = group
                modules.setdefault(key, []).append(name.removesuffix(".weight"))
        groups = groups or {"": _group(False)}
        found = [{"targets": modules[key] if len(groups) > 1 else ["Linear"], **group} for key, group in groups.items()]
        formats = sorted({group["format"] for group in found})
        cache = checkpoint.cache
        scheme = {**_CACHE, **cache} if isinstance(cache, dict) else _CACHE if is_fp8_cache(cache) else None
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision" if len(formats) > 1 else formats[0],
            "quantization_status": "compressed",
            "config_groups": {f"group_{i}": group for i, group in enumerate(found)},
            "ignore": dense_linears(checkpoint),
            "kv_cache_scheme": scheme,
            "global_compression_ratio": None,
        }


FORMAT = CompressedTensors()


def packed_weights(checkpoint: FolderCheckpoint) -> list[str]:
    """Return the names in a model of the weights that are stored packed."""
    return [name.removesuffix("_packed") for name in checkpoint.shards.info if name.endswith(".weight_packed")]


def _checked(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration if it has groups of NVFP4, and no transform or sparsity."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not any(group_size(each) or is_fp8(each) for each in groups.values()):
        raise ValueError(
            f"{file}: expected a config group of 4-bit floats with group_size {BLOCK} ({PACKED}) or of 8-bit floats, "
            f"found {groups}"
        )
    formats = {str(each.get("format") or "") for each in (found, *groups.values())}
    if others := sorted(each for each in formats if "e5m3" in each):
        raise ValueError(f"{file}: expected block scales in e4m3 ({PACKED}), found {others[0]}")
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"{file}: expected dense weights, found sparsity {sparsity}")
    return found


def group_size(group: Mapping[str, Any]) -> int:
    """Return the elements of a block if a config group has 4-bit floats: 16 of NVFP4, 32 of MXFP4; otherwise 0."""
    weights = group.get("weights") or {}
    strategies = {BLOCK: ("tensor_group", "group"), MX_BLOCK: ("group",)}
    is_fp4 = weights.get("num_bits") == 4 and weights.get("type") == "float"
    fitting = (size for size, names in strategies.items() if weights.get("strategy") in names)
    return next((size for size in fitting if is_fp4 and weights.get("group_size") == size), 0)


def _scheme(checkpoint: FolderCheckpoint, packed: str) -> Scheme:
    """Return what the group of a weight says: the one that names its module, or that of all linears.

    Products of MXFP4 weights do not quantize activations, because NVFP4's are others.
    """
    module = packed.removesuffix(".weight_packed")
    if not checkpoint.is_described:
        info = checkpoint.shards.info
        scale, static = info.get(f"{module}.weight_scale"), f"{module}.input_global_scale" in info
        is_mx = scale is not None and scale.dtype == torch.uint8
        return Scheme(activations=static, static=static, scaled=not is_mx, group=MX_BLOCK if is_mx else BLOCK)
    group = group_of(checkpoint, packed, group_size)
    activations = group.get("input_activations") or {}
    if group_size(group) == MX_BLOCK:
        return Scheme(scaled=False, group=MX_BLOCK, loses_activations=bool(activations))
    if activations and (activations.get("num_bits"), activations.get("type")) != (4, "float"):
        raise ValueError(
            f"{checkpoint.path}: {module}: expected input_activations of 4-bit floats or none, found "
            f"{activations.get('num_bits')}-bit {activations.get('type')}"
        )
    return Scheme(
        activations=bool(activations),
        scaled=group["weights"].get("strategy") != "group",
        # "dynamic" is True if each call computes its amax. "local" refers only to block scales.
        static=bool(activations) and activations.get("dynamic") is not True,
    )


def group_of(checkpoint: FolderCheckpoint, name: str, fits: Callable[[Any], object]) -> dict[str, Any]:
    """Return the group of a tensor among those that fit: the one that names its module, or that of all linears."""
    module = name.rpartition(".")[0]
    groups = [group for group in (checkpoint.quantization.get("config_groups") or {}).values() if fits(group)]
    named = [group for group in groups if is_matched(module, group.get("targets") or [])]
    general = [group for group in groups if "Linear" in (group.get("targets") or [])]
    found = named or general or (groups if len(groups) == 1 else [])
    if not found:
        kind = " of FP8" if fits is is_fp8 else " of NVFP4" if fits is group_size else ""
        raise ValueError(f"{checkpoint.path}: tensor {name} is in no config group{kind} in config.json")
    return found[0]


def is_fp8(group: Mapping[str, Any]) -> bool:
    """Return whether a config group has 8-bit floats."""
    weights = group.get("weights") or {}
    return (weights.get("num_bits"), weights.get("type")) == (8, "float")


def _scheme_of_fp8(checkpoint: FolderCheckpoint, name: str) -> Scheme:
    group = group_of(checkpoint, name, is_fp8)
    weights, activations = group["weights"], group.get("input_activations") or {}
    strategy, size = weights.get("strategy") or "tensor", weights.get("group_size")
    where = f"{checkpoint.path}: {name}"
    if weights.get("symmetric") is False or "uint8" in str(weights.get("scale_dtype")):
        raise ValueError(f"{where}: expected symmetric FP8 with scales in floating point, found {weights}")
    blocks = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, size),
        "block": tuple(weights.get("block_structure") or ()),
    }
    block = blocks.get(strategy, ())
    if len(block) != 2 or None in block:
        raise ValueError(f"{where}: expected FP8 per tensor, channel, group or block, found {weights}")
    if not activations:
        return Scheme(fp8=FP8Spec(block))
    dynamic, kind = activations.get("dynamic") is True, KINDS.get(activations.get("strategy") or "tensor")
    of_group = kind != FP8Activations.GROUP or (activations.get("group_size") == block[1] and dynamic)
    if (
        not is_fp8({"weights": activations})
        or kind is None
        or not of_group
        or (kind == FP8Activations.TOKEN and not dynamic)
    ):
        raise ValueError(
            f"{where}: expected input_activations of 8-bit floats per tensor, or at each call per token or in the "
            f"groups of the weight, found {activations}"
        )
    return Scheme(fp8=FP8Spec(block, kind), static=kind == FP8Activations.TENSOR and not dynamic)


KINDS = {"tensor": FP8Activations.TENSOR, "token": FP8Activations.TOKEN, "group": FP8Activations.GROUP}


def _group(activations: bool) -> dict[str, Any]:
    arguments = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True,
        "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    input_activations = {**arguments, "dynamic": "local", "observer": "static_minmax"} if activations else None
    return {"weights": arguments, "input_activations": input_activations, "format": PACKED}


def _fp8_group(entry: Entry) -> dict[str, Any]:
    assert entry.fp8 is not None
    (rows, columns), kind = entry.fp8.block, entry.fp8.activations
    strategy = {0: "tensor", 1: "group" if columns else "channel"}.get(rows, "block")
    common: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    sizes: dict[str, dict[str, Any]] = {"group": {"group_size": columns}, "block": {"block_structure": [rows, columns]}}
    weights = {**common, "strategy": strategy, "dynamic": False, **sizes.get(strategy, {})}
    if kind is None:  # compressed-tensors calls weight-only FP8 "naive"
        return {"weights": weights, "input_activations": None, "format": "naive-quantized"}
    activations = {**common, "strategy": kind.name.lower(), "dynamic": not entry.has_input_scale}
    activations |= {"group_size": columns} if kind == FP8Activations.GROUP else {}
    return {"weights": weights, "input_activations": activations, "format": "float-quantized"}
