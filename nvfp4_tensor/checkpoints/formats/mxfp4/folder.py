"""gpt-oss folders with MXFP4 experts. They are read as NVFP4 with the same values, and cannot be written.

``experts.down_proj`` is stored as ``experts.down_proj_blocks``, uint8 (E, N, K/32, 16), and
``experts.down_proj_scales``, uint8 (E, N, K/32). The parameter is (E, N, K), with one per-tensor scale per expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK, parts_of_mxfp4
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat, config_has
from nvfp4_tensor.checkpoints.parts import LinearParts

_BLOCKS, _SCALES = "_blocks", "_scales"


class MXFP4(SafetensorsFormat):
    """gpt-oss's format, read-only."""

    name = "mxfp4"

    def detect(self, path: Path) -> bool:
        return config_has(path, lambda config: _method(config) == self.name)

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        if _method(config) != self.name:
            raise ValueError(f"{folder / 'config.json'}: expected quant_method mxfp4, found {_method(config)}")
        return dict(config["quantization_config"])

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        info, entries = checkpoint.shards.info, {}
        names = [name.removesuffix(_BLOCKS) for name in info if name.endswith(_BLOCKS)]
        parts = {name + part for name in names for part in (_BLOCKS, _SCALES)}
        for name in names:
            blocks = info[name + _BLOCKS]
            *leading, groups, half = blocks.shape
            if len(leading) not in (1, 2) or half != MX_BLOCK // 2 or blocks.dtype != torch.uint8:
                wanted = "uint8 (N, K/32, 16) or (E, N, K/32, 16)"
                raise ValueError(f"{blocks.file}: tensor {name}{_BLOCKS}: expected {wanted}, found {blocks}")
            checkpoint.expect(name + _SCALES, torch.uint8, (*leading, groups), name + _BLOCKS)
            entries[name] = Entry(
                shape=(*leading, groups * MX_BLOCK),
                dtype=checkpoint.dtype(),
                quantized=True,
                scales=(leading[0], 1) if len(leading) == 2 else (),
                shard=blocks.file.name,
            )
        dense = {name: each for name, each in info.items() if name not in parts}
        return entries | {n: Entry(shape=e.shape, dtype=e.dtype, shard=e.file.name) for n, e in dense.items()}

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        return parts_of_mxfp4(tensors[name + _BLOCKS], tensors[name + _SCALES])

    def write(self, checkpoint: Checkpoint, path: Path, *, progress: bool = True, **options: Any) -> NoReturn:
        """Raise a ValueError, because the scales of NVFP4 are not powers of two."""
        raise ValueError(
            "MXFP4 cannot be written, because the scales of NVFP4 are not powers of two: choose another format"
        )

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        raise AssertionError(name)

    def config_of(self, checkpoint: Checkpoint) -> None:
        return None


FORMAT = MXFP4()


def _method(config: Mapping[str, Any]) -> object:
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None
