"""Make weights of the parameters that a server's loaders fill: what the plug-ins of vLLM and SGLang share.

The loaders fill plain parameters: packed codes, block scales in the order of the weight, and one scale for each of the
weights that are fused (q, k and v). :class:`Served`, what a server's method does with its layer, turns them into an
:class:`NVFP4Tensor` with one per-tensor scale a row, so that fused weights with different scales are exact.

Parameters can begin with arbitrary values, which look like scales, and vLLM reloads a layer into new, uninitialized
ones. So scales begin as NaN, and each parameter of ours keeps a record of its loads.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales, tensor_of
from nvfp4_tensor.integrations import serving
from nvfp4_tensor.integrations.serving import SETTING, SPEC, SPEC_BY_TOKEN, Activations, Combine, Weight
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

logger = logging.getLogger(__name__)

# --- what was loaded -------------------------------------------------------------------------------------------------

_RECORD = "_nvfp4_loads"
_POSITIONS = {"loaded_shard_id": 0, "shard_id": 1, "expert_id": 2}
"""Where loaders of linears (first) and of experts take these arguments, after the parameter and the tensor."""


class Loader:
    """A weight loader of a server's that records each load on the parameter. It does not keep the layer alive.

    elsewhere: whether an expert, of a parameter of a layer, is on another rank, where the server's loader does not say
        that it has skipped it by returning False.
    """

    __name__ = "nvfp4_loader"

    def __init__(
        self,
        layer: nn.Module,
        loader: Any,
        experts: bool = False,
        elsewhere: Callable[[Any, nn.Parameter, Any], bool] = lambda *_: False,
    ) -> None:
        self._layer = weakref.ref(layer)
        self._bound = getattr(loader, "__self__", None) is layer
        self._loader = loader.__func__ if self._bound else loader
        self._experts, self._elsewhere = experts, elsewhere

    def __call__(self, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer()
        if layer is not None and any(name.startswith("nvfp4_") for name in layer._parameters):
            raise RuntimeError(
                f"{type(layer).__name__}: a weight cannot be loaded into a layer that is being served: reload by "
                "vLLM's `reload_weights` (collective_rpc), which starts each layer anew; start SGLang again"
            )
        first = (layer, param, loaded_weight) if self._bound else (param, loaded_weight)
        result = self._loader(*first, *args, **kwargs)
        given = {n: kwargs.get(n, args[i] if len(args) > i else None) for n, i in _POSITIONS.items()}
        if result is False or param.is_meta or self._elsewhere(layer, param, given["expert_id"]):
            return result  # False: an expert of another rank. Meta: vLLM only counts
        ids: set[Hashable]
        if self._experts:
            ids = {(given["shard_id"], None if loaded_weight.dim() == 3 else given["expert_id"])}
        else:
            shard = given["loaded_shard_id"]
            shard = kwargs.get("shard_id") if shard is None else shard
            ids = set(shard) if isinstance(shard, tuple) else {shard}
        setattr(param, _RECORD, loads_of(param) | ids)
        return result


def loads_of(parameter: nn.Parameter | None) -> frozenset[Hashable]:
    """Return the ids of the shards, resp. (shard, expert), that were loaded; empty for dummy weights."""
    return getattr(parameter, _RECORD, frozenset())


def is_recorded(parameter: nn.Parameter) -> bool:
    """Return whether loads are recorded: models can set loaders of their own, as vLLM's Mamba does."""
    return isinstance(getattr(parameter, "weight_loader", None), Loader)


def is_whole(parameter: nn.Parameter, parts: int) -> bool:
    """Return whether each part of a linear's parameter was loaded, as far as loads are recorded."""
    found = loads_of(parameter)  # None: q, k and v are one tensor in the file
    return not is_recorded(parameter) or None in found or len(found) >= parts


def has_all_experts(parameter: nn.Parameter, shards: Sequence[str], count: int) -> bool:
    """Return whether each shard ("w1", "w2", "w3") of each of ``count`` experts was loaded."""
    found = [each for each in loads_of(parameter) if isinstance(each, tuple)]
    return all((shard, None) in found or sum(each[0] == shard for each in found) >= count for shard in shards)


# --- a layer ---------------------------------------------------------------------------------------------------------


class Names(NamedTuple):
    """The parameters' names in a checkpoint, and whether scales are divisors."""

    qdata: str
    scale: str
    factor: str
    input_scale: str
    divides: bool


MODELOPT = Names("weight", "weight_scale", "weight_scale_2", "input_scale", False)
COMPRESSED = Names("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale", True)

EXPERTS = ("w13_", "w2_")
"""The prefixes of the parameters of experts."""


class Served:
    """What our methods do in every server with a layer whose parameters its loaders fill.

    A layer that is ready has its codes as ``weight``, and ``nvfp4_scale`` and ``nvfp4_factor``, with static activations
    also ``nvfp4_amax``; experts have ``w13_weight``, ``nvfp4_w13_scale`` and so on. The checkpoint's own names are
    gone, so that nothing else reads them by mistake.
    """

    names: Names = MODELOPT
    quantizes_activations = False
    """Whether the checkpoint is W4A4 and the setting keeps it so."""
    activations: Mapping[str, Activations] | None = None
    """How products treat activations, by prefix; None before weights were loaded."""

    def expect(self, layer: Any, prefixes: Iterable[str] = ("",)) -> None:
        """Fill the scales with NaN until they are loaded, and say what `--load-format dummy` writes to them."""
        small = 1e3 if self.names.divides else 1e-3
        for name, dummy in zip(self.names[1:4], (1.0, small, small), strict=True):
            for prefix in prefixes:
                if (parameter := getattr(layer, f"{prefix}{name}", None)) is not None:
                    parameter.data.fill_(torch.nan)
                    parameter.dummy_weight_value = dummy

    def adopt(self, layer: Any, label: str) -> None:
        """Put the weight of a linear in our layout in place of what was loaded. A second call does nothing.

        Raises:
            ValueError: a part was not loaded; a scale is NaN, infinite or negative; K is not a multiple of 16; or a
                reload changes how activations are quantized.
        """
        self._adopt(layer, label, {"": ()})

    def adopt_experts(self, layer: Any, label: str, gated: bool) -> None:
        """Do the same with the weights of experts."""
        self._adopt(layer, label, dict(zip(EXPERTS, (("w1", "w3") if gated else ("w1",), ("w2",)), strict=True)))

    def _adopt(self, layer: Any, label: str, shards: Mapping[str, Sequence[str]]) -> None:
        first = next(iter(shards))
        if f"{first}{self.names.scale}" not in layer._parameters and hasattr(layer, f"nvfp4_{first}scale"):
            return
        weights = {prefix: self._weight(layer, label, prefix, each) for prefix, each in shards.items()}
        found = {prefix: _activations_of(weight) for prefix, weight in weights.items()}
        if self.activations not in (None, found):
            raise ValueError(
                f"{label}: activations were {_words(self.activations)}, and are {_words(found)} in the checkpoint that "
                "is loaded now: start the server anew"
            )
        self.activations = found
        for prefix, weight in weights.items():
            for name in self.names[:4]:
                if name != "weight":
                    layer._parameters.pop(f"{prefix}{name}", None)
            _replace(layer, f"{prefix}weight", weight.qdata)
            _replace(layer, f"nvfp4_{prefix}scale", weight.scale)
            _replace(layer, f"nvfp4_{prefix}factor", weight.per_tensor_scale)
            if weight.activation_amax is not None:
                _replace(layer, f"nvfp4_{prefix}amax", weight.activation_amax)

    def _weight(self, layer: Any, label: str, prefix: str, shards: Sequence[str]) -> NVFP4Tensor:
        """Return the weight of a linear (N, K), or with shards of experts (E, N, K), which shares the codes.

        Its ``per_tensor_scale`` is 0-d for one weight, and has one element a row for fused weights and experts. Its
        ``activation_spec`` and ``activation_amax`` say how products quantize activations: not, with the static amax, or
        with one scale a token. Fused weights and experts get the largest of their static amaxes, so that none of them
        clips more than alone.
        """
        name = f"{label}.{prefix}weight" if shards else label
        qdata, scale, factor = (getattr(layer, f"{prefix}{each}") for each in self.names[:3])
        columns = qdata.shape[-1] * 2
        if qdata.dtype != torch.uint8:
            raise ValueError(
                f"{name}: the weight is {qdata.dtype} and not packed NVFP4 codes (uint8), as of a head that is tied "
                "to dense embeddings: add the layer to `ignore` in the checkpoint's quantization_config"
            )
        if columns % BLOCK or scale.shape[-1] * BLOCK != columns:
            raise ValueError(
                f"{name}: its {columns} columns on this rank have {scale.shape[-1]} block scales: they must be a "
                f"multiple of {BLOCK}, with a scale for each {BLOCK}. Use fewer ranks of tensor parallelism"
            )
        rows = [qdata.shape[1] // len(shards)] * len(shards) if shards else layer.logical_widths
        inputs = self._check_loaded(layer, label, prefix, shards, len(rows))
        parts = LinearParts(
            qdata=qdata.data,
            scale=scale.data,
            per_tensor_scale=_row_factors(name, self._numbers(factor, shards), rows),
            columns=columns,
            quantizes_activations=self.quantizes_activations,
            input_scale=None if inputs is None else _input_scale(name, self._numbers(inputs, shards)),
        )
        if count := int(((parts.scale.view(torch.uint8) & 0x7F) == 0x7F).sum()):
            raise ValueError(
                f"{name}: {count} of {parts.scale.numel()} block scales were not loaded, or are NaN in the checkpoint: "
                "a layer that the checkpoint keeps dense must be in `ignore` of its quantization_config"
            )
        spec = SPEC_BY_TOKEN if parts.input_scale is None else SPEC
        try:
            return tensor_of(check_scales(parts), layer.params_dtype, activation_spec=spec)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _check_loaded(
        self, layer: Any, label: str, prefix: str, shards: Sequence[str], parts: int
    ) -> nn.Parameter | None:
        """Raise a ValueError if a parameter was not loaded, or only in part; return the input scales that were."""
        *required, key = (f"{prefix}{each}" for each in self.names[:4])
        stored = {name: getattr(layer, name) for name in required}
        inputs = getattr(layer, key, None) if self.quantizes_activations else None
        if not any(map(loads_of, stored.values())):  # dummy weights, which nothing loads
            return inputs
        if inputs is not None and is_recorded(inputs) and not loads_of(inputs):
            inputs = None
        missing_in = "what the checkpoint keeps dense must be in `ignore` of its quantization_config"
        fixes = dict.fromkeys(stored, missing_in)
        if inputs is not None:
            stored[key] = inputs
            fixes[key] = f"calibrate the model again, or set {SETTING}=w4a16 to keep activations dense"
        for name, parameter in stored.items():
            count = len(parameter)
            if not (has_all_experts(parameter, shards, count) if shards else is_whole(parameter, parts)):
                of = f" for all of {count} experts" if shards else ", or only in part"
                raise ValueError(f"{label}: {name} was not loaded{of}: {fixes[name]}")
        return inputs

    def _numbers(self, parameter: nn.Parameter, shards: Sequence[str]) -> Tensor:
        """Return per-tensor scales or input scales as factors, float32 (parts,) or (E, parts); NaN if not loaded."""
        data = parameter.data.float().reshape((-1, len(shards)) if shards else -1)
        if not shards and loads_of(parameter) == {None}:  # one in the file for all: the others have arbitrary values
            data = torch.where(torch.arange(len(data), device=data.device) == 0, data, torch.nan)
        return data.reciprocal() if self.names.divides else data

    def weight(self, layer: Any, prefix: str = "") -> Weight:
        """Return what products with a layer that is ready read."""
        assert self.activations is not None, "process_weights_after_loading comes first"
        return Weight(
            getattr(layer, f"{prefix}weight"),
            getattr(layer, f"nvfp4_{prefix}scale"),
            getattr(layer, f"nvfp4_{prefix}factor"),
            self.activations[prefix],
            getattr(layer, f"nvfp4_{prefix}amax", None),
        )

    def sum_experts(
        self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor, combine: Combine, **options: Any
    ) -> Tensor:
        """Return :func:`serving.experts` of a layer that is ready."""
        gate_up, down = (self.weight(layer, prefix) for prefix in EXPERTS)
        return serving.experts(x, weights, ids, gate_up, down, combine, **options)


def _row_factors(name: str, factors: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the per-tensor scales of weights of these rows: 0-d for one weight, else one per row."""
    missing = factors.isnan()
    if missing.any():
        # A checkpoint that stores q, k and v as one tensor has one scale, which loaders put first.
        if factors.dim() > 1 or missing[0] or not missing[1:].all():
            raise ValueError(
                f"{name}: {int(missing.sum())} of {factors.numel()} per-tensor scales were not loaded, or are NaN: the "
                "checkpoint is incomplete, or its names are not those of this model"
            )
        factors = factors[0].expand_as(factors)
    if len(rows) == 1 and factors.dim() == 1:
        return factors.reshape(()).clone()
    # The same form on every load: a reload writes into the memory that CUDA graphs read.
    return factors.repeat_interleave(torch.tensor(rows, dtype=torch.int64, device=factors.device), dim=-1).reshape(-1)


def _input_scale(name: str, scales: Tensor) -> Tensor | None:
    """Return the static scale of the activations, 0-d, or None if the checkpoint has none."""
    found, fix = scales[~scales.isnan()], f"set {SETTING}=w4a16 to keep activations dense"
    if not found.numel():
        return None
    first_only = scales.dim() == 1 and len(found) == 1 and not scales[0].isnan()
    if len(found) < scales.numel() and not first_only:
        raise ValueError(
            f"{name}: {scales.numel() - len(found)} of {scales.numel()} input scales are missing, so its activations "
            f"have no scale: calibrate the model again, or {fix}"
        )
    if not (found.isfinite() & (found > 0)).all():
        raise ValueError(f"{name}: an input scale is zero, negative or infinite: calibrate the model again, or {fix}")
    if scales.dim() == 1 and (found != found[0]).any():
        logger.warning("%s: fused weights have different input scales: the largest is used, so none clips", name)
    return found.max()


def _activations_of(weight: NVFP4Tensor) -> Activations:
    if weight.activation_spec is None:
        return Activations.DENSE
    return Activations.STATIC if weight.activation_amax is not None else Activations.BY_TOKEN


def _words(activations: Mapping[str, Activations] | None) -> str:
    return " and ".join(each.value for each in (activations or {}).values())


def _replace(layer: nn.Module, name: str, data: Tensor) -> None:
    if name in layer._parameters:
        getattr(layer, name).data = data
    else:
        layer.register_parameter(name, nn.Parameter(data, requires_grad=False))
