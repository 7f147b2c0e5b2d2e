"""A key-value cache in NVFP4 for transformers: a third to a quarter of bfloat16's memory, on any device.

    cache = nvfp4_cache(model.config)
    model.generate(**inputs, past_key_values=cache)

Blocks run along the head dimension, so a token's keys need no other token: it is appended as it comes. A row, one
token's head, is first multiplied by a power of two that puts its largest magnitude near the top of the block scales'
range; then no row is too large or too small for its scales, whatever the tokens before it were. The power is kept, one
byte a row, beside codes and block scales: 4.625 bits a number for heads of 64, 4.5625 for heads of 128.

What a layer returns are the decoded states, those of new tokens too. So the numbers that attention sees depend neither
on how a prompt was cut into pieces nor on the other rows of a batch.
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


class Rows:
    """Rows (n, columns) of NVFP4 to which rows are appended; each has a power of two of its own.

    Attributes:
        codes: uint8 (n, columns rounded up to 16, halved).
        scale: e4m3 (row tiles, column tiles, 32, 16), swizzled, as the operators take it.
        factor: e8m0 (n,): value = code x block scale x factor.
    """

    def __init__(self, columns: int, spec: QuantizeSpec, device: torch.device) -> None:
        self.columns, self.spec = columns, spec
        padded = layout.ceil_to(columns, BLOCK)
        tiles = layout.scale_tiles(0, padded)
        self.codes = torch.empty((0, padded // 2), dtype=torch.uint8, device=device)
        self.scale = torch.empty((*tiles, 32, 16), dtype=torch.float8_e4m3fn, device=device)
        self.factor = torch.empty((0,), dtype=torch.float8_e8m0fnu, device=device)

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
        amax = torch.full((), self.spec.largest_value, device=x.device)
        codes, scale, _ = torch.ops.nvfp4.quantize(scaled, amax, None, self.spec.pack())
        first, blocks = len(self), codes.shape[-1] * 2 // BLOCK
        self.codes = torch.cat((self.codes, codes))
        self.factor = torch.cat((self.factor.view(torch.uint8), (exponent + E8M0_BIAS).to(torch.uint8))).view(
            torch.float8_e8m0fnu
        )
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
        self.scale.view(torch.uint8)[place] = scale.view(torch.uint8)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """(n, columns) of dtype, by the native operator."""
        return torch.ops.nvfp4.dequantize(self.codes, self.scale, self.factor.float(), self.columns, dtype)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: int64 (m,)."""
        linear = layout.unswizzle(self.scale, len(self), self.codes.shape[-1] * 2 // BLOCK)
        self.codes = self.codes[rows]
        self.factor = self.factor.view(torch.uint8)[rows].view(torch.float8_e8m0fnu)
        self.scale = layout.swizzle(linear.view(torch.uint8)[rows]).view(torch.float8_e4m3fn)

    def to(self, device: torch.device | str) -> None:
        self.codes, self.scale, self.factor = (
            t.to(device, non_blocking=True) for t in (self.codes, self.scale, self.factor)
        )


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, by its bits: float32 of integers from -126 to 126."""
    return (exponent.int() + E8M0_BIAS << 23).view(torch.float32)


class NVFP4CacheLayer(DynamicLayer):
    """One layer's keys and values in NVFP4, for a ``transformers.Cache``; :func:`nvfp4_cache` makes all of a model's.

    Rows lie in the order token, batch, head: a new token's come last.

    Args:
        spec: how to quantize: to nearest, in 1x16 blocks, without a transform; by a scale search by default.

    Raises:
        ValueError: a spec that rounds stochastically, shares scales among tokens, or transforms.
    """

    def __init__(self, spec: QuantizeSpec | None = None) -> None:
        super().__init__()
        self.spec = QuantizeSpec(scale_search=ScaleSearch.MSE) if spec is None else spec
        if self.spec.is_stochastic or self.spec.block_rows != 1 or self.spec.rotation is not None:
            raise ValueError(
                f"a cache is quantized to nearest, in 1x16 blocks and without a transform, not by ({self.spec})"
            )
        self._reset()

    def _reset(self) -> None:
        self.length = 0
        self._keys: Rows | None = None
        self._values: Rows | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Keeps the shape but for tokens, (batch, heads), and makes empty stores."""
        super().lazy_initialization(key_states, value_states)
        self.batch, self.heads = key_states.shape[0], key_states.shape[1]
        self._keys, self._values = (Rows(x.shape[-1], self.spec, x.device) for x in (key_states, value_states))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (batch, heads, tokens, head_dim) each; all states decoded, (batch, heads, length, head_dim).

        Raises:
            ValueError: another batch size or number of heads than before.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._keys is not None and self._values is not None
        if key_states.shape[:2] != (self.batch, self.heads):
            raise ValueError(
                f"the cache holds {self.batch} x {self.heads} heads (batch x heads), and got {tuple(key_states.shape)}"
            )
        self.length += key_states.shape[-2]
        for rows, states in ((self._keys, key_states), (self._values, value_states)):
            rows.append(states.permute(2, 0, 1, 3).reshape(-1, states.shape[-1]))
        return self._decoded(self._keys), self._decoded(self._values)

    def _decoded(self, rows: Rows) -> Tensor:
        values = rows.decode(self.dtype)
        return values.view(self.length, self.batch, self.heads, rows.columns).permute(1, 2, 0, 3)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales (padding included) and factors, of keys and values."""
        return sum(rows.nbytes for rows in (self._keys, self._values) if rows is not None)

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
            self._select(torch.arange(max(kept, 0)), torch.arange(self.batch))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Batch entries in another order, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these entries of the batch: whole numbers, or a mask."""
        if self.is_initialized:
            indices = torch.as_tensor(indices).cpu()
            entries = indices.nonzero().flatten() if indices.dtype == torch.bool else indices.long()
            self._select(torch.arange(self.length), entries)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each entry of the batch ``repeats`` times."""
        if self.is_initialized:
            self._select(torch.arange(self.length), torch.arange(self.batch).repeat_interleave(repeats))

    def _select(self, tokens: Tensor, entries: Tensor) -> None:
        assert self._keys is not None and self._values is not None
        row = (tokens[:, None, None] * self.batch + entries[:, None]) * self.heads + torch.arange(self.heads)
        for rows in (self._keys, self._values):
            rows.select(row.flatten().to(rows.codes.device))
        self.length, self.batch = len(tokens), len(entries)

    def offload(self) -> None:
        """Move what is stored to the CPU."""
        self._move("cpu")

    def prefetch(self) -> None:
        """Move what is stored back to the device of the states."""
        if self.is_initialized:
            self._move(self.device)

    def _move(self, device: torch.device | str) -> None:
        for rows in (self._keys, self._values):
            if rows is not None:
                rows.to(device)


def nvfp4_cache(config: PreTrainedConfig, spec: QuantizeSpec | None = None) -> Cache:
    """A cache for ``model.generate(past_key_values=...)`` or a model's forward, keys and values in NVFP4.

    Layers that keep no growing keys and values (sliding windows, linear attention) stay as transformers makes them.

    Args:
        config: of the model.
        spec: as :class:`NVFP4CacheLayer` takes it.

    Raises:
        ValueError: no layer of the model has keys and values that grow; a spec that does not do.

    Example:
        >>> cache = nvfp4_cache(model.config)
        >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    """
    layers = [
        NVFP4CacheLayer(spec) if type(layer) is DynamicLayer else layer for layer in DynamicCache(config=config).layers
    ]
    if not any(isinstance(layer, NVFP4CacheLayer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no layers"
        raise ValueError(
            f"{type(config).__name__} has no layer whose keys and values grow ({kinds}): nothing to quantize"
        )
    return Cache(layers=layers)
