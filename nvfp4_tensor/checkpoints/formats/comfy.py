"""ComfyUI's quantized files: one .safetensors file with a marker for every quantized layer.

====================  ====================================================================================
``weight``            uint8 (N, K / 2), both rounded up to multiples of 16, the even element in the **high** nibble
``weight_scale``      float8_e4m3fn, swizzled 128x4: rows rounded up to 128, columns to 4
``weight_scale_2``    float32 0-d, a factor
``input_scale``       float32 0-d, the activation's amax / 2688; optional
``comfy_quant``       the marker, JSON as uint8: ``{"format": "nvfp4"}``
====================  ====================================================================================

The header has the markers too, as ``_quantization_metadata``; some files have them only there. With
``full_precision_matrix_mult`` in a marker, activations are not quantized. ``shape`` is an addition of this package: the
shape of a weight that was padded. ComfyUI itself uses the shapes of its models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.table import Layout, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, warn_of_nan
from nvfp4_tensor.checkpoints.io.resumable_write import check_is_new, temporary
from nvfp4_tensor.checkpoints.io.safetensors import Shards, parse_json
from nvfp4_tensor.checkpoints.io.sidecar import check_sidecar, write_factors
from nvfp4_tensor.checkpoints.names import warn_of_missing_input_scales
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.checkpoints.wrappers import View, WeightOnly
from nvfp4_tensor.numerics.layout import BLOCK, TILE_COLUMNS, TILE_ROWS, ceil_to
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.fp8 import FP8Tensor

_HEADER, _MARKER = "_quantization_metadata", "comfy_quant"
_NVFP4, _FULL_PRECISION, _SHAPE = "nvfp4", "full_precision_matrix_mult", "shape"
_ROWS = 16


def _swizzled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return ceil_to(shape[0], TILE_ROWS), ceil_to(ceil_to(shape[1], BLOCK) // BLOCK, TILE_COLUMNS)


class ComfyUI(TableFormat):
    """ComfyUI's format."""

    name = "comfy"
    layout = Layout(
        keys={
            "qdata": "{name}",
            "scale": "{stem}weight_scale",
            "per_tensor_scale": "{stem}weight_scale_2",
            "input_scale": "{stem}input_scale",
            "marker": "{stem}comfy_quant",
        },
        swizzled=_swizzled_shape,
        row_multiple=_ROWS,
        swaps_nibbles=True,
        ranks=(2,),
        names=r".*\.weight",
    )
    is_file = True
    is_served = False
    reserved = (f".{_MARKER}", ".weight_scale_2")

    def detect(self, path: Path) -> bool:
        try:
            return path.is_file() and path.suffix == ".safetensors" and bool(_markers(Shards(path)))
        except (ValueError, OSError):
            return False

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        config.clear()  # a config.json in the same folder belongs to another model
        return {}

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        entries = super().entries(checkpoint)
        warn_of_missing_input_scales(checkpoint.path, entries)
        return entries

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        info, schemes = checkpoint.shards.info, {}
        markers = _markers(checkpoint.shards)
        if not (markers or checkpoint.is_described):
            layers = [name.removesuffix(".weight_scale_2") for name in info if name.endswith(".weight_scale_2")]
            markers = {each: {"format": _NVFP4, _FULL_PRECISION: f"{each}.input_scale" not in info} for each in layers}
        others = [
            f"{layer} ({marker.get('format')})"
            for layer, marker in markers.items()
            if marker.get("format") != _NVFP4 or marker.get("convrot")  # rotated
        ]
        if others:
            raise ValueError(f"{checkpoint.path}: expected layers of format {_NVFP4}, found {some(others)}")
        if lost := [layer for layer in markers if f"{layer}.weight" not in info]:
            raise ValueError(f"{checkpoint.path}: markers name {some(lost)} as quantized, but they have no weight")
        for layer, marker in markers.items():
            codes = info[f"{layer}.weight"]
            shape = _logical_shape(marker, codes.shape)
            if shape is not None and (ceil_to(shape[0], _ROWS), ceil_to(shape[1], BLOCK) // 2) != codes.shape:
                where = f"{codes.file}: tensor {layer}.weight"
                raise ValueError(f"{where}: expected codes of shape {list(shape)}, found {codes}")
            activations = not marker.get(_FULL_PRECISION, False)
            schemes[f"{layer}.weight"] = Scheme(activations=activations, dtype=torch.bfloat16, shape=shape)
        return schemes

    def encode(self, name: str, weight: LinearParts | FP8Tensor, entry: Entry) -> dict[str, Tensor]:
        marker = bytearray(json.dumps(_marker(entry)).encode())
        key = self.layout.keys_of(name)["marker"]
        return {**super().encode(name, weight, entry), key: torch.frombuffer(marker, dtype=torch.uint8)}

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        entries = sorted(checkpoint.entries.items())
        layers = {name.removesuffix(".weight"): _marker(entry) for name, entry in entries if entry.quantized}
        return {"format": "pt", _HEADER: json.dumps({"format_version": "1.0", "layers": layers})}

    def write(
        self,
        checkpoint: Checkpoint,
        path: Path,
        *,
        progress: bool = True,
        quantize_activations: bool | None = None,
        **options: Any,
    ) -> None:
        """Write ``checkpoint`` to the file ``path``, which appears when it is complete.

        Args:
            quantize_activations: whether ComfyUI quantizes activations on GPUs that multiply FP4, with the amax of
                each call if the checkpoint has no static scale. This is faster and less accurate. The default is the
                checkpoint's setting of each layer.
        """
        if options:
            raise ValueError(f"{self.name} has no option {', '.join(options)}, only quantize_activations")
        path = Path(path)
        if path.suffix != ".safetensors":
            raise ValueError(f"ComfyUI uses one .safetensors file: expected a path with this suffix, found {path.name}")
        check_is_new(path, checkpoint, is_file=True)
        sidecar = check_sidecar(path)
        if quantize_activations is not None:
            checkpoint = _Activations(checkpoint) if quantize_activations else WeightOnly(checkpoint)
        self.check(checkpoint)
        (names,) = self._plan(checkpoint, 1 << 62).values()
        with temporary(path), tqdm(desc=f"writing {path.name}", unit="B", unit_scale=True, disable=not progress) as bar:
            _, factors, with_nan = self._write_shard(checkpoint, path, names, bar)
            try:
                write_factors(sidecar, factors)
            except OSError:
                path.unlink()  # without the factors, the file would differ from its source
                raise
        warn_of_nan(with_nan)


FORMAT = ComfyUI()


class _Activations(View):
    """A checkpoint in which the activations of all weights are quantized."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        for name, entry in source.entries.items():
            self.entries[name] = dataclasses.replace(entry, quantizes_activations=entry.quantized)

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        value = self.source.value(name)
        return value.replace(quantizes_activations=True) if isinstance(value, LinearParts) else value


def _markers(shards: Shards) -> dict[str, dict[str, Any]]:
    """Return the markers by layer, from the header and from tensors, which take precedence."""
    where = _HEADER
    try:
        found = parse_json(shards.metadata.get(_HEADER, "{}")).get("layers") or {}
        for where in shards.info:
            if where.endswith(f".{_MARKER}"):
                found[where.removesuffix(f".{_MARKER}")] = parse_json(bytes(shards[where].tolist()))
    except (ValueError, AttributeError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{shards.path}: {where}: expected layer markers in JSON, found {error}") from None
    return {layer: marker if isinstance(marker, dict) else {"format": marker} for layer, marker in found.items()}


def _marker(entry: Entry) -> dict[str, Any]:
    marker: dict[str, Any] = {"format": _NVFP4}
    if not entry.quantizes_activations:
        marker[_FULL_PRECISION] = True
    if entry.shape[0] % _ROWS or entry.shape[1] % BLOCK:
        marker[_SHAPE] = list(entry.shape)
    return marker


def _logical_shape(marker: Mapping[str, Any], stored: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the shape of a padded weight; None if its marker has none, or the stored one."""
    shape = marker.get(_SHAPE)
    if not isinstance(shape, list) or len(shape) != 2 or not all(isinstance(size, int) for size in shape):
        return None
    return None if stored == (shape[0], shape[1] // 2) else (shape[0], shape[1])
