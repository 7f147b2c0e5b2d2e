"""torchao's NVFP4Tensor in safetensors, as torchao and transformers' ``TorchAoConfig`` write it.

The weight of module ``m`` is stored as ``m._weight_qdata`` (uint8 (N, K / 2), the even element in the low nibble),
``m._weight_scale`` (float8_e4m3fn, swizzled 128x4 or in order), ``m._weight_per_tensor_scale`` (float32 0-d, or
(E, 1, 1)) and ``m._weight_act_per_tensor_scale`` (float32 0-d, static W4A4). The metadata of every file's header has
the class and attributes of all tensors as JSON, and their names as ``tensor_names``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat, check_writable
from nvfp4_tensor.checkpoints.io.safetensors import Shards, parse_json, read_json
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization.names import natural, some

_CLASS, _DENSE = "NVFP4Tensor", "Tensor"
_PARTS = ("qdata", "scale", "per_tensor_scale", "act_per_tensor_scale")


def key_of(name: str, part: str) -> str:
    """Return the name of a stored tensor: "m._weight_qdata" for "m.weight" and "qdata"."""
    module, _, attribute = name.rpartition(".")
    return f"{module}._{attribute}_{part}"


class TorchAO(SafetensorsFormat):
    """torchao's format."""

    name = "torchao"

    def detect(self, path: Path) -> bool:
        try:
            if path.is_dir() and (path / "config.json").exists():
                return _method(read_json(path / "config.json")) == "torchao"
            return any(fields.get("_type") == _CLASS for fields in _described(Shards(path).metadata).values())
        except (ValueError, OSError):
            return False

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        method = _method(config)
        if method not in (None, "torchao"):
            raise ValueError(f"{folder / 'config.json'}: expected quant_method torchao, found {method}")
        found = config.get("quantization_config")
        return found if isinstance(found, dict) else {}

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        info = checkpoint.shards.info
        described = _described(checkpoint.shards.metadata)
        others = [f"{name} ({d.get('_type')})" for name, d in described.items() if d["_type"] not in (_CLASS, _DENSE)]
        if others:
            raise ValueError(f"{checkpoint.path}: expected tensors of torchao's NVFP4Tensor, found {some(others)}")
        entries = {
            name: _linear_entry(checkpoint, name, fields)
            for name, fields in described.items()
            if fields["_type"] == _CLASS
        }
        parts = {key_of(name, part) for name in entries for part in _PARTS}
        for name in info:
            if name not in parts:
                entries[name] = Entry(shape=info[name].shape, dtype=info[name].dtype, shard=info[name].file.name)
        if lost := [name for name in described if name not in entries]:
            raise ValueError(f"{checkpoint.path}: the headers describe {some(lost)}, but no file has them")
        return entries

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        *leading, columns = entry.shape
        blocks = columns // BLOCK
        scale = tensors[key_of(name, "scale")]
        if scale.shape != (*leading, blocks):  # swizzled; the shapes always differ
            rows = torch.Size(leading).numel()
            scale = layout.unswizzle(scale.reshape(*layout.scale_tiles(rows, columns), 32, 16), rows, blocks)
        per_tensor_scale = tensors.get(key_of(name, "per_tensor_scale"))
        return LinearParts(
            qdata=tensors[key_of(name, "qdata")],
            scale=scale.reshape(*leading, blocks),
            per_tensor_scale=torch.ones((), dtype=torch.float32)
            if per_tensor_scale is None
            else per_tensor_scale.reshape(entry.scales),
            columns=columns,
            quantizes_activations=entry.quantizes_activations,
            input_scale=tensors[key_of(name, "act_per_tensor_scale")].reshape(()) if entry.has_input_scale else None,
        )

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        *leading, columns = entry.shape
        swizzled = layout.swizzle(parts.scale.reshape(-1, columns // BLOCK))
        tensors = {
            key_of(name, "qdata"): parts.qdata,
            key_of(name, "scale"): swizzled.reshape(_swizzled_shape(leading, columns)),
            key_of(name, "per_tensor_scale"): parts.per_tensor_scale.reshape(
                (*entry.scales, 1) if entry.scales else ()
            ),
        }
        if parts.input_scale is not None:
            tensors[key_of(name, "act_per_tensor_scale")] = parts.input_scale
        return tensors

    def check(self, checkpoint: Checkpoint) -> None:
        check_writable(checkpoint, self.name)
        odd = [n for n, e in checkpoint.entries.items() if e.quantized and len(e.shape) > 2 and e.shape[-2] % 128]
        if odd:
            raise ValueError(f"torchao's swizzled experts need rows in multiples of 128, unlike {some(odd)}")
        if bare := [n for n, e in checkpoint.entries.items() if e.quantized and "." not in n]:
            raise ValueError(f"torchao's keys need a module's name before the parameter's, unlike {some(bare)}")

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


def _method(config: Mapping[str, Any]) -> object:
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None


def _described(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the description of each tensor in the headers; {} if they have no torchao metadata."""
    try:
        names = parse_json(metadata.get("tensor_names", "[]"))
        described = {name: parse_json(metadata[name]) for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"torchao's metadata in the headers is invalid: {error}") from None
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


def _linear_entry(checkpoint: FolderCheckpoint, name: str, fields: Mapping[str, Any]) -> Entry:
    """Return the entry of an NVFP4 weight, and check its tensors against the header."""
    info, qdata, attributes = checkpoint.shards.info, key_of(name, "qdata"), fields["_data"]
    if qdata not in info or info[qdata].dtype != torch.uint8 or len(info[qdata].shape) < 2:
        found = info.get(qdata, "none")
        raise ValueError(f"{checkpoint.path}: tensor {qdata}: expected uint8 (N, K / 2), found {found}")
    listed, stored = fields["_tensor_data_names"], [part for part in _PARTS if key_of(name, part) in info]
    if sorted(listed) != sorted(stored):
        raise ValueError(f"{checkpoint.path}: {name}: the header lists {listed}, found {stored}")
    if attributes.get("block_size") != BLOCK:
        raise ValueError(
            f"{checkpoint.path}: {name}: expected block_size {BLOCK}, found {attributes.get('block_size')}"
        )
    *leading, half = info[qdata].shape
    dtype = getattr(torch, str((attributes.get("orig_dtype") or {}).get("_data")), None)
    if dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"{checkpoint.path}: {name}: expected an orig_dtype, found {attributes.get('orig_dtype')}")
    swizzled = _swizzled_shape(leading, half * 2) if attributes.get("is_swizzled_scales") else (*leading, half // 8)
    checkpoint.expect(key_of(name, "scale"), torch.float8_e4m3fn, swizzled, qdata)
    activations = attributes.get("act_quant_kwargs") is not None
    has_input_scale = activations and "act_per_tensor_scale" in stored
    if has_input_scale:
        checkpoint.expect(key_of(name, "act_per_tensor_scale"), torch.float32, (), qdata)
    scales: tuple[int, ...] = ()
    if (scale := info.get(key_of(name, "per_tensor_scale"))) is not None:
        scales = (leading[0], 1) if len(leading) == 2 and scale.shape else ()
        checkpoint.expect(key_of(name, "per_tensor_scale"), torch.float32, (*scales, 1) if scales else (), qdata)
    return Entry(
        shape=(*leading, half * 2),
        dtype=dtype,
        quantized=True,
        quantizes_activations=activations,
        has_input_scale=has_input_scale,
        scales=scales,
        shard=info[qdata].file.name,
    )


def _swizzled_shape(leading: Sequence[int], columns: int) -> tuple[int, ...]:
    """Return the shape of swizzled scales (*leading, N, columns / 16). Those of experts are separate."""
    *experts, rows = leading
    row_tiles, column_tiles = layout.scale_tiles(rows, columns)
    return (*experts, row_tiles * 32, column_tiles * 16)
