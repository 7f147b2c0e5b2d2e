"""Folders of safetensors that are not quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.formats.table import Layout, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint


class Dense(TableFormat):
    """A folder of safetensors that are not quantized."""

    name = "dense"
    layout = Layout(keys={})

    def detect(self, path: Path) -> bool:
        return any(path.glob("*.safetensors")) if path.is_dir() else path.suffix == ".safetensors"

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        inner = [value for value in config.values() if isinstance(value, dict)]  # such as text_config
        for found in (each.get("quantization_config") for each in (config, *inner)):
            if found is not None:
                method = found.get("quant_method") if isinstance(found, dict) else found
                raise ValueError(
                    f"{folder / 'config.json'}: expected a dense model, found one quantized by {method}: "
                    "checkpoints.quantize reads some of these, and `nvfp4 inspect` tells which; pass the folder of an "
                    "NVFP4 model, not a file in it"
                )
        return {}

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        return {}


FORMAT = Dense()
