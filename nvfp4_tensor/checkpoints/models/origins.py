"""Map a parameter of a model to tensors of a checkpoint: one of the same name, several joined, or stacked experts.

Files have separate tensors for q, k and v, for gate and up, and for every expert. Models join some of them:
``qkv_proj``, ``gate_up_proj``, and the experts of transformers, parameters (E, N, K). Joining does not round: the
result has one per-tensor scale per row if the scales differ. :class:`Origin` records how to split it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.architectures import JOINED_AS, MIXTRAL_EXPERTS
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.parts import LARGEST, LinearParts

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


def origin_of(name: str, dimensions: int, entries: Mapping[str, Entry]) -> Origin | None:
    """Return the origin of the parameter ``name`` of a model, or None if the checkpoint does not have it."""
    mixtral = in_mixtral(name)
    for each in (name, mixtral):
        if each in entries:
            return Origin(((each,),))
    groups = _groups(name, dimensions, entries) or list(_expert_groups(mixtral, entries, MIXTRAL_EXPERTS))
    if not groups:
        return None
    rows = tuple(entries[each].shape[0] for each in groups[0])
    return Origin(tuple(groups), rows, stacked=dimensions == 3)


def in_mixtral(name: str) -> str:
    """Return the name in Mixtral's files: "layers.0.block_sparse_moe.gate.weight" for "layers.0.mlp.gate.weight"."""
    return name.replace(".mlp.", ".block_sparse_moe.")


def _groups(name: str, dimensions: int, names: Container[str]) -> list[tuple[str, ...]]:
    if dimensions == 3:
        return list(_expert_groups(name, names))
    module, _, attribute = name.rpartition(".")
    prefix, _, last = module.rpartition(".")
    parts = JOINED_AS.get(last, ())
    group = tuple(f"{prefix}.{part}.{attribute}" if prefix else f"{part}.{attribute}" for part in parts)
    return [group] if len(group) > 1 and all(each in names for each in group) else []


def expert_group(name: str, expert: int, called: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return ("experts.0.gate_proj.weight", "experts.0.up_proj.weight") for "experts.gate_up_proj" and expert 0.

    called: other names of gate_proj, up_proj and down_proj.
    """
    prefix, _, last = name.rpartition(".")
    called = {} if called is None else called
    return tuple(f"{prefix}.{expert}.{called.get(part, part)}.weight" for part in JOINED_AS.get(last, ()))


def _expert_groups(
    name: str, names: Container[str], called: Mapping[str, str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield the group of each expert that the checkpoint has, from expert 0 on."""
    expert = 0
    while group := expert_group(name, expert, called):
        if not all(each in names for each in group):
            return
        yield group
        expert += 1


def shape_of(origin: Origin, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """Return the shape of the joined parameter.

    Raises:
        ValueError: the tensors cannot be joined.
    """
    if origin.is_whole:
        return entries[origin.names[0]].shape
    dense = [name for name in origin.names if not entries[name].quantized]
    if dense and len(dense) < len(origin.names):
        raise ValueError(
            f"{dense[0]} is dense, but tensors that the model joins with it are NVFP4 "
            f"({next(name for name in origin.names if entries[name].quantized)}): leave all of q, k and v dense, or "
            "none; likewise gate and up, and all experts of a layer"
        )
    for group in origin.groups:
        rows, rest = tuple(entries[each].shape[0] for each in group), {entries[each].shape[1:] for each in group}
        if rows != origin.rows or len(rest) > 1:
            found = ", ".join(f"{each} {list(entries[each].shape)}" for each in group)
            raise ValueError(f"expected tensors that can be joined along their rows, found {found}")
    shape = (sum(origin.rows), *entries[origin.names[0]].shape[1:])
    return (len(origin.groups), *shape) if origin.stacked else shape


def gather(origin: Origin, checkpoint: Checkpoint) -> tuple[LinearParts | Tensor, Origin]:
    """Read a parameter: its parts or a dense tensor, and the origin with the scales of the file."""
    if not checkpoint.entries[origin.names[0]].quantized:
        tensors = [[checkpoint.dense(name) for name in group] for group in origin.groups]
        if origin.is_whole:
            return tensors[0][0], origin
        joined = [torch.cat(group) for group in tensors]
        return (torch.stack(joined) if origin.stacked else joined[0]), origin
    factors: dict[str, Mapping[str, float]] = {}
    groups = []
    for group in origin.groups:
        parts = [checkpoint.linear(name) for name in group]
        factors.update((name, kept) for name, each in zip(group, parts, strict=True) if (kept := _kept(each)))
        groups.append(parts[0] if origin.is_whole else _joined(parts))
    parameter = _stacked(groups) if origin.stacked else groups[0]
    return parameter, dataclasses.replace(origin, factors=factors)


def _kept(parts: LinearParts) -> dict[str, float]:
    values = {name: getattr(parts, name) for name in _KEPT}
    return {name: value.item() for name, value in values.items() if value is not None and value.numel() == 1}


def _joined(parts: Sequence[LinearParts]) -> LinearParts:
    """Join along the rows. Activations are quantized with the largest of the input scales."""
    scales = [each.per_tensor_scale for each in parts]
    if not all(torch.equal(scales[0], scale) for scale in scales):
        scales = [torch.cat([each.per_tensor_scale.expand(each.shape[0]) for each in parts])]
    return parts[0].replace(
        qdata=torch.cat([each.qdata for each in parts]),
        scale=_cat_bytes([each.scale for each in parts]),
        per_tensor_scale=scales[0],
        input_scale=_largest([each.input_scale for each in parts]),
        divisor=None,
        input_divisor=None,
        input_amax=_largest([each.input_amax for each in parts]),
    )


def _stacked(parts: Sequence[LinearParts]) -> LinearParts:
    """Stack experts to (E, N, K), with one per-tensor scale per expert, or per row."""
    scales = [each.per_tensor_scale for each in parts]
    if any(scale.dim() for scale in scales):
        per_tensor_scale = torch.cat([scale.expand(each.shape[0]) for scale, each in zip(scales, parts, strict=True)])
    else:
        per_tensor_scale = torch.stack(scales).unsqueeze(1)
    return parts[0].replace(
        qdata=torch.stack([each.qdata for each in parts]),
        scale=_cat_bytes([each.scale for each in parts]).view(len(parts), *parts[0].scale.shape),
        per_tensor_scale=per_tensor_scale,
        input_scale=_largest([each.input_scale for each in parts]),
        divisor=None,
        input_divisor=None,
        input_amax=_largest([each.input_amax for each in parts]),
    )


def _cat_bytes(scales: Sequence[Tensor]) -> Tensor:
    return torch.cat([scale.view(torch.uint8) for scale in scales]).view(torch.float8_e4m3fn)


def _largest(scales: Sequence[Tensor | None]) -> Tensor | None:
    """Return the largest scale, or None if any is None: then each call computes its own."""
    given = [scale for scale in scales if scale is not None]
    return torch.stack(given).amax() if given and len(given) == len(scales) else None


def split(parts: LinearParts, origin: Origin) -> dict[str, LinearParts]:
    """Split a parameter into the tensors of its origin, with the scales of the file if they still match.

    Raises:
        ValueError: rows of one tensor have different per-tensor scales.
    """
    tensors = {origin.names[0]: parts} if origin.is_whole else dict(_split_rows(parts, origin))
    return with_factors(tensors, origin.factors)


def _split_rows(parts: LinearParts, origin: Origin) -> Iterator[tuple[str, LinearParts]]:
    matrices = parts.qdata if origin.stacked else parts.qdata[None]
    scales = parts.scale if origin.stacked else parts.scale[None]
    rows = sum(origin.rows)
    factors = parts.per_tensor_scale
    factors = (factors if factors.dim() == 2 else factors.expand(len(matrices) * rows)).reshape(len(matrices), -1)
    factors = factors.expand(len(matrices), rows)
    for expert, group in enumerate(origin.groups):
        first = 0
        for name, count in zip(group, origin.rows, strict=True):
            where = slice(first, first + count)
            first += count
            factor = factors[expert, where]
            if not (factor == factor[0]).all():
                raise ValueError(f"{name}: its rows have different per-tensor scales, which no format supports")
            yield (
                name,
                parts.replace(
                    qdata=matrices[expert, where], scale=scales[expert, where], per_tensor_scale=factor[0].clone()
                ),
            )


def with_factors(
    tensors: Mapping[str, LinearParts], factors: Mapping[str, Mapping[str, float]]
) -> dict[str, LinearParts]:
    """Return the parts of one parameter with the scales of the file, if they still match."""
    kept = {
        name: {key: torch.tensor(value, dtype=torch.float32) for key, value in values.items()}
        for name, values in factors.items()
    }
    inputs = [kept.get(name, {}).get("input_scale") for name in tensors]
    largest = _largest(inputs)
    input_scale = next(iter(tensors.values())).input_scale
    holds = largest is not None and input_scale is not None and input_scale in (largest, largest * LARGEST / LARGEST)
    return {name: _with(parts, kept.get(name, {}), holds) for name, parts in tensors.items()}


def _with(parts: LinearParts, kept: Mapping[str, Tensor], input_holds: bool) -> LinearParts:
    divisor, input_divisor = kept.get("divisor"), kept.get("input_divisor")
    if divisor is not None and torch.equal(divisor.reciprocal(), parts.per_tensor_scale):
        parts = parts.replace(divisor=divisor)
    if input_holds:
        parts = parts.replace(input_scale=kept["input_scale"])
        if input_divisor is not None and torch.equal(input_divisor.reciprocal(), kept["input_scale"]):
            parts = parts.replace(input_divisor=input_divisor)
    return parts
