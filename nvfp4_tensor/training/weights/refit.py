"""A trainer's weights into the NVFP4 parameters of a model that serves, in place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.tensor.nvfp4 import Aliasing, NVFP4Tensor, quantize, quantize_experts

Place: TypeAlias = "str | tuple[str, int] | None"
"""Where a trainer's weight goes: a name in the model, a name and the position in a fused one, or nowhere."""

_Pieces: TypeAlias = dict[int, Tensor]


@dataclasses.dataclass(frozen=True)
class RefitReport:
    """What :func:`refit_` did.

    Attributes:
        quantized, dense: how many parameters and buffers of each kind were written.
        source_bytes: of the weights given.
        written_bytes: of what the model stores of them.
        seconds: from the first write to the end of the last, devices included.
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
    name_map: Callable[[str], Place] | None = None,
    round_mode: RoundingMode | str | None = None,
    seed: int = 0,
    step: int = 0,
) -> RefitReport:
    """Write dense weights into a model's parameters: NVFP4 ones are quantized by their specs, dense ones copied.

    No address changes: what a CUDA graph has captured (codes, scales, per-tensor scales) is what is written to, so the
    graph's next replay sees the new weights. Static activation scales stay. The bits are those of a fresh
    :func:`quantize` of the weight as it is given, in its own dtype.

    All names and shapes are checked before the first write, so an iterator is read to its end first.

    Args:
        model: with NVFP4 parameters, made by ``quantize_`` or loaded.
        named_weights: (name, tensor) pairs or a mapping: bfloat16, float16 or float32, on any device.
        strict: every parameter of the model has to be given, and everything given has to be in the model. Buffers may
            be given, but need not be.
        name_map: where the weight of a name goes: a name in the model; (name, i) for piece i of a fused one, whose
            pieces are joined along dimension 0 in order; None for nowhere. As named by default.
        round_mode: in place of that of the specs. "stochastic" adds rounding noise that is zero in the mean, which
            other steps draw anew: exploration that can be repeated.
        seed, step: decide the random bits, together with the parameter's name.

    Raises:
        KeyError: names missing or unexpected (strict), given twice, or pieces of a fused one missing.
        TypeError: a weight that is no dense tensor of those dtypes.
        ValueError: a shape that does not fit, a parameter that cannot be written to or is on the meta device, EDEN.

    >>> report = refit_(server, trainer.state_dict())
    """
    if round_mode is not None and RoundingMode.of(round_mode) == RoundingMode.EDEN:
        raise ValueError("EDEN makes no weight that is kept: use 'stochastic' or 'rne'")
    targets = _targets(model)
    given = _sorted_by_target(named_weights, name_map)
    _check_names(model, targets, given, strict)
    writes = {name: [pieces[i] for i in sorted(pieces)] for name, pieces in given.items() if name in targets}
    for name, pieces in writes.items():
        _check_write(name, targets[name], pieces, given[name])
    devices = {targets[name].device for name in writes}
    _wait_for(devices)
    start = time.perf_counter()
    for name, pieces in writes.items():
        _write(name, targets[name], pieces, round_mode, seed, step)
    _wait_for(devices)
    seconds = time.perf_counter() - start
    quantized = sum(isinstance(targets[name], NVFP4Tensor) for name in writes)
    return RefitReport(
        quantized=quantized,
        dense=len(writes) - quantized,
        source_bytes=sum(piece.nbytes for pieces in writes.values() for piece in pieces),
        written_bytes=sum(targets[name].nbytes for name in writes),
        seconds=seconds,
    )


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by all of their names, those of tied ones included."""
    return {**dict(model.named_buffers(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}


def _sorted_by_target(
    named_weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], name_map: Callable[[str], Place] | None
) -> dict[str, _Pieces]:
    pairs = named_weights.items() if isinstance(named_weights, Mapping) else named_weights
    given: dict[str, _Pieces] = {}
    for name, tensor in pairs:
        where = name if name_map is None else name_map(name)
        if where is None:
            continue
        target, position = (where, 0) if isinstance(where, str) else where
        if isinstance(tensor, NVFP4Tensor) or not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{name} is to be a dense tensor, not a {type(tensor).__name__}")
        if position in given.setdefault(target, {}):
            raise KeyError(f"{target}, piece {position}, is given twice, the second time by {name}")
        given[target][position] = tensor.detach()
    return given


def _check_names(model: nn.Module, targets: dict[str, Tensor], given: dict[str, _Pieces], strict: bool) -> None:
    if not strict:
        return
    unexpected = [name for name in given if name not in targets]
    held = {id(targets[name]) for name in given if name in targets}
    missing = [name for name, parameter in model.named_parameters() if id(parameter) not in held]
    problems = [
        f"{what}: {_listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if problems:
        raise KeyError(f"{'; '.join(problems)}. Nothing was written. Give a place function, or strict=False")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_write(name: str, target: Tensor, pieces: list[Tensor], positions: _Pieces) -> None:
    if set(positions) != set(range(len(pieces))):
        raise KeyError(f"{name} has pieces {sorted(positions)}: the ones between are missing. Nothing was written")
    if target.is_meta:
        raise ValueError(f"{name} is on the meta device: materialize the model first")
    if isinstance(target, NVFP4Tensor):
        for piece in pieces:
            if piece.dtype not in HIGH_PRECISION_DTYPES:
                raise TypeError(f"{name} is NVFP4 and takes bfloat16, float16 or float32, not {piece.dtype}")
        if target.aliasing != Aliasing.WHOLE:
            raise ValueError(f"{name} is a part or a copy of another tensor: refit the whole")
    if len({(piece.dtype, piece.shape[1:]) for piece in pieces}) > 1:
        raise ValueError(f"the pieces of {name} differ in dtype or in their last dimensions")
    if len(pieces) > 1 and pieces[0].dim() == 0:
        raise ValueError(f"the pieces of {name} are 0-d and cannot be joined")
    shape = tuple(pieces[0].shape)
    if len(pieces) > 1:
        shape = (sum(len(piece) for piece in pieces), *shape[1:])
    if shape != tuple(target.shape):
        raise ValueError(f"{name} is {tuple(target.shape)} in the model and {shape} as given. Nothing was written")


def _write(
    name: str, target: Tensor, pieces: list[Tensor], round_mode: RoundingMode | str | None, seed: int, step: int
) -> None:
    weight = torch.cat([piece.to(target.device) for piece in pieces]) if len(pieces) > 1 else pieces[0]
    if not isinstance(target, NVFP4Tensor):
        target.copy_(weight)
        return
    weight = weight.to(target.device)
    spec = target.spec if round_mode is None else target.spec.replace(round_mode=round_mode)
    rng_state = rng_state_of(seed, name, step, target.device) if spec.is_stochastic else None
    by_matrix = target.per_tensor_scale.dim() == 2 and len(target) > 0
    new = (quantize_experts if by_matrix else quantize)(
        weight.mT if target.transposed else weight, spec, rng_state=rng_state
    )
    target.copy_(new.mT if target.transposed else new)


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
