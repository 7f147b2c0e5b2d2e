"""Write a trainer's weights to the NVFP4 parameters of an inference model, in place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.quantization.conv1d import was_conv1d
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.quantization.weights import shared_amax
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import quantized_like
from nvfp4_tensor.training.weights.base import scale_groups

RefitTarget: TypeAlias = "str | tuple[str, int] | None"
"""The target of a trainer's weight: a name in the model, the name of a fused weight and an index, or None."""

_Slices: TypeAlias = dict[int, Tensor]
"""The slices of a fused weight by index; one slice with index 0 for other weights."""


@dataclasses.dataclass(frozen=True)
class RefitReport:
    """The result of :func:`refit_`.

    Attributes:
        quantized, dense: the numbers of NVFP4 and of dense parameters and buffers that were written.
        source_bytes: the size of the given weights.
        written_bytes: the size of the written parameters.
        seconds: the time from the first write until all devices have finished.
    """

    quantized: int
    dense: int
    source_bytes: int
    written_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.source_bytes / max(self.seconds, 1e-9) / 1e9
        return (
            f"{self.quantized} NVFP4 and {self.dense} dense tensors, {self.source_bytes / 1e6:.1f} MB given, "
            f"{self.written_bytes / 1e6:.1f} MB written in {self.seconds * 1e3:.1f} ms ({rate:.1f} GB/s of the source)"
        )


@torch.no_grad()
def refit_(
    model: nn.Module,
    named_weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    strict: bool = True,
    name_map: Callable[[str], RefitTarget] | None = None,
    round_mode: RoundingMode | str | None = None,
    seed: int = 0,
    step: int = 0,
) -> RefitReport:
    """Write dense weights to a model's parameters: quantize them by the spec of NVFP4 parameters, copy them to others.

    Codes, scales and per-tensor scales are written in place, so the next replay of a CUDA graph uses the new weights.
    Static activation scales do not change. The result equals :func:`quantize` of the given weight, in its dtype.
    Linears that share a per-tensor scale (q, k and v; gate and up, after ``quantize_`` of the model) go on sharing one.

    All names and shapes are checked before the first write, so an iterator is consumed first.

    Args:
        model: a model with NVFP4 parameters, quantized by ``quantize_`` or loaded.
        named_weights: (name, tensor) pairs or a mapping: bfloat16, float16 or float32, on any device.
        strict: require that every parameter of the model is given, and that every given name is in the model. Buffers
            are optional.
        name_map: a function from a given name to a name in the model; to (name, i) for slice i of a fused weight, whose
            slices are concatenated along dimension 0; or to None, which skips the weight. By default, names are equal.
        round_mode: the rounding mode, instead of that of the specs. "stochastic" adds rounding noise with mean zero,
            which differs between steps, for exploration that is reproducible; block scales are then rounded up, so that
            nothing clips.
        seed, step: together with the parameter's name, they determine the random bits.

    Raises:
        KeyError: if names are missing or unexpected (strict) or given twice, or slices of a fused weight are missing.
        TypeError: if a weight is not a dense tensor of a supported dtype, with values and not sharded.
        ValueError: if a shape does not fit, a parameter cannot be written to (on the meta device, sharded, made in
            inference mode), or for EDEN.

    >>> report = refit_(server, trainer.state_dict())
    """
    if round_mode is not None and RoundingMode.of(round_mode) == RoundingMode.EDEN:
        raise ValueError("EDEN does not support weights: use 'stochastic' or 'rne'")
    if isinstance(named_weights, nn.Module):
        raise TypeError(
            f"named_weights are names and tensors: pass the state_dict() of the {type(named_weights).__name__}"
        )
    targets = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    given = _group_by_target(named_weights, name_map)
    if strict:
        _check_names(model, targets, given)
    writes = {name: [slices[i] for i in sorted(slices)] for name, slices in given.items() if name in targets}
    for path, module in model.named_modules():
        name, scale = (f"{path}.{each}".lstrip(".") for each in ("weight", PRE_SCALE))
        if was_conv1d(module) and name in writes:
            writes[name] = [t.mT if t.dim() == 2 else t for t in writes[name]]  # as in the state_dict
        if PRE_SCALE in module._buffers and name in writes and scale not in writes:
            raise ValueError(
                f"the inputs of {name} are multiplied by {PRE_SCALE} (AWQ), which a trainer's weight is not divided "
                f"by, and nothing was written: refit a model without AWQ, or give weights divided by {scale}, and it"
            )
    for name, slices in writes.items():
        _check_write(name, targets[name], slices, given[name])
    devices = {targets[name].device for name in writes}
    _synchronize(devices)
    start = time.perf_counter()
    for group in _groups(model, targets, writes):
        _write({name: writes[name] for name in group}, targets, round_mode, seed, step)
    _synchronize(devices)
    seconds = time.perf_counter() - start
    quantized = sum(isinstance(targets[name], NVFP4Tensor) for name in writes)
    return RefitReport(
        quantized=quantized,
        dense=len(writes) - quantized,
        source_bytes=sum(t.nbytes for slices in writes.values() for t in slices),
        written_bytes=sum(targets[name].nbytes for name in writes),
        seconds=seconds,
    )


def _group_by_target(
    named_weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], name_map: Callable[[str], RefitTarget] | None
) -> dict[str, _Slices]:
    pairs = named_weights.items() if isinstance(named_weights, Mapping) else named_weights
    given: dict[str, _Slices] = {}
    for name, tensor in pairs:
        target = name if name_map is None else name_map(name)
        if target is None:
            continue
        target_name, index = (target, 0) if isinstance(target, str) else target
        if (
            isinstance(tensor, NVFP4Tensor | FP8Tensor)
            or not isinstance(tensor, Tensor)
            or tensor.layout != torch.strided
        ):
            raise TypeError(f"{name} has to be a dense tensor, not a {type(tensor).__name__}")
        if isinstance(tensor, DTensor) or tensor.is_meta:
            why = "a shard: give its full_tensor()" if isinstance(tensor, DTensor) else "on the meta device"
            raise TypeError(f"{name} has to be a dense tensor with all values, and is {why}")
        if index in given.setdefault(target_name, {}):
            raise KeyError(f"{target_name}, slice {index}, is given twice, the second time by {name}")
        given[target_name][index] = tensor.detach()
    return given


def _check_names(model: nn.Module, targets: dict[str, Tensor], given: dict[str, _Slices]) -> None:
    unexpected = [name for name in given if name not in targets]
    found = {id(targets[name]) for name in given if name in targets}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in found]
    problems = [f"{kind}: {some(names)}" for kind, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if problems:
        raise KeyError(f"{'; '.join(problems)}. Nothing was written. Pass a name_map, or strict=False")


def _check_write(name: str, target: Tensor, slices: list[Tensor], indices: _Slices) -> None:
    if set(indices) != set(range(len(slices))):
        raise KeyError(f"{name} has slices {sorted(indices)}, but others are missing. Nothing was written")
    if isinstance(target, FP8Tensor):
        raise ValueError(f"{name} is FP8, whose codes are read-only: dequantize it, or leave it out with strict=False")
    if target.is_meta:
        raise ValueError(f"{name} is on the meta device: materialize the model first")
    if isinstance(target, DTensor):
        raise ValueError(
            f"{name} is sharded: refit the whole model, or copy_ distribute_tensor(quantize(new), ...) to it"
        )
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, and is written only in it: refit_ in torch.inference_mode()"
        )
    if isinstance(target, NVFP4Tensor):
        for t in slices:
            if t.dtype not in HIGH_PRECISION_DTYPES:
                raise TypeError(f"{name} is NVFP4 and needs a bfloat16, float16 or float32 tensor, not {t.dtype}")
        if target.window is not None:
            raise ValueError(f"{name} is a part of another tensor: refit the full tensor")
    if len({(t.dtype, t.shape[1:]) for t in slices}) > 1:
        raise ValueError(f"the slices of {name} differ in dtype or in their last dimensions: convert them to one")
    shape = tuple(slices[0].shape)
    if len(slices) > 1:
        shape = (sum(len(t) for t in slices), *shape[1:])
    if shape != tuple(target.shape):
        raise ValueError(f"{name} is {tuple(target.shape)} in the model and {shape} as given. Nothing was written")


def _groups(model: nn.Module, targets: dict[str, Tensor], writes: Collection[str]) -> list[tuple[str, ...]]:
    """Return the names to write, those together that share a per-tensor scale; warn of parts of a group."""
    coded = {name: each for name, each in targets.items() if isinstance(each, NVFP4Tensor) and not each.is_meta}
    groups: dict[str, tuple[str, ...]] = {}
    parts: list[str] = []
    for group in scale_groups(model, coded):
        given = [name for name in group if name in writes]
        if len(given) == len(group):
            groups |= dict.fromkeys(group, group)
        else:
            parts += given
    if parts:
        warn_user(
            f"{some(parts)} without the linears that servers join with them: they no longer share a per-tensor "
            "scale, and saving rounds them again. Give q, k and v, or gate and up, in one call"
        )
    return list(dict.fromkeys(groups.get(name, (name,)) for name in writes))


def _write(
    group: dict[str, list[Tensor]],
    targets: dict[str, Tensor],
    round_mode: RoundingMode | str | None,
    seed: int,
    step: int,
) -> None:
    """Write weights that share a per-tensor scale, or a single one."""
    options: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for name, slices in group.items():
        parts = [t.to(targets[name].device) for t in slices]
        weights[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    for name, weight in weights.items():
        target = targets[name]
        if not isinstance(target, NVFP4Tensor):
            target.copy_(weight)
            continue
        if len(group) > 1 and not options:
            options["amax"] = shared_amax(weights.values(), target.spec)
        spec = target.spec if round_mode is None else target.spec.with_round_mode(round_mode)
        rng_state = rng_state_of("refit", seed, name, step, target.device) if spec.is_stochastic else None
        target.copy_(quantized_like(target, weight, spec, rng_state=rng_state, **options))


def _synchronize(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
