"""Recognize NVFP4 weights without a configuration by the names and shapes of their tensors.

Such are single files that vendors publish for ComfyUI or from ModelOpt, and folders that lost their configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from nvfp4_tensor.checkpoints.io.safetensors import Shards, TensorInfo, read_json
from nvfp4_tensor.numerics.layout import BLOCK, TILE_COLUMNS, TILE_ROWS, ceil_to

_E4M3 = torch.float8_e4m3fn
HF_QUANT_CONFIG = "hf_quant_config.json"


def formats_of(info: Mapping[str, TensorInfo]) -> list[str]:
    """Return the formats whose names and shapes the NVFP4 weights of a checkpoint have: none, one, or both of two.

    ModelOpt and ComfyUI have the same names, and the same shapes if all sizes are multiples of 128 and 64.
    """
    if any(each.dtype == torch.uint8 and name.endswith(".weight_packed") for name, each in info.items()):
        return ["compressed-tensors"]
    pairs = [
        (codes.shape, info[f"{name}_scale"].shape)
        for name, codes in info.items()
        if name.endswith("weight")
        and codes.dtype == torch.uint8
        and len(codes.shape) == 2
        and f"{name}_scale_2" in info
        and f"{name}_scale" in info
        and info[f"{name}_scale"].dtype == _E4M3
    ]
    linear = all(scale == (rows, half * 2 / BLOCK) for (rows, half), scale in pairs)
    swizzled = all(
        scale == (ceil_to(rows, TILE_ROWS), ceil_to(math.ceil(half * 2 / BLOCK), TILE_COLUMNS))
        for (rows, half), scale in pairs
    )
    return [name for name, fits in (("modelopt", linear), ("comfy", swizzled)) if pairs and fits]


def unlabelled(path: Path, shards: Shards | None = None) -> list[str]:
    """Return what :func:`formats_of` says of a folder or file; [] if a configuration or ComfyUI's markers say what it
    is, or it is invalid."""
    folder = path if path.is_dir() else path.parent
    try:
        config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        inner = [value for value in config.values() if isinstance(value, dict)]  # such as text_config
        is_described = any(each.get("quantization_config") or each.get("quantization") for each in (config, *inner))
        if is_described or (folder / HF_QUANT_CONFIG).exists():
            return []
        shards = Shards(path) if shards is None else shards
        is_marked = "_quantization_metadata" in shards.metadata or any(n.endswith(".comfy_quant") for n in shards.info)
        return [] if is_marked else formats_of(shards.info)
    except (ValueError, OSError):
        return []
