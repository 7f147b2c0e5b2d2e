"""Checkpoints that change another one: weights only, without some tensors, or with an output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nvfp4_tensor.checkpoints.architectures import EXPERT_STACKS, INTERLEAVED, JOINED_ROWS
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, Entry, chunks_of
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.quantization.model_families import EMBEDDINGS, JOINED_AS, LM_HEAD
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


class Apart(View):
    """A dense checkpoint with a matrix (N, K) per linear, where its files have one tensor for several."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self._rows = dict[str, tuple[str, int, slice, bool]]()
        """By name: the stored tensor, which of its matrices, the rows of that, and whether it is transposed first."""
        self._last: tuple[str, int, Iterator[Tensor], Tensor] | None = None

    def dense(self, name: str) -> Tensor:
        return self._part(name).clone() if name in self._rows else self.source.dense(name)

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return chunks_of(self._part(name), rows) if name in self._rows else self.source.chunks(name, rows, buffer)

    def _part(self, name: str) -> Tensor:
        """Read a matrix, which is valid until one of another is read. They are read one after the other."""
        stack, index, rows, transposed = self._rows[name]
        if self._last is None or self._last[0] != stack or self._last[1] > index:
            matrices = self.source.chunks(stack, self.source.entries[stack].shape[-2])
            self._last = stack, 0, matrices, next(matrices)
        _, at, matrices, matrix = self._last
        for _ in range(index - at):
            matrix = next(matrices)
        self._last = stack, index, matrices, matrix
        return (matrix.t() if transposed else matrix)[rows].contiguous()


class ExpertsApart(Apart):
    """A dense checkpoint with one matrix (N, K) per expert, where its files have one tensor for all experts of a layer.

    Their names are those that ``save`` gives to the experts of a model in memory.
    """

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries = {}
        stacks = {name: found for name in source.entries for found in _stacks(name, source.entries)}
        for name, entry in source.entries.items():
            if name not in stacks:
                self.entries[name] = entry
                continue
            called, transposed = stacks[name]
            count, rows, columns = (entry.shape[i] for i in ((0, 2, 1) if transposed else (0, 1, 2)))
            module, _, joined = called.rpartition(".")
            parts = JOINED_AS[joined]
            for expert in range(count):
                for i, part in enumerate(parts):
                    own = slice(i, None, len(parts))
                    if not name.endswith(INTERLEAVED):
                        own = slice(i * rows // len(parts), (i + 1) * rows // len(parts))
                    each = f"{module}.{expert}.{part}.weight"
                    self.entries[each] = dataclasses.replace(entry, shape=(rows // len(parts), columns))
                    self._rows[each] = name, expert, own, transposed


class RowsApart(Apart):
    """A dense checkpoint with one matrix per linear of transformers, where its files have one below the other."""

    def __init__(self, source: Checkpoint) -> None:
        """
        Raises:
            ValueError: the rows of a weight are not those that config.json describes.
        """
        super().__init__(source)
        self.entries = {}
        for name, entry in source.entries.items():
            self.entries |= self._split(name, entry) or {name: entry}

    def _split(self, name: str, entry: Entry) -> dict[str, Entry]:
        config, stem = self.source.config, name.removesuffix(".weight")
        found = {end: of for (kind, end), of in JOINED_ROWS.items() if kind == config.get("model_type")}
        end = next((end for end in found if stem.endswith(end)), None)
        if end is None or stem == name or entry.is_coded or len(entry.shape) != 2:
            return {}
        try:
            shares = found[end](config)
            unit, rest = divmod(entry.shape[0], sum(shares.values()))
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{self.path}: config.json does not say the parts of {name}: {error!r}") from None
        if rest or min(shares.values()) < 1:
            raise ValueError(
                f"{entry.shard or self.path}: tensor {name}: expected shares {shares} of its rows, which are those of "
                f"config.json, found {list(entry.shape)}"
            )
        parts, first = {}, 0
        for part, share in shares.items():
            each = f"{stem.removesuffix(end)}{part}.weight"
            parts[each] = dataclasses.replace(entry, shape=(share * unit, entry.shape[1]))
            self._rows[each] = name, 0, slice(first, first + share * unit), False
            first += share * unit
        return parts


def _stacks(name: str, entries: Mapping[str, Entry]) -> Iterator[tuple[str, bool]]:
    """Yield what transformers calls the tensor of all experts of a layer, and whether it is (E, K, N)."""
    for first, second in EXPERT_STACKS.items():
        end = next((each for each in (first, second) if name.endswith(each)), None)
        pair = [f"{name.removesuffix(end)}{each}" for each in (first, second)] if end else []
        shapes = [entries[each].shape for each in pair if each in entries and f"{each}_bias" not in entries]
        if len(shapes) == 2 and all(len(shape) == 3 for shape in shapes):
            (_, a, b), (_, c, d) = shapes
            prefix = f"{pair[0].removesuffix(first)}{first[: first.find('.', 1)]}"
            experts = prefix if prefix.endswith(".experts") else f"{prefix}.experts"
            if (a, c) == (2 * d, b) or (b, d) == (2 * c, a):
                yield f"{experts}.{'gate_up_proj' if end == first else 'down_proj'}", (a, c) != (2 * d, b)


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
