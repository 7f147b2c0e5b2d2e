"""Which tensors of a checkpoint make a parameter of a model: the one of its name, several joined, experts stacked.

Files keep q, k and v apart, gate and up, and every expert. Models join some: ``qkv_proj``, ``gate_up_proj``, and the
experts of transformers, parameters (E, N, K). The parts are joined as they are, with a per-tensor scale a row where
theirs differ, and taken apart again by what :class:`Origin` remembers.
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
    """What a parameter is made of.

    Attributes:
        groups: names in the checkpoint, one tuple an expert, in each the names that are joined along the rows.
        rows: the rows of each of a group's names; () where one name is the whole parameter.
        stacked: whether the parameter is (E, N, K), a matrix a group.
        factors: by name, the scales as the file had them (Python floats, which hold float32 exactly).
    """

    groups: tuple[tuple[str, ...], ...]
    rows: tuple[int, ...] = ()
    stacked: bool = False
    factors: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [name for group in self.groups for name in group]

    @property
    def is_whole(self) -> bool:
        """Whether one tensor of the checkpoint is the parameter."""
        return not self.rows

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of that shape can still be made of it."""
        if self.is_whole:
            return True
        rows = sum(self.rows)
        return tuple(shape[:-1]) == ((len(self.groups), rows) if self.stacked else (rows,)) or tuple(shape) == (rows,)


def origin_of(name: str, dimensions: int, entries: Mapping[str, Entry]) -> Origin | None:
    """What makes the parameter ``name`` of a model, or None where the checkpoint does not have it."""
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
    """ "layers.0.mlp.gate.weight" -> "layers.0.block_sparse_moe.gate.weight", as Mixtral's files have it."""
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
    """For "experts.gate_up_proj": ("experts.0.gate_proj.weight", "experts.0.up_proj.weight"), or as ``called``."""
    prefix, _, last = name.rpartition(".")
    called = {} if called is None else called
    return tuple(f"{prefix}.{expert}.{called.get(part, part)}.weight" for part in JOINED_AS.get(last, ()))


def _expert_groups(
    name: str, names: Container[str], called: Mapping[str, str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Those that there are, of expert 0, 1 and so on."""
    expert = 0
    while group := expert_group(name, expert, called):
        if not all(each in names for each in group):
            return
        yield group
        expert += 1


def shape_of(origin: Origin, entries: Mapping[str, Entry]) -> tuple[int, ...]:
    """The shape that the parts come to.

    Raises:
        ValueError: they do not fit together.
    """
    if origin.is_whole:
        return entries[origin.names[0]].shape
    for group in origin.groups:
        rows, rest = tuple(entries[each].shape[0] for each in group), {entries[each].shape[1:] for each in group}
        if rows != origin.rows or len(rest) > 1 or len({entries[each].quantized for each in group}) > 1:
            found = ", ".join(
                f"{each} {list(entries[each].shape)}{' NVFP4' if entries[each].quantized else ''}" for each in group
            )
            raise ValueError(f"expected tensors that join along their rows, found {found}")
    whole = (sum(origin.rows), *entries[origin.names[0]].shape[1:])
    return (len(origin.groups), *whole) if origin.stacked else whole


def gather(origin: Origin, checkpoint: Checkpoint) -> tuple[LinearParts | Tensor, Origin]:
    """The parameter's parts, or a dense tensor, and the origin with the scales as the file had them."""
    if not checkpoint.entries[origin.names[0]].quantized:
        pieces = [[checkpoint.dense(name) for name in group] for group in origin.groups]
        if origin.is_whole:
            return pieces[0][0], origin
        joined = [torch.cat(group) for group in pieces]
        return (torch.stack(joined) if origin.stacked else joined[0]), origin
    factors: dict[str, Mapping[str, float]] = {}
    groups = []
    for group in origin.groups:
        parts = [checkpoint.linear(name) for name in group]
        factors.update((name, kept) for name, each in zip(group, parts, strict=True) if (kept := _kept(each)))
        groups.append(parts[0] if origin.is_whole else _joined(parts))
    whole = _stacked(groups) if origin.stacked else groups[0]
    return whole, dataclasses.replace(origin, factors=factors)


def _kept(parts: LinearParts) -> dict[str, float]:
    values = {name: getattr(parts, name) for name in _KEPT}
    return {name: value.item() for name, value in values.items() if value is not None and value.numel() == 1}


def _joined(parts: Sequence[LinearParts]) -> LinearParts:
    """Along the rows; activations are quantized by the largest of the input scales."""
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
    """Experts (E, N, K), with a per-tensor scale each, or one a row."""
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
    """None where one has none: then each call takes its own."""
    given = [scale for scale in scales if scale is not None]
    return torch.stack(given).amax() if given and len(given) == len(scales) else None


def split(parts: LinearParts, origin: Origin) -> dict[str, LinearParts]:
    """The parts of each name of the origin; with the scales that the file had, where they still hold.

    Raises:
        ValueError: rows of one name have different per-tensor scales.
    """
    pieces = {origin.names[0]: parts} if origin.is_whole else dict(_pieces(parts, origin))
    return with_factors(pieces, origin.factors)


def _pieces(parts: LinearParts, origin: Origin) -> Iterator[tuple[str, LinearParts]]:
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
                raise ValueError(f"{name}: its rows have different per-tensor scales, and no layout can hold them")
            yield (
                name,
                parts.replace(
                    qdata=matrices[expert, where], scale=scales[expert, where], per_tensor_scale=factor[0].clone()
                ),
            )


def with_factors(
    pieces: Mapping[str, LinearParts], factors: Mapping[str, Mapping[str, float]]
) -> dict[str, LinearParts]:
    """The parts of one parameter with the scales that files had of them, as far as they still say the same."""
    kept = {name: {key: torch.tensor(value) for key, value in values.items()} for name, values in factors.items()}
    inputs = [kept.get(name, {}).get("input_scale") for name in pieces]
    largest = _largest(inputs)
    whole = next(iter(pieces.values())).input_scale
    holds = largest is not None and whole is not None and whole in (largest, largest * LARGEST / LARGEST)
    return {name: _with(parts, kept.get(name, {}), holds) for name, parts in pieces.items()}


def _with(parts: LinearParts, kept: Mapping[str, Tensor], input_holds: bool) -> LinearParts:
    divisor, input_divisor = kept.get("divisor"), kept.get("input_divisor")
    if divisor is not None and torch.equal(divisor.reciprocal(), parts.per_tensor_scale):
        parts = parts.replace(divisor=divisor)
    if input_holds:
        parts = parts.replace(input_scale=kept["input_scale"])
        if input_divisor is not None and torch.equal(input_divisor.reciprocal(), kept["input_scale"]):
            parts = parts.replace(input_divisor=input_divisor)
    return parts
