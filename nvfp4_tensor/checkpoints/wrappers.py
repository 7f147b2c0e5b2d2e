"""Checkpoints that change another one: weights only, without some tensors, or with an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.quantization.model_families import EMBEDDINGS, LM_HEAD
from nvfp4_tensor.quantization.names import is_matched, is_stored_transposed
from nvfp4_tensor.tensor.fp8 import FP8Tensor


class View(Checkpoint):
    """A checkpoint that passes every call on to another one, for subclasses that change some.

    Attributes:
        stored: the names in the source of the tensors that have other names there.
    """

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.format, self.path, self.config, self.files = source.format, source.path, source.config, source.files
        self.cache = source.cache
        self.entries = dict(source.entries)
        self.stored: Mapping[str, str] = {}

    def linear(self, name: str) -> LinearParts:
        return self.source.linear(self.stored.get(name, name))

    def fp8(self, name: str) -> FP8Tensor:
        return self.source.fp8(self.stored.get(name, name))

    def dense(self, name: str) -> Tensor:
        return self.source.dense(self.stored.get(name, name))

    def per_tensor_scale(self, name: str) -> Tensor:
        return self.source.per_tensor_scale(self.stored.get(name, name))

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return self.source.chunks(self.stored.get(name, name), rows, buffer)

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
        for name, entry in source.entries.items():
            fp8 = None if entry.fp8 is None else dataclasses.replace(entry.fp8, activations=None)
            self.entries[name] = dataclasses.replace(entry, quantizes_activations=False, has_input_scale=False, fp8=fp8)

    def linear(self, name: str) -> LinearParts:
        return self.source.linear(name).weight_only()

    def fp8(self, name: str) -> FP8Tensor:
        return self.source.fp8(name).weight_only()


class WithCacheScales(View):
    """A checkpoint whose scales of a key-value cache have other names, by their names in it; "" omits a tensor."""

    def __init__(self, source: Checkpoint, renamed: Mapping[str, str]) -> None:
        super().__init__(source)
        self.stored = {new: name for name, new in renamed.items() if new}
        self.cache = source.cache if self.stored else None
        named = ((renamed.get(name, name), entry) for name, entry in source.entries.items())
        self.entries = {name: entry for name, entry in named if name}


class AsLinears(View):
    """A dense checkpoint with some of its weights as (N, K), which its files have as (K, N)."""

    def __init__(self, source: Checkpoint, names: Iterable[str]) -> None:
        super().__init__(source)
        self._names = set(names)
        for name in self._names:
            self.entries[name] = dataclasses.replace(source.entries[name], shape=source.entries[name].shape[::-1])

    def dense(self, name: str) -> Tensor:
        return self.source.dense(name).t().contiguous() if name in self._names else self.source.dense(name)

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        whole = Checkpoint.chunks(self, name, rows)
        return whole if name in self._names else self.source.chunks(name, rows, buffer)


def with_conv1d_transposed(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the dense weights of Conv1D transposed: (N, K) for (K, N), or the other way round."""
    model_type = source.config.get("model_type")
    names = [n for n, e in source.entries.items() if n.endswith("weight") and is_stored_transposed(model_type, n)]
    names = [n for n in names if not source.entries[n].quantized]
    return AsLinears(source, names) if names else source


class OfWholeModel(View):
    """A checkpoint of a model without its output layer, such as GPT-2's, with the names of the one that has it."""

    def __init__(self, source: Checkpoint, prefix: str) -> None:
        super().__init__(source)
        bare = not any(name.startswith(prefix) for name in source.entries)
        self.stored = {name if not bare or name.endswith(LM_HEAD) else prefix + name: name for name in source.entries}
        self.entries = {ours: source.entries[name] for ours, name in self.stored.items()}


class WithHead(View):
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
        self.config = untied(source.config)
        heads = [name for name in source.entries if name.endswith(LM_HEAD)]
        embeddings = [name for name in source.entries if name.endswith("weight") and is_matched(name, EMBEDDINGS)]
        if len(heads) != 1 and (heads or len(embeddings) != 1):
            found = ", ".join(heads or embeddings) or "neither"
            raise ValueError(f"{source.path}: expected one output layer ({LM_HEAD}) or one embedding, found {found}")
        self.head = heads[0] if heads else LM_HEAD
        if not heads:
            self.stored = {LM_HEAD: embeddings[0]}
            self.entries[LM_HEAD] = source.entries[embeddings[0]]


def untied(config: dict[str, Any]) -> dict[str, Any]:
    """Return a transformers configuration with ``tie_word_embeddings`` False, in its ``text_config`` too."""
    inner = {name: untied(value) for name, value in config.items() if name == "text_config"}
    return {**config, **inner, "tie_word_embeddings": False}
