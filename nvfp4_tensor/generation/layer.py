"""What the layers of our caches have in common: the number of tokens is on the host, and texts are chosen by rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class Layer(DynamicLayer):
    """Keys and values of one layer, of which transformers sees tensors (batch, heads, length, head_dim).

    Attributes:
        length: the number of tokens.
        batch: the number of texts.
        narrowed: the texts that go on, if others have ended.
    """

    length: int = 0
    batch: int = 0
    narrowed: Any = None

    def _view(self, which: int) -> Tensor | None:
        """Return all keys (0) or values (1), None without tokens."""
        raise NotImplementedError

    def _select(self, tokens: int, entries: Tensor | None) -> None:
        """Keep the first ``tokens`` tokens and the given texts (None: all), int64 (m,) on the CPU, in order."""
        raise NotImplementedError

    # Tensors of transformers' layers, which other code reads.
    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys (batch, heads, length, head_dim); None without tokens."""
        return self._view(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._assign(value)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values, as :attr:`keys`."""
        return self._view(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._assign(value)

    @staticmethod
    def _assign(value: Tensor | None) -> None:
        """Take what transformers assigns before the first token and after the last, and nothing else."""
        if value is not None and value.numel():
            raise RuntimeError("keys and values of this cache are its own: append tokens by update(), or crop() them")

    def _check_fits(self, key_states: Tensor, heads: int) -> None:
        """Raise a ValueError before a write of other texts, or of another model."""
        if key_states.shape[:2] != (self.batch, heads):
            raise ValueError(
                f"the cache has (batch, heads) ({self.batch}, {heads}), and got {tuple(key_states.shape)}: make a new "
                "cache, or reset() this one"
            )

    def _undo_narrowing(self) -> None:
        """Put all texts back, for a reader of this layer."""
        if self.narrowed is not None:
            self.narrowed.undo()

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. A positive argument is the number to keep, as it once was."""
        kept = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if kept < self.length:
            self._select(max(kept, 0), None)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder batch entries, for beam search."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given batch entries: integers, or a mask."""
        if self.is_initialized:
            indices = torch.as_tensor(indices, dtype=None, device="cpu")
            entries = indices.nonzero().flatten() if indices.dtype == torch.bool else indices.long()
            if not torch.equal(entries, _arange(self.batch)):
                self._select(self.length, entries)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry ``repeats`` times."""
        if self.is_initialized:
            self._select(self.length, _arange(self.batch).repeat_interleave(repeats))


def _arange(count: int) -> Tensor:
    """Return 0 to count - 1 on the CPU, where indices are computed, regardless of the default device."""
    return torch.arange(count, device="cpu")
