"""Folders of published checkpoints with FP8 beside NVFP4.

Their tensors are compressed by the package compressed-tensors, or laid out from ModelOpt's quant_utils.py and
convert_hf_config.py. Our converter has no part in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.layouts import as_modelopt, group_amax, nvfp4, write_folder

STATIC = 0.02
"""The input scale of layers with static activations."""
NVFP4_GROUP = {
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"},
    "input_activations": None, "format": "nvfp4-pack-quantized",
}  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """How the attention of a model is stored beside its MLP in NVFP4.

    Attributes:
        format: what ``detect`` calls it.
        strategy: of the scales of FP8 weights.
        activations: of compressed-tensors, None for none.
        algorithm: ModelOpt's.
        wide: whether ModelOpt's block scales are (rows, 1, columns, 1).
        to: the other format, if it has a name for it.
    """

    format: str
    strategy: str
    activations: Mapping[str, Any] | None = None
    algorithm: str = ""
    wide: bool = False
    to: bool = True

    @property
    def static(self) -> bool:
        return self.algorithm == "FP8" or (self.activations is not None and not self.activations["dynamic"])

    def weights(self) -> dict[str, Any]:
        block = {"block_structure": [128, 128]} if self.strategy == "block" else {}
        return {"num_bits": 8, "type": "float", "strategy": self.strategy, "symmetric": True, "dynamic": False, **block}

    def scale(self, weight: Tensor) -> Tensor:
        """Return the scales by which llm-compressor and ModelOpt divide: the largest magnitude / 448."""
        w = weight.float().abs()
        if self.strategy == "tensor":
            return (w.amax() / 448).reshape(1)
        if self.strategy == "channel":
            return w.amax(1, keepdim=True) / 448
        rows, columns = (-size % 128 for size in w.shape)
        blocks = torch.nn.functional.pad(w, (0, columns, 0, rows)).unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        return blocks.amax((1, 3)) / 448

    def compress(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a weight (N, K) in FP8."""
        scale = self.scale(weight)
        if self.format == "compressed-tensors":
            from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor
            from compressed_tensors.quantization import QuantizationScheme

            scheme = QuantizationScheme(targets=["Linear"], weights=self.weights())
            scale = scale.to(weight.dtype)
            parts = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
            return {**parts, **({"input_scale": torch.tensor([STATIC], dtype=weight.dtype)} if self.static else {})}
        codes = (weight.float() / spread(scale, weight.shape)).to(torch.float8_e4m3fn)
        shape = {"tensor": (), "channel": (len(weight),)}.get(self.strategy, scale.shape)
        shape = (scale.shape[0], 1, scale.shape[1], 1) if self.wide else shape
        static = {"input_scale": torch.tensor(STATIC)} if self.static else {}
        return {"weight": codes, "weight_scale": scale.reshape(shape), **static}

    def config(self, in_fp8: list[str], in_nvfp4: list[str], where: str) -> dict[str, Any]:
        if self.format == "modelopt":
            fp8, w4a16 = {"quant_algo": self.algorithm}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
            layers = {**{module: fp8 for module in in_fp8}, **{module: w4a16 for module in in_nvfp4}}
            return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        fp8 = {"weights": self.weights(), "input_activations": self.activations, "format": "float-quantized"}
        groups = {
            "group_0": {**fp8, "targets": [f"re:.*{where}.*"]},
            "group_1": {**NVFP4_GROUP, "targets": [f"re:(?!.*{where}).*_proj"]},
        }
        return {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups,
                "quantization_status": "compressed", "ignore": ["lm_head"]}  # fmt: skip

    def write(
        self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], where: str = "self_attn"
    ) -> dict[str, Tensor]:
        """Write a folder of these dense tensors, and return the values of FP8 weights, float32, by name.

        where: part of the names of the linears that are FP8.
        """
        found, values, modules = {}, {}, {"fp8": [], "nvfp4": []}
        for name, weight in tensors.items():
            module = name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            if not last.endswith("_proj") or "_proj.weight" not in name:
                found[name] = weight
                continue
            if where in name:
                parts = self.compress(weight)
                if "input_scale" in parts:  # another one for each of q, k and v
                    parts["input_scale"] = parts["input_scale"] * (1 + "qkvo".find(last[0]) % 4)
                values[name] = parts["weight"].float() * spread(parts["weight_scale"].float(), weight.shape)
                modules["fp8"].append(module)
            else:
                parts = nvfp4(weight.float(), group_amax(tensors, name))
                parts = {key: value for key, value in parts.items() if value is not None}
                parts = as_modelopt(parts) if self.format == "modelopt" else parts
                modules["nvfp4"].append(module)
            found |= {f"{module}.{key}": value for key, value in parts.items()}
        settings = self.config(modules["fp8"], modules["nvfp4"], where)
        write_folder(folder, {**config, "quantization_config": settings}, found)
        return values


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return each element's scale."""
    if scale.dim() < 2 and scale.numel() == shape[0]:
        scale = scale[:, None]
    scale = scale.reshape([size for i, size in enumerate(scale.shape) if scale.dim() < 3 or i in (0, 2)] or [1])
    if scale.numel() == 1 or scale.shape == (shape[0], 1):
        return scale
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def _args(strategy: str, dynamic: bool, **others: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": dynamic, **others}


CT, MODELOPT = "compressed-tensors", "modelopt"
LAYOUTS = {
    "ct, tensor, static": Mixed(CT, "tensor", _args("tensor", False)),
    "ct, tensor, dynamic": Mixed(CT, "tensor", _args("tensor", True), to=False),
    "ct, tensor, per token": Mixed(CT, "tensor", _args("token", True)),
    "ct, tensor, weights only": Mixed(CT, "tensor"),
    "ct, channel, per token": Mixed(CT, "channel", _args("token", True)),
    "ct, channel, weights only": Mixed(CT, "channel", to=False),
    "ct, block": Mixed(CT, "block", _args("group", True, group_size=128), to=False),
    "ct, block, weights only": Mixed(CT, "block"),
    "ModelOpt FP8": Mixed(MODELOPT, "tensor", algorithm="FP8"),
    "ModelOpt FP8_PER_CHANNEL_PER_TOKEN": Mixed(MODELOPT, "channel", algorithm="FP8_PER_CHANNEL_PER_TOKEN"),
    "ModelOpt FP8_PB_WO": Mixed(MODELOPT, "block", algorithm="FP8_PB_WO", wide=True),
    "ModelOpt fp8_pb_wo, a matrix": Mixed(MODELOPT, "block", algorithm="fp8_pb_wo"),
}


def rows() -> list[str]:
    """Return the rows of the guide's table, which test_fp8_layers.py tests."""
    algorithms = sorted({each.algorithm.upper() for each in LAYOUTS.values()} - {""})
    own = "; ".join(name.removeprefix("ct, ") for name, each in LAYOUTS.items() if not each.to)
    return [
        f"| NVFP4 with FP8: ModelOpt {', '.join(algorithms)}, compressed-tensors | `modelopt`, `compressed-tensors` | "
        "stays FP8 |",
        f"| with FP8 of compressed-tensors: {own} | `compressed-tensors` | |",
    ]
