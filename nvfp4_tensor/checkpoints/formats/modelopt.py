"""NVIDIA ModelOpt's format of a Hugging Face folder, which vLLM, SGLang and TensorRT-LLM read.

====================  ==================================================================
``weight``            uint8 (N, K / 2), the even element in the low nibble
``weight_scale``      float8_e4m3fn (N, K / 16), in the order of the weight
``weight_scale_2``    float32 0-d, amax / 2688, a factor
``input_scale``       float32 0-d, the activation's amax / 2688; W4A4 only
====================  ==================================================================

A parameter with another name than ``weight`` (``gate_up_proj`` of experts) is stored as ``gate_up_proj``,
``gate_up_proj_weight_scale`` and so on. The experts of Llama 4 and gpt-oss, whose models multiply by (E, K, N), are
stored transposed: uint8 (E, K / 2, N) and float8_e4m3fn (E, K / 16, N). The configuration is in hf_quant_config.json,
in config.json, or in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.architectures import TRANSPOSED_EXPERTS
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat
from nvfp4_tensor.checkpoints.io.safetensors import read_json
from nvfp4_tensor.checkpoints.names import dense_linears, warn_of_mixed_groups, without_input_scale
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import some

HF_QUANT_CONFIG = "hf_quant_config.json"
LAYOUT_VERSION = "0.47.0"
"""The release of ModelOpt that defines this format."""

ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False}
"""The algorithms that are supported, and whether each quantizes activations."""


def keys_of(name: str) -> dict[str, str]:
    """Return the names of the tensors of a weight: qdata, scale, per_tensor_scale, input_scale."""
    prefix = name.removesuffix("weight") if name == "weight" or name.endswith(".weight") else f"{name}_"
    return {
        "qdata": name,
        "scale": f"{prefix}weight_scale",
        "per_tensor_scale": f"{prefix}weight_scale_2",
        "input_scale": f"{prefix}input_scale",
    }


class ModelOpt(SafetensorsFormat):
    """ModelOpt's format."""

    name = "modelopt"
    holds_experts = True
    reserved = (".weight_scale", ".weight_scale_2")

    def __init__(self, transposes_experts: bool = False) -> None:
        """transposes_experts: whether to write experts as (E, K / 2, N). Both layouts can be read."""
        self._transposes = transposes_experts

    def detect(self, path: Path) -> bool:
        try:
            return path.is_dir() and _is_modelopt(path)
        except (ValueError, OSError):
            return False

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        found = _configuration(folder, config)
        if found is None:
            raise ValueError(
                f"{folder}: expected ModelOpt's configuration in {HF_QUANT_CONFIG} or in config.json's "
                "quantization_config, found neither"
            )
        return _checked(folder, found)

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        info = checkpoint.shards.info
        mixed = checkpoint.quantization["quantized_layers"]
        quantized = [name for name in info if info[name].dtype == torch.uint8 and keys_of(name)["scale"] in info]
        parts = {key for name in quantized for key in keys_of(name).values() if key != name}
        for name, each in info.items():
            if each.dtype == torch.uint8 and name.endswith("weight") and name not in quantized:
                checkpoint.expect(keys_of(name)["scale"], torch.float8_e4m3fn, None, name)
        entries = {}
        for name in info:
            if name in parts:
                continue
            if name in quantized:
                activations = _quantizes_activations(checkpoint, name, mixed)
                entries[name] = self._linear_entry(checkpoint, name, activations)
            else:
                entries[name] = Entry(shape=info[name].shape, dtype=info[name].dtype, shard=info[name].file.name)
        if missing := without_input_scale(entries):
            raise ValueError(
                f"{checkpoint.path}: tensor {keys_of(missing[0])['input_scale']} is missing: {some(missing)} have no "
                "input scale, but other weights do"
            )
        return entries

    def _linear_entry(self, checkpoint: FolderCheckpoint, name: str, activations: bool) -> Entry:
        keys, info = keys_of(name), checkpoint.shards.info
        stored, transposed = info[name].shape, _are_transposed(info[name].shape, info[keys["scale"]].shape)
        *leading, half = (stored[0], stored[2], stored[1]) if transposed else stored
        factor = info.get(keys["per_tensor_scale"])
        scales = tuple(leading[:-1]) if len(leading) > 1 and factor is not None and factor.shape else ()
        scale = (leading[0], half * 2 // BLOCK, leading[1]) if transposed else (*leading, half * 2 // BLOCK)
        checkpoint.expect(keys["scale"], torch.float8_e4m3fn, scale, name)
        _expect_number(checkpoint, keys["per_tensor_scale"], scales, name)
        has_input_scale = activations and keys["input_scale"] in info
        if has_input_scale:
            _expect_number(checkpoint, keys["input_scale"], (), name)
        return Entry(
            shape=(*leading, half * 2),
            dtype=checkpoint.dtype(),
            quantized=True,
            quantizes_activations=activations,
            has_input_scale=has_input_scale,
            scales=(*scales, 1) if scales else (),
            shard=info[name].file.name,
        )

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        keys = keys_of(name)
        qdata, scale = tensors[name], tensors[keys["scale"]]
        if _are_transposed(qdata.shape, scale.shape):
            qdata, scale = _transposed_copy(qdata), _transposed_copy(scale)
        return LinearParts(
            qdata=qdata,
            scale=scale,
            per_tensor_scale=tensors[keys["per_tensor_scale"]].reshape(entry.scales),
            columns=entry.shape[-1],
            quantizes_activations=entry.quantizes_activations,
            input_scale=tensors[keys["input_scale"]].reshape(()) if entry.has_input_scale else None,
        )

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        keys = keys_of(name)
        transpose = self._transposes and parts.qdata.dim() == 3
        tensors = {
            keys["qdata"]: _transposed_copy(parts.qdata) if transpose else parts.qdata,
            keys["scale"]: _transposed_copy(parts.scale) if transpose else parts.scale,
            keys["per_tensor_scale"]: parts.per_tensor_scale.reshape(entry.scales[:1]),
        }
        if parts.input_scale is not None:
            tensors[keys["input_scale"]] = parts.input_scale
        return tensors

    def check_names(self, checkpoint: Checkpoint) -> None:
        super().check_names(checkpoint)
        entries = checkpoint.entries
        own = [key for name, entry in entries.items() if entry.quantized for key in keys_of(name).values()]
        if reserved := [key for key in own if key in entries and not entries[key].quantized]:
            raise ValueError(
                f"modelopt uses these names for scales of NVFP4 weights, but {some(reserved)} are dense: rename them"
            )

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        check_static(checkpoint, self.name)
        warn_of_mixed_groups(checkpoint)

    def write(self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, **options: Any) -> None:
        super(ModelOpt, format_for(checkpoint.config)).write(checkpoint, path, progress=progress, **options)

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return flat_config(checkpoint)

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        return {HF_QUANT_CONFIG: hf_quant_config(checkpoint)}


FORMAT = ModelOpt()


def format_for(config: Mapping[str, Any]) -> ModelOpt:
    """Return the format that writes a model with this config.json, with experts as ModelOpt stores them."""
    return ModelOpt(config.get("model_type") in TRANSPOSED_EXPERTS)


def _are_transposed(weight: Sequence[int], scale: Sequence[int]) -> bool:
    """Return whether codes are (E, K / 2, N) instead of (E, N, K / 2), from the shape of their block scales."""
    return len(weight) == len(scale) == 3 and weight[2] == scale[2] and weight[1] * 2 == scale[1] * BLOCK


def _transposed_copy(data: Tensor) -> Tensor:
    """Return a contiguous transpose of (E, a, b)."""
    copy: Tensor = data.view(torch.uint8).transpose(-2, -1).contiguous().view(data.dtype)
    return copy


def _is_modelopt(folder: Path) -> bool:
    file = folder / "config.json"
    return _configuration(folder, read_json(file) if file.exists() else {}) is not None


def _configuration(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ModelOpt's configuration in its flat form, or None if there is none."""
    flat = config.get("quantization_config")
    if isinstance(flat, dict) and str(flat.get("quant_method", "")).startswith("modelopt"):
        return _flattened(flat)
    file = folder / HF_QUANT_CONFIG
    if not file.exists():
        return None
    return _flattened(read_json(file))


def _flattened(found: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a configuration with a "quantization" object, which hf_quant_config.json and some config.json have."""
    inner = found.get("quantization")
    flat = {**found, **inner} if isinstance(inner, dict) else dict(found)
    flat.setdefault("ignore", flat.get("exclude_modules") or [])
    return flat


def _checked(folder: Path, flat: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration if all its layers are NVFP4."""
    algorithm = flat.get("quant_algo")
    layers = flat.get("quantized_layers") or {}
    if algorithm == "MIXED_PRECISION":
        others = [
            f"{name} ({layer.get('quant_algo')})"
            for name, layer in layers.items()
            if layer.get("quant_algo") not in ALGORITHMS
        ]
        if others:
            raise ValueError(
                f"{folder}: expected layers of {' or '.join(ALGORITHMS)} in MIXED_PRECISION, found {some(others)}"
            )
    elif algorithm not in ALGORITHMS:
        raise ValueError(
            f"{folder}: expected ModelOpt's quant_algo {', '.join(ALGORITHMS)} or MIXED_PRECISION, found {algorithm}"
        )
    sizes = {flat.get("group_size"), *(layer.get("group_size") for layer in layers.values())} - {None}
    if sizes - {BLOCK}:
        raise ValueError(f"{folder}: expected group_size {BLOCK}, found {sorted(sizes)}")
    return {**flat, "quantized_layers": layers}


def _quantizes_activations(checkpoint: FolderCheckpoint, name: str, mixed: Mapping[str, Any]) -> bool:
    algorithm = checkpoint.quantization["quant_algo"]
    if algorithm == "MIXED_PRECISION":
        layer = mixed.get(name.removesuffix(".weight"))
        if layer is None:
            raise ValueError(
                f"{checkpoint.path}: tensor {name} is NVFP4 (uint8, with weight_scale), but is not in quantized_layers "
                "of the MIXED_PRECISION configuration"
            )
        algorithm = layer["quant_algo"]
    groups = checkpoint.quantization.get("config_groups") or {}
    # NVFP4 without a group that quantizes activations is weight-only, for servers too.
    if algorithm == "NVFP4" and groups and all(not group.get("input_activations") for group in groups.values()):
        return False
    return ALGORITHMS[algorithm]


def _expect_number(checkpoint: FolderCheckpoint, key: str, shape: tuple[int, ...], owner: str) -> None:
    """Check that a scale is float32 and has this shape; () also allows (1,)."""
    info = checkpoint.shards.info.get(key)
    checkpoint.expect(
        key, torch.float32, (1,) if info is not None and not shape and info.shape == (1,) else shape, owner
    )


def check_static(checkpoint: Checkpoint, format: str) -> None:
    """Raise a ValueError for weights without a static input scale, which servers need."""
    dynamic = [
        name for name, entry in checkpoint.entries.items() if entry.quantizes_activations and not entry.has_input_scale
    ]
    if dynamic:
        raise ValueError(
            f"{some(dynamic)} quantize activations by the amax of each call, but {format} needs a static input scale: "
            "use calibrate(model, batches), or write only the weights with weight_only=True"
        )


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return quant_algo, group_size and, if linears differ, quantized_layers."""
    entries = {name.removesuffix(".weight"): entry for name, entry in checkpoint.entries.items() if entry.quantized}
    algorithms = {
        module: "NVFP4" if entry.quantizes_activations else "W4A16_NVFP4" for module, entry in entries.items()
    }
    if len(set(algorithms.values())) < 2:
        return {"quant_algo": next(iter(algorithms.values()), "W4A16_NVFP4"), "group_size": BLOCK}
    layers = {module: {"quant_algo": algorithm, "group_size": BLOCK} for module, algorithm in algorithms.items()}
    return {"quant_algo": "MIXED_PRECISION", "group_size": BLOCK, "quantized_layers": layers}


def hf_quant_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return hf_quant_config.json. Servers need group_size, kv_cache_quant_algo and exclude_modules."""
    quantization = {**quantization_of(checkpoint), "kv_cache_quant_algo": None}
    return {"producer": _producer(), "quantization": {**quantization, "exclude_modules": dense_linears(checkpoint)}}


def flat_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return config.json's quantization_config."""
    quantization = quantization_of(checkpoint)
    groups: dict[str, list[str]] = {}
    for module, layer in quantization.get("quantized_layers", {}).items():
        groups.setdefault(layer["quant_algo"], []).append(module)
    if not groups:
        groups = {quantization["quant_algo"]: ["Linear"]}
    return {
        "quant_method": "modelopt",
        **quantization,
        "ignore": dense_linears(checkpoint),
        "config_groups": {
            f"group_{i}": _group(algorithm, sorted(targets)) for i, (algorithm, targets) in enumerate(groups.items())
        },
        "producer": _producer(),
    }


def _group(algorithm: str, targets: list[str]) -> dict[str, Any]:
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    activations = {"input_activations": dict(arguments)} if ALGORITHMS[algorithm] else {}
    return {**activations, "weights": arguments, "targets": targets}


def _producer() -> dict[str, str]:
    """Return the producer. Servers accept hf_quant_config.json only from one with this name."""
    try:
        ours = version("nvfp4-tensor")
    except PackageNotFoundError:
        ours = "unknown"
    return {"name": "modelopt", "version": LAYOUT_VERSION, "written_by": f"nvfp4_tensor {ours}"}
