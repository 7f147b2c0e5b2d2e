"""Runs one token after the other: on CUDA one replay of a graph each, elsewhere the same operators one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.generation.capture import captured
from nvfp4_tensor.generation.choice import Chooser
from nvfp4_tensor.generation.fixed_cache import (
    buffers_of,
    capacity_of,
    length_of,
)
from nvfp4_tensor.generation.plan import Plan, Step
from nvfp4_tensor.generation.token_step import Rotation

WARM_UPS = 2
"""Steps before a capture, in which libraries allocate their workspaces."""


class Runner:
    """Static inputs and outputs of the step of a plan, for one batch size and the buffers of one cache.

    Args:
        chooser: with it, a step also chooses the next tokens, which are the input of the following step. Positions of
            rotary embeddings are then those of the cache, and rotations are read from a table.
        padded: texts may begin behind padding.
        rows: texts are at their own positions, and each step is for so many of ``batch``; None: one step for all.

    Attributes:
        logits: (B, vocabulary), those of the last step. The next step overwrites them.
        plan: the plan.
    """

    def __init__(
        self,
        plan: Plan,
        cache: Any,
        batch: int,
        chooser: Chooser | None = None,
        padded: bool = False,
        pool: Any = None,
        rows: int | None = None,
    ) -> None:
        self.plan, self.batch, self.chooser, self.rows = plan, batch, chooser, rows
        self._known: int | None = None
        self._known_rotary: tuple[int, bool] | None = None
        self._known_padding: Any = None
        with torch.no_grad():
            with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
                self._tokens = torch.zeros((batch, 1), dtype=torch.int64, device=plan.device)
                self._positions = torch.zeros((batch, 1), dtype=torch.int64, device=plan.device)
                self._position = torch.zeros((batch if rows else 1,), dtype=torch.int64, device=plan.device)
                self._starts = torch.zeros((batch,), dtype=torch.int64, device=plan.device) if padded else None
                self._rotations: list[Rotation] | None = None
                self._tables: list[Rotation] | None = None
                if plan.changing_rotaries:
                    self._rotations = [(cos.clone(), sin.clone()) for cos, sin in plan.rotations(self._positions)]
                elif chooser is not None and plan.description is not None and not plan.takes_one_operator:
                    places = torch.arange(capacity_of(cache), device=plan.device)[:, None]
                    self._tables = [(cos.clone(), sin.clone()) for cos, sin in plan.rotations(places)]
            texts = [slice(at, at + (rows or batch)) for at in range(0, batch, rows or batch)]
            bound = [plan.bind(cache, padded, each if rows else None) for each in texts]
            self._kept = [kept for _, kept in bound]
            # A graph knows buffers by their addresses: they go when the cache moves to others.
            run = functools.partial(self._run, [(each, step) for each, (step, _) in zip(texts, bound, strict=True)])
            self._replay: Callable[[], object] = run
            if plan.device.type == "cuda":
                self._replay = captured(run, plan.device, pool, functools.partial(self._warm_up, run, length_of(cache)))

    def _run(self, steps: list[tuple[slice, Step]]) -> None:
        rotations = self._rotations
        if self._tables is not None:
            at = self._position if self._starts is None else self._positions[:, 0]
            rotations = [(cos.index_select(0, at), sin.index_select(0, at)) for cos, sin in self._tables]
        starts = None if self.rows else self._starts
        parts = []
        for texts, step in steps:  # without `rows` a single one, which has the one position of all texts
            its = None if rotations is None else [(cos[texts], sin[texts]) for cos, sin in rotations]
            parts.append(step(self._tokens[texts], self._position[texts], starts, self._positions[texts], its))
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.chooser is not None:
            self._tokens.copy_(self.chooser(logits)[:, None])
        self._position += 1
        self._positions += 1
        self.logits = logits

    def _warm_up(self, run: Callable[[], object], position: int) -> None:
        """Run some steps whose results do not matter: the next token overwrites the keys and values at ``position``."""
        index = None if self.chooser is None else self.chooser.index.clone()
        for _ in range(WARM_UPS):
            self._position.fill_(position)
            self._positions.fill_(position)
            run()
        if self.chooser is not None and index is not None:
            self.chooser.index.copy_(index)

    @property
    def tokens(self) -> Tensor:
        """A copy of the next input (B,), which was fed or chosen."""
        return self._tokens[:, 0].clone()

    def restart(self) -> None:
        """Compute the table of rotations again, for another text: frequencies may have been written to."""
        if self._tables is not None:
            places = torch.arange(len(self._tables[0][0]), device=self.plan.device)[:, None]
            for table, new in zip(self._tables, self.plan.rotations(places), strict=True):
                torch._foreach_copy_(list(table), list(new))

    def feed(self, tokens: Tensor) -> None:
        """Set the next input: tokens of B elements."""
        _first(self._tokens, len(tokens)).copy_(tokens.view(-1, 1))

    def launch(
        self, position: int, position_ids: Tensor | None = None, padding: Any = None, counts_padding: bool = False
    ) -> None:
        """Run the fed tokens at this position of the cache, without waiting for the device.

        Args:
            position: the number of tokens in the cache, less than its capacity.
            position_ids: (1 or B, 1), the positions of the rotary embeddings. None: counted from the starts.
            padding: before the texts in the cache, the same object as long as it is the same; None: none.
            counts_padding: without ``position_ids``, count from the begin of the cache instead.
        """
        if padding is not self._known_padding:
            assert self._starts is not None
            self._starts.zero_()
            if padding is not None:
                _first(self._starts, len(padding.starts)).copy_(padding.starts)
            self._known_padding, self._known, self._known_rotary = padding, None, None
        if self._known != position:
            self._position.copy_(self._own(position)) if self.rows else self._position.fill_(position)
        if position_ids is not None:
            _first(self._positions, len(position_ids)).copy_(position_ids)
        elif self._known_rotary != (position, counts_padding):
            own = torch.full_like(self._position, position) if counts_padding else self._own(position)
            self._positions.copy_(own[:, None])
        if self._rotations is not None:
            for static, new in zip(self._rotations, self.plan.rotations(self._positions), strict=True):
                torch._foreach_copy_(list(static), list(new))
        self._known, self._known_rotary = None, None  # unknown should the replay raise
        self._replay()
        self._known = position + 1
        self._known_rotary = None if position_ids is not None else (position + 1, counts_padding)

    def _own(self, position: int) -> Tensor:
        """Return the position of each text, or of all (1,), behind padding."""
        return torch.full_like(self._position, position) if self._starts is None else position - self._starts


def _first(static: Tensor, count: int) -> Tensor:
    """Return the rows of the texts; of one row for all texts, all."""
    return static if count in (1, len(static)) else static[:count]


def addresses_of(cache: Any) -> tuple[int, ...]:
    """Return the batch size and capacity of a cache, and the addresses of its buffers: what a graph depends on."""
    buffers = buffers_of(cache)
    rows = buffers[0].dense[0].shape[0]
    return rows, capacity_of(cache), *(each for layer in buffers for each in layer.identity)
