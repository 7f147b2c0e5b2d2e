"""Map a parameter of a model to tensors of a checkpoint: one of the same name, several joined, or stacked experts.

Files have separate tensors for q, k and v, for gate and up, and for every expert. Models join some of them:
``qkv_proj``, ``gate_up_proj``, and the experts of transformers, parameters (E, N, K). Joining does not round: the
result has one per-tensor scale per row if the scales differ. :class:`Origin` records how to split it again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.io.sidecar import with_factors
from nvfp4_tensor.checkpoints.models.hf_names import names_in_model
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts
from nvfp4_tensor.checkpoints.understood import has_pre_scale, pre_scale_of
from nvfp4_tensor.quantization.experts import expert_group, in_mixtral
from nvfp4_tensor.quantization.model_families import EXPERTS_IN_FILES, JOINED_AS
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Tensor

Value: TypeAlias = LinearParts | FP8Tensor | Tensor
_KEPT = ("divisor", "input_scale", "input_divisor")


@dataclasses.dataclass(frozen=True)
class Origin:
    """The tensors of a checkpoint that make up a parameter.

    Attributes:
        groups: names in the checkpoint, one tuple per expert, with the names that are joined along the rows.
        rows: the number of rows of each name of a group; () if a single tensor is the parameter.
        stacked: whether the parameter is (E, N, K), with one matrix per group.
        factors: by name, the scales that were read from the file, as Python floats, which represent float32 exactly.
    """

    groups: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...] = ()
    stacked: bool = False
    factors: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Return all names in order."""
        return [name for group in self.groups for name in group]

    @property
    def is_whole(self) -> bool:
        """Return whether a single tensor of the checkpoint is the parameter."""
        return not self.rows

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether a parameter of this shape can be split into these tensors."""
        if self.is_whole:
            return True
        rows = sum(self.rows)
        return tuple(shape[:-1]) == ((len(self.groups), rows) if self.stacked else (rows,)) or tuple(shape) == (rows,)


def origins_in_model(model: object, tensors: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> dict[str, Origin]:
    """Return the origins of the parameters ``tensors`` of a model, of those that the checkpoint has."""
    renamed = names_in_model(model, entries)
    found = {name: _origin_of(name, tensor.dim(), renamed, entries) for name, tensor in tensors.items()}
    return {name: origin for name, origin in found.items() if origin is not None}


def _origin_of(name: str, dimensions: int, renamed: Mapping[str, str], entries: Mapping[str, Entry]) -> Origin | None:
    name = renamed.get(name, name)
    for each in (name, in_mixtral(name)):
        if each in entries:
            return Origin(((each,),))
    groups = _groups(name, dimensions, renamed, entries)
    if not groups:
        return None
    rows = tuple(entries[each].shape[0] for each in groups[0])
    return Origin(tuple(groups), rows, stacked=dimensions == 3)


def _groups(name: str, dimensions: int, renamed: Mapping[str, str], names: Container[str]) -> list[tuple[str, ...]]:
    if dimensions == 3:
        called = itertools.product((name, in_mixtral(name)), EXPERTS_IN_FILES)
        return next((groups for each in called if (groups := _expert_groups(each[0], renamed, names, each[1]))), [])
    module, _, attribute = name.rpartition(".")
    prefix, _, last = module.rpartition(".")
    parts = JOINED_AS.get(last, ())
    group = tuple(f"{prefix}.{part}.{attribute}" if prefix else f"{part}.{attribute}" for part in parts)
    return [group] if len(group) > 1 and all(each in names for each in group) else []


def _expert_groups(
    name: str, renamed: Mapping[str, str], names: Container[str], called: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """Return the group of each expert that the checkpoint has, from expert 0 on."""
    groups: list[tuple[str, ...]] = []
    while group := tuple(renamed.get(each, each) for each in expert_group(name, len(groups), called)):
        if not all(each in names for each in group):
            break
        groups.append(group)
    return groups


def shape_of(origin: Origin, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """Return the shape of the joined parameter.

    Raises:
        ValueError: the tensors cannot be joined.
    """
    if origin.is_whole:
        return entries[origin.names[0]].shape
    kinds = {_kind(entries[name]): name for name in reversed(origin.names)}
    if len(kinds) > 1:
        kind, other = sorted(kinds)[-1], sorted(kinds)[0]
        raise ValueError(
            f"{kinds[kind]} is {kind}, but tensors that the model joins with it are {other} ({kinds[other]}): leave "
            "all of q, k and v dense, or none; likewise gate and up, and all experts of a layer"
        )
    for group in origin.groups:
        rows, rest = tuple(entries[each].shape[0] for each in group), {entries[each].shape[1:] for each in group}
        if rows != origin.rows or len(rest) > 1:
            found = ", ".join(f"{each} {list(entries[each].shape)}" for each in group)
            raise ValueError(f"expected tensors that can be joined along their rows, found {found}")
    shape = (sum(origin.rows), *entries[origin.names[0]].shape[1:])
    return (len(origin.groups), *shape) if origin.stacked else shape


def _kind(entry: Entry) -> str:
    """Return what weights must have in common to be joined."""
    if entry.fp8 is None:
        return "NVFP4" if entry.quantized else "dense"
    kind = entry.fp8.activations
    activations = "dense" if kind is None else f"{'static' if entry.has_input_scale else 'dynamic'} {kind.name.lower()}"
    return f"FP8 (blocks of {entry.fp8.block[1] or 'all'} columns, activations {activations})"


def gather(origin: Origin, read: Callable[[str], Value]) -> tuple[Value, Origin]:
    """Read a parameter: its parts, an FP8Tensor or a dense tensor; and the origin with the scales of the file."""
    parts: dict[str, Any] = {name: read(name) for name in origin.names}
    values, leading = list(parts.values()), (len(origin.groups), -1) if origin.stacked else (-1,)
    origin = dataclasses.replace(origin, factors={name: kept for name, each in parts.items() if (kept := _kept(each))})
    if origin.is_whole:
        return values[0], origin
    if not isinstance(values[0], LinearParts | FP8Tensor):
        joined = torch.cat(values)
        return joined.view(*leading, *joined.shape[1:]), origin
    static = _largest([each.input_scale for each in values])
    if isinstance(values[0], FP8Tensor):
        joined = _join_fp8([[parts[name] for name in group] for group in origin.groups], origin.stacked)
        return joined.replace(input_scale=static), origin
    blocks = torch.cat([each.scale.view(torch.uint8) for each in values]).view(torch.float8_e4m3fn)
    qdata = torch.cat([each.qdata for each in values])
    return values[0].replace(
        qdata=qdata.view(*leading, *qdata.shape[1:]),
        scale=blocks.view(*leading, *blocks.shape[1:]),
        per_tensor_scale=_joined_scale(origin, parts),
        input_scale=static,
        divisor=None,
        input_divisor=None,
        input_amax=_largest([each.input_amax for each in values]),
    ), origin


def pre_scales_of(origin: Origin, entries: Mapping[str, Entry]) -> list[str]:
    """Return the names of the scales by which AWQ multiplies the inputs of a parameter; [] if there are none.

    Raises:
        ValueError: the parameter has experts, or only some of the weights that are joined have such a scale.
    """
    found = [pre_scale_of(name) for name in origin.names if has_pre_scale(name, entries)]
    if found and (origin.stacked or len(found) < len(origin.names)):
        raise ValueError(
            f"{some(found)} multiply the inputs of weights that the model joins to one parameter, which has one input: "
            "use a checkpoint without AWQ, or quantize the dense model"
        )
    return found


def read_pre_scale(origin: Origin, checkpoint: Checkpoint) -> Tensor | None:
    """Return the scale (K,) of the inputs of a parameter, or None.

    Raises:
        ValueError: see :func:`pre_scales_of`; or scales of weights that are joined differ, or are not above zero.
    """
    names = pre_scales_of(origin, checkpoint.entries)
    scales = [checkpoint.dense(name).reshape(-1) for name in names]
    for name, scale in zip(names, scales, strict=True):
        if not (scale.isfinite() & (scale > 0)).all() or not torch.equal(scale, scales[0]):
            file = checkpoint.entries[name].shard
            raise ValueError(f"{file}: tensor {name}: expected numbers above zero, those of {names[0]}, found others")
    return scales[0] if scales else None


def _kept(value: Value) -> dict[str, float]:
    values = {name: getattr(value, name, None) for name in _KEPT}
    return {name: value.item() for name, value in values.items() if value is not None and value.numel() == 1}


def _joined_scale(origin: Origin, parts: Mapping[str, LinearParts]) -> Tensor:
    """Return the per-tensor scale, or one per expert, if those of a group are equal; otherwise one per row."""
    groups = [[parts[name].per_tensor_scale for name in group] for group in origin.groups]
    if all(scale.dim() == 0 and torch.equal(scale, group[0]) for group in groups for scale in group):
        return torch.stack([group[0] for group in groups]).unsqueeze(1) if origin.stacked else groups[0][0]
    return torch.cat([each.per_tensor_scale.expand(each.shape[0]) for each in parts.values()])


def _largest(scales: Sequence[Tensor | None]) -> Tensor | None:
    """Return the largest scale, or None if any is None: then each call computes its own."""
    given = [scale for scale in scales if scale is not None]
    return torch.stack(given).amax() if given and len(given) == len(scales) else None


def split(value: Value, origin: Origin) -> dict[str, Any]:
    """Split a parameter into the tensors of its origin, with the scales of the file if they still match.

    Raises:
        ValueError: rows of one tensor have different per-tensor scales.
    """
    spans = [slice(*span) for span in itertools.pairwise(itertools.accumulate(origin.rows, initial=0))]
    places: list[Any] = list(itertools.product(range(len(origin.groups)), spans)) if origin.stacked else spans
    parts: Iterable[Any]
    if origin.is_whole:
        parts = [value]
    elif isinstance(value, LinearParts):
        parts = (value.rows(place, name) for name, place in zip(origin.names, places, strict=True))
    elif isinstance(value, FP8Tensor):
        parts = (_rows_of(value[place[0]], place[1]) if origin.stacked else _rows_of(value, place) for place in places)
    else:
        parts = (value[place] for place in places)
    tensors = dict(zip(origin.names, parts, strict=True))
    return _with_scales_of_file(tensors, origin.factors) if isinstance(value, LinearParts | FP8Tensor) else tensors


def _with_scales_of_file(
    tensors: Mapping[str, Any], factors: Mapping[str, Mapping[str, float]]
) -> dict[str, LinearParts | FP8Tensor]:
    """Return the weights of one parameter with the scales of the file, if they still match."""
    kept = {name: factors[name]["input_scale"] for name in tensors if "input_scale" in factors.get(name, {})}
    inputs = {name: torch.tensor(value, dtype=torch.float32) for name, value in kept.items()}
    largest, now = _largest([inputs.get(name) for name in tensors]), next(iter(tensors.values())).input_scale
    if largest is not None and now is not None and now in (largest, largest * LARGEST / LARGEST):
        tensors = {name: each.replace(input_scale=inputs[name]) for name, each in tensors.items()}
    return {
        name: with_factors(each, factors.get(name, {})) if isinstance(each, LinearParts) else each
        for name, each in tensors.items()
    }


# --- weights in FP8 -------------------------------------------------------------------------------------------------

_BLOCK = 128


def _join_fp8(groups: Sequence[Sequence[FP8Tensor]], stacked: bool) -> FP8Tensor:
    """Return weights (N, K) joined along their rows, and with ``stacked`` the groups as (E, N, K).

    They have the same columns in a block, and treat activations alike. The result has no input scale.
    """
    matrices = [_joined_rows(group) for group in groups]
    if not stacked:
        return matrices[0]
    if len({each.spec for each in matrices}) > 1:
        matrices = [_by_row(each) for each in matrices]
    codes = torch.stack([each.qdata.view(torch.uint8) for each in matrices]).view(E4M3)
    return matrices[0].replace(qdata=codes, scale=torch.stack([each.scale for each in matrices]), input_scale=None)


def _joined_rows(parts: Sequence[FP8Tensor]) -> FP8Tensor:
    first, (height, _) = parts[0], parts[0].spec.block
    alike = len({each.spec for each in parts}) == 1
    if alike and not height and all(torch.equal(each.scale, first.scale) for each in parts):
        scale = first.scale
    else:
        if not alike or not height or any(len(each.qdata) % height for each in parts[:-1]):
            parts = [_by_row(each) for each in parts]
        scale = torch.cat([each.scale for each in parts])
    codes = torch.cat([each.qdata.view(torch.uint8) for each in parts]).view(E4M3)
    return parts[0].replace(qdata=codes, scale=scale, input_scale=None)


def _by_row(w: FP8Tensor) -> FP8Tensor:
    """Return a weight (N, K) with scales of its own for each row."""
    rows, (height, width) = len(w.qdata), w.spec.block
    scale = w.scale.repeat_interleave(height or rows, 0)[:rows]
    return w.replace(spec=dataclasses.replace(w.spec, block=(1, width)), scale=scale)


def _rows_of(w: FP8Tensor, rows: slice) -> FP8Tensor:
    """Return some rows of a weight (N, K), with larger blocks if the scales of their rows are equal."""
    first, last, (height, width) = rows.start, rows.stop, w.spec.block
    assert first % max(height, 1) == 0  # join has split other blocks
    codes, scale = w.qdata[first:last], w.scale
    if height:
        scale = scale[first // height : -(-last // height)]
    part = FP8Tensor(codes, scale, w.spec, w.orig_dtype, input_scale=w.input_scale)
    taller = {0: 0, _BLOCK: _BLOCK}.get(width) if height == 1 else None
    if taller is None:
        return part
    larger = scale[:: taller or len(scale)]
    if not torch.equal(larger.repeat_interleave(taller or len(scale), 0)[: len(scale)], scale):
        return part
    return part.replace(spec=dataclasses.replace(w.spec, block=(taller, width)), scale=larger)
