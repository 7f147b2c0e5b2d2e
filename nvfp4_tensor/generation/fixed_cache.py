"""The key-value cache of native decoding: dense, in buffers that stay where they are, with its length on the host.

A CUDA graph reads and writes the buffers, whose addresses may not change from token to token. To transformers the cache
is one that grows: prompts attend to their own tokens only, not to the empty rest of a buffer, and reading the length
does not wait for the device. All layers keep all tokens, also those with a sliding window, so that position p is always
at index p; windows are a matter of attention.
"""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from nvfp4_tensor.generation.cache import NVFP4CacheLayer
from nvfp4_tensor.generation.ended_texts import Narrowed, narrowed_of
from nvfp4_tensor.generation.layer import Layer
from nvfp4_tensor.generation.ring import DenseBuffers

GROWTH = 256
"""The number of tokens of a cache is a multiple of this one."""
ROOM = 4096
"""The largest number of tokens after a prompt for which there is room at first, however far the limit of a text is."""


_MOVES, _CAPACITY, _IS_INITIALIZED = map(attrgetter, ("moves", "capacity", "is_initialized"))


class Buffers:
    """Keys and values of each layer, which the caches of one decoder use one after the other."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        self._users: list[weakref.ref[FixedLayer]] = []

    @property
    def in_use(self) -> bool:
        """Whether a layer with these buffers exists."""
        return any(user() is not None for user in self._users)

    def lend(self, cache: FixedCache) -> None:
        """Let the cache's layers take the buffers, or leave theirs."""
        self._users = [weakref.ref(layer) for layer in cache.layers]
        for i, layer in enumerate(cache.layers):
            layer.index, layer.lender = i, self


class FixedLayer(Layer):
    """Keys and values of one layer: the first tokens of two buffers (batch, heads, capacity, head_dim).

    Attributes:
        rows: buffers are of a multiple of so many texts, each at its own positions, without padding; None: of all.
        moves: how often the buffers were replaced.
        is_read: whether a reader may keep a part of the buffers, which no other tokens then take.
    """

    index: int = 0
    lender: Buffers | None = None
    is_read: bool = False

    def __init__(self, capacity: int, rows: int | None = None) -> None:
        self.capacity, self.rows, self.moves = capacity, rows, 0
        self._pair: tuple[Tensor, Tensor] | None = None
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has buffers of its own."""
        self._undo_narrowing()
        return {**vars(self), "lender": None}

    @property
    def buffers(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values, each (batch, heads, capacity, head_dim), of the texts that go on."""
        if self._pair is None or (self.narrowed is None and self.rows is None):
            return self._pair
        return self._first(self.batch if self.narrowed is None else self.narrowed.rows)

    @buffers.setter
    def buffers(self, pair: tuple[Tensor, Tensor] | None) -> None:
        self._pair, self.is_read = pair, False
        self.moves += 1

    def step_buffers(self) -> DenseBuffers:
        """Return the buffers with the rows behind the texts that make them a multiple of ``rows``."""
        assert self.buffers is not None
        if self.rows is None:
            return DenseBuffers(*self.buffers)
        return DenseBuffers(*self._first(_multiple(len(self.buffers[0]), self.rows)))

    def _first(self, rows: int) -> tuple[Tensor, Tensor]:
        assert self._pair is not None
        return self._pair[0][:rows], self._pair[1][:rows]

    @property
    def by_text(self) -> list[Tensor]:
        """What there is of each text (batch, ...)."""
        assert self._pair is not None
        return [t[:, :, : self.length] for t in self._pair]

    def narrow(self, narrowed: Narrowed | None) -> None:
        """Let the buffers be those of some texts, or of all."""
        self.narrowed = narrowed
        self.moves += 1

    def _view(self, which: int) -> Tensor | None:
        self.is_read = True
        if self.lender is not None:
            self.lender.pairs.pop(self.index, None)
            self.lender = None
        return self._tokens(which)

    def _tokens(self, which: int) -> Tensor | None:
        self._undo_narrowing()
        return None if self.buffers is None else self.buffers[which][:, :, : self.length]

    def _select(self, tokens: int, entries: Tensor | None) -> None:
        if entries is not None:
            self._check_is_of_all()
        self._undo_narrowing()
        self.length = tokens
        if entries is not None:
            self.lender, self.batch = None, len(entries)
            self._move([t.index_select(0, entries.to(t.device)) for t in self.by_text])
        elif self.is_read:
            self._move(self.by_text)

    def _move(self, tokens: list[Tensor]) -> None:
        """Move to other buffers, which hold these keys and values (batch, heads, length, head_dim)."""
        self.buffers = self._allocate(tokens[0]), self._allocate(tokens[1])
        for buffer, before in zip(self.by_text, tokens, strict=True):
            buffer.copy_(before)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the lender's buffers if they fit, otherwise allocate some."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.capacity = min(self.capacity, round_up(key_states.shape[-2] + ROOM))
        self.batch = key_states.shape[0]
        lent = None if self.lender is None else self.lender.pairs.get(self.index)
        if lent is not None and all(map(self._fits, lent, (key_states, value_states))):
            for buffer in lent:
                buffer.zero_()
            self.buffers, self.capacity = lent, lent[0].shape[2]
        else:
            self.buffers = self._allocate(key_states), self._allocate(value_states)
            self._lend_back()
        self.length = 0
        self.is_initialized = True

    def _allocate(self, like: Tensor) -> Tensor:
        with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
            return torch.zeros(self._shape(like), dtype=like.dtype, device=like.device)

    def _shape(self, like: Tensor) -> tuple[int, ...]:
        return _multiple(like.shape[0], self.rows or 1), like.shape[1], self.capacity, like.shape[3]

    def _fits(self, buffer: Tensor, new: Tensor) -> bool:
        first = buffer[:, :, : self.capacity]
        return (first.shape, first.dtype, first.device) == (self._shape(new), new.dtype, new.device)

    def _lend_back(self) -> None:
        if self.lender is not None:
            assert self._pair is not None
            self.lender.pairs[self.index] = self._pair

    def reserve(self, length: int) -> None:
        """Move to larger buffers if these have no room for ``length`` tokens."""
        if length > self.capacity:
            self.capacity = round_up(max(length, 2 * self.capacity))
            self._move(self.by_text)
            self._lend_back()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, n, head_dim). Return those of all tokens.

        Raises:
            ValueError: the batch size or the number of heads has changed.
        """
        self._check_is_of_all()
        self._undo_narrowing()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.buffers is not None
        self._check_fits(key_states, self.buffers[0].shape[1])
        start, end = self.length, self.length + key_states.shape[-2]
        self.reserve(end)
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        self.length = end
        keys, values = self._tokens(0), self._tokens(1)
        assert keys is not None and values is not None
        return keys, values

    def _check_is_of_all(self) -> None:
        if self.rows is not None:
            raise RuntimeError(
                "decode_natively(model, batch_invariant=True) keeps each text of this cache at its own positions, "
                "without padding: make another cache for other forwards, beam search, or other texts"
            )

    def reset(self) -> None:
        """Remove all tokens. The next ones may have another batch size."""
        self._undo_narrowing()
        self.is_initialized = False
        self.buffers, self.length = None, 0


class FixedCache(Cache):
    """A cache of :class:`FixedLayer`.

    Args:
        layers: number of layers.
        length: number of tokens to make room for, at first up to :data:`ROOM` after the prompt. More tokens move the
            cache to larger buffers.
        lender: buffers of earlier caches to use again.
        rows: see :class:`FixedLayer`.

    Attributes:
        padding: with ``rows``, that before the texts in masks; None: none.
    """

    layers: list[Any]
    padding: Any = None

    def __init__(self, layers: int, length: int, lender: Buffers | None = None, rows: int | None = None) -> None:
        super().__init__(layers=[FixedLayer(round_up(length), rows) for _ in range(layers)])
        self.rows = rows
        if lender is not None:
            lender.lend(self)

    @property
    def moves(self) -> int:
        """How often buffers were replaced."""
        return sum(map(_MOVES, self.layers))

    def of_text(self, row: int, length: int) -> FixedCache:
        """Return a cache of one text's first tokens, in the same memory, which has room where this one has."""
        one = FixedCache(len(self.layers), 1)
        for its, layer in zip(one.layers, self.layers, strict=True):
            its.dtype, its.device, its.capacity = layer.dtype, layer.device, layer.capacity
            its.buffers = tuple(t[row : row + 1] for t in layer.buffers)
            its.is_initialized, its.batch = True, 1
        append(one, length)
        return one

    def reserve(self, length: int) -> None:
        """Move all layers to larger buffers if these have no room for ``length`` tokens."""
        if length > capacity_of(self):
            for layer in self.layers:
                layer.reserve(length)


def round_up(length: int) -> int:
    """Return the number of tokens that a cache for ``length`` tokens has room for."""
    return _multiple(max(length, 1), GROWTH)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def static_view(cache: FixedCache) -> Cache:
    """Return a static cache of transformers with the same buffers, and its length on the device.

    The model's own forward can be captured with it: each replay appends at the length that the device counts.
    """
    layers: list[Any] = []
    for each in cache.layers:
        layer = StaticLayer(each.capacity)
        layer.device = each.device
        layer.keys, layer.values = each.buffers
        layer.batch_size, layer.num_heads = layer.keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = layer.keys.shape[-1], layer.values.shape[-1]
        with torch.inference_mode(False):
            layer.cumulative_length = torch.zeros((), dtype=torch.int64, device=each.device)
        layer.is_initialized = True
        layers.append(layer)
    return Cache(layers=layers)


def keeps_all_keys(config: PreTrainedConfig) -> bool:
    """Return whether all layers of the model attend to keys and values, which a FixedCache can keep."""
    layers = StaticCache(config.get_text_config(decoder=True), 1).layers
    if any(type(each) not in (StaticLayer, StaticSlidingWindowLayer) for each in layers):
        return False
    return "chunked_attention" not in (getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def takes_steps(cache: Any) -> bool:
    """Return whether a step can append a token: a FixedCache with tokens, or codes of one kind in all layers."""
    layers: list[Any] = cache.layers
    if type(cache) is FixedCache:
        return all(map(_IS_INITIALIZED, layers))
    return (
        type(cache) in (Cache, DynamicCache)
        and bool(layers)
        and not cache.offloading
        and all(type(each) is NVFP4CacheLayer and each.is_steady for each in layers)
        and all(each.kind == layers[0].kind for each in layers)
    )


def buffers_of(cache: Any) -> list[Any]:
    """Return what a step reads and writes of each layer."""
    return [each.step_buffers() for each in cache.layers]


def batch_of(cache: Any) -> int:
    """Return the number of texts that a step appends to."""
    batch: int = cache.layers[0].batch if (narrowed := narrowed_of(cache)) is None else narrowed.rows
    return batch


def capacity_of(cache: Any) -> int:
    """Return the number of tokens that all layers have room for."""
    return min(map(_CAPACITY, cache.layers))


def length_of(cache: Any) -> int:
    """Return the number of tokens in the cache. transformers' static cache has it on the device."""
    first = next((each for each in cache.layers if hasattr(each, "get_seq_length")), None)  # not linear attention
    return 0 if first is None else int(first.get_seq_length())


def append(cache: Any, count: int = 1) -> None:
    """Count tokens that were written into the buffers of all layers."""
    for each in cache.layers:
        each.length += count
