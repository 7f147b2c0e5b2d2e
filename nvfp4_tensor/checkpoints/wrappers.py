"""Checkpoints that change another one: weights only, without some tensors, or with an output layer."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
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
        made: the names of the tensors that :meth:`make` reads.
    """

    made: Container[str] = ()

    def __init__(self, source: Checkpoint) -> None:
        self.source = source
        self.format, self.path, self.config, self.files = source.format, source.path, source.config, source.files
        self.cache = source.cache
        self.entries = dict(source.entries)
        self.stored: Mapping[str, str] = {}

    def make(self, name: str) -> LinearParts | Tensor:
        """Read one of the tensors that the source does not have."""
        raise NotImplementedError

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        return self.make(name) if name in self.made else self.source.value(self.stored.get(name, name))

    def per_tensor_scale(self, name: str) -> Tensor:
        if name in self.made:
            return super().per_tensor_scale(name)
        return self.source.per_tensor_scale(self.stored.get(name, name))

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        if name in self.made:
            return super().chunks(name, rows)
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

    def value(self, name: str) -> LinearParts | FP8Tensor | Tensor:
        value = self.source.value(name)
        return value.weight_only() if isinstance(value, LinearParts | FP8Tensor) else value


class Renamed(View):
    """A checkpoint some of whose tensors have other names, by their names in it; "" omits a tensor."""

    def __init__(self, source: Checkpoint, renamed: Mapping[str, str]) -> None:
        super().__init__(source)
        self.stored = {new: name for name, new in renamed.items() if new}
        named = ((renamed.get(name, name), entry) for name, entry in source.entries.items())
        self.entries = {name: entry for name, entry in named if name}


class AsLinears(View):
    """A dense checkpoint with some of its weights as (N, K), which its files have as (K, N)."""

    def __init__(self, source: Checkpoint, names: Iterable[str]) -> None:
        super().__init__(source)
        self.made = set(names)
        for name in self.made:
            self.entries[name] = dataclasses.replace(source.entries[name], shape=source.entries[name].shape[::-1])

    def make(self, name: str) -> Tensor:
        return self.source.dense(name).t().contiguous()


def with_conv1d_transposed(source: Checkpoint) -> Checkpoint:
    """Return a checkpoint with the dense weights of Conv1D transposed: (N, K) for (K, N), or the other way round."""
    model_type = source.config.get("model_type")
    names = [n for n, e in source.entries.items() if n.endswith("weight") and is_stored_transposed(model_type, n)]
    names = [n for n in names if not source.entries[n].quantized]
    return AsLinears(source, names) if names else source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """What the tensor of all experts of a layer is, (E, N, K) or, of biases, (E, N).

    Attributes:
        name: what transformers calls it.
        kind: "weight" or "bias".
        transposed: whether it is (E, K, N).
        interleaved: whether rows of gate and up alternate, instead of gate above up.
    """

    name: str
    kind: str = "weight"
    transposed: bool = False
    interleaved: bool = False


class Apart(View):
    """A dense checkpoint with a matrix (N, K) per linear, where its files have one tensor for several."""

    made: dict[str, tuple[str, int, slice, bool]]
    """By name: the stored tensor, which of its matrices, the rows of that, and whether it is transposed first."""

    def __init__(self, source: Checkpoint) -> None:
        super().__init__(source)
        self.entries, self.made = {}, {}
        self._last: tuple[str, int, Iterator[Tensor], Tensor] | None = None

    def make(self, name: str) -> LinearParts | Tensor:
        return self._matrix(name).clone()

    def chunks(self, name: str, rows: int = 0, buffer: Tensor | None = None) -> Iterator[Tensor]:
        return chunks_of(self._matrix(name), rows) if name in self.made else self.source.chunks(name, rows, buffer)

    def _shape_of(self, stack: str) -> tuple[int, ...]:
        """Return the shape of each matrix of a stored tensor."""
        return self.source.entries[stack].shape[-2:]

    def _matrix(self, name: str) -> Tensor:
        """Read a matrix, which is valid until one of another is read. They are read one after the other."""
        stack, index, rows, transposed = self.made[name]
        shape = self._shape_of(stack)
        if self._last is None or self._last[0] != stack or self._last[1] > index:
            matrices = self.source.chunks(stack, shape[0] if len(shape) > 1 else 1)
            self._last = stack, 0, matrices, next(matrices)
        _, at, matrices, matrix = self._last
        for _ in range(index - at):
            matrix = next(matrices)
        self._last = stack, index, matrices, matrix
        matrix = matrix.view(shape)
        return (matrix.t() if transposed else matrix)[rows].contiguous()


class ExpertsApart(Apart):
    """A checkpoint with one matrix (N, K) per expert, where its files have one tensor for all experts of a layer.

    Their names are those that ``save`` gives to the experts of a model in memory.
    """

    def __init__(self, source: Checkpoint, stacks: Mapping[str, Stack] | None = None) -> None:
        """stacks: what is taken apart, by name; by default all dense experts of :data:`EXPERT_STACKS`."""
        super().__init__(source)
        stacks = dict(_stacks(source.entries)) if stacks is None else stacks
        self._quantized: tuple[str, LinearParts] | None = None
        for name, entry in source.entries.items():
            if name not in stacks:
                self.entries[name] = entry
                continue
            stack, (count, *shape) = stacks[name], entry.shape
            shape = shape[::-1] if stack.transposed else shape
            module, _, joined = stack.name.rpartition(".")
            parts = JOINED_AS[joined]
            rows = shape[0] // len(parts)
            for expert in range(count):
                for i, part in enumerate(parts):
                    each = f"{module}.{expert}.{part}.{stack.kind}"
                    own = slice(i, None, len(parts)) if stack.interleaved else slice(i * rows, (i + 1) * rows)
                    self.entries[each] = dataclasses.replace(entry, shape=(rows, *shape[1:]), scales=())
                    self.made[each] = name, expert, own, stack.transposed

    def make(self, name: str) -> LinearParts | Tensor:
        return self._linear(name) if self.entries[name].quantized else super().make(name)

    def _shape_of(self, stack: str) -> tuple[int, ...]:
        return self.source.entries[stack].shape[1:]  # of biases too

    def _linear(self, name: str) -> LinearParts:
        """Read the rows of an expert in NVFP4. The parts of all are kept, because each expert asks for them."""
        stack, expert, rows, _ = self.made[name]
        if self._quantized is None or self._quantized[0] != stack:
            self._quantized = stack, self.source.linear(stack)
        return self._quantized[1].rows((expert, rows), name)


class RowsApart(Apart):
    """A dense checkpoint with one matrix per linear of transformers, where its files have one below the other."""

    def __init__(self, source: Checkpoint) -> None:
        """
        Raises:
            ValueError: the rows of a weight are not those that config.json describes.
        """
        super().__init__(source)
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
            self.made[each] = name, 0, slice(first, first + share * unit), False
            first += share * unit
        return parts


def _stacks(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Stack]]:
    """Yield the tensors of all experts of a layer of :data:`EXPERT_STACKS`; without biases, as gpt-oss's are."""
    for name, (first, second) in itertools.product(entries, EXPERT_STACKS.items()):
        end = next((each for each in (first, second) if name.endswith(each)), None)
        pair = [f"{name.removesuffix(end)}{each}" for each in (first, second)] if end else []
        shapes = [entries[each].shape for each in pair if each in entries and f"{each}_bias" not in entries]
        if len(shapes) == 2 and all(len(shape) == 3 for shape in shapes):
            (_, a, b), (_, c, d) = shapes
            prefix = f"{pair[0].removesuffix(first)}{first[: first.find('.', 1)]}"
            called = f"{prefix if prefix.endswith('.experts') else f'{prefix}.experts'}"
            called += ".gate_up_proj" if end == first else ".down_proj"
            if (a, c) == (2 * d, b) or (b, d) == (2 * c, a):
                interleaved = name.endswith(INTERLEAVED)
                yield name, Stack(name=called, transposed=(a, c) != (2 * d, b), interleaved=interleaved)


def of_whole_model(source: Checkpoint, prefix: str) -> Checkpoint:
    """Return a checkpoint of a model without its output layer, such as GPT-2's, with the names of the whole model."""
    if any(name.startswith(prefix) for name in source.entries):
        return source
    return Renamed(source, {name: prefix + name for name in source.entries if not name.endswith(LM_HEAD)})


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
