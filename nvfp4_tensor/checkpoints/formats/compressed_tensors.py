"""compressed-tensors' format "nvfp4-pack-quantized": llm-compressor writes it; vLLM, SGLang and transformers read it.

========================  ==============================================================
``weight_packed``         uint8 (N, K / 2), the even element in the low nibble
``weight_scale``          float8_e4m3fn (N, K / 16), in the order of the weight
``weight_global_scale``   float32 (1,), 2688 / amax, a divisor
``input_global_scale``    float32 (1,), 2688 / the activation's amax; W4A4 only
========================  ==============================================================

The configuration is config.json's ``quantization_config``: groups of linears, each with a scheme and targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.modelopt import check_static
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat, config_has
from nvfp4_tensor.checkpoints.names import dense_linears, warn_of_mixed_groups, without_input_scale
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import is_matched, some

PACKED = "nvfp4-pack-quantized"
_FOREIGN = (
    ".weight_scale", ".weight_global_scale", ".input_global_scale", ".input_scale", ".weight_zero_point",
    ".input_zero_point", ".weight_shape",
)  # fmt: skip
"""Suffixes of tensors that belong to compressed weights."""
_PARTS = ("weight_scale", "weight_global_scale", "input_global_scale")


class CompressedTensors(SafetensorsFormat):
    """compressed-tensors' format."""

    name = "compressed-tensors"
    stores_divisors = True
    reserved = (".weight_packed", *_FOREIGN)

    def detect(self, path: Path) -> bool:
        return config_has(path, _configuration)

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        found = _configuration(config)
        if found is None:
            raise ValueError(
                f"{folder / 'config.json'}: expected a quantization_config with quant_method compressed-tensors, found "
                "none"
            )
        config.pop("compression_config", None)
        return _checked(folder / "config.json", found)

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        info = checkpoint.shards.info
        modules = [name.removesuffix("weight_packed") for name in info if name.endswith(".weight_packed")]
        parts = {f"{module}{part}" for module in modules for part in _PARTS}
        entries = {}
        for name, tensor in info.items():
            if name.endswith(".weight_packed"):
                entries[f"{name.removesuffix('_packed')}"] = self._linear_entry(checkpoint, name)
            elif name not in parts:
                entries[name] = Entry(shape=tensor.shape, dtype=tensor.dtype, shard=tensor.file.name)
        if missing := without_input_scale(entries):
            raise ValueError(
                f"{checkpoint.path}: input_global_scale is missing for {some(missing)}, but other weights have one"
            )
        return entries

    def _linear_entry(self, checkpoint: FolderCheckpoint, packed: str) -> Entry:
        info, module = checkpoint.shards.info, packed.removesuffix("weight_packed")
        if info[packed].dtype != torch.uint8 or len(info[packed].shape) != 2:
            raise ValueError(f"{info[packed].file}: tensor {packed}: expected uint8 (N, K / 2), found {info[packed]}")
        rows, half = info[packed].shape
        checkpoint.expect(f"{module}weight_scale", torch.float8_e4m3fn, (rows, half * 2 // BLOCK), packed)
        scheme = _scheme(checkpoint, packed.removesuffix(".weight_packed"))
        if f"{module}weight_global_scale" in info or scheme["weights"].get("strategy") != "group":
            _expect_divisor(checkpoint, f"{module}weight_global_scale", packed)
        activations = scheme.get("input_activations") or {}
        # "dynamic" is True if each call computes its amax. "local" refers only to block scales.
        has_input_scale = bool(activations) and (
            activations.get("dynamic") is not True or f"{module}input_global_scale" in info
        )
        if has_input_scale:
            _expect_divisor(checkpoint, f"{module}input_global_scale", packed)
        return Entry(
            shape=(rows, half * 2),
            dtype=checkpoint.dtype(),
            quantized=True,
            quantizes_activations=bool(activations),
            has_input_scale=has_input_scale,
            shard=info[packed].file.name,
        )

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        module = name.removesuffix("weight")
        scale, divisor = _both(tensors.get(f"{module}weight_global_scale"))
        input_scale, input_divisor = _both(tensors[f"{module}input_global_scale"] if entry.has_input_scale else None)
        return LinearParts(
            qdata=tensors[f"{module}weight_packed"],
            scale=tensors[f"{module}weight_scale"],
            per_tensor_scale=torch.ones((), dtype=torch.float32) if scale is None else scale,
            columns=entry.shape[-1],
            quantizes_activations=entry.quantizes_activations,
            input_scale=input_scale,
            divisor=divisor,
            input_divisor=input_divisor,
        )

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        module = name.removesuffix("weight")
        tensors = {
            f"{module}weight_packed": parts.qdata,
            f"{module}weight_scale": parts.scale,
            f"{module}weight_global_scale": parts.weight_divisor().reshape(1),
        }
        input_divisor = parts.activation_divisor()
        if input_divisor is not None:
            tensors[f"{module}input_global_scale"] = input_divisor.reshape(1)
        for key in list(tensors)[2:]:
            if not tensors[key].is_meta and not tensors[key].isfinite().all():
                raise ValueError(
                    f"{name}: its scale is too small for compressed-tensors, because {key} would be infinite"
                )
        return tensors

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        check_static(checkpoint, self.name)
        warn_of_mixed_groups(checkpoint)
        odd = [
            name
            for name, entry in checkpoint.entries.items()
            if entry.quantized and (len(entry.shape) != 2 or not name.endswith(".weight"))
        ]
        if odd:
            raise ValueError(f"compressed-tensors stores quantized weights (N, K) of modules, not {some(odd)}")

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return quantization_config(checkpoint)


FORMAT = CompressedTensors()


def _configuration(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return quantization_config, or compression_config, its name in earlier releases; None if there is none."""
    found = config.get("quantization_config") or config.get("compression_config")
    return found if isinstance(found, dict) and found.get("quant_method") == "compressed-tensors" else None


def _checked(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration if it has groups of NVFP4, and no transform or sparsity."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not any(_is_nvfp4(group) for group in groups.values()):
        raise ValueError(
            f"{file}: expected a config group of 4-bit floats with group_size {BLOCK} ({PACKED}), found {groups}"
        )
    if found.get("transform_config"):
        raise ValueError(f"{file}: its transform_config rotates activations, which is not supported")
    sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(f"{file}: expected dense weights, found sparsity {sparsity}")
    return found


def _is_nvfp4(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights") or {}
    return (
        weights.get("num_bits") == 4
        and weights.get("type") == "float"
        and weights.get("group_size") == BLOCK
        and weights.get("strategy") in ("tensor_group", "group")
    )


def _scheme(checkpoint: FolderCheckpoint, module: str) -> Mapping[str, Any]:
    """Return the group of a module: the one that names it, or that of all linears."""
    groups = [group for group in checkpoint.quantization["config_groups"].values() if _is_nvfp4(group)]
    named = [group for group in groups if is_matched(module, group.get("targets") or [])]
    general = [group for group in groups if "Linear" in (group.get("targets") or [])]
    found = named or general or (groups if len(groups) == 1 else [])
    if not found:
        raise ValueError(
            f"{checkpoint.path}: tensor {module}.weight_packed is in no config group of NVFP4 in config.json"
        )
    activations = found[0].get("input_activations")
    if activations and (activations.get("num_bits"), activations.get("type")) != (4, "float"):
        raise ValueError(
            f"{checkpoint.path}: {module}: expected input_activations of 4-bit floats or none, found "
            f"{activations.get('num_bits')}-bit {activations.get('type')}"
        )
    return found[0]


def _expect_divisor(checkpoint: FolderCheckpoint, key: str, owner: str) -> None:
    info = checkpoint.shards.info.get(key)
    checkpoint.expect(key, torch.float32, () if info is not None and not info.shape else (1,), owner)


def _both(divisor: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the factor 1 / divisor, and the divisor."""
    if divisor is None:
        return None, None
    divisor = divisor.reshape(())
    return divisor.reciprocal(), divisor


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json's quantization_config: one group of all linears, or one for W4A4 and one for W4A16 linears."""
    entries = {name.removesuffix(".weight"): entry for name, entry in checkpoint.entries.items() if entry.quantized}
    with_activations = [module for module, entry in entries.items() if entry.quantizes_activations]
    weight_only = [module for module, entry in entries.items() if not entry.quantizes_activations]
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
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(activations: bool, targets: list[str]) -> dict[str, Any]:
    arguments = {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": True,
        "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    }  # fmt: skip
    input_activations = {**arguments, "dynamic": "local", "observer": "static_minmax"} if activations else None
    return {"targets": targets, "weights": arguments, "input_activations": input_activations, "format": PACKED}
