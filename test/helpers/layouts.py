"""Small Llamas in the layouts of published checkpoints, and what each layout is read and written by.

Their tensors are compressed by the package compressed-tensors, or laid out from the writers' documents: AutoRound's
export_to_nvfp_mx.py, ModelOpt's quant_utils.py and convert_hf_config.py. Our converter has no part in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from helpers.checkpoints import TINY, tiny_tensors

SMALL = TINY | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 32}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
PRE_SCALED = ("o_proj", "down_proj")
"""The linears whose AWQ scales ModelOpt exports: those of the others are folded into norms."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def compressed_by(preset: str, format: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compress a weight (N, K) with its scales by the package compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    return BaseCompressor.get_value_from_registry(format).compress(state, preset_name_to_scheme(preset, ["Linear"]))


def nvfp4(weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
    """Compress a weight by the scales that llm-compressor and AutoRound compute."""
    divisor = (2688 / amax).reshape(1)
    scale = divisor * weight.unflatten(-1, (-1, 16)).abs().amax(-1) / 6
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn)  # beyond it torch 2.11 makes a NaN
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": divisor}
    return compressed_by("NVFP4A16", _NVFP4, state)


def group_amax(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Return the amax of the linears that share a per-tensor scale with this one."""
    prefix, _, last = name.removesuffix(".weight").rpartition(".")
    group = next(row for row in GROUPS if last in row)
    return torch.stack([tensors[f"{prefix}.{each}.weight"].abs().amax().float() for each in group]).amax()


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def mxfp4(weight: Tensor, amax: Tensor) -> dict[str, Tensor]:
    scale = torch.exp2(weight.unflatten(-1, (-1, 32)).abs().amax(-1).log2().floor() - 2)
    return compressed_by("MXFP4A16", _MXFP4, {"weight": weight, "weight_scale": scale})


def decoded(parts: dict[str, Tensor]) -> Tensor:
    """Decode packed tensors by the definition of their formats, float32 (N, K)."""
    codes = torch.stack([parts["weight_packed"] & 15, parts["weight_packed"] >> 4], -1).flatten(-2).long()
    scale = parts["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    values = E2M1[codes].unflatten(-1, (scale.shape[-1], -1)) * scale.float().unsqueeze(-1)
    return values.flatten(-2) / parts.get("weight_global_scale", torch.ones(1))


def as_modelopt(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors of compressed-tensors to ModelOpt's, whose scales are the inverse."""
    inverse = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
    found = {inverse[name]: parts[name].reciprocal()[0] for name in inverse if name in parts}
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"], **found}


Config = dict[str, Any]


def auto_round(kind: str, group: int, act: str | None) -> Config:
    """Return what AutoRound's filter_quantization_config leaves of a scheme."""
    static = {"act_bits": 4, "act_data_type": act, "act_dynamic": True, "act_group_size": group, "act_sym": True}
    return {
        "bits": 4, "data_type": kind, "group_size": group, "sym": True, **(static if act else {}),
        "autoround_version": "0.9.2", "block_name_to_quantize": "model.layers", "quant_method": "auto-round",
        "packing_format": "auto_round:llm_compressor", "iters": 0, "super_group_size": None,
        "extra_config": {"lm_head": {"bits": 16, "act_bits": 16}, ".*mlp\\.gate": {"bits": 16, "data_type": "fp"}},
    }  # fmt: skip


def compressed(preset: str, format: str, **others: Any) -> Config:
    """Return the quantization_config of a preset of compressed-tensors, which its package writes."""
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = format
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], format=format, **others,
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    return json.loads(json.dumps(config.to_dict(), default=str))


def modelopt(algorithm: str, **others: Any) -> Config:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": ["lm_head"], **others}


OPT_IN = ("compressed-tensors",)
"""Formats whose checkpoints from_pretrained gives to transformers' own reader by default."""
TARGETS = ("modelopt", "compressed-tensors", "torchao", "mlx", "gguf", "comfy")
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@dataclass(frozen=True)
class Published:
    """A layout of published checkpoints.

    Attributes:
        format: what ``detect`` calls it.
        config: its quantization_config.
        compress: from a weight and the amax of its group to packed tensors.
        static: whether linears have an input scale.
        awq: whether some linears have pre_quant_scale.
        cache: the names of the scales of an FP8 cache in a layer's attention.
        targets: formats that it is converted to; others refuse it by name.
        note: what the guide says of it.
    """

    format: str
    config: Callable[[], Config]
    compress: Callable[[Tensor, Tensor], dict[str, Tensor]] = nvfp4
    static: bool = False
    awq: bool = False
    cache: tuple[str, ...] = ()
    targets: tuple[str, ...] = TARGETS
    note: str = ""

    def write(self, folder: Path, model: Config = TINY, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Write a folder, and return the weights that its linears compute with, float32, by name."""
        dense = tiny_tensors(model) if tensors is None else dict(tensors)
        found, effective = {}, {}
        for name, weight in dense.items():
            module = name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            if not any(last in row for row in GROUPS):
                found[name] = weight
                continue
            generator = torch.Generator().manual_seed(len(found))
            scale = torch.rand(weight.shape[1], generator=generator).add(0.5).bfloat16()
            scaled = self.awq and last in PRE_SCALED
            columns = scale.float() if scaled else torch.ones(())
            parts = self.compress(weight.float() / columns, group_amax(dense, name))
            parts = {key: value for key, value in parts.items() if value is not None}
            effective[name] = decoded(parts) * columns
            if self.static:
                parts["input_global_scale"] = torch.tensor([2688 / 40.0])
            parts = as_modelopt(parts) if self.format == "modelopt" else parts
            found |= {f"{module}.{key}": value for key, value in parts.items()}
            if scaled:
                found[f"{module}.pre_quant_scale"] = scale
        for i in range(model["num_hidden_layers"]):
            for j, each in enumerate(self.cache):
                found[f"model.layers.{i}.self_attn.{each}"] = torch.tensor(0.25 + i + j)
        write_folder(folder, {**model, "dtype": "bfloat16", "quantization_config": self.config()}, found)
        return effective


_NVFP4, _MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
_AWQ = "inputs are multiplied by `pre_quant_scale`"
_CACHE = "scales kept by `modelopt`, `compressed-tensors`; unused here"
_MXFP4_NOTE = "becomes W4A16 NVFP4 with equal values"
LAYOUTS = {
    "ModelOpt NVFP4": Published("modelopt", lambda: modelopt("NVFP4"), static=True),
    "ModelOpt W4A16_NVFP4": Published("modelopt", lambda: modelopt("W4A16_NVFP4")),
    "ModelOpt NVFP4_AWQ": Published(
        "modelopt", lambda: modelopt("NVFP4_AWQ", has_zero_point=False, pre_quant_scale=True), static=True, awq=True,
        targets=("modelopt",), note=_AWQ,
    ),
    "ModelOpt NVFP4_AWQ W4A16": Published(
        "modelopt", lambda: modelopt("NVFP4_AWQ", has_zero_point=False, pre_quant_scale=True), awq=True,
        targets=("modelopt",), note=_AWQ,
    ),
    "ModelOpt FP8 cache": Published(
        "modelopt", lambda: modelopt("NVFP4", kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False}),
        static=True, cache=("k_proj.k_scale", "v_proj.v_scale"), note=_CACHE,
    ),
    "compressed-tensors NVFP4": Published("compressed-tensors", lambda: compressed("NVFP4", _NVFP4), static=True),
    "compressed-tensors NVFP4A16": Published("compressed-tensors", lambda: compressed("NVFP4A16", _NVFP4)),
    "compressed-tensors MXFP4": Published(
        "compressed-tensors", lambda: compressed("MXFP4A16", _MXFP4), mxfp4, note=_MXFP4_NOTE,
    ),
    "compressed-tensors FP8 cache": Published(
        "compressed-tensors", lambda: compressed("NVFP4", _NVFP4, kv_cache_scheme=FP8_CACHE), static=True,
        cache=("k_scale", "v_scale"), note=_CACHE,
    ),
    "AutoRound NVFP4": Published(
        "auto-round", lambda: auto_round("nv_fp", 16, "nv_fp4_with_static_gs"), static=True,
    ),
    "AutoRound NVFP4 W4A16": Published("auto-round", lambda: auto_round("nv_fp", 16, None)),
    "AutoRound MXFP4": Published(
        "auto-round", lambda: auto_round("mx_fp", 32, "mx_fp"), mxfp4,
        note=_MXFP4_NOTE,
    ),
}  # fmt: skip


def table() -> str:
    """Return the guide's table, whose cells test_layouts.py tests: names with equal cells are one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, each in LAYOUTS.items():
        targets = "all" if each.targets == TARGETS else ", ".join(f"`{target}`" for target in each.targets)
        names = rows.setdefault((targets, each.note), [])
        writer, kind = name.split(" ", 1)
        names.append(kind if names and names[-1].startswith(writer) else name)
    lines = ["| checkpoint | `convert` to | |", "| --- | --- | --- |"]
    lines += [f"| {', '.join(names)} | {targets} | {note} |" for (targets, note), names in rows.items()]
    return "\n".join(line.replace("|  |", "| |") for line in lines)
