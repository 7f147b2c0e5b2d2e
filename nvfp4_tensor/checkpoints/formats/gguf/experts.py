"""gpt-oss's experts: one tensor per layer in transformers, with gate and up interleaved; llama.cpp has them apart."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.parts import LinearParts, with_scale
from nvfp4_tensor.checkpoints.wrappers import ExpertsApart, Renamed, Stack
from nvfp4_tensor.quantization.model_families import JOINED_AS

_JOINED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.(?:gate_up_proj|down_proj))(_bias)?")
_FIRST = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.0\.(gate|up|down)_proj\.(weight|bias)")
_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\..*")
_SINKS = ".self_attn.sinks"


def split_experts(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint of gpt-oss with a tensor per expert, named as Qwen3-MoE's; sinks end in ``.weight``."""
    source = Renamed(source, {name: f"{name}.weight" for name in source.entries if name.endswith(_SINKS)})
    stacks = {}
    for name, entry in source.entries.items():
        if found := _JOINED.fullmatch(name):
            kind = "bias" if found[2] else "weight"
            transposed = kind == "weight" and not entry.quantized
            stacks[name] = Stack(name=found[1], kind=kind, transposed=transposed, interleaved=True)
    return ExpertsApart(source, stacks)


class JoinedExperts(Renamed):
    """The inverse of :func:`split_experts`: transformers' parameters of a file with a tensor per expert."""

    made: dict[str, list[list[str]]]

    def __init__(self, source: Checkpoint) -> None:
        sinks = {n: n.removesuffix(".weight") for n in source.entries if n.endswith(f"{_SINKS}.weight")}
        super().__init__(source, sinks | {name: "" for name in source.entries if _EXPERT.fullmatch(name)})
        self.made = {}
        for name in source.entries:
            if found := _FIRST.fullmatch(name):
                joined = "down_proj" if found[2] == "down" else "gate_up_proj"
                target = f"{found[1]}.{joined}{'_bias' if found[3] == 'bias' else ''}"
                self.made[target] = [
                    [f"{found[1]}.{expert}.{part}.{found[3]}" for part in JOINED_AS[joined]]
                    for expert in range(source.config["num_local_experts"])
                ]
                self.entries[target] = self._entry(self.made[target])

    def _entry(self, groups: list[list[str]]) -> Entry:
        names, entries = [name for group in groups for name in group], self.source.entries
        if missing := [name for name in names if name not in entries]:
            raise ValueError(f"{self.path}: the file has no {missing[0]}")
        entry = entries[names[0]]
        if others := [name for name in names if entries[name] != entry]:
            raise ValueError(f"{self.path}: {others[0]} and {names[0]} differ in shape, dtype or quantization")
        shape = [entry.shape[0] * len(groups[0]), *entry.shape[1:]]
        shape = shape if entry.quantized else shape[::-1]
        return dataclasses.replace(
            entry, shape=(len(groups), *shape), scales=(len(groups), 1) if entry.quantized else ()
        )

    def make(self, name: str) -> LinearParts | Tensor:
        if not self.entries[name].quantized:
            values = _interleaved([[self.source.dense(each) for each in group] for group in self.made[name]])
            return values.transpose(1, 2).contiguous() if values.dim() == 3 else values
        groups = [_with_one_scale(name, [self.source.linear(each) for each in group]) for group in self.made[name]]
        scale = _interleaved([[parts.scale.view(torch.uint8) for parts in group] for group in groups])
        return groups[0][0].replace(
            qdata=_interleaved([[parts.qdata for parts in group] for group in groups]),
            scale=scale.view(torch.float8_e4m3fn),
            per_tensor_scale=torch.stack([group[0].per_tensor_scale for group in groups]).unsqueeze(1),
            divisor=None,
            input_divisor=None,
        )


def _with_one_scale(name: str, group: list[LinearParts]) -> list[LinearParts]:
    """Return gate and up of an expert with one of their per-tensor scales, which changes no value."""
    factors = torch.stack([parts.per_tensor_scale for parts in group])
    for factor in (factors.amax(), factors.amin()):
        moved = [each for parts in group if (each := with_scale(parts, factor)) is not None]
        if len(moved) == len(group):
            return moved
    raise ValueError(f"{name}: gate and up of an expert have per-tensor scales that cannot become one exactly")


def _interleaved(groups: list[list[Tensor]]) -> Tensor:
    """Stack experts, with the rows of the tensors of each taking turns."""
    return torch.stack([torch.stack(group, dim=1).flatten(0, 1) for group in groups])
