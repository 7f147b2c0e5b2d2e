"""NVIDIA ModelOpt's format of a Hugging Face folder, which vLLM, SGLang and TensorRT-LLM read.

====================  ============================================================================================
``weight``            uint8 (N, K / 2), the even element in the low nibble
``weight_scale``      float8_e4m3fn (N, K / 16), in the order of the weight
``weight_scale_2``    float32 0-d, amax / 2688, a factor
``input_scale``       float32 0-d, the activation's amax / 2688; W4A4 only
``pre_quant_scale``   floats (K,), by which inputs are multiplied first; with NVFP4_AWQ only, and not for all linears
====================  ============================================================================================

A parameter with another name than ``weight`` (``gate_up_proj`` of experts) is stored as ``gate_up_proj``,
``gate_up_proj_weight_scale`` and so on. The experts of Llama 4 and gpt-oss, whose models multiply by (E, K, N), are
stored transposed: uint8 (E, K / 2, N) and float8_e4m3fn (E, K / 16, N). The configuration is in hf_quant_config.json,
in config.json, or in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor import __version__
from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.architectures import TRANSPOSED_EXPERTS
from nvfp4_tensor.checkpoints.checkpoint import FP8_CACHE, Checkpoint, Entry, is_fp8_cache
from nvfp4_tensor.checkpoints.formats import fp8
from nvfp4_tensor.checkpoints.formats.table import Layout, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.io.safetensors import read_json
from nvfp4_tensor.checkpoints.names import dense_linears
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.checkpoints.understood import has_pre_scale
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.fp8 import FP8Spec, FP8Tensor

HF_QUANT_CONFIG = "hf_quant_config.json"
LAYOUT_VERSION = "0.47.0"
"""The release of ModelOpt that defines this format."""

AWQ = "NVFP4_AWQ"
ALGORITHMS = {"NVFP4": True, "W4A16_NVFP4": False, AWQ: True}
"""The algorithms that are supported, and whether each quantizes activations; AWQ does if there are input scales."""

AWQ_SETTINGS = {"has_zero_point": False, "pre_quant_scale": True}
"""Further settings of a layer with AWQ."""

PRODUCER = {"name": "modelopt", "version": LAYOUT_VERSION, "written_by": f"nvfp4_tensor {__version__}"}
"""Servers accept hf_quant_config.json only from a producer with this name."""

LAYOUT = Layout(
    keys={
        "qdata": "{name}",
        "scale": "{stem}weight_scale",
        "per_tensor_scale": "{stem}weight_scale_2",
        "input_scale": "{stem}input_scale",
    },
    experts=(),
)
keys_of = LAYOUT.keys_of


class ModelOpt(TableFormat):
    """ModelOpt's format."""

    name = "modelopt"
    layout = LAYOUT
    config_files = f"{HF_QUANT_CONFIG} or config.json"
    is_static = True
    holds_experts = True
    has_pre_scales = True
    cache_scales = ("k_proj.k_scale", "v_proj.v_scale")
    reserved = (".weight_scale", ".weight_scale_2")

    def __init__(self, transposes_experts: bool = False) -> None:
        """transposes_experts: whether to write experts as (E, K / 2, N). Both layouts can be read."""
        self._transposes = transposes_experts

    def is_own(self, found: Mapping[str, Any]) -> bool:
        return str(found.get("quant_method", "")).startswith(self.name)

    def configuration(self, folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
        found, file = super().configuration(folder, config), folder / HF_QUANT_CONFIG
        if found is None and not file.exists():
            return None
        found = found or read_json(file)
        inner = found.get("quantization")  # in hf_quant_config.json, and in some config.json
        flat = {**found, **inner} if isinstance(inner, dict) else dict(found)
        flat.setdefault("ignore", flat.get("exclude_modules") or [])
        return flat

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        return _checked(folder, super().quantization(folder, config))

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        info, schemes = checkpoint.shards.info, {}
        for name, codes in info.items():
            if fp8.is_stored(checkpoint, name) and (spec := fp8.ALGORITHMS.get(str(_algorithm_of(checkpoint, name)))):
                static = spec.activations == FP8Activations.TENSOR and fp8.keys_of(name)["input_scale"] in info
                if spec.activations == FP8Activations.TENSOR and not static:
                    spec = FP8Spec(spec.block)
                schemes[name] = Scheme(fp8=spec, static=static)
            if codes.dtype != torch.uint8:
                continue
            key = keys_of(name)["scale"]
            if key not in info and not name.endswith("weight"):
                continue
            checkpoint.expect(key, torch.float8_e4m3fn, None, name)
            shape = scale_shape = None
            if _are_transposed(codes.shape, info[key].shape):
                shape, scale_shape = (codes.shape[0], codes.shape[2], codes.shape[1] * 2), info[key].shape
            activations = _quantizes_activations(checkpoint, name)
            schemes[name] = Scheme(activations=activations, shape=shape, scale_shape=scale_shape)
        return schemes

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        keys = keys_of(name)
        qdata, scale = tensors[name], tensors[keys["scale"]]
        if _are_transposed(qdata.shape, scale.shape):
            qdata, scale = qdata.mT.contiguous(), scale.mT.contiguous()
        numbers = {key: tensors[key] for key in list(keys.values())[2:] if key in tensors}
        return super().decode(name, {name: qdata, keys["scale"]: scale, **numbers}, entry)

    def encode(self, name: str, weight: LinearParts | FP8Tensor, entry: Entry) -> dict[str, Tensor]:
        if not isinstance(weight, FP8Tensor):
            tensors = super().encode(name, weight, entry)
            if self._transposes and weight.qdata.dim() == 3:
                tensors |= {key: tensors[key].mT.contiguous() for key in list(tensors)[:2]}
            return tensors
        if fp8.is_by_channel(weight.spec):
            spec = dataclasses.replace(weight.spec, block=(1, 0))
            weight = weight.replace(spec=spec, scale=weight.scale.expand(spec.scale_shape(weight.shape)).contiguous())
        *leading, rows, columns = weight.scale.shape
        shape = (*leading, rows, 1, columns, 1) if weight.spec.block[1] else (*leading, rows)
        return fp8.encode(name, weight, (), shape)

    def fp8_name(self, entry: Entry) -> str | None:
        return None if entry.fp8 is None else fp8.algorithm_of(entry.fp8, entry.has_input_scale)

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        if dense := [name for name, each in checkpoint.entries.items() if each.fp8 == FP8Spec()]:
            warn_user(
                f"{some(dense)} in FP8 keep activations dense, and vLLM needs an input scale beside ModelOpt's FP8: "
                "convert to compressed-tensors to serve the model",
            )

    def write(self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, **options: Any) -> None:
        super(ModelOpt, format_for(checkpoint.config)).write(checkpoint, path, progress=progress, **options)

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return config.json's quantization_config."""
        quantization = quantization_of(checkpoint)
        groups: dict[str, list[str]] = {}
        for module, layer in quantization.get("quantized_layers", {}).items():
            groups.setdefault(layer["quant_algo"], []).append(module)
        if not groups:
            groups = {quantization["quant_algo"]: ["Linear"]}
        return {
            # diffusers reads "modelopt" by NVIDIA's library
            "quant_method": "modelopt_nvfp4" if "_class_name" in checkpoint.config else "modelopt",
            **quantization,
            **({"kv_cache_scheme": FP8_CACHE if is_fp8_cache(cache) else cache} if (cache := checkpoint.cache) else {}),
            "ignore": dense_linears(checkpoint),
            "config_groups": {
                f"group_{i}": _group(algorithm, sorted(targets))
                for i, (algorithm, targets) in enumerate(groups.items())
            },
            "producer": dict(PRODUCER),
        }

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        return {HF_QUANT_CONFIG: hf_quant_config(checkpoint)}


FORMAT = ModelOpt()


def format_for(config: Mapping[str, Any]) -> ModelOpt:
    """Return the format that writes a model with this config.json, with experts as ModelOpt stores them."""
    return ModelOpt(config.get("model_type") in TRANSPOSED_EXPERTS)


def _are_transposed(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Return whether codes are (E, K / 2, N) instead of (E, N, K / 2), from the shape of their block scales."""
    return len(weight) == len(scale) == 3 and weight[2] == scale[2] and weight[1] * 2 == scale[1] * BLOCK


def _checked(folder: Path, flat: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration if all its layers are NVFP4 or FP8, with the names of algorithms in capitals."""
    algorithm = _upper(flat)
    layers = {name: {**each, "quant_algo": _upper(each)} for name, each in (flat.get("quantized_layers") or {}).items()}
    known = (*ALGORITHMS, *fp8.ALGORITHMS)
    if algorithm == "MIXED_PRECISION":
        kinds = {name: layer["quant_algo"] for name, layer in layers.items()}
        if others := [f"{name} ({kind})" for name, kind in kinds.items() if kind not in known]:
            raise ValueError(
                f"{folder}: expected layers of {' or '.join(known)} in MIXED_PRECISION, found {some(others)}"
            )
    elif algorithm not in known:
        raise ValueError(
            f"{folder}: expected ModelOpt's quant_algo {', '.join(known)} or MIXED_PRECISION, found "
            f"{flat.get('quant_algo')}"
        )
    of_nvfp4 = [layer for layer in layers.values() if layer["quant_algo"] in ALGORITHMS]
    sizes = {each.get("group_size") for each in ([flat] if algorithm in ALGORITHMS else []) + of_nvfp4} - {None}
    if sizes - {BLOCK}:
        raise ValueError(f"{folder}: expected group_size {BLOCK}, found {sorted(sizes)}")
    return {**flat, "quant_algo": algorithm, "quantized_layers": layers}


def _upper(layer: Mapping[str, Any]) -> str:
    return str(layer.get("quant_algo")).upper()


def _algorithm_of(checkpoint: FolderCheckpoint, name: str) -> str | None:
    """Return the algorithm of a weight, which the configuration may have for a module around it."""
    if not checkpoint.is_described:
        return AWQ
    algorithm: str = checkpoint.quantization["quant_algo"]
    layers, module = checkpoint.quantization["quantized_layers"], name.removesuffix(".weight")
    if algorithm != "MIXED_PRECISION":
        return algorithm
    while module and module not in layers:
        module = module.rpartition(".")[0]
    return layers[module]["quant_algo"] if module else None


def _quantizes_activations(checkpoint: FolderCheckpoint, name: str) -> bool:
    algorithm = _algorithm_of(checkpoint, name)
    if algorithm is None:
        raise ValueError(
            f"{checkpoint.path}: tensor {name} is NVFP4 (uint8, with weight_scale), but is not in quantized_layers "
            "of the MIXED_PRECISION configuration"
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{checkpoint.path}: tensor {name} is NVFP4 (uint8), and {algorithm} in the configuration")
    groups = (checkpoint.quantization.get("config_groups") or {}).values()
    groups = [group for group in groups if (group.get("weights") or {}).get("num_bits", 4) == 4]
    # NVFP4 without a group that quantizes activations is weight-only, for servers too.
    if algorithm == "NVFP4" and groups and not any(group.get("input_activations") for group in groups):
        return False
    return ALGORITHMS[algorithm] and (algorithm != AWQ or keys_of(name)["input_scale"] in checkpoint.shards.info)


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return quant_algo, group_size and, if linears differ, quantized_layers."""
    entries = {name.removesuffix(".weight"): entry for name, entry in checkpoint.entries.items() if entry.is_coded}
    usual = {name: "NVFP4" if entry.quantizes_activations else "W4A16_NVFP4" for name, entry in entries.items()}
    algorithms = {name: str(FORMAT.fp8_name(entry) or usual[name]) for name, entry in entries.items()}
    if any(has_pre_scale(name, checkpoint.entries) for name in checkpoint.entries):
        algorithms = {name: AWQ if each in ALGORITHMS else each for name, each in algorithms.items()}
    sizes = {each: {"group_size": BLOCK} | (AWQ_SETTINGS if each == AWQ else {}) for each in ALGORITHMS}
    layers = {name: sizes.get(each, {}) | {"quant_algo": each} for name, each in algorithms.items()}
    found = list(layers.values()) or [{"quant_algo": "W4A16_NVFP4", "group_size": BLOCK}]
    if all(each == found[0] for each in found):
        return found[0]
    return {"quant_algo": "MIXED_PRECISION", "group_size": BLOCK, "quantized_layers": layers}


def hf_quant_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return hf_quant_config.json. Servers need group_size, kv_cache_quant_algo and exclude_modules."""
    cache = "FP8" if is_fp8_cache(checkpoint.cache) else checkpoint.cache
    quantization = {**quantization_of(checkpoint), "kv_cache_quant_algo": cache if isinstance(cache, str) else None}
    return {"producer": dict(PRODUCER), "quantization": {**quantization, "exclude_modules": dense_linears(checkpoint)}}


def _group(algorithm: str, targets: list[str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    if algorithm in ALGORITHMS:
        activations = {"input_activations": dict(arguments)} if ALGORITHMS[algorithm] else {}
        return {**activations, "weights": arguments, "targets": targets}
    arguments, spec = {"dynamic": False, "num_bits": 8, "type": "float"}, fp8.ALGORITHMS[algorithm]
    activations = {"input_activations": dict(arguments)} if spec.activations else {}
    strategies = {(0, 0): {}, (1, 0): {"strategy": "channel"}}
    block = strategies.get(spec.block, {"strategy": "block", "block_structure": list(spec.block)})
    return {**activations, "weights": {**arguments, **block}, "targets": targets}
