"""Make weights of the parameters that a server's loaders fill: what the plug-ins of vLLM and SGLang share.

The loaders fill plain parameters: packed codes, block scales in the order of the weight, and one scale for each of the
weights that are fused (q, k and v). :func:`weight_of` turns them into an :class:`NVFP4Tensor`, with one per-tensor
scale a row, so that fused weights with different scales are exact. :class:`Served` is what a server's method does with
its layer.

Parameters can begin with arbitrary values, which look like scales, and vLLM reloads a layer into new, uninitialized
ones. So scales begin as NaN, and each parameter of ours keeps a record of its loads.
"""

from __future__ import annotations

import dataclasses
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


# --- a weight --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The parameters of one linear, or of one projection of all experts, as a server's loaders have filled them.

    Attributes:
        name: the layer's name, for messages.
        qdata: uint8 (N, K / 2) or (E, N, K / 2), the even element in the low nibble.
        scale: float8_e4m3fn (N, K / 16) or (E, N, K / 16), in the order of the weight; NaN where none was loaded.
        factors: float32 (parts,) or (E, parts), one a fused weight; NaN where none was loaded.
        rows: the rows of each fused weight, which sum to N.
        input_scales: None, or float32 (parts,) or (E, parts); NaN where none was loaded.
        divides: whether factors and input_scales are divisors, as compressed-tensors stores them.
        quantizes_activations: whether the checkpoint is W4A4.
    """

    name: str
    qdata: Tensor
    scale: Tensor
    factors: Tensor
    rows: Sequence[int]
    input_scales: Tensor | None
    divides: bool
    quantizes_activations: bool


def weight_of(loaded: Loaded, dtype: torch.dtype) -> NVFP4Tensor:
    """Return the weight: an NVFP4Tensor (N, K) or (E, N, K) that shares the codes.

    Its ``per_tensor_scale`` is 0-d for one weight, and has one element a row for fused weights and experts. Its
    ``activation_spec`` and ``activation_amax`` say how products quantize activations: not, with the static amax, or
    with one scale a token. Fused weights and experts get the largest of their static amaxes, so that none of them clips
    more than alone.

    Raises:
        ValueError: a scale was not loaded, is NaN, infinite or negative; scales were loaded for some of the fused
            weights or experts only; or K is not a multiple of 16.
    """
    name, by_expert = loaded.name, loaded.qdata.dim() == 3
    columns = loaded.qdata.shape[-1] * 2
    if loaded.qdata.dtype != torch.uint8:
        raise ValueError(
            f"{name}: the weight is {loaded.qdata.dtype} and not packed NVFP4 codes (uint8), as of a head that is tied "
            "to dense embeddings: add the layer to `ignore` in the checkpoint's quantization_config"
        )
    if columns % BLOCK or loaded.scale.shape[-1] * BLOCK != columns:
        raise ValueError(
            f"{name}: its {columns} columns on this rank have {loaded.scale.shape[-1]} block scales: they must be a "
            f"multiple of {BLOCK}, with a scale for each {BLOCK}. Use fewer ranks of tensor parallelism"
        )
    parts = LinearParts(
        qdata=loaded.qdata,
        scale=loaded.scale,
        per_tensor_scale=_row_factors(loaded, by_expert),
        columns=columns,
        quantizes_activations=loaded.quantizes_activations,
        input_scale=_input_scale(loaded) if loaded.quantizes_activations else None,
    )
    if count := int(((parts.scale.view(torch.uint8) & 0x7F) == 0x7F).sum()):
        raise ValueError(
            f"{name}: {count} of {parts.scale.numel()} block scales were not loaded, or are NaN in the checkpoint: a "
            "layer that the checkpoint keeps dense must be in `ignore` of its quantization_config"
        )
    try:
        check_scales(parts)
        static = parts.input_scale is not None
        return tensor_of(parts, dtype, activation_spec=SPEC if static else SPEC_BY_TOKEN)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _row_factors(loaded: Loaded, by_expert: bool) -> Tensor:
    """Return the per-tensor scales: 0-d for one weight, else one per row."""
    factors = loaded.factors.detach().float()
    missing = factors.isnan()
    if missing.any():
        # A checkpoint that stores q, k and v as one tensor has one scale, which loaders put first.
        if by_expert or missing[0] or not missing[1:].all():
            raise ValueError(
                f"{loaded.name}: {int(missing.sum())} of {factors.numel()} per-tensor scales were not loaded, or are "
                "NaN: the checkpoint is incomplete, or its names are not those of this model"
            )
        factors = factors[0].expand_as(factors)
    if loaded.divides:
        factors = factors.reciprocal()
    if len(loaded.rows) == 1 and not by_expert:
        return factors.reshape(()).clone()
    rows = torch.tensor(loaded.rows, dtype=torch.int64, device=factors.device)
    # The same form on every load: a reload writes into the memory that CUDA graphs read.
    return factors.repeat_interleave(rows, dim=-1).reshape(-1).contiguous()


def _input_scale(loaded: Loaded) -> Tensor | None:
    """Return the static scale of the activations, 0-d, or None if the checkpoint has none."""
    if loaded.input_scales is None:
        return None
    scales = loaded.input_scales.detach().float()
    loaded_ones = ~scales.isnan()
    if not loaded_ones.any():
        return None
    first_only = scales.dim() == 1 and bool(loaded_ones[0]) and not bool(loaded_ones[1:].any())
    if not loaded_ones.all() and not first_only:
        raise ValueError(
            f"{loaded.name}: {int((~loaded_ones).sum())} of {scales.numel()} input scales are missing, so its "
            f"activations have no scale: calibrate the model again, or set {SETTING}=w4a16 to keep activations dense"
        )
    found = scales[loaded_ones]
    if loaded.divides:
        found = found.reciprocal()
    if not (found.isfinite() & (found > 0)).all():
        raise ValueError(
            f"{loaded.name}: an input scale is zero, negative or infinite: calibrate the model again, or set "
            f"{SETTING}=w4a16 to keep activations dense"
        )
    return found.max()


def differs_within(scales: Tensor) -> bool:
    """Return whether fused weights have different static scales of their common input."""
    found = scales[~scales.isnan()]
    return found.numel() > 1 and bool((found != found[0]).any())


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
            ValueError: see :func:`weight_of`; a part was not loaded; or a reload changes how activations are quantized.
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
        """Return the weight of a linear, or with shards of experts, if all of it was loaded."""
        names = self.names
        stored = {name: getattr(layer, f"{prefix}{name}") for name in names[:3]}
        inputs = getattr(layer, f"{prefix}{names.input_scale}", None) if self.quantizes_activations else None
        count, rows = stored[names.qdata].shape[:2]
        parts = [rows // len(shards)] * len(shards) if shards else layer.logical_widths

        def was_loaded(parameter: nn.Parameter) -> bool:
            return has_all_experts(parameter, shards, count) if shards else is_whole(parameter, len(parts))

        of = f" for all of {count} experts" if shards else ", or only in part"
        if any(map(loads_of, stored.values())):  # else dummy weights, which nothing loads
            for name, parameter in stored.items():
                if not was_loaded(parameter):
                    raise ValueError(
                        f"{label}: {prefix}{name} was not loaded{of}: what the checkpoint keeps dense must be in "
                        "`ignore` of its quantization_config"
                    )
            if inputs is not None and is_recorded(inputs) and not loads_of(inputs):
                inputs = None
            elif inputs is not None and not was_loaded(inputs):
                raise ValueError(
                    f"{label}: {prefix}{names.input_scale} was not loaded{of}: calibrate the model again, or set "
                    f"{SETTING}=w4a16 to keep activations dense"
                )

        def scales(parameter: nn.Parameter) -> Tensor:
            if shards:
                return parameter.data.reshape(-1, len(shards))
            data = parameter.data.clone().reshape(-1)
            if loads_of(parameter) == {None}:  # one in the file for all: the others have arbitrary values
                data[1:] = torch.nan
            return data

        input_scales = None if inputs is None else scales(inputs)
        if input_scales is not None and not shards and differs_within(input_scales):
            logger.warning("%s: fused weights have different input scales: the largest is used, so none clips", label)
        loaded = Loaded(
            name=f"{label}.{prefix}weight" if shards else label,
            qdata=stored[names.qdata].data,
            scale=stored[names.scale].data,
            factors=scales(stored[names.factor]),
            rows=parts,
            input_scales=input_scales,
            divides=names.divides,
            quantizes_activations=self.quantizes_activations,
        )
        return weight_of(loaded, layer.params_dtype)

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
