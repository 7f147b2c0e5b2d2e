"""Texts of a batch that have ended cost nothing once they are half of it: the others move to the front of the cache."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LOOK_EVERY = 8
"""Tokens after which the host looks which texts have ended, under transformers' ``generate``."""


class Narrowed:
    """The texts of a cache that go on, in the first rows of its layers, where a step finds them.

    A reader of a layer finds all texts where they were: it calls :meth:`undo` first.

    Attributes:
        rows: how many texts a step is for.
        order: the text in each row.
        texts: int64 (rows,), those of the first rows on their device.
    """

    def __init__(self, layers: Sequence[Any], batch: int) -> None:
        self._layers = weakref.WeakSet(layers)  # which have this object: a cycle would keep their buffers
        self._device, self.rows, self.order = layers[0].device, batch, list(range(batch))
        self._padding: tuple[Any, Any] = None, None

    def keep(self, ended: Sequence[bool], rows: int) -> list[int]:
        """Move texts that have not ended into the first ``rows`` rows. Return the rows in which these were before."""
        outside = [i for i in range(rows, self.rows) if not ended[self.order[i]]]
        free = [i for i in range(rows) if ended[self.order[i]]][: len(outside)]
        self._move([*outside, *free], [*free, *outside])
        before = list(range(self.rows))
        for i, j in zip(outside, free, strict=True):
            for each in (self.order, before):
                each[i], each[j] = each[j], each[i]
        self.rows = rows
        self.texts = torch.tensor(self.order[:rows], dtype=torch.int64, device=self._device)
        self._padding = None, None
        for layer in self._layers:
            layer.narrow(self)
        return before[:rows]

    def _move(self, rows: list[int], to: list[int]) -> None:
        if not rows:
            return
        source, target = (torch.tensor(each, dtype=torch.int64, device=self._device) for each in (rows, to))
        for layer in self._layers:
            for t in layer.by_text:
                t.index_copy_(0, target, t.index_select(0, source))

    def undo(self) -> None:
        """Put all texts back. Those that had ended lack the tokens since."""
        for layer in self._layers:
            layer.narrow(None)
        moved = [i for i, text in enumerate(self.order) if i != text]
        self._move(moved, [self.order[i] for i in moved])

    def select(self, x: Tensor) -> Tensor:
        """Return x (batch, ...) of the first rows; if it is of all texts, x (1, ...)."""
        return x if len(x) == 1 else x.index_select(0, self.texts)

    def select_padding(self, padding: Any) -> Any:
        """Return the padding of the first rows, the same object for the same padding."""
        if self._padding[0] is not padding:
            self._padding = padding, padding._replace(starts=self.select(padding.starts))
        return self._padding[1]

    def spread(self, x: Tensor) -> Tensor:
        """Return x (rows, ...) by text, with zeros for the others."""
        return x.new_zeros((len(self.order), *x.shape[1:])).index_copy_(0, self.texts, x)


def narrow(cache: Any, ended: Sequence[bool]) -> list[int] | None:
    """Leave out rows of a cache that takes steps, if half of them are of texts that have ended.

    Rows are halved, so that graphs for as many serve later calls, too.

    Args:
        ended: by text.

    Returns:
        The rows in which the texts of the new rows were before; None if nothing has changed.
    """
    narrowed = narrowed_of(cache) or Narrowed(cache.layers, len(ended))
    going_on, rows = max(len(ended) - sum(ended), 1), narrowed.rows
    while rows > 1 and going_on <= (rows + 1) // 2:
        rows = (rows + 1) // 2
    return None if rows == narrowed.rows else narrowed.keep(ended, rows)


def narrowed_of(cache: Any) -> Narrowed | None:
    """Return which texts of a cache go on; None: all."""
    return getattr(cache.layers[0], "narrowed", None) if cache.layers else None


def padding_of_rows(cache: Any, padding: Any) -> Any:
    """Return the padding of the texts that go on, None for none."""
    narrowed = narrowed_of(cache)
    return padding if narrowed is None or padding is None else narrowed.select_padding(padding)


def widen(cache: Any) -> None:
    """Let all texts of a cache go on."""
    if (narrowed := narrowed_of(cache)) is not None:
        narrowed.undo()


class Endings:
    """Which texts of a call of ``generate`` have ended: those that were given a token that ends them."""

    def __init__(self, stops: Tensor) -> None:
        self._stops, self._calls = stops, 0
        self._ended: Tensor | None = None

    def see(self, tokens: Tensor) -> list[bool] | None:
        """Take the next tokens (B, 1), and return at times which texts have ended, which waits for the device."""
        ended = (tokens == self._stops).any(-1)
        self._ended = ended if self._ended is None else self._ended | ended
        self._calls += 1
        return self._ended.tolist() if self._calls % LOOK_EVERY == 0 else None
