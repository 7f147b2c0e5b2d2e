"""A key-value cache in NVFP4 for transformers, a quarter to a third of the size of bfloat16, on any device.

    cache = nvfp4_cache(model.config)
    model.generate(**inputs, past_key_values=cache)

Blocks run along the head dimension, so each token is quantized independently of the others and appended. A row is one
token of one head. It is first multiplied by a power of two that moves its largest magnitude near the top of the block
scales' range, so that block scales neither overflow nor underflow, regardless of earlier tokens. This factor is stored
as one byte per row in addition to codes and block scales: 4.625 bits per element for a head dimension of 64, 4.5625 for
128.

The latest tokens, which get most of the attention, stay dense, and attention reads new tokens before they are rounded.
With ``recent=0``, attention reads only quantized values, so results do not depend on how a prompt is split into chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import ScaleSearch
from nvfp4_tensor.numerics.layout import BLOCK, TILE_ROWS
from nvfp4_tensor.numerics.spec import QuantizeSpec

E8M0_BIAS = 127

RECENT = 128
"""The default number of recent tokens that stay dense. They reduce the loss of SmolLM2 to a seventh (docs/guides)."""


class Rows:
    """A growable matrix (n, columns) in NVFP4 with one power-of-two factor per row.

    Attributes:
        codes: uint8 (n, padded columns / 2), columns padded to a multiple of 16.
        scale: bytes of e4m3 (row tiles, column tiles, 32, 16), in the swizzled layout of the operators.
        factor: bytes of e8m0 (n,): value = code x block scale x factor.

    Scales are stored as bytes because autocast cannot concatenate e4m3, and torch.compile's C++ does not support e8m0.
    """

    def __init__(self, columns: int, spec: QuantizeSpec, device: torch.device) -> None:
        self.columns, self.spec = columns, spec
        padded = layout.ceil_to(columns, BLOCK)
        tiles = layout.scale_tiles(0, padded)
        self.codes = torch.empty((0, padded // 2), dtype=torch.uint8, device=device)
        self.scale = torch.empty((*tiles, 32, 16), dtype=torch.uint8, device=device)
        self.factor = torch.empty((0,), dtype=torch.uint8, device=device)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.numel() + self.scale.numel() + self.factor.numel()

    def append(self, x: Tensor) -> None:
        """Quantize x (n, columns), of any dtype that the operators support, and append its rows."""
        exponent = self._exponents(x)
        scaled = x.float() * _power(-exponent).unsqueeze(-1)
        # With this amax the per-tensor scale is 1, so that each row has only its own factor.
        amax = scaled.new_full((), self.spec.largest_value)
        codes, scale, _ = torch.ops.nvfp4.quantize(scaled, amax, None, self.spec.pack())
        first, blocks = len(self), codes.shape[-1] * 2 // BLOCK
        self.codes = torch.cat((self.codes, codes))
        self.factor = torch.cat((self.factor, (exponent + E8M0_BIAS).to(torch.uint8)))
        self._write_scales(first, layout.unswizzle(scale, len(x), blocks))

    def _exponents(self, x: Tensor) -> Tensor:
        """Return the exponents of the rows' factors, int32 (n,). NaN and Inf do not count for the amax of a row."""
        magnitude = x.abs().float()
        amax = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(dim=-1)
        # One below the exponent of the largest representable value, so that mantissas need not be compared.
        top = int(self.spec.largest_value).bit_length() - 2
        return (torch.frexp(amax).exponent - 1 - top).clamp(-126, 126)

    def _write_scales(self, first: int, scale: Tensor) -> None:
        """Write block scales (n, blocks), in linear layout, to the rows from ``first`` on. Add tiles as needed."""
        missing = layout.scale_tiles(first + len(scale), BLOCK)[0] - len(self.scale)
        if missing:
            self.scale = torch.cat((self.scale, self.scale.new_zeros((missing, *self.scale.shape[1:]))))
        row = torch.arange(first, first + len(scale), device=scale.device).unsqueeze(1)
        column = torch.arange(scale.shape[1], device=scale.device)
        tile, inside = row // TILE_ROWS, row % TILE_ROWS
        index = tile, column // 4, inside % 32, inside // 32 * 4 + column % 4
        self.scale = self.scale.index_put(index, scale.view(torch.uint8))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """Decode all rows to (n, columns) of dtype."""
        factor = _power(self.factor.int() - E8M0_BIAS)
        scale = self.scale.view(torch.float8_e4m3fn)
        return torch.ops.nvfp4.dequantize(self.codes, scale, factor, self.columns, dtype)

    def select(self, rows: Tensor) -> None:
        """Keep only the given rows, int64 (m,), in this order."""
        linear = layout.unswizzle(self.scale, len(self), self.codes.shape[-1] * 2 // BLOCK)
        self.codes = self.codes[rows]
        self.factor = self.factor[rows]
        self.scale = layout.swizzle(linear[rows])

    def to(self, device: torch.device | str) -> None:
        self.codes, self.scale, self.factor = (
            t.to(device, non_blocking=True) for t in (self.codes, self.scale, self.factor)
        )


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly as float32, for integers from -126 to 126."""
    return (exponent.int() + E8M0_BIAS << 23).view(torch.float32)


def _arange(count: int) -> Tensor:
    """Return 0 to count - 1 on the CPU, where indices are computed, regardless of the default device."""
    return torch.arange(count, device="cpu")


class States:
    """The keys or the values of one layer: the latest tokens dense, older ones as :class:`Rows`.

    Rows are ordered by (token, batch, head), so that new tokens are appended.

    Attributes:
        rows: the older tokens.
        latest: the latest tokens, unquantized: (batch, heads, up to ``recent`` tokens, head_dim).
    """

    def __init__(self, x: Tensor, spec: QuantizeSpec, recent: int) -> None:
        self.rows, self.latest, self.recent = Rows(x.shape[-1], spec, x.device), x[..., :0, :], recent

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.latest.numel() * self.latest.element_size()

    def add(self, x: Tensor) -> Tensor:
        """Append x (batch, heads, tokens, head_dim). Return all states, quantized ones decoded to the dtype of x."""
        if not self.recent:
            self._quantize(x)
            return self._decoded(x)
        fresh = torch.cat((self.latest, x), dim=-2)
        states = torch.cat((self._decoded(x), fresh), dim=-2)
        older = max(fresh.shape[-2] - self.recent, 0)
        self._quantize(fresh[..., :older, :])
        self.latest = fresh[..., older:, :].detach().clone()  # a view would keep the full prompt in memory
        return states

    def select(self, tokens: int, entries: Tensor) -> None:
        """Keep the first ``tokens`` tokens and the given batch entries, int64 (m,) on the CPU, in this order."""
        batch, heads = self.latest.shape[:2]
        older = len(self.rows) // (batch * heads)
        kept = _arange(min(tokens, older))[:, None, None]
        row = (kept * batch + entries[:, None]) * heads + _arange(heads)
        self.rows.select(row.flatten().to(self.rows.codes.device))
        self.latest = self.latest[entries.to(self.latest.device), :, : max(tokens - older, 0)]

    def to(self, device: torch.device | str) -> None:
        self.rows.to(device)
        self.latest = self.latest.to(device, non_blocking=True)

    def _quantize(self, x: Tensor) -> None:
        if x.numel():
            self.rows.append(x.detach().permute(2, 0, 1, 3).reshape(-1, x.shape[-1]))

    def _decoded(self, like: Tensor) -> Tensor:
        values = self.rows.decode(like.dtype)
        return values.view(-1, *like.shape[:2], self.rows.columns).permute(1, 2, 0, 3)


class NVFP4CacheLayer(DynamicLayer):
    """The keys and values of one layer in NVFP4, for a ``transformers.Cache``. :func:`nvfp4_cache` creates all layers.

    Gradients do not flow through stored tokens. They flow through dense tokens in the call that appends them.

    Args:
        spec: a spec with rounding to nearest, 1x16 blocks and no transform. By default a scale search.
        recent: the number of latest tokens that stay dense.

    Raises:
        ValueError: a spec with stochastic rounding, 16x16 blocks, a transform or row scales; a negative ``recent``.
    """

    def __init__(self, spec: QuantizeSpec | None = None, recent: int = RECENT) -> None:
        super().__init__()
        self.spec = QuantizeSpec(scale_search=ScaleSearch.MSE) if spec is None else spec
        if self.spec.is_stochastic or self.spec.block_rows != 1 or self.spec.rotation is not None:
            raise ValueError(
                f"a cache needs a spec that rounds to nearest, in 1x16 blocks, without a transform, not ({self.spec})"
            )
        if self.spec.row_scaled:
            raise ValueError("each row of a cache already has its own factor: give a spec without row_scaled")
        if not isinstance(recent, int) or recent < 0:
            raise ValueError(f"recent must be a number of tokens, 0 or more, got {recent!r}")
        self.recent = recent
        self._reset()

    def _reset(self) -> None:
        self.length = 0
        self._states: tuple[States, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Record the shape (batch, heads), and create empty states."""
        super().lazy_initialization(key_states, value_states)
        self.batch, self.heads = key_states.shape[0], key_states.shape[1]
        self._states = tuple(States(x.detach(), self.spec, self.recent) for x in (key_states, value_states))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, head_dim). Return all of them (batch, heads, length, head_dim).

        Raises:
            ValueError: the batch size or the number of heads has changed.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[:2] != (self.batch, self.heads):
            raise ValueError(
                f"the cache has (batch, heads) ({self.batch}, {self.heads}), and got {tuple(key_states.shape)}: make a "
                "new cache, or reset() this one"
            )
        self.length += key_states.shape[-2]
        keys, values = self._states
        return keys.add(key_states), values.add(value_states)

    @property
    def nbytes(self) -> int:
        """The size of keys and values in bytes: codes, block scales with padding, factors, and dense tokens."""
        return sum(states.nbytes for states in self._states)

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.length

    def reset(self) -> None:
        """Remove all tokens. The next ones may have another batch size."""
        self.is_initialized = False  # transformers 5.17 and older keep it set
        super().reset()
        self._reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive argument is the number to keep, as it once was."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if kept < self.length:
            self._select(max(kept, 0), _arange(self.batch))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder batch entries, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch entries: integers, or a mask."""
        if self.is_initialized:
            indices = torch.as_tensor(indices, device="cpu")
            entries = indices.nonzero().flatten() if indices.dtype == torch.bool else indices.long()
            self._select(self.length, entries)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry ``repeats`` times."""
        if self.is_initialized:
            self._select(self.length, _arange(self.batch).repeat_interleave(repeats))

    def _select(self, tokens: int, entries: Tensor) -> None:
        for states in self._states:
            states.select(tokens, entries)
        self.length, self.batch = tokens, len(entries)

    def offload(self) -> None:
        """Move the stored states to the CPU."""
        for states in self._states:
            states.to("cpu")

    def prefetch(self) -> None:
        """Move the stored states back to the device of the model."""
        for states in self._states:
            states.to(self.device)


def nvfp4_cache(config: PreTrainedConfig, spec: QuantizeSpec | None = None, *, recent: int = RECENT) -> Cache:
    """Return a key-value cache in NVFP4 for ``model.generate(past_key_values=...)`` or a model's forward.

    Layers without growing keys and values (sliding windows, linear attention) stay those of transformers.

    Args:
        config: the config of the model.
        spec, recent: as in :class:`NVFP4CacheLayer`.

    Raises:
        ValueError: no layer of the model has growing keys and values, or ``spec`` or ``recent`` is invalid.

    Example:
        >>> cache = nvfp4_cache(model.config)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """
    layers = [
        NVFP4CacheLayer(spec, recent) if type(layer) is DynamicLayer else layer
        for layer in DynamicCache(config=config).layers
    ]
    if not any(isinstance(layer, NVFP4CacheLayer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"
        raise ValueError(
            f"{type(config).__name__} has no layer with growing keys and values, only {kinds}: use transformers' cache"
        )
    return Cache(layers=layers)
