"""Folders of safetensors that are not quantized."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat
from nvfp4_tensor.checkpoints.io.safetensors import Shards
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.quantization.names import some


class Dense(SafetensorsFormat):
    """A folder of safetensors that are not quantized."""

    name = "dense"

    def detect(self, path: Path) -> bool:
        return any(path.glob("*.safetensors")) if path.is_dir() else path.suffix == ".safetensors"

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        found = _quantization_config(config)
        if found is not None:
            method = found.get("quant_method") if isinstance(found, dict) else found
            raise ValueError(
                f"{folder / 'config.json'}: expected a dense model, found one quantized by {method}: "
                "pass the folder itself, not a file in it, and use checkpoints.convert for a quantized model"
            )
        return {}

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        return entries_of(checkpoint.shards)

    def check(self, checkpoint: Checkpoint) -> None:
        quantized = [name for name, entry in checkpoint.entries.items() if entry.quantized]
        if quantized:
            raise ValueError(f"the format dense has no NVFP4, but {some(quantized)} are NVFP4: choose another format")

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        raise AssertionError(name)

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        raise AssertionError(name)

    def config_of(self, checkpoint: Checkpoint) -> None:
        return None


FORMAT = Dense()


def entries_of(shards: Shards) -> dict[str, Entry]:
    """Return the entries of tensors that are all dense."""
    return {name: Entry(shape=info.shape, dtype=info.dtype, shard=info.file.name) for name, info in shards.info.items()}


def _quantization_config(config: dict[str, Any]) -> Any:
    """Return the quantization_config of config.json, or of a model in it, such as ``text_config``."""
    inner = [value for value in config.values() if isinstance(value, dict)]
    found = [each["quantization_config"] for each in (config, *inner) if each.get("quantization_config") is not None]
    return found[0] if found else None
