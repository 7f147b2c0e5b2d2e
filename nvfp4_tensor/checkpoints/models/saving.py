"""Save a model in any format, as a checkpoint in memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, format_named
from nvfp4_tensor.checkpoints.convert import different_scales
from nvfp4_tensor.checkpoints.io.safetensors import write_json
from nvfp4_tensor.checkpoints.models.loading import ORIGINS, unwrapped
from nvfp4_tensor.checkpoints.models.origins import Origin, split
from nvfp4_tensor.checkpoints.parts import LinearParts, check_scales, parts_of, tensor_of, with_scale
from nvfp4_tensor.checkpoints.understood import pre_scale_of
from nvfp4_tensor.checkpoints.wrappers import WeightOnly
from nvfp4_tensor.dispatch.fp8 import FP8Tensor
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.quantization.conv1d import is_conv1d, was_conv1d
from nvfp4_tensor.quantization.experts import in_mixtral, names_in_files
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.quantization.model_families import EMBEDDINGS, MIXTRAL_TYPES
from nvfp4_tensor.quantization.names import is_matched, some
from nvfp4_tensor.quantization.observer import InputStatistics
from nvfp4_tensor.tensor.description import CodedTensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import requantize

MismatchedScales = Literal["requantize", "keep", "refuse"]


def save(
    model: nn.Module | Mapping[str, Tensor],
    path: str | Path,
    *,
    format: str = "modelopt",
    weight_only: bool = False,
    mismatched_scales: MismatchedScales = "requantize",
    config: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> None:
    """Save a model with NVFP4 weights in a checkpoint format. Weights that :func:`load` read are written unchanged.

    A tensor that several modules share is written once, under its first name. Linears and experts that :func:`load`
    joined are split again, and so are the experts of transformers models.

    Args:
        model: a module, or a state dict. What torch.compile and torch's wrappers hold is saved, by its own names.
        path: a path that does not exist yet. It appears when it is complete.
        format: the name of a format of :data:`FORMATS`.
        weight_only: omit the quantization of activations (W4A4 becomes W4A16).
        mismatched_scales: what to do with linears that servers join (q, k and v; gate and up) if their per-tensor
            scales differ, because vLLM computes wrong numbers with them. They get the largest scale: with the same
            values if powers of two lie between, as after training in NVFP4; otherwise "requantize" warns, and quantizes
            them again, which adds 3 to 4 % to their error. "keep" writes them unchanged. "refuse" raises a ValueError.
        config: the content of config.json. The default is that of a model of transformers, with the class and dtype
            that the model has, or of diffusers; without one, config.json is not written. A generation config is, too.
        progress: show a progress bar.
        options: options of the format.

    Example::

        quantize_(model.model, NVFP4WeightOnlyConfig(four_over_six=True))
        checkpoints.save(model, "SmolLM2-135M-NVFP4", format="compressed-tensors")

    Raises:
        ValueError: a tensor cannot be stored in the format, or would not be read back (an embedding in NVFP4, but for
            GGUF and MLX), or the model has adapters or is prepared for a calibration; the message has the name. Nothing
            is written.
    """
    if mismatched_scales not in ("requantize", "keep", "refuse"):
        raise ValueError(f"mismatched_scales: expected 'requantize', 'keep' or 'refuse', found {mismatched_scales!r}")
    target = format_named(format)
    model = unwrapped(model) if isinstance(model, nn.Module) else model
    if not target.holds_embeddings:
        refuse_embeddings(model)
    checkpoint: Checkpoint = ModelCheckpoint(model, config, mismatched_scales)
    if format not in ("dense", "gguf") and not any(entry.is_coded for entry in checkpoint.entries.values()):
        warn_user(f"the {type(model).__name__} has only dense weights: quantize it, or give format='dense'")
    target.write(WeightOnly(checkpoint) if weight_only else checkpoint, Path(path), progress=progress, **options)


class ModelCheckpoint(Checkpoint):
    """A model, or a state dict, as a checkpoint that can be written.

    Attributes:
        tensors: its parameters and persistent buffers, each by its first name.
    """

    format = "memory"
    path: Path | None = None

    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        config: Mapping[str, Any] | None = None,
        mismatched_scales: MismatchedScales = "keep",
    ) -> None:
        """
        Raises:
            ValueError: a weight is on the meta device, or no format can store it, or scales differ and
                mismatched_scales is "refuse".
        """
        modules = model.named_modules() if isinstance(model, nn.Module) else ()
        conv1d = {f"{path}.weight" for path, module in modules if was_conv1d(module) or is_conv1d(module)}
        self.tensors = {name: _stored_orientation(tensor, name in conv1d) for name, tensor in _named_tensors(model)}
        self._origins = _origins(model, self.tensors) if isinstance(model, nn.Module) else {}
        self._shared: dict[str, Tensor] = {}
        self._parameter: dict[str, str] = {}
        self._last: tuple[str, dict[str, Any]] = ("", {})
        self.config = _config(model) if config is None else dict(config)
        self._generation_config = _as_json(getattr(model, "generation_config", None))
        self.config.pop("quantization_config", None)
        self.entries = {}
        for name, tensor in self.tensors.items():
            for each, entry in self._entries_of(name, tensor).items():
                self.entries[each], self._parameter[each] = entry, name
        if mismatched_scales != "keep" and (groups := different_scales(self)):
            self._share_scales(groups, mismatched_scales)

    def _entries_of(self, name: str, tensor: Tensor) -> dict[str, Entry]:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values: load or initialize the model first")
        try:
            value = check_scales(parts_of(tensor)) if isinstance(tensor, NVFP4Tensor) else tensor
            entries = {each: Entry.of(part, tensor.dtype) for each, part in self._split(name, value).items()}
            spec = getattr(tensor, "activation_spec", None)
            return {each: dataclasses.replace(entry, activation=spec) for each, entry in entries.items()}
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _split(self, parameter: str, value: LinearParts | Tensor) -> dict[str, Any]:
        """Return what files have of a parameter: the tensors that it was joined of, or the scale of their inputs."""
        if parameter.rpartition(".")[2] != PRE_SCALE:
            return split(value, self._origin(parameter))
        names = self._origin(f"{parameter.removesuffix(PRE_SCALE)}weight").names
        return {pre_scale_of(each): value for each in names}

    def _origin(self, parameter: str) -> Origin:
        return self._origins.get(parameter, Origin(((parameter,),)))

    def names_by_parameter(self) -> dict[str, list[str]]:
        """Return the names in files of each parameter of the model: several for experts and for joined linears."""
        names: dict[str, list[str]] = {}
        for name, parameter in self._parameter.items():
            names.setdefault(parameter, []).append(name)
        return names

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        parameter = self._parameter[name]
        if self._last[0] != parameter:  # the tensors of one parameter are read one after the other
            tensor = self.tensors[parameter].detach().cpu()
            self._last = (
                parameter,
                self._split(parameter, parts_of(tensor) if isinstance(tensor, NVFP4Tensor) else tensor),
            )
        value = self._last[1][name]
        return self._requantized(name, value) if name in self._shared else value

    def write_auxiliary_files(self, folder: Path) -> None:
        if self._generation_config:
            write_json(folder / "generation_config.json", self._generation_config)

    def _share_scales(self, groups: list[tuple[str, ...]], mismatched_scales: MismatchedScales) -> None:
        """Give the linears of each group the largest of their per-tensor scales."""
        rounded = []
        for group in groups:
            linears = [self.linear(name) for name in group]
            # The scale of a weight of zeros is 1, and does not matter.
            scales = [parts.per_tensor_scale for parts in linears if parts.qdata.bitwise_and(0x77).any()]
            largest = torch.stack(scales or [linears[0].per_tensor_scale]).amax()
            self._shared.update(dict.fromkeys(group, largest))
            if any(with_scale(parts, largest) is None for parts in linears):
                rounded.append(group)
        names = some([" and ".join(group) for group in rounded])
        if rounded and mismatched_scales == "refuse":
            raise ValueError(
                f"{len(rounded)} groups of linears that servers join have different per-tensor scales: {names}. "
                "mismatched_scales='requantize' gives them one"
            )
        if rounded:
            warn_user(
                f"requantizing {len(rounded)} groups of linears that servers join, because each group needs one "
                f"per-tensor scale: {names}. One call of quantize_model or quantize_ for the whole model gives each "
                "group one scale",
            )

    def _requantized(self, name: str, parts: LinearParts) -> LinearParts:
        """Give a weight the shared scale: with its own codes, or else quantized again."""
        shared = self._shared[name]
        if (moved := with_scale(parts, shared)) is not None:
            return moved
        weight = self.tensors[self._parameter[name]]
        assert isinstance(weight, NVFP4Tensor)
        spec = weight.spec.replace(round_mode=RoundingMode.RNE) if weight.spec.is_stochastic else weight.spec
        stored = tensor_of(parts, torch.float32)
        again = parts_of(requantize(stored, stored.dequantize(), spec, amax=shared * spec.largest_value))
        return parts.replace(qdata=again.qdata, scale=again.scale, per_tensor_scale=shared, divisor=None)


def refuse_embeddings(model: nn.Module | Mapping[str, Tensor]) -> None:
    """Raise a ValueError with the name of an embedding whose weight has codes: no loader reads it back.

    In a state dict, names tell which tensors are embeddings.
    """
    weights: dict[str, Tensor | None] = {}
    if isinstance(model, nn.Module):
        modules = {path: each for path, each in model.named_modules() if isinstance(each, nn.Embedding)}
        weights |= {f"{path}.weight".lstrip("."): each._parameters.get("weight") for path, each in modules.items()}
    else:
        weights |= {name: each for name, each in model.items() if is_matched(name, EMBEDDINGS)}
    for name, weight in weights.items():
        if isinstance(weight, CodedTensor):
            raise ValueError(
                f"{name} is the {type(weight).__name__} of an embedding, which no loader reads back: give it its dense "
                "weight first (embedding.weight = nn.Parameter(embedding.weight.dequantize())), or keep the model by "
                "torch.save"
            )


def _named_tensors(model: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers. A shared tensor comes once, under its first name."""
    if isinstance(model, nn.Module):
        if adapted := [name for name, module in model.named_modules() if hasattr(module, "base_layer")]:
            raise ValueError(
                f"{adapted[0]} has adapters, which no reader of checkpoints knows: merge them with "
                "training.merge_lora(model), or save model.unload() and, before it, model.save_pretrained(folder)"
            )
        if prepared := [name for name, module in model.named_modules() if isinstance(module, InputStatistics)]:
            raise ValueError(
                f"{prepared[0]} is prepared, and its observations are no part of a checkpoint: finish with step "
                '"convert" of the config'
            )
        model = model.state_dict(keep_vars=True)
    seen: set[int] = set()
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}: checkpoints can only have tensors")
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"{name} is sharded over ranks: save what torch's get_model_state_dict(model, options="
                "StateDictOptions(full_state_dict=True)) returns on rank 0"
            )
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _stored_orientation(tensor: Tensor, conv1d: bool = False) -> Tensor:
    """Return coded experts (E, K, N), and weights (K, N) of a former Conv1D, with blocks along K, as in files."""
    transposed = isinstance(tensor, NVFP4Tensor | FP8Tensor) and tensor.transposed and (tensor.dim() == 3 or conv1d)
    return tensor.detach().transpose(-2, -1) if transposed else tensor


def _origins(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Origin]:
    """Return the origins of loaded parameters, and of the experts of transformers models."""
    origins = {}
    mixtral = getattr(getattr(model, "config", None), "model_type", None) in MIXTRAL_TYPES
    for path, module in model.named_modules():
        kept = getattr(module, ORIGINS, {})
        for attribute in module._parameters:
            name = f"{path}.{attribute}" if path else attribute
            if name not in tensors:
                continue
            origin = Origin(**kept[attribute]) if attribute in kept else None
            if origin is None or not origin.fits(tensors[name].shape):
                origin = _of_experts(name, module, tensors[name], mixtral)
            if origin is not None:
                origins[name] = origin
    return origins


def _of_experts(name: str, module: nn.Module, tensor: Tensor, mixtral: bool) -> Origin | None:
    """Return the origin of experts, which transformers joins to one parameter (E, N, K), with gate above up."""
    stored = in_mixtral(name) if mixtral else name
    groups = names_in_files(module, name, len(tensor)) if tensor.dim() == 3 else ()
    if not groups:
        return None if stored == name else Origin(((stored,),))
    parts = len(groups[0])
    return Origin(groups, (tensor.shape[1] // parts,) * parts, stacked=True)


def _config(model: object) -> dict[str, Any]:
    """Return the config.json of a model of transformers or diffusers, as its save_pretrained writes it, or {}."""
    if config := _as_json(getattr(model, "config", None)):
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        if dtype := getattr(model, "dtype", None):  # that of the config may be the one that the model was made with
            config["dtype"] = str(dtype).removeprefix("torch.")
    return config or _as_json(model)


def _as_json(config: object) -> dict[str, Any]:
    to_json = getattr(config, "to_json_string", None)
    return {} if to_json is None else json.loads(to_json())
