"""Store finished layers of a GPTQ run on disk, so that an interrupted run can resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.quantization.accuracy.gptq.config import GPTQConfig
from nvfp4_tensor.quantization.accuracy.gptq.targets import WeightRef
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_SETTINGS = "settings.json"


class Finished:
    """A folder with one file per finished layer, for one model, one config and one set of batches.

    Raises:
        ValueError: the folder has the layers of another run.
    """

    def __init__(
        self,
        folder: str | Path,
        config: GPTQConfig,
        model: nn.Module,
        targets: Sequence[WeightRef],
        batches: Sequence[Any],
    ) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = hashlib.blake2b(digest_size=16)
        _digest([target.name for target in targets], weights)
        _digest(dict(model.named_parameters()), weights)  # including norms and embeddings: inputs depend on them
        inputs = hashlib.blake2b(digest_size=16)
        _digest(batches, inputs)
        settings = {"config": str(config), "weights": weights.hexdigest(), "batches": inputs.hexdigest()}
        path = self.folder / _SETTINGS
        if not path.exists():
            path.with_suffix(".part").write_text(json.dumps(settings, indent=1) + "\n")
            path.with_suffix(".part").replace(path)
        found = json.loads(path.read_text())
        if differs := [name for name, value in settings.items() if found.get(name) != value]:
            raise ValueError(
                f"{self.folder} has the layers of a run with other {', '.join(differs)}: resume with the same ones, or "
                "give another folder"
            )

    def load(self, name: str, targets: Sequence[WeightRef]) -> dict[str, NVFP4Tensor] | None:
        """Return the weights of layer ``name`` by parameter name, or None if it is not finished."""
        path = self._path(name)
        if not path.exists():
            return None
        weights = torch.load(path, weights_only=True, map_location=targets[0].dense.device if targets else None)
        if set(weights) != {target.name for target in targets}:
            raise ValueError(f"{path} does not have the weights of {name}: delete it to quantize the layer again")
        return weights

    def save(self, name: str, weights: dict[str, NVFP4Tensor]) -> None:
        """Write the weights of a layer atomically."""
        path = self._path(name)
        torch.save(weights, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.pt"


def _digest(value: Any, into: Any) -> None:
    """Update the hash ``into`` with the values of tensors and containers of tensors."""
    if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        into.update(repr((context, tuple(value.shape), value.stride())).encode())
        _digest([getattr(value, name) for name in names], into)
    elif isinstance(value, Tensor):
        into.update(repr((value.dtype, tuple(value.shape))).encode())
        into.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            into.update(repr(name).encode())
            _digest(item, into)
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        for item in value:
            _digest(item, into)
    else:
        into.update(repr(value).encode())
