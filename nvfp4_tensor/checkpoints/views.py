"""Checkpoints seen through another: weights without the quantization of activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from nvfp4_tensor.checkpoints.common import Checkpoint, Entry, LinearParts


class View(Checkpoint):
    """Another checkpoint, as it is: what a subclass does not change."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.format, self.path, self.config = source.format, source.path, source.config
        self.entries = dict(source.entries)

    def linear(self, name: str) -> LinearParts:
        return self.source.linear(name)

    def dense(self, name: str) -> Tensor:
        return self.source.dense(name)

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.source.per_tensor_scale(name)

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        return self.source.rows(name, first, last, buffer)

    def chunks(self, name: str) -> Iterator[Tensor]:
        return self.source.chunks(name)

    def identity(self) -> list[Any] | None:
        inner = self.source.identity()
        return None if inner is None else [type(self).__name__, *inner]

    def close(self) -> None:
        self.source.close()


class WeightOnly(View):
    """The same weights, with which products do not quantize activations (W4A16)."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries = {name: _weight_only(entry) for name, entry in source.entries.items()}

    def linear(self, name: str) -> LinearParts:
        parts = self.source.linear(name)
        return parts.replace(quantizes_activations=False, input_scale=None, input_divisor=None, input_amax=None)


class Without(View):
    """All but some tensors."""

    def __init__(self, source: Checkpoint, names: Iterable[str]) -> None:
        super().__init__(source)
        for name in names:
            del self.entries[name]


def _weight_only(entry: Entry) -> Entry:
    return dataclasses.replace(entry, quantizes_activations=False, has_input_scale=False)
