"""MLX's folders, as mlx-lm reads them: mode "nvfp4", groups of 16.

==================  =============================================================================
``m.weight``        uint32 (N, K / 8), eight codes per word, the first in the lowest nibble
``m.scales``        uint8 (N, K / 16): the bytes of e4m3
``m.global_scale``  float32 0-d, the weight's amax: values are code x scale x global_scale / 2688
==================  =============================================================================

mlx's layers do not support ``global_scale`` (its operators and some other programs do), so it is written only on
request. Without it, the per-tensor scale is folded into the block scales, which is exact if each product is an e4m3
number, as for a per-tensor scale of 1: :data:`AMAX_OF_ONE`. Mode "mxfp4" can be read too.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK, parts_of_mxfp4
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint, SafetensorsFormat, check_writable, config_has
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts, parts_of, tensor_of
from nvfp4_tensor.checkpoints.wrappers import View
from nvfp4_tensor.numerics.layout import BLOCK, E4M3_NAN
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.nvfp4 import quantize

AMAX_OF_ONE = LARGEST
"""``quantize(x, amax=AMAX_OF_ONE)`` has a per-tensor scale of 1, so that conversion to MLX does not round."""

_FIX = "Other modes are not supported: quantize the dense model by checkpoints.quantize with to='mlx'"

_GROUPS = {"nvfp4": BLOCK, "mxfp4": MX_BLOCK}


class MLX(SafetensorsFormat):
    """MLX's format."""

    name = "mlx"
    is_served = False
    reserved = (".scales", ".biases", ".global_scale")

    def __init__(self, global_scale: bool = False) -> None:
        """global_scale: whether to write one. Files with and without one can be read."""
        self._global_scale = global_scale

    def detect(self, path: Path) -> bool:
        return config_has(path, _quantization)

    def quantization(self, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
        found = _quantization(config)
        if found is None:
            raise ValueError(
                f"{folder / 'config.json'}: expected MLX's quantization (group_size, bits, mode), found none"
            )
        config.pop("quantization", None)
        return found

    def entries(self, checkpoint: FolderCheckpoint) -> dict[str, Entry]:
        info = checkpoint.shards.info
        quantized = [name for name in info if name.endswith(".weight") and _key(name, "scales") in info]
        parts = {_key(name, part) for name in quantized for part in ("scales", "global_scale")}
        for name in info:
            if name.endswith(".weight") and info[name].dtype == torch.uint32 and name not in quantized:
                checkpoint.expect(_key(name, "scales"), torch.uint8, None, name)
        for name in quantized:
            _mode(checkpoint, name)  # before the check of biases, which are of mode affine, for a better message
        if lonely := [n for n in info if n not in parts and n.endswith((".scales", ".biases", ".global_scale"))]:
            raise ValueError(
                f"{checkpoint.path}: {some(lonely)} belong to no weight of mode nvfp4 or mxfp4: a weight is missing or "
                f"has another mode. {_FIX}"
            )
        own = [name for name in quantized if _key(name, "global_scale") in info]
        if own and (missing := [name for name in quantized if name not in own]):
            raise ValueError(f"{checkpoint.path}: {some(missing)} have no global_scale, but other weights do. {_FIX}")
        return {
            name: self._linear_entry(checkpoint, name)
            if name in quantized
            else Entry(shape=each.shape, dtype=each.dtype, shard=each.file.name)
            for name, each in info.items()
            if name not in parts
        }

    def _linear_entry(self, checkpoint: FolderCheckpoint, name: str) -> Entry:
        info = checkpoint.shards.info
        group = _GROUPS[_mode(checkpoint, name)]
        *leading, words = info[name].shape
        checkpoint.expect(name, torch.uint32, None, name)
        checkpoint.expect(_key(name, "scales"), torch.uint8, (*leading, words * 8 // group), name)
        if _key(name, "global_scale") in info and info[_key(name, "global_scale")].shape != (1,):
            checkpoint.expect(_key(name, "global_scale"), torch.float32, (), name)
        experts = len(leading) > 1 and group == MX_BLOCK  # one per-tensor scale for each
        return Entry(
            shape=(*leading, words * 8),
            dtype=checkpoint.dtype(),
            quantized=True,
            scales=(leading[0], 1) if experts else (),
            shard=info[name].file.name,
        )

    def decode(self, name: str, tensors: Mapping[str, Tensor], entry: Entry) -> LinearParts:
        codes, scales = tensors[name].view(torch.uint8), tensors[_key(name, "scales")]
        if scales.shape[-1] * MX_BLOCK == entry.shape[-1]:
            return parts_of_mxfp4(codes, scales)
        amax = tensors.get(_key(name, "global_scale"))
        if amax is not None and not (amax >= 0).all():
            raise ValueError(f"expected a per-tensor scale (global_scale) that is not negative, found {amax.item()}")
        return LinearParts(
            qdata=codes,
            scale=scales.view(torch.float8_e4m3fn),
            per_tensor_scale=torch.ones((), dtype=torch.float32) if amax is None else amax.reshape(()) / LARGEST,
            columns=entry.shape[-1],
        )

    def encode(self, name: str, parts: LinearParts, entry: Entry) -> dict[str, Tensor]:
        tensors = {name: parts.qdata.view(torch.uint32), _key(name, "scales"): parts.scale.view(torch.uint8)}
        if self._global_scale:
            tensors[_key(name, "global_scale")] = parts.per_tensor_scale * LARGEST
        return tensors

    def check(self, checkpoint: Checkpoint) -> None:
        check_writable(checkpoint, self.name, rows=not self._global_scale)
        quantized = {name: entry for name, entry in checkpoint.entries.items() if entry.quantized}
        if bare := [name for name in quantized if not name.endswith(".weight")]:
            raise ValueError(f"MLX supports only quantized parameters named .weight, not {some(bare)}")
        if self._global_scale and (experts := [name for name, entry in quantized.items() if entry.scales]):
            raise ValueError(f"MLX has one global_scale per weight, but these experts have one each: {some(experts)}")

    def has_scale(self, checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> bool:
        return bool(options.get("global_scale"))

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {"format": "mlx"}

    def config_of(self, checkpoint: Checkpoint) -> None:
        return None

    def files_of(self, checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
        """Return config.json with "quantization", which mlx-lm reads, and "quantization_config", its transformers
        name."""
        quantization = {"group_size": BLOCK, "bits": 4, "mode": "nvfp4"}
        both = {"quantization": quantization, "quantization_config": quantization}
        return {"config.json": {**checkpoint.config, **both}}

    def write(
        self,
        checkpoint: Checkpoint,
        path: Path,
        *,
        progress: bool = True,
        global_scale: bool = False,
        lossy: bool = False,
        **options: Any,
    ) -> None:
        """See :meth:`SafetensorsFormat.write`.

        Args:
            global_scale: keep per-tensor scales as tensors ``global_scale``, which mlx-lm does not load.
            lossy: if a per-tensor scale cannot be folded into block scales exactly, quantize the decoded values again;
                if a global_scale cannot represent it exactly, use the nearest one, which differs in the last bit.

        Raises:
            ValueError: a weight needs ``lossy``, or cannot be stored; the message has its name.
        """
        if any(entry.quantizes_activations for entry in checkpoint.entries.values()):
            warnings.warn("MLX does not quantize activations: their quantization is omitted", stacklevel=2)
        target = MLX(global_scale)
        target.check(checkpoint)
        view = (_Global if global_scale else _Folded)(checkpoint, lossy)
        super(MLX, target).write(view, path, progress=progress, **options)


FORMAT = MLX()


def _key(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def _quantization(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return MLX's quantization settings of config.json, or None."""
    found = config.get("quantization", config.get("quantization_config"))
    return found if isinstance(found, dict) and {"group_size", "bits"} <= set(found) else None


def _mode(checkpoint: FolderCheckpoint, name: str) -> str:
    """Return the mode of a weight: its own, or that of the folder.

    Raises:
        ValueError: the mode is neither nvfp4 nor mxfp4.
    """
    own = checkpoint.quantization.get(name.removesuffix(".weight"))
    settings = own if isinstance(own, dict) else checkpoint.quantization
    mode = settings.get("mode", "affine")
    if (
        not isinstance(mode, str)
        or mode not in _GROUPS
        or settings.get("bits", 4) != 4
        or settings.get("group_size", _GROUPS[mode]) != _GROUPS[mode]
    ):
        found = {"mode": mode, "bits": settings.get("bits"), "group_size": settings.get("group_size")}
        raise ValueError(f"{checkpoint.path}: {name}: expected mode nvfp4 or mxfp4, found {found}. {_FIX}")
    return str(mode)


class _View(View):
    """A checkpoint with weights that MLX can represent, exactly or approximately."""

    def __init__(self, source: Checkpoint, lossy: bool) -> None:
        """
        Raises:
            ValueError: some weights cannot be represented exactly, and ``lossy`` is False.
        """
        super().__init__(source)
        self._lossy = lossy
        quantized = [name for name, entry in self.entries.items() if entry.quantized]
        inexact = [] if lossy else [name for name in quantized if not self._is_exact(name)]
        if inexact:
            raise ValueError(self._message(some(inexact)))

    def identity(self) -> list[Any] | None:
        inner = super().identity()
        return None if inner is None else [*inner, self._lossy]

    def linear(self, name: str) -> LinearParts:
        parts = self.source.linear(name).replace(
            quantizes_activations=False, input_scale=None, input_divisor=None, input_amax=None
        )  # fmt: skip
        return self._represented(parts)

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.linear(name).per_tensor_scale

    @abc.abstractmethod
    def _is_exact(self, name: str) -> bool:
        """Return whether MLX can represent this weight exactly."""

    @abc.abstractmethod
    def _represented(self, parts: LinearParts) -> LinearParts:
        """Return the weight as MLX represents it."""

    @abc.abstractmethod
    def _message(self, names: str) -> str:
        """Return the message for weights that cannot be represented exactly."""


class _Folded(_View):
    """A checkpoint with per-tensor scales folded into block scales."""

    def _is_exact(self, name: str) -> bool:
        return folds_exactly(self.source, name)

    def _represented(self, parts: LinearParts) -> LinearParts:
        return with_scale_of_one(parts)

    def _message(self, names: str) -> str:
        return (
            f"MLX has no per-tensor scales, and those of {names} cannot be folded into their block scales exactly: "
            "quantize the dense weights by checkpoints.quantize with to='mlx' (which uses per-tensor scales of 1), "
            "pass lossy=True, or pass global_scale=True for programs that read it"
        )


def folds_exactly(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a per-tensor scale can be folded into the block scales without rounding."""
    factor = checkpoint.per_tensor_scale(name)
    if (factor == 1).all():
        return True
    significand = torch.frexp(factor.double()).mantissa * 16
    if not torch.equal(significand, significand.round()):  # e4m3 has four bits
        return False
    return folded(checkpoint.linear(name)) is not None


def with_scale_of_one(parts: LinearParts) -> LinearParts:
    """Fold the per-tensor scale into the block scales, or quantize the weight again if this is not exact."""
    scale = folded(parts)
    if scale is not None:
        return parts.replace(scale=scale, per_tensor_scale=torch.ones((), dtype=torch.float32), divisor=None)
    again = parts_of(quantize(tensor_of(parts, torch.float32).dequantize(), amax=AMAX_OF_ONE))
    return parts.replace(qdata=again.qdata, scale=again.scale, per_tensor_scale=again.per_tensor_scale, divisor=None)


def folded(parts: LinearParts) -> Tensor | None:
    """Return the block scales times the per-tensor scale, e4m3, or None if a product is not an e4m3 number."""
    factor = parts.per_tensor_scale.double()
    factor = factor.reshape(*factor.shape, *(1,) * (parts.scale.dim() - factor.dim()))
    product = parts.scale.double() * factor  # exact: 4 bits times 24
    result = product.float().to(torch.float8_e4m3fn)
    nan = parts.scale.view(torch.uint8) >= E4M3_NAN
    return result if ((result.double() == product) | nan).all() else None


class _Global(_View):
    """A checkpoint with per-tensor scales that are a float32 divided by 2688."""

    def _is_exact(self, name: str) -> bool:
        scale = self.source.per_tensor_scale(name)
        return bool((scale * LARGEST / LARGEST == scale).all())

    def _represented(self, parts: LinearParts) -> LinearParts:
        return parts

    def _message(self, names: str) -> str:
        return (
            f"MLX stores 2688 times the per-tensor scale, which no float32 is exactly for {names}: pass lossy=True, "
            "which changes the last bit"
        )
