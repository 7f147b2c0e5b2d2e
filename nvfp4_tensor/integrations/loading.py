"""Record what a server's loaders have written, because parameters can begin with arbitrary values.

vLLM reloads a layer into new, uninitialized parameters. A tensor that is missing from the new checkpoint would leave
such values in place, which look like scales. So each parameter of ours keeps a record of its loads.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn

_RECORD = "_nvfp4_loads"
_POSITIONS = {"loaded_shard_id": 0, "shard_id": 1, "expert_id": 2}
"""Where loaders of linears (first) and of experts take these arguments, after the parameter and the tensor."""


class Loader:
    """A weight loader of a server's that records each load on the parameter. It does not keep the layer alive."""

    __name__ = "nvfp4_loader"

    def __init__(self, layer: nn.Module, loader: Any, experts: bool = False) -> None:
        self._layer = weakref.ref(layer)
        bound = getattr(loader, "__self__", None) is layer
        self._loader = loader.__func__ if bound else loader
        self._bound = bound
        self._experts = experts

    def __call__(self, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        if layer is not None and any(name.startswith("nvfp4_") for name in layer._parameters):
            raise RuntimeError(
                f"{type(layer).__name__}: a weight cannot be loaded into a layer that is being served: reload by "
                "vLLM's `reload_weights` (collective_rpc), which starts each layer anew; start SGLang again"
            )
        first = (layer, param, loaded_weight) if self._bound else (param, loaded_weight)
        result = self._loader(*first, *args, **kwargs)
        if result is not False and not param.is_meta:  # False: an expert of another rank. Meta: vLLM only counts
            self.record(param, loads_of(param) | self._ids(loaded_weight, args, kwargs))
        return result

    @staticmethod
    def record(param: nn.Parameter, loads: frozenset[Hashable]) -> None:
        """Set what :func:`loads_of` returns."""
        setattr(param, _RECORD, loads)

    def _ids(self, loaded: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[Hashable]:
        def given(name: str) -> Any:
            position = _POSITIONS[name]
            return kwargs.get(name, args[position] if len(args) > position else None)

        if self._experts:
            return {(given("shard_id"), None if loaded.dim() == 3 else given("expert_id"))}
        shard = given("loaded_shard_id")
        shard = kwargs.get("shard_id") if shard is None else shard
        return set(shard) if isinstance(shard, tuple) else {shard}


def loads_of(parameter: nn.Parameter | None) -> frozenset[Hashable]:
    """Return the ids of the shards, resp. (shard, expert), that were loaded; empty for dummy weights."""
    return getattr(parameter, _RECORD, frozenset())


def is_recorded(parameter: nn.Parameter) -> bool:
    """Return whether loads are recorded: models can set loaders of their own, as vLLM's Mamba does."""
    return isinstance(getattr(parameter, "weight_loader", None), Loader)


def is_whole(parameter: nn.Parameter, parts: int) -> bool:
    """Return whether each part of a linear's parameter was loaded, as far as loads are recorded."""
    found = loads_of(parameter)
    return (
        not is_recorded(parameter) or None in found or len(found) >= parts
    )  # None: q, k and v are one tensor in the file


def has_all_experts(parameter: nn.Parameter, shards: Sequence[str], count: int) -> bool:
    """Return whether each shard ("w1", "w2", "w3") of each of ``count`` experts was loaded."""
    found = [each for each in loads_of(parameter) if isinstance(each, tuple)]
    return all((shard, None) in found or sum(each[0] == shard for each in found) >= count for shard in shards)
