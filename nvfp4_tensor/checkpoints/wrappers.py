"""Checkpoints that change another one: weights only, without some tensors, or with an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.quantization.model_families import EMBEDDINGS, LM_HEAD
from nvfp4_tensor.quantization.names import is_matched, is_stored_transposed


class View(Checkpoint):
    """A checkpoint that passes every call on to another one, for subclasses that change some."""

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.format, self.path, self.config, self.files = source.format, source.path, source.config, source.files
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

    def write_auxiliary_files(self, folder: Path) -> None:
        self.source.write_auxiliary_files(folder)

    def identity(self) -> list[Any] | None:
        inner = self.source.identity()
        return None if inner is None else [type(self).__name__, *inner]

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def close(self) -> None:
        self.source.close()


class WeightOnly(View):
    """A checkpoint without the quantization of activations (W4A16)."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries = {name: _weight_only(entry) for name, entry in source.entries.items()}

    def linear(self, name: str) -> LinearParts:
        parts = self.source.linear(name)
        return parts.replace(quantizes_activations=False, input_scale=None, input_divisor=None, input_amax=None)


class Without(View):
    """A checkpoint without some of its tensors."""

    def __init__(self, source: Checkpoint, names: Iterable[str]) -> None:
        super().__init__(source)
        for name in names:
            del self.entries[name]


class AsLinears(View):
    """A dense checkpoint with some of its weights as (N, K), which its files have as (K, N)."""

    def __init__(self, source: Checkpoint, names: Iterable[str]) -> None:
        super().__init__(source)
        self._names = set(names)
        for name in self._names:
            self.entries[name] = dataclasses.replace(source.entries[name], shape=source.entries[name].shape[::-1])

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        if name not in self._names:
            return self.source.rows(name, first, last, buffer)
        return self.source.dense(name)[:, first:last].t().contiguous()

    def chunks(self, name: str) -> Iterator[Tensor]:
        return iter([self.dense(name)]) if name in self._names else self.source.chunks(name)

    def dense(self, name: str) -> Tensor:
        return self.source.dense(name).t().contiguous() if name in self._names else self.source.dense(name)


def with_conv1d_transposed(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the dense weights of Conv1D transposed: (N, K) for (K, N), or the other way round."""
    model_type = source.config.get("model_type")
    names = [n for n, e in source.entries.items() if n.endswith("weight") and is_stored_transposed(model_type, n)]
    names = [n for n in names if not source.entries[n].quantized]
    return AsLinears(source, names) if names else source


class Renamed(View):
    """A checkpoint that reads some of its tensors by other names: ``_stored`` has those of the source."""

    _stored: Mapping[str, str]

    def linear(self, name: str) -> LinearParts:
        return self.source.linear(self._stored.get(name, name))

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.source.per_tensor_scale(self._stored.get(name, name))

    def dense(self, name: str) -> Tensor:
        return self.source.dense(self._stored.get(name, name))

    def rows(self, name: str, first: int, last: int, buffer: Tensor | None = None) -> Tensor:
        return self.source.rows(self._stored.get(name, name), first, last, buffer)

    def chunks(self, name: str) -> Iterator[Tensor]:
        return self.source.chunks(self._stored.get(name, name))


class OfWholeModel(Renamed):
    """A checkpoint of a model without its output layer, such as GPT-2's, with the names of the one that has it."""

    def __init__(self, source: Checkpoint, prefix: str) -> None:
        super().__init__(source)
        bare = not any(name.startswith(prefix) for name in source.entries)
        names = {name: name if not bare or name.endswith(LM_HEAD) else prefix + name for name in source.entries}
        self._stored = {ours: name for name, ours in names.items()}
        self.entries = {names[name]: entry for name, entry in source.entries.items()}


class WithHead(Renamed):
    """A checkpoint whose output layer has its own weight: a copy of the embedding's if they were shared.

    Attributes:
        head: the name of the output layer's weight.
    """

    def __init__(self, source: Checkpoint) -> None:
        """
        Raises:
            ValueError: there is no output layer, and not exactly one embedding.
        """
        super().__init__(source)
        self.config = _untied(source.config)
        heads = [name for name in source.entries if name.endswith(LM_HEAD)]
        embeddings = [name for name in source.entries if name.endswith("weight") and is_matched(name, EMBEDDINGS)]
        if len(heads) != 1 and (heads or len(embeddings) != 1):
            found = ", ".join(heads or embeddings) or "neither"
            raise ValueError(f"{source.path}: expected one output layer ({LM_HEAD}) or one embedding, found {found}")
        self.head = heads[0] if heads else LM_HEAD
        self._stored = {} if heads else {LM_HEAD: embeddings[0]}
        for head, embedding in self._stored.items():
            self.entries[head] = source.entries[embedding]


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    """Return a transformers configuration with ``tie_word_embeddings`` False, in its ``text_config`` too."""
    inner = {name: _untied(value) for name, value in config.items() if name == "text_config"}
    return {**config, **inner, "tie_word_embeddings": False}


def _weight_only(entry: Entry) -> Entry:
    return dataclasses.replace(entry, quantizes_activations=False, has_input_scale=False)
