"""A key-value cache in NVFP4 for transformers, a quarter to a third of the size of bfloat16, on any device.

    cache = nvfp4_cache(model.config)
    model.generate(**inputs, past_key_values=cache)

Blocks run along the head dimension, so each token is quantized independently of the others and appended. A row is one
token of one head. It is first multiplied by a power of two that moves its largest magnitude near the top of the block
scales' range, so that block scales neither overflow nor underflow, regardless of earlier tokens. This factor is stored
as one byte per row in addition to codes and block scales: 4.625 bits per element for a head dimension of 64, 4.5625 for
128. Keys are first rotated by a Hadamard transform over the head dimension, as queries are for the products with codes:
a few channels of keys have large values, which would take the precision of their blocks.

The latest tokens, which get most of the attention, stay dense, and attention reads new tokens before they are rounded.
With ``recent=0``, attention reads only quantized values, so results do not depend on how a prompt is split into chunks.

With native kernels, attention reads codes where they are stored (``coded_states.py``, ``attention.py``); elsewhere, and
where something else reads keys or values, a layer is decoded as a whole. With ``max_tokens``, codes stay where they are
until there are more tokens, and a CUDA graph can write tokens (``ring.py``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.generation import attention  # registers "nvfp4" with transformers
from nvfp4_tensor.generation.coded_states import CodedStates, StoredStates, append
from nvfp4_tensor.generation.layer import Layer
from nvfp4_tensor.generation.ring import CodedBuffers, from_ring, to_ring
from nvfp4_tensor.numerics.choices import ScaleSearch
from nvfp4_tensor.numerics.spec import QuantizeSpec

RECENT = 64
"""The default number of recent tokens that stay dense. Attention weights them most (docs/guides/kv_cache.md)."""

LARGEST_GROWTH = 32768
"""Tokens by which the room of ``max_tokens`` grows at most, and so what is free of it at most."""


class NVFP4CacheLayer(Layer):
    """The keys and values of one layer in NVFP4, for a ``transformers.Cache``. :func:`nvfp4_cache` creates all layers.

    Gradients do not flow through stored tokens. They flow through dense tokens in the call that appends them.

    Args:
        spec: a spec with rounding to nearest, 1x16 blocks and no transform. By default a scale search.
        recent: the number of latest tokens that stay dense.
        sink: the number of first tokens that stay dense.
        rotate_keys: whether codes of keys are those of a Hadamard transform over the head dimension, which spreads
            channels with large values. Queries are transformed likewise, or decoded keys are transformed back.
        max_tokens: the number of tokens to make room for at first, so that codes do not move until there are more:
            then the room doubles, or grows by :data:`LARGEST_GROWTH` tokens. None: room grows with the tokens.

    Raises:
        ValueError: a spec with stochastic rounding, 16x16 blocks, a transform or row scales; a negative ``recent`` or
            ``sink``, or a ``max_tokens`` below 1.
    """

    _narrow_buffers: CodedBuffers | None = None
    """What a graph reads and writes of the texts that go on, if others have ended."""
    _ring: tuple[Tensor, Tensor] | None = None
    _spare: tuple[tuple[CodedStates, ...], tuple[Tensor, Tensor] | None] = (), None

    def __init__(
        self,
        spec: QuantizeSpec | None = None,
        recent: int = RECENT,
        sink: int = 0,
        rotate_keys: bool = True,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = QuantizeSpec(scale_search=ScaleSearch.MSE) if spec is None else spec
        if self.spec.is_stochastic or self.spec.block_rows != 1 or self.spec.rotation is not None:
            raise ValueError(
                f"a cache needs a spec that rounds to nearest, in 1x16 blocks, without a transform, not ({self.spec})"
            )
        if self.spec.row_scaled:
            raise ValueError("each row of a cache already has its own factor: give a spec without row_scaled")
        for name, tokens in (("recent", recent), ("sink", sink)):
            if not isinstance(tokens, int) or tokens < 0:
                raise ValueError(f"{name} must be a number of tokens, 0 or more, got {tokens!r}")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise ValueError(f"max_tokens must be a number of tokens, 1 or more, got {max_tokens!r}")
        self.recent, self.sink, self.rotate_keys, self.max_tokens = recent, sink, rotate_keys, max_tokens
        self.capacity = max_tokens or 0
        """The tokens that codes have room for without moving, with ``max_tokens``."""
        self._reset()

    def _reset(self) -> None:
        self.length = 0
        self._pair: tuple[CodedStates, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, whose latest tokens are not in a ring."""
        self._settle()
        return {name: value for name, value in vars(self).items() if name not in ("_ring", "_spare")}

    @property
    def _states(self) -> tuple[CodedStates, ...]:
        """Keys and values. Nothing but a graph knows the tokens in a ring until they are taken out of it."""
        self._settle()
        return self._pair

    def _view(self, which: int) -> Tensor | None:
        if not self.is_initialized or not self._pair:
            return None
        states = self._states[which]
        return StoredStates(states, states.stored, states.latest)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record the shape (batch, heads), and create empty states, in the memory of those before a reset."""
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype  # transformers 5.24 and later leave it out
        self.batch, self.heads = key_states.shape[0], key_states.shape[1]
        self._pair = CodedStates(key_states, self.rotate_keys), CodedStates(value_states)
        for states, old in zip(self._pair, self._spare[0] or (None, None), strict=True):
            states.reserve(self.capacity, old)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, head_dim). Return all of them (batch, heads, length, head_dim).

        On a CPU they are :class:`StoredStates` as soon as there are codes, which attention reads in place.

        Raises:
            ValueError: the batch size or the number of heads has changed.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_fits(key_states, self.heads)
        keys, values = self._states
        if keys.stored and torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            warn_user(
                "gradients do not reach the keys and values of earlier calls, which the cache keeps in 4 bits: give "
                "the model all tokens in one call, with use_cache=False",
            )
        self.length += key_states.shape[-2]
        if self.max_tokens is not None and self.length > self.capacity:
            self._make_room()
        key_front, new_keys = keys.to_front(key_states, self.sink)
        value_front, new_values = values.to_front(value_states, self.sink)
        fronts = key_front, value_front
        if not self.recent:
            append(keys, values, new_keys, new_values, self.spec)
            return self._all(fronts, (new_keys[:, :, :0], new_values[:, :, :0]))
        fresh = torch.cat((keys.latest, new_keys), dim=2), torch.cat((values.latest, new_values), dim=2)
        result = self._all(fronts, fresh)
        older = max(fresh[0].shape[2] - self.recent, 0)
        append(keys, values, fresh[0][:, :, :older], fresh[1][:, :, :older], self.spec)
        for states, x in zip(self._states, fresh, strict=True):
            states.keep_latest(x, older)
        return result

    def _make_room(self) -> None:
        """Move the codes to where there is room for twice the tokens, or for :data:`LARGEST_GROWTH` more."""
        while self.capacity < self.length:
            self.capacity += min(max(self.capacity, 1), LARGEST_GROWTH)
        for states in self._pair:
            states.reserve(self.capacity)

    def _all(self, fronts: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values: the first tokens, those in codes, and ``fresh``."""
        stored, both = self._states[0].stored, zip(self._states, fronts, fresh, strict=True)
        if stored and attention.reads_codes(fresh[0]):
            states = [StoredStates(each, stored, x) for each, _, x in both]
            return states[0], states[1]
        dense = [torch.cat((front.to(x.dtype), each.decode(x.dtype, stored), x), dim=2) for each, front, x in both]
        return dense[0], dense[1]

    # --- tokens that a CUDA graph writes ------------------------------------------------------------------------------

    @property
    def kind(self) -> tuple[int, int, bool, QuantizeSpec]:
        """How many tokens are dense, and how the others become codes."""
        return self.recent, self.sink, self.rotate_keys, self.spec

    @property
    def is_steady(self) -> bool:
        """Whether a graph can write the next token: dense tokens are complete, and there is room without moving."""
        if self.max_tokens is None or not self.recent or not self.is_initialized or self.length >= self.capacity:
            return False
        return self._ring is not None or all(
            (each.front.shape[2], each.latest.shape[2]) == (self.sink, self.recent)
            and each.codes.shape[2] >= self.capacity
            for each in self._pair
        )

    def step_buffers(self) -> CodedBuffers:
        """Return what a graph reads and writes, after moving the latest tokens into a ring. The layer is steady."""
        if self._narrow_buffers is not None:
            return self._narrow_buffers
        keys, values = self._pair
        if self._ring is None:
            position, (old_keys, old_values) = self.length - self.sink, self._spare[1] or (None, None)
            self._ring = to_ring(keys.latest, position, old_keys), to_ring(values.latest, position, old_values)
            self._spare = (), self._ring
        front = (keys.front, values.front) if self.sink else ()
        coding = self.spec.pack(), keys.rotation is not None
        return CodedBuffers((*keys.coded, *values.coded), front, self._ring, coding, self.sink, self.recent)

    @property
    def by_text(self) -> tuple[Tensor, ...]:
        """What there is of each text (batch, ...), in a graph."""
        return self.step_buffers().by_text

    def narrow(self, narrowed: Any) -> None:
        """Let graphs read and write some texts only, or all."""
        self.narrowed, self._narrow_buffers = narrowed, None
        if narrowed is not None:
            self._narrow_buffers = self.step_buffers().first(narrowed.rows)

    def _settle(self) -> None:
        """Take the latest tokens out of the ring."""
        self._undo_narrowing()
        if self._ring is None:
            return
        for states, ring in zip(self._pair, self._ring, strict=True):
            states.latest = from_ring(ring, self.length - self.sink)
            states.stored = self.length - self.sink - self.recent
        self._ring = None

    @property
    def nbytes(self) -> int:
        """The size of keys and values in bytes: codes, block scales, factors, their free capacity, and dense tokens."""
        return sum(states.nbytes for states in self._states)

    def reset(self) -> None:
        """Remove all tokens. The next ones may have another batch size."""
        if self.max_tokens is not None:
            self._spare = self._states or self._spare[0], self._spare[1]
            for states in self._pair:
                states.changes += 1  # the next tokens overwrite these
        self.is_initialized = False  # transformers 5.17 and older keep it set
        super().reset()
        self._reset()

    def _select(self, tokens: int, entries: Tensor | None) -> None:
        for states in self._states:
            states.select(tokens, entries)
        self.length = tokens
        if entries is not None:
            self.batch = len(entries)

    def offload(self) -> None:
        """Move the stored states to the CPU."""
        for states in self._states:
            states.to("cpu")

    def prefetch(self) -> None:
        """Move the stored states back to the device of the model."""
        for states in self._states:
            states.to(self.device)


def nvfp4_cache(
    config: PreTrainedConfig,
    spec: QuantizeSpec | None = None,
    *,
    recent: int = RECENT,
    sink: int = 0,
    rotate_keys: bool = True,
    max_tokens: int | None = None,
) -> DynamicCache:
    """Return a key-value cache in NVFP4 for ``model.generate(past_key_values=...)`` or a model's forward.

    With native kernels, attention of a new token reads the codes where they are if no text of the batch is padded. For
    padded batches, prompts in chunks and soft caps too, call ``model.set_attn_implementation("nvfp4")``. Layers without
    growing keys and values (sliding windows, linear attention) stay those of transformers.

    Args:
        config: the config of the model.
        spec, recent, sink, rotate_keys, max_tokens: as in :class:`NVFP4CacheLayer`. ``decode_natively`` on CUDA uses
            caches with ``max_tokens``.

    Raises:
        TypeError: ``config`` is no config of transformers.
        ValueError: no layer of the model has growing keys and values, or ``spec``, ``recent`` or ``sink`` is invalid.

    Example:
        >>> cache = nvfp4_cache(model.config)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"nvfp4_cache needs the config of a model, model.config, not {type(config).__name__}")
    cache = DynamicCache(config=config)
    cache.layers = [
        NVFP4CacheLayer(spec, recent, sink, rotate_keys, max_tokens) if type(layer) is DynamicLayer else layer
        for layer in cache.layers
    ]
    if not any(isinstance(layer, NVFP4CacheLayer) for layer in cache.layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in cache.layers})) or "no layers"
        raise ValueError(
            f"{type(config).__name__} has no layer with growing keys and values, only {kinds}: use transformers' cache"
        )
    return cache
