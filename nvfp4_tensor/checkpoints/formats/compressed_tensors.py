"""compressed-tensors' format "nvfp4-pack-quantized": llm-compressor writes it; vLLM, SGLang and transformers read it.

========================  ==============================================================
``weight_packed``         uint8 (N, K / 2), the even element in the low nibble
``weight_scale``          float8_e4m3fn (N, K / 16), in the order of the weight
``weight_global_scale``   float32 (1,), 2688 / amax, a divisor
``input_global_scale``    float32 (1,), 2688 / the activation's amax; W4A4 only
========================  ==============================================================

The configuration is config.json's ``quantization_config``: groups of linears, each with a scheme and targets. Groups of
"mxfp4-pack-quantized", whose ``weight_scale`` is uint8 (N, K / 32) and which have no other scales, are read too,
without the quantization of their activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from nvfp4_tensor.checkpoints.checkpoint import FP8_CACHE, Checkpoint, is_fp8_cache
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.formats.table import Layout, Number, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.names import dense_linears
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import is_matched

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
        return {name: _scheme(checkpoint, f"{name}_packed") for name in packed_weights(checkpoint)}

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return quantization_config(checkpoint)


FORMAT = CompressedTensors()


def packed_weights(checkpoint: FolderCheckpoint) -> list[str]:
    """Return the names in a model of the weights that are stored packed."""
    return [name.removesuffix("_packed") for name in checkpoint.shards.info if name.endswith(".weight_packed")]


def _checked(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration if it has groups of NVFP4, and no transform or sparsity."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not any(map(group_size, groups.values())):
        raise ValueError(
            f"{file}: expected a config group of 4-bit floats with group_size {BLOCK} ({PACKED}), found {groups}"
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
    groups = [group for group in checkpoint.quantization["config_groups"].values() if group_size(group)]
    named = [group for group in groups if is_matched(module, group.get("targets") or [])]
    general = [group for group in groups if "Linear" in (group.get("targets") or [])]
    found = named or general or (groups if len(groups) == 1 else [])
    if not found:
        raise ValueError(f"{checkpoint.path}: tensor {packed} is in no config group of NVFP4 in config.json")
    activations = found[0].get("input_activations") or {}
    if group_size(found[0]) == MX_BLOCK:
        return Scheme(scaled=False, group=MX_BLOCK, loses_activations=bool(activations))
    if activations and (activations.get("num_bits"), activations.get("type")) != (4, "float"):
        raise ValueError(
            f"{checkpoint.path}: {module}: expected input_activations of 4-bit floats or none, found "
            f"{activations.get('num_bits')}-bit {activations.get('type')}"
        )
    return Scheme(
        activations=bool(activations),
        scaled=found[0]["weights"].get("strategy") != "group",
        # "dynamic" is True if each call computes its amax. "local" refers only to block scales.
        static=bool(activations) and activations.get("dynamic") is not True,
    )


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json's quantization_config: one group of all linears, or one for W4A4 and one for W4A16 linears."""
    entries = {name.removesuffix(".weight"): entry for name, entry in checkpoint.entries.items() if entry.quantized}
    with_activations = [module for module, entry in entries.items() if entry.quantizes_activations]
    weight_only = [module for module, entry in entries.items() if not entry.quantizes_activations]
    cache = checkpoint.cache
    if with_activations and weight_only:
        groups = {"group_0": _group(True, with_activations), "group_1": _group(False, weight_only)}
    else:
        groups = {"group_0": _group(bool(with_activations), ["Linear"])}
    return {
        "quant_method": "compressed-tensors",
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": dense_linears(checkpoint),
        "kv_cache_scheme": {**_CACHE, **cache} if isinstance(cache, dict) else _CACHE if is_fp8_cache(cache) else None,
        "global_compression_ratio": None,
    }


def _group(activations: bool, targets: list[str]) -> dict[str, Any]:
    arguments = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True,
        "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    input_activations = {**arguments, "dynamic": "local", "observer": "static_minmax"} if activations else None
    return {"targets": targets, "weights": arguments, "input_activations": input_activations, "format": PACKED}
