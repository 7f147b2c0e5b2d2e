"""Load a checkpoint into an existing model. Weights that are quantized in the file stay quantized."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from tqdm import tqdm

from nvfp4_tensor.checkpoints.architectures import CACHE_SCALES
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, read
from nvfp4_tensor.checkpoints.models.origins import (
    Origin,
    Value,
    gather,
    origins_in_model,
    pre_scales_of,
    read_pre_scale,
    shape_of,
)
from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
from nvfp4_tensor.checkpoints.wrappers import RowsApart, WeightOnly
from nvfp4_tensor.dispatch.fp8 import FP8Tensor
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization import NVFP4Linear
from nvfp4_tensor.quantization.conv1d import as_linear, is_conv1d, is_linear, was_conv1d
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.linear import PRE_SCALE, linear_of_codes, set_pre_scale
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.description import CodedTensor

ORIGINS = "_nvfp4_origins"
"""The attribute of modules with the fields of the :class:`Origin` of each parameter, which :func:`save` uses."""

_IGNORED = (*CACHE_SCALES, ".inv_freq")
"""Suffixes of tensors that are ignored if the model does not have them: scales of a key-value cache, computed
tables."""

_WRAPPERS = (DataParallel, DistributedDataParallel, AveragedModel)


def load(
    model: nn.Module,
    path: str | Path,
    *,
    format: str | None = None,
    weight_only: bool = False,
    strict: bool = True,
    progress: bool = True,
) -> nn.Module:
    """Load a checkpoint into ``model`` in place. NVFP4 and FP8 weights stay so, others are dense.

    The model may be on the meta device (``accelerate.init_empty_weights(include_buffers=False)``), dense or quantized.
    Its parameters keep their dtypes and devices (meta becomes CPU), and an NVFP4 weight decodes to the dtype of the
    parameter that it replaces. Shared parameters stay shared. ``qkv_proj``, ``gate_up_proj`` and experts (E, N, K) of
    the model are joined from the separate tensors of a file. The model changes only after everything was read and
    checked: after an error it is unchanged.

    Args:
        path: a folder or file of any format of :data:`FORMATS`.
        format: the name of the format, which is detected by default.
        weight_only: do not quantize activations (W4A4 becomes W4A16). This is more accurate, and faster without FP4
            tensor cores.
        strict: raise an error if the checkpoint has tensors that the model does not have, or the reverse. If False,
            additional tensors are ignored, and missing parameters are unchanged.
        progress: show a progress bar.

    Returns:
        ``model``.

    Example::

        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        checkpoints.load(model, path)

    Raises:
        ValueError: the file is invalid, or belongs to another model. The message has the file, the tensor, and what was
            expected and found.
    """
    with read(path, format) as opened:
        load_open(model, WeightOnly(opened) if weight_only else opened, strict=strict, progress=progress)
    return model


def load_open(model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True, progress: bool = True) -> None:
    """Load an open checkpoint into a model, as :func:`load` does."""
    model = unwrapped(model)
    slots, loaded, checkpoint = _slots(model), {}, RowsApart(checkpoint)
    tensors = {name: slot.tensor for slot in slots.values() for name in slot.holders}
    plan = _plan(slots, checkpoint, strict, origins_in_model(model, tensors, checkpoint.entries))
    name_of_file = "" if checkpoint.path is None else checkpoint.path.name
    for name, origin in tqdm(plan.items(), desc=f"loading {name_of_file}", unit="tensor", disable=not progress):
        slot, entry = slots[name], checkpoint.entries[origin.names[0]]
        tensor, origin = read_tensor(slot, origin, entry, checkpoint.value)
        device = "cpu" if slot.tensor.is_meta else slot.tensor.device
        loaded[name] = tensor.to(device), origin, read_pre_scale(origin, checkpoint)
    checkpoint.check_unchanged()
    for name, (tensor, origin, scale) in loaded.items():
        _assign(slots[name], tensor, origin, scale)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model in a wrapper of torch, torch.compile's for instance, whose names have a prefix."""
    while "_orig_mod" in model._modules or isinstance(model, _WRAPPERS):
        (model,) = model.children()
    return model


@dataclasses.dataclass(frozen=True)
class Slot:
    """A parameter or persistent buffer, and by its names in the model the modules that share it."""

    tensor: Tensor
    holders: dict[str, tuple[nn.Module, str]]

    @property
    def is_transposed(self) -> bool:
        """Return whether it has experts (E, K, N), which NVFP4 stores as (E, N, K), with blocks along K."""
        return self.tensor.dim() == 3 and any(is_transposed(module) for module, _ in self.holders.values())

    @property
    def stored_transposed(self) -> bool:
        """Return whether it is the weight (N, K) of a former Conv1D, which dense files have as (K, N)."""
        return any(name == "weight" and was_conv1d(module) for module, name in self.holders.values())

    def stored_shape(self, quantized: bool) -> tuple[int, ...]:
        """Return the shape that a file must have."""
        shape, conv1d = tuple(self.tensor.shape), any(is_conv1d(module) for module, _ in self.holders.values())
        differs = self.is_transposed or conv1d if quantized else self.stored_transposed
        return (*shape[:-2], shape[-1], shape[-2]) if differs else shape


def slot_of(model: nn.Module, name: str) -> Slot:
    """Return a parameter of a model under one of its names."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return Slot(getattr(module, attribute), {name: (module, attribute)})


def _slots(model: nn.Module) -> dict[str, Slot]:
    """Return the parameters and persistent buffers of a model by the first name of each.

    Raises:
        ValueError: another buffer is on the meta device, which no checkpoint has values for.
    """
    by_id: dict[int, Slot] = {}
    for path, module in model.named_modules():
        for attribute, tensor in itertools.chain(module._parameters.items(), module._buffers.items()):
            name = f"{path}.{attribute}" if path else attribute
            if tensor is None or attribute == PRE_SCALE:  # it comes and goes with its weight
                continue
            if attribute not in module._non_persistent_buffers_set:
                by_id.setdefault(id(tensor), Slot(tensor, {})).holders[name] = (module, attribute)
            elif tensor.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and not in checkpoints: make the model with "
                    "accelerate.init_empty_weights(include_buffers=False), which computes such buffers"
                )
    _tie(model, by_id)
    return {next(iter(slot.holders)): slot for slot in by_id.values()}


def _tie(model: nn.Module, by_id: dict[int, Slot]) -> None:
    """Join parameters that transformers ties. On the meta device they are separate until then."""
    by_name = {name: slot for slot in by_id.values() for name in slot.holders}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():
        one, other = by_name.get(source), by_name.get(target)
        if one is not None and other is not None and one is not other and one.tensor.is_meta and other.tensor.is_meta:
            one.holders.update(other.holders)
            del by_id[id(other.tensor)]


def _plan(
    slots: dict[str, Slot], checkpoint: Checkpoint, strict: bool, found: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Return the origin of each slot, of those that were found by name, checked against the headers."""
    plan: dict[str, Origin] = {}
    used: set[str] = set()
    missing = []
    for first, slot in slots.items():
        origins = [found[name] for name in slot.holders if name in found]
        used.update(name for o in origins for name in (*o.names, *pre_scales_of(o, checkpoint.entries)))
        if not origins:
            missing.append(first)
            continue
        plan[first] = origins[0]
        for origin in origins:
            check_slot(slot, origin, checkpoint)
    unexpected = [name for name in checkpoint.entries if name not in used and not name.endswith(_IGNORED)]
    wanted = missing if strict else [name for name in missing if slots[name].tensor.is_meta]
    if wanted or (strict and unexpected):
        differences = [f"the checkpoint has no tensors for {some(wanted)}"] if wanted else []
        differences += [f"the model does not have {some(unexpected)}"] if unexpected else []
        raise ValueError(
            f"{checkpoint.path} belongs to another model: {'; '.join(differences)}. The model is unchanged"
        )
    return plan


def check_slot(slot: Slot, origin: Origin, checkpoint: Checkpoint) -> None:
    """Raise a ValueError if the tensors of a checkpoint do not fit a parameter, from the headers."""
    name, entry = next(iter(slot.holders)), checkpoint.entries[origin.names[0]]
    file = entry.shard or checkpoint.path
    try:
        shape = shape_of(origin, checkpoint.entries)
    except ValueError as error:
        raise ValueError(f"{file}: {name}: {error}") from None
    if shape != (expected := slot.stored_shape(entry.is_coded)):
        raise ValueError(
            f"{file}: tensor {origin.names[0]}: expected {list(expected)}, found {list(shape)} for {name}: make the "
            "model with the config.json of the checkpoint"
        )
    if not entry.is_coded:
        if slot.tensor.dtype.is_floating_point and not entry.dtype.is_floating_point:
            raise ValueError(
                f"{file}: tensor {origin.names[0]}: expected a floating-point dtype for a parameter in "
                f"{slot.tensor.dtype}, found {entry.dtype}"
            )
        return
    scales = pre_scales_of(origin, checkpoint.entries)
    for holder, (module, _) in slot.holders.items():
        if scales and not (type(module) is nn.Linear or isinstance(module, NVFP4Linear) or is_conv1d(module)):
            raise ValueError(f"{file}: tensor {scales[0]}: expected an nn.Linear, found {holder} of {type(module)}")
        if not is_linear(module) and slot.tensor.dim() != 3:
            raise ValueError(
                f"{file}: tensor {origin.names[0]}: expected a dense tensor for {holder} of a "
                f"{type(module).__name__}, found {entry.kind}, which only linears and experts (E, N, K) support"
                + (": untie the output layer from the embedding first" if len(slot.holders) > 1 else "")
            )


def read_tensor(slot: Slot, origin: Origin, entry: Entry, read: Callable[[str], Value]) -> tuple[Tensor, Origin]:
    """Return the tensor for a parameter, and its origin with the scales of the file; entry: of its first weight."""
    value, origin = gather(origin, read)
    if isinstance(value, LinearParts | FP8Tensor):
        dtype = slot.tensor.dtype if slot.tensor.dtype in HIGH_PRECISION_DTYPES else entry.dtype
        weight = value.to(dtype) if isinstance(value, FP8Tensor) else tensor_of(value, dtype)
        return weight.transpose(-2, -1) if slot.is_transposed else weight, origin
    value = value.t().contiguous() if slot.stored_transposed else value
    floating = slot.tensor.dtype.is_floating_point and value.dtype.is_floating_point
    return value.to(slot.tensor.dtype if floating else None), origin


def _assign(slot: Slot, tensor: Tensor, origin: Origin, scale: Tensor | None) -> None:
    """Set the tensor in all modules that share it. This cannot fail."""
    coded, value = isinstance(tensor, CodedTensor), tensor
    if isinstance(slot.tensor, nn.Parameter):
        value = nn.Parameter(tensor, requires_grad=slot.tensor.requires_grad and not coded)
    for module, attribute in slot.holders.values():
        if coded:
            linear_of_codes(as_linear(module))
        setattr(module, attribute, value)
        origins = dict(getattr(module, ORIGINS, {}))
        origins.pop(attribute, None)
        if origin.factors or not origin.is_whole or origin.names[0] not in slot.holders:
            origins[attribute] = dataclasses.asdict(origin)
        if origins or hasattr(module, ORIGINS):
            setattr(module, ORIGINS, origins)
        if attribute == "weight":
            set_pre_scale(module, None if scale is None else scale.to(tensor.device))
