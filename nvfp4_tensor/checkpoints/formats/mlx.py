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

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.checkpoints.formats.table import Layout, Number, Scheme, TableFormat
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts, parts_of, tensor_of, with_scale
from nvfp4_tensor.checkpoints.wrappers import View
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.nvfp4 import quantize

AMAX_OF_ONE = LARGEST
"""``quantize(x, amax=AMAX_OF_ONE)`` has a per-tensor scale of 1, so that conversion to MLX does not round."""

_FIX = "Other modes are not supported: quantize the dense model by checkpoints.quantize with to='mlx'"

_ONE = torch.ones((), dtype=torch.float32)
_GROUPS = {"nvfp4": BLOCK, "mxfp4": MX_BLOCK}
_KEYS = {"qdata": "{name}", "scale": "{stem}scales"}


class MLX(TableFormat):
    """MLX's format."""

    name = "mlx"
    layout = Layout(
        keys={**_KEYS, "per_tensor_scale": "{stem}global_scale"},
        codes=torch.uint32,
        scale=torch.uint8,
        number=Number.AMAX,
        names=r".*\.weight",
    )
    config_keys = ("quantization", "quantization_config")
    is_served = False
    holds_embeddings = True
    reserved = (".scales", ".biases", ".global_scale")

    def __init__(self, global_scale: bool = True) -> None:
        """global_scale: whether to write one. Files with and without one can be read."""
        if not global_scale:
            self.layout = dataclasses.replace(self.layout, keys=_KEYS)

    def is_own(self, found: Mapping[str, Any]) -> bool:
        return {"group_size", "bits"} <= set(found) and found.get("quant_method", self.name) == self.name

    def schemes(self, checkpoint: FolderCheckpoint) -> dict[str, Scheme]:
        info, keys_of, schemes = checkpoint.shards.info, self.layout.keys_of, {}
        for name in info:
            if name.endswith(".weight") and (info[name].dtype == torch.uint32 or keys_of(name)["scale"] in info):
                schemes[name] = Scheme(scaled=False, group=_GROUPS[_mode(checkpoint, name)])
        parts = {key for name in schemes for key in keys_of(name).values()}
        if lonely := [name for name in info if name not in parts and name.endswith(self.reserved)]:
            raise ValueError(
                f"{checkpoint.path}: {some(lonely)} belong to no weight of mode nvfp4 or mxfp4: a weight is missing or "
                f"has another mode. {_FIX}"
            )
        without = [name for name in schemes if keys_of(name)["per_tensor_scale"] not in info]
        if 0 < len(without) < len(schemes):
            raise ValueError(f"{checkpoint.path}: {some(without)} have no global_scale, but other weights do. {_FIX}")
        return schemes

    def check(self, checkpoint: Checkpoint) -> None:
        super().check(checkpoint)
        experts = [name for name, entry in checkpoint.entries.items() if entry.quantized and len(entry.scales) == 2]
        if experts and "per_tensor_scale" in self.layout.keys:
            raise ValueError(f"MLX has one global_scale per weight, but these experts have one each: {some(experts)}")

    def has_scale(self, checkpoint: Checkpoint, name: str, options: dict[str, Any]) -> bool:
        return bool(options.get("global_scale"))

    def metadata(self, checkpoint: Checkpoint) -> dict[str, str]:
        return {"format": "mlx"}

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
        """See :meth:`TableFormat.write`.

        Args:
            global_scale: keep per-tensor scales as tensors ``global_scale``, which mlx-lm does not load.
            lossy: if a per-tensor scale cannot be folded into block scales exactly, quantize the decoded values again;
                if a global_scale cannot represent it exactly, use the nearest one, which differs in the last bit.

        Raises:
            ValueError: a weight needs ``lossy``, or cannot be stored; the message has its name.
        """
        if any(entry.quantizes_activations for entry in checkpoint.entries.values()):
            warn_user("MLX does not quantize activations: their quantization is omitted")
        target = MLX(global_scale)
        target.check(checkpoint)
        super(MLX, target).write(_Represented(checkpoint, global_scale, lossy), path, progress=progress, **options)


FORMAT = MLX()


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


class _Represented(View):
    """A checkpoint with weights that MLX can represent, exactly or approximately: with per-tensor scales that are a
    float32 divided by 2688, or folded into block scales."""

    def __init__(self, source: Checkpoint, global_scale: bool, lossy: bool) -> None:
        """
        Raises:
            ValueError: some weights cannot be represented exactly, and ``lossy`` is False.
        """
        super().__init__(source)
        self._global_scale, self._lossy = global_scale, lossy
        self.made = {name: entry for name, entry in self.entries.items() if entry.quantized}
        inexact = [] if lossy else [name for name in self.made if not self._is_exact(name)]
        if inexact and global_scale:
            raise ValueError(
                f"MLX stores 2688 times the per-tensor scale, which no float32 is exactly for {some(inexact)}: pass "
                "lossy=True, which changes the last bit"
            )
        if inexact:
            raise ValueError(
                f"MLX has no per-tensor scales, and those of {some(inexact)} cannot be folded into their block scales "
                "exactly: quantize the dense weights by checkpoints.quantize with to='mlx' (which uses per-tensor "
                "scales of 1), pass lossy=True, or pass global_scale=True for programs that read it"
            )

    def _is_exact(self, name: str) -> bool:
        if not self._global_scale:
            return folds_exactly(self.source, name)
        scale = self.source.per_tensor_scale(name)
        return bool((scale * LARGEST / LARGEST == scale).all())

    def identity(self) -> list[Any] | None:
        inner = super().identity()
        return None if inner is None else [*inner, self._global_scale, self._lossy]

    def make(self, name: str) -> LinearParts:
        parts = self.source.linear(name).weight_only()
        return parts if self._global_scale else with_scale_of_one(parts)


def folds_exactly(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a per-tensor scale can be folded into the block scales without rounding."""
    factor = checkpoint.per_tensor_scale(name)
    if (factor == 1).all():
        return True
    significand = torch.frexp(factor.double()).mantissa * 16
    if not torch.equal(significand, significand.round()):  # e4m3 has four bits
        return False
    return with_scale(checkpoint.linear(name), _ONE) is not None


def with_scale_of_one(parts: LinearParts) -> LinearParts:
    """Fold the per-tensor scale into the block scales, or quantize the weight again if this is not exact."""
    if (moved := with_scale(parts, _ONE)) is not None:
        return moved
    again = parts_of(quantize(tensor_of(parts, torch.float32).dequantize(), amax=AMAX_OF_ONE))
    return parts.replace(qdata=again.qdata, scale=again.scale, per_tensor_scale=again.per_tensor_scale, divisor=None)
