"""torchao's NVFP4Tensor in safetensors, as torchao and transformers' ``TorchAoConfig`` write it.

The weight of module ``m`` is stored as ``m._weight_qdata`` (uint8 (N, K / 2), the even element in the low nibble),
``m._weight_scale`` (float8_e4m3fn, swizzled 128x4 or in order), ``m._weight_per_tensor_scale`` (float32 0-d, or
(E, 1, 1)) and ``m._weight_act_per_tensor_scale`` (float32 0-d, static W4A4). The metadata of every file's header has
the class and attributes of all tensors as JSON, and their names as ``tensor_names``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.table import Layout, Scheme, TableFormat, method_of
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.io.safetensors import Shards, parse_json, read_json
from nvfp4_tensor.checkpoints.names import warn_of_activations
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, TILE_ROWS, scale_tiles
from nvfp4_tensor.quantization.names import natural, some

_CLASS, _DENSE = "NVFP4Tensor", "Tensor"


def _swizzled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of swizzled scales. Those of experts are separate."""
    row_tiles, column_tiles = scale_tiles(*shape[-2:])
    return (*shape[:-2], row_tiles * 32, column_tiles * 16)


class TorchAO(TableFormat):
    """torchao's format."""

    name = "torchao"
    layout = Layout(
        keys={
            "qdata": "{module}._{attribute}_qdata",
            "scale": "{module}._{attribute}_scale",
            "per_tensor_scale": "{module}._{attribute}_per_tensor_scale",
            "input_scale": "{module}._{attribute}_act_per_tensor_scale",
        },
        experts=(1, 1),
        swizzled=_swizzled_shape,
        names=r".*\..*",
    )

    def detect(self, path: Path) -> bool:
        try:
            if path.is_dir() and (path / "config.json").exists():
                return method_of(read_json(path / "config.json")) == self.name
            return any(fields.get("_type") == _CLASS for fields in described(Shards(path)).values())
        except (ValueError, OSError):
            return False

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        if method_of(config) not in (None, self.name):
            raise ValueError(f"{folder / 'config.json'}: expected quant_method torchao, found {method_of(config)}")
        return {}

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        tensors = described(checkpoint.shards)
        others = [f"{name} ({d.get('_type')})" for name, d in tensors.items() if d["_type"] not in (_CLASS, _DENSE)]
        if others:
            raise ValueError(f"{checkpoint.path}: expected tensors of torchao's NVFP4Tensor, found {some(others)}")
        lost = [n for n, d in tensors.items() if d["_type"] == _DENSE and n not in checkpoint.shards.info]
        if lost:
            raise ValueError(f"{checkpoint.path}: the headers describe {some(lost)}, but no file has them")
        weights = {name: fields for name, fields in tensors.items() if fields["_type"] == _CLASS}
        return {name: self._scheme(checkpoint, name, fields) for name, fields in weights.items()}

    def _scheme(self, checkpoint: FolderCheckpoint, name: str, fields: Mapping[str, Any]) -> Scheme:
        """Return what the header says of a weight, and check that it lists the tensors that there are."""
        info, keys, attributes = checkpoint.shards.info, self.layout.keys_of(name), fields["_data"]
        start = len(keys["qdata"]) - len("qdata")
        listed, stored = fields["_tensor_data_names"], [key[start:] for key in keys.values() if key in info]
        if keys["qdata"] in info and sorted(listed) != sorted(stored):
            raise ValueError(f"{checkpoint.path}: {name}: the header lists {listed}, found {stored}")
        if attributes.get("block_size") != BLOCK:
            found = attributes.get("block_size")
            raise ValueError(f"{checkpoint.path}: {name}: expected block_size {BLOCK}, found {found}")
        dtype = getattr(torch, str((attributes.get("orig_dtype") or {}).get("_data")), None)
        if dtype not in HIGH_PRECISION_DTYPES:
            raise ValueError(f"{checkpoint.path}: {name}: expected an orig_dtype, found {attributes.get('orig_dtype')}")
        return Scheme(
            activations=attributes.get("act_quant_kwargs") is not None,
            scaled=False,
            dtype=dtype,
            swizzled=bool(attributes.get("is_swizzled_scales")),
        )

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        warn_of_activations(checkpoint.entries)
        odd = [n for n, e in checkpoint.entries.items() if e.quantized and len(e.shape) > 2 and e.shape[-2] % TILE_ROWS]
        if odd:
            raise ValueError(f"torchao's swizzled experts need rows in multiples of {TILE_ROWS}, unlike {some(odd)}")
        experts = [name for name, e in checkpoint.entries.items() if e.quantized and ".experts." in name]
        if experts and checkpoint.config:
            warn_user(
                f"by TorchAoConfig, transformers gives {some(experts)} random values: load them by checkpoints.load, "
                "or choose modelopt"
            )

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        names = sorted(checkpoint.entries, key=natural)
        described = {name: json.dumps(_description(checkpoint.entries[name])) for name in names}
        return {"format": "pt", **described, "tensor_names": json.dumps(names)}

    def config_of(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return quantization_config as transformers' TorchAoConfig writes it, which applies to dense weights."""
        w4a4 = any(entry.quantizes_activations for entry in checkpoint.entries.values())
        name = "NVFP4DynamicActivationNVFP4WeightConfig" if w4a4 else "NVFP4WeightOnlyConfig"
        data = {"use_dynamic_per_tensor_scale": True, **({"use_triton_kernel": False} if w4a4 else {})}
        return {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": name, "_version": 1, "_data": data}},
            "modules_to_not_convert": None,
            "include_input_output_embeddings": False,
            "untie_embedding_weights": False,
        }


FORMAT = TorchAO()


def described(shards: Shards) -> dict[str, dict[str, Any]]:
    """Return the description of each tensor in the headers; {} if they have no torchao metadata."""
    metadata = shards.metadata
    try:
        names = parse_json(metadata.get("tensor_names", "[]"))
        described = {name: parse_json(metadata[name]) for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{shards.path}: torchao's metadata in the headers is invalid: {error!r}") from None
    return {name: fields for name, fields in described.items() if isinstance(fields, dict) and "_type" in fields}


def _description(entry: Entry) -> dict[str, Any]:
    """Return the description of a tensor, as torchao writes it."""
    if not entry.quantized:
        return {"_type": _DENSE}
    activation = None
    if entry.quantizes_activations:
        settings = {
            "block_size": BLOCK, "is_swizzled_scales": True, "use_triton_kernel": False,
            "use_dynamic_per_tensor_scale": not entry.has_input_scale,
        }  # fmt: skip
        activation = {"_type": "QuantizeTensorToNVFP4Kwargs", "_data": settings}
    attributes = {
        "is_swizzled_scales": True,
        "use_triton_kernel": False,
        "act_quant_kwargs": activation,
        "block_size": BLOCK,
        "orig_dtype": {"_type": "torch.dtype", "_data": str(entry.dtype).removeprefix("torch.")},
    }
    static = ["act_per_tensor_scale"] if entry.has_input_scale else []
    return {"_type": _CLASS, "_data": attributes, "_tensor_data_names": ["per_tensor_scale", *static, "qdata", "scale"]}
