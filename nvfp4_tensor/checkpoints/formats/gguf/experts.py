"""gpt-oss's experts: one tensor per layer in transformers, with gate and up interleaved; llama.cpp has them apart."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.formats.mlx import folded
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.checkpoints.wrappers import View

_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_JOINED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias)?")
_SPLIT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_SINKS = ".self_attn.sinks"


class SplitExperts(View):
    """A checkpoint of gpt-oss with a tensor per expert, named as Qwen3-MoE names them; sinks end in ``.weight``."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries = {}
        self.stored = {f"{name}.weight": name for name in source.entries if name.endswith(_SINKS)}
        self._slices: dict[str, tuple[str, int, slice]] = {}
        self._last: tuple[str, Any] = ("", None)
        for name, entry in source.entries.items():
            found = _JOINED.fullmatch(name)
            if found is None:
                self.entries[f"{name}.weight" if name.endswith(_SINKS) else name] = entry
                continue
            modules, kind = _MODULES[found[2]], "bias" if found[3] else "weight"
            experts, *shape = entry.shape
            if kind == "weight" and not entry.quantized:
                shape.reverse()  # stored (K, N)
            shape[0] //= len(modules)
            split = dataclasses.replace(entry, shape=tuple(shape), scales=())
            for expert in range(experts):
                for first, module in enumerate(modules):
                    each = f"{found[1]}.{expert}.{module}.{kind}"
                    self.entries[each] = split
                    self._slices[each] = name, expert, slice(first, None, len(modules))

    def _whole(self, name: str) -> Any:
        """Read the tensor of all experts. The last one is kept, because each expert asks for it."""
        if self._last[0] != name:
            quantized = self.source.entries[name].quantized
            self._last = name, self.source.linear(name) if quantized else self.source.dense(name)
        return self._last[1]

    def linear(self, name: str) -> LinearParts:
        if name not in self._slices:
            return super().linear(name)
        joined, expert, rows = self._slices[name]
        parts: LinearParts = self._whole(joined)
        experts, count = parts.qdata.shape[:2]
        factors = parts.per_tensor_scale
        shape = (experts, count) if factors.dim() == 2 else (experts * count,)
        factors = factors.expand(shape).reshape(experts, count)[expert, rows]
        if not (factors == factors[0]).all():
            raise ValueError(f"{name}: its rows have different per-tensor scales, which GGUF does not support")
        return parts.replace(
            qdata=parts.qdata[expert, rows].contiguous(),
            scale=parts.scale[expert, rows].contiguous(),
            per_tensor_scale=factors[0].clone(),
            divisor=None,
        )

    def dense(self, name: str) -> Tensor:
        if name not in self._slices:
            return super().dense(name)
        joined, expert, rows = self._slices[name]
        matrix: Tensor = self._whole(joined)[expert]
        return (matrix.T if matrix.dim() == 2 else matrix)[rows].contiguous()

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.linear(name).per_tensor_scale

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return Checkpoint.chunks(self, name, rows)


class JoinedExperts(View):
    """The inverse of :class:`SplitExperts`: transformers' parameters of a file with a tensor per expert."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries = {}
        self.stored = {name.removesuffix(".weight"): name for name in source.entries if f"{_SINKS}.weight" in name}
        self._groups: dict[str, list[list[str]]] = {}
        for name, entry in source.entries.items():
            found = _SPLIT.fullmatch(name)
            if found is None:
                self.entries[name.removesuffix(".weight") if f"{_SINKS}.weight" in name else name] = entry
                continue
            joined = "gate_up_proj" if found[3] in ("gate", "up") else "down_proj"
            target = f"{found[1]}.{joined}{'_bias' if found[4] == 'bias' else ''}"
            if target not in self._groups:
                self._groups[target] = self._group(found[1], joined, found[4])
                self.entries[target] = self._entry(target, entry)

    def _group(self, prefix: str, joined: str, kind: str) -> list[list[str]]:
        groups: list[list[str]] = []
        while True:
            names = [f"{prefix}.{len(groups)}.{module}.{kind}" for module in _MODULES[joined]]
            missing = [name for name in names if name not in self.source.entries]
            if len(missing) == len(names):
                return groups
            if missing:
                raise ValueError(f"{self.path}: the file has no {missing[0]}")
            groups.append(names)

    def _entry(self, target: str, entry: Entry) -> Entry:
        names = [name for group in self._groups[target] for name in group]
        if others := [n for n in names if dataclasses.replace(self.source.entries[n], shard=entry.shard) != entry]:
            raise ValueError(f"{self.path}: {others[0]} and {names[0]} differ in shape, dtype or quantization")
        experts = len(self._groups[target])
        shape = [entry.shape[0] * (len(names) // experts), *entry.shape[1:]]
        if len(shape) == 2 and not entry.quantized:
            shape.reverse()
        return dataclasses.replace(entry, shape=(experts, *shape), scales=(experts, 1) if entry.quantized else ())

    def linear(self, name: str) -> LinearParts:
        if name not in self._groups:
            return super().linear(name)
        groups = [_with_one_scale(name, [self.source.linear(each) for each in group]) for group in self._groups[name]]
        scale = _interleaved([[parts.scale.view(torch.uint8) for parts in group] for group in groups])
        return groups[0][0].replace(
            qdata=_interleaved([[parts.qdata for parts in group] for group in groups]),
            scale=scale.view(torch.float8_e4m3fn),
            per_tensor_scale=torch.stack([group[0].per_tensor_scale for group in groups]).unsqueeze(1),
            divisor=None,
            input_divisor=None,
        )

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.linear(name).per_tensor_scale

    def dense(self, name: str) -> Tensor:
        if name not in self._groups:
            return super().dense(name)
        values = _interleaved([[self.source.dense(each) for each in group] for group in self._groups[name]])
        return values.transpose(1, 2).contiguous() if values.dim() == 3 else values

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return Checkpoint.chunks(self, name, rows)


def _with_one_scale(name: str, group: list[LinearParts]) -> list[LinearParts]:
    """Return gate and up of an expert with one of their per-tensor scales, which changes no value."""
    factors = torch.stack([parts.per_tensor_scale for parts in group])
    for factor in (factors.amax(), factors.amin()):
        scales = [folded(parts.replace(per_tensor_scale=parts.per_tensor_scale / factor)) for parts in group]
        if all(scale is not None for scale in scales):
            found = zip(group, scales, strict=True)
            return [parts.replace(scale=scale, per_tensor_scale=factor) for parts, scale in found]
    raise ValueError(f"{name}: gate and up of an expert have per-tensor scales that cannot become one exactly")


def _interleaved(groups: list[list[Tensor]]) -> Tensor:
    """Stack experts, with the rows of the tensors of each taking turns."""
    return torch.stack([torch.stack(group, dim=1).flatten(0, 1) for group in groups])
