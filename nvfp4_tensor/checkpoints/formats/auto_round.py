"""AutoRound's folders of NVFP4 and MXFP4, which have compressed-tensors' tensors and settings of their own. Read-only.

config.json's ``quantization_config`` has the settings of all linears, and in ``extra_config`` those of some, by names
or regular expressions: ``data_type`` "nv_fp" or "mx_fp", ``bits``, ``group_size``, and the same of activations
(``act_bits``). Linears without ``weight_packed`` are dense. AutoRound's export to compressed-tensors is that format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_tensor.checkpoints.formats.compressed_tensors import CompressedTensors, packed_weights
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.formats.table import Scheme
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import is_matched

PACKING = "auto_round:llm_compressor"
GROUPS = {"nv_fp": BLOCK, "mx_fp": MX_BLOCK}
"""The data types that are supported, and the number of elements of a block."""


class AutoRound(CompressedTensors):
    """AutoRound's format."""

    name = "auto-round"
    config_keys = ("quantization_config",)
    unwritable = "AutoRound's folders are only read: choose compressed-tensors, which has the same tensors"

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        found = super(CompressedTensors, self).quantization(folder, config)
        if found.get("packing_format", PACKING) != PACKING:
            packing = f"{found['packing_format']} ({found.get('bits')}-bit {found.get('data_type')})"
            raise ValueError(f"{folder / 'config.json'}: expected packing_format {PACKING}, found {packing}")
        return found

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        return {name: _scheme(checkpoint, name) for name in packed_weights(checkpoint)}


FORMAT = AutoRound()


def is_fp4(config: Mapping[str, Any]) -> bool:
    """Return whether a quantization_config is of AutoRound's NVFP4 or MXFP4, of which this module reads folders."""
    return config.get("packing_format") == PACKING and config.get("data_type") in GROUPS and config.get("bits") == 4


def _scheme(checkpoint: FolderCheckpoint, name: str) -> Scheme:
    module, settings = name.removesuffix(".weight"), dict(checkpoint.quantization)
    for pattern, own in (settings.pop("extra_config", None) or {}).items():
        if pattern == module or is_matched(module, [f"re:(?:{pattern})$"]):
            settings |= own
    where, kind = f"{checkpoint.path}: tensor {module}.weight_packed", str(settings.get("data_type"))
    group = GROUPS.get(kind, 0)
    if not group or settings.get("bits") != 4 or settings.get("group_size") != group:
        found = f"{settings.get('bits')}-bit {kind} of group_size {settings.get('group_size')}"
        wanted = f"4-bit nv_fp of group_size {BLOCK} or mx_fp of {MX_BLOCK}"
        raise ValueError(f"{where}: expected {wanted}, found {found}")
    bits, activations = settings.get("act_bits", 16), str(settings.get("act_data_type"))
    quantizes = bits <= 8
    if quantizes and (bits != 4 or not activations.startswith(kind)):
        raise ValueError(f"{where}: expected activations of 4-bit {kind} or none, found {bits}-bit {activations}")
    static = quantizes and group == BLOCK
    return Scheme(
        activations=static,
        static=static,
        scaled=group == BLOCK,
        group=group,
        loses_activations=quantizes and group == MX_BLOCK,
    )
