"""A key-value cache in NVFP4 for transformers: a third to a quarter of bfloat16's memory, on any device.

    cache = nvfp4_cache(model.config)
    model.generate(**inputs, past_key_values=cache)

Blocks run along the head dimension, so a token's keys need no other token: it is appended as it comes. A row, one
token's head, is first multiplied by a power of two that puts its largest magnitude near the top of the block scales'
range; then no row is too large or too small for its scales, whatever the tokens before it were. The power is kept, one
byte a row, beside codes and block scales: 4.625 bits a number for heads of 64, 4.5625 for heads of 128.

The latest tokens, to which attention goes most, stay dense; those that come are seen before they are rounded. With
``recent=0`` what attention sees is what is stored, so that it does not depend on how a prompt was cut into pieces.
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
"""Tokens that stay dense. Attention goes to the latest most: with these, SmolLM2 loses a seventh (docs/guides)."""


class Rows:
    """Rows (n, columns) of NVFP4 to which rows are appended; each has a power of two of its own.

    Attributes:
        codes: uint8 (n, columns rounded up to 16, halved).
        scale: the bytes of e4m3 (row tiles, column tiles, 32, 16), swizzled, as the operators take it.
        factor: the bytes of e8m0 (n,): value = code x block scale x factor.

    Bytes, for autocast does not know how to join e4m3, nor torch.compile's C++ what e8m0 is.
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
        """Quantize x (n, columns), any dtype that the operators take, behind the rows that are there."""
        exponent = self._exponents(x)
        scaled = x.float() * _power(-exponent).unsqueeze(-1)
        # With the amax that makes the per-tensor scale 1, the row's own factor is all there is.
        amax = scaled.new_full((), self.spec.largest_value)
        codes, scale, _ = torch.ops.nvfp4.quantize(scaled, amax, None, self.spec.pack())
        first, blocks = len(self), codes.shape[-1] * 2 // BLOCK
        self.codes = torch.cat((self.codes, codes))
        self.factor = torch.cat((self.factor, (exponent + E8M0_BIAS).to(torch.uint8)))
        self._write_scales(first, layout.unswizzle(scale, len(x), blocks))

    def _exponents(self, x: Tensor) -> Tensor:
        """int32 (n,): of the power of two by which each row is divided; NaN and Inf are left out of its amax."""
        magnitude = x.abs().float()
        amax = torch.where(magnitude.isfinite(), magnitude, 0.0).amax(dim=-1)
        # One below the exponent of the largest value that the scales reach, so that no mantissa has to be looked at.
        top = int(self.spec.largest_value).bit_length() - 2
        return (torch.frexp(amax).exponent - 1 - top).clamp(-126, 126)

    def _write_scales(self, first: int, scale: Tensor) -> None:
        """Block scales (n, blocks), linear, as those of the rows from ``first`` on; tiles are added as needed."""
        missing = layout.scale_tiles(first + len(scale), BLOCK)[0] - len(self.scale)
        if missing:
            self.scale = torch.cat((self.scale, self.scale.new_zeros((missing, *self.scale.shape[1:]))))
        row = torch.arange(first, first + len(scale), device=scale.device).unsqueeze(1)
        column = torch.arange(scale.shape[1], device=scale.device)
        tile, inside = row // TILE_ROWS, row % TILE_ROWS
        place = tile, column // 4, inside % 32, inside // 32 * 4 + column % 4
        self.scale = self.scale.index_put(place, scale.view(torch.uint8))

    def decode(self, dtype: torch.dtype) -> Tensor:
        """(n, columns) of dtype, by the native operator."""
        factor = _power(self.factor.int() - E8M0_BIAS)
        scale = self.scale.view(torch.float8_e4m3fn)
        return torch.ops.nvfp4.dequantize(self.codes, scale, factor, self.columns, dtype)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: int64 (m,)."""
        linear = layout.unswizzle(self.scale, len(self), self.codes.shape[-1] * 2 // BLOCK)
        self.codes = self.codes[rows]
        self.factor = self.factor[rows]
        self.scale = layout.swizzle(linear[rows])

    def to(self, device: torch.device | str) -> None:
        self.codes, self.scale, self.factor = (
            t.to(device, non_blocking=True) for t in (self.codes, self.scale, self.factor)
        )


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, by its bits: float32 of integers from -126 to 126."""
    return (exponent.int() + E8M0_BIAS << 23).view(torch.float32)


def _numbers(count: int) -> Tensor:
    """0 to count - 1, on the CPU whatever the default device is: indices are made there."""
    return torch.arange(count, device="cpu")


class States:
    """The keys, or the values, of one layer: the latest tokens dense, those before them as :class:`Rows`.

    Rows lie in the order token, batch, head: a new token's come last.

    Attributes:
        rows: of the older tokens.
        latest: (batch, heads, up to ``recent`` tokens, head_dim), as they came.
    """

    def __init__(self, x: Tensor, spec: QuantizeSpec, recent: int) -> None:
        self.rows, self.latest, self.recent = Rows(x.shape[-1], spec, x.device), x[..., :0, :], recent

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.latest.numel() * self.latest.element_size()

    def add(self, x: Tensor) -> Tensor:
        """Append x (batch, heads, tokens, head_dim); all states, what is quantized decoded to x's dtype."""
        if not self.recent:
            self._quantize(x)
            return self._decoded(x)
        fresh = torch.cat((self.latest, x), dim=-2)
        states = torch.cat((self._decoded(x), fresh), dim=-2)
        older = max(fresh.shape[-2] - self.recent, 0)
        self._quantize(fresh[..., :older, :])
        self.latest = fresh[..., older:, :].detach().clone()  # not a view, which would keep all of a prompt
        return states

    def select(self, tokens: int, entries: Tensor) -> None:
        """Keep the first tokens, and these entries of the batch in this order: int64 (m,), on the CPU."""
        batch, heads = self.latest.shape[:2]
        older = len(self.rows) // (batch * heads)
        kept = _numbers(min(tokens, older))[:, None, None]
        row = (kept * batch + entries[:, None]) * heads + _numbers(heads)
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
    """One layer's keys and values in NVFP4, for a ``transformers.Cache``; :func:`nvfp4_cache` makes all of a model's.

    No gradient passes what is stored; tokens that stay dense have one in their own call.

    Args:
        spec: how to quantize: to nearest, in 1x16 blocks, without a transform; by a scale search by default.
        recent: how many of the latest tokens stay dense.

    Raises:
        ValueError: a spec that rounds stochastically, shares scales among tokens, transforms, or has row scales; a
            negative recent.
    """

    def __init__(self, spec: QuantizeSpec | None = None, recent: int = RECENT) -> None:
        super().__init__()
        self.spec = QuantizeSpec(scale_search=ScaleSearch.MSE) if spec is None else spec
        if self.spec.is_stochastic or self.spec.block_rows != 1 or self.spec.rotation is not None:
            raise ValueError(
                f"a cache is quantized to nearest, in 1x16 blocks and without a transform, not by ({self.spec})"
            )
        if self.spec.row_scaled:
            raise ValueError("each row of a cache has a power of two of its own: give a spec without row_scaled")
        if not isinstance(recent, int) or recent < 0:
            raise ValueError(f"recent is a number of tokens, 0 or more, got {recent!r}")
        self.recent = recent
        self._reset()

    def _reset(self) -> None:
        self.length = 0
        self._states: tuple[States, ...] = ()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keeps the shape but for tokens, (batch, heads), and makes empty stores."""
        super().lazy_initialization(key_states, value_states)
        self.batch, self.heads = key_states.shape[0], key_states.shape[1]
        self._states = tuple(States(x.detach(), self.spec, self.recent) for x in (key_states, value_states))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (batch, heads, tokens, head_dim) each; all states, (batch, heads, length, head_dim).

        Raises:
            ValueError: another batch size or number of heads than before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[:2] != (self.batch, self.heads):
            raise ValueError(
                f"the cache holds {self.batch} x {self.heads} heads (batch x heads), and got {tuple(key_states.shape)}"
            )
        self.length += key_states.shape[-2]
        keys, values = self._states
        return keys.add(key_states), values.add(value_states)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales (padding included) and factors, and of dense tokens; of keys and values."""
        return sum(states.nbytes for states in self._states)

    def get_seq_length(self) -> int:
        """The number of tokens."""
        return self.length

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()
        self._reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens; of a positive number, transformers' older way, keep so many."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if kept < self.length:
            self._select(max(kept, 0), _numbers(self.batch))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch entries in another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch: whole numbers, or a mask."""
        if self.is_initialized:
            indices = torch.as_tensor(indices, device="cpu")
            entries = indices.nonzero().flatten() if indices.dtype == torch.bool else indices.long()
            self._select(self.length, entries)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each entry of the batch ``repeats`` times."""
        if self.is_initialized:
            self._select(self.length, _numbers(self.batch).repeat_interleave(repeats))

    def _select(self, tokens: int, entries: Tensor) -> None:
        for states in self._states:
            states.select(tokens, entries)
        self.length, self.batch = tokens, len(entries)

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        for states in self._states:
            states.to("cpu")

    def prefetch(self) -> None:
        """Move what is stored back to the device of the states."""
        for states in self._states:
            states.to(self.device)


def nvfp4_cache(config: PreTrainedConfig, spec: QuantizeSpec | None = None, *, recent: int = RECENT) -> Cache:
    """A cache for ``model.generate(past_key_values=...)`` or a model's forward, keys and values in NVFP4.

    Layers that keep no growing keys and values (sliding windows, linear attention) stay as transformers makes them.

    Args:
        config: of the model.
        spec, recent: as :class:`NVFP4CacheLayer` takes them.

    Raises:
        ValueError: no layer of the model has keys and values that grow; a spec or number that does not do.

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
            f"{type(config).__name__} has no layer whose keys and values grow ({kinds}): nothing to quantize"
        )
    return Cache(layers=layers)
