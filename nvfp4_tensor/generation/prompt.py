"""Prompts through a described model: the operators of a token's step for many rows, and torch's attention.

The host launches the operators of a short prompt more slowly than a GPU runs them, so :class:`Prompts` replays them
as a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.generation.architectures import Block, Linear, Model
from nvfp4_tensor.generation.capture import captured
from nvfp4_tensor.generation.fixed_cache import FixedCache, append, buffers_of
from nvfp4_tensor.generation.ring import DenseBuffers
from nvfp4_tensor.generation.token_step import Rotation, Sum, TokenStep, head_norms, rotation_of, takes_fp8
from nvfp4_tensor.matmul.backends import FP8_ROWS
from nvfp4_tensor.ops.composite.step import normed_and_rotated

SHORT = 1024
"""Tokens of all texts up to which prompts are short: of an 8B model, an H200 computes them as fast as a host launches
them or faster. With FP8 activations, whose products take a host 0.15 ms each, twice as many."""
LEAST = 16
"""Short prompts are computed for at least so many tokens of each text."""
KINDS = 32
"""The largest number of graphs of prompts, more than there are lengths for one text. The oldest gives way."""


def fits(model: Model) -> bool:
    """Return whether torch's attention is that of all blocks: without soft caps and sinks."""
    return all(not each.numbers["softcap"] and "sinks" not in each.parts for each in model.blocks)


class Prompt:
    """What the tokens of prompts (B, T) have in common in all layers."""

    def __init__(
        self,
        buffers: Sequence[DenseBuffers],
        first: int,
        count: int,
        rotations: Sequence[Rotation],
        starts: Tensor | None,
    ) -> None:
        self.buffers, self.first, self.count, self.starts = buffers, first, count, starts
        self.batch = buffers[0].keys.shape[0]
        self.rotations: list[Any] = [[t.expand(self.batch, -1, -1).flatten(0, 1) for t in pair] for pair in rotations]
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, block: Block, qkv: Tensor) -> Tensor:
        """Append keys and values, and return what queries attend to (B * T, heads * head_dim)."""
        heads, kv_heads, dim = (block.kinds[name] for name in ("heads", "kv_heads", "dim"))
        parts = normed_and_rotated(qkv, *head_norms(block), *rotation_of(block, self.rotations), heads, kv_heads, dim)
        q, k, v = (t.view(self.batch, self.count, -1, dim).transpose(1, 2) for t in parts)
        last = self.first + self.count
        for buffer, new in zip(self.buffers[layer], (k, v), strict=True):
            buffer[:, :, self.first : last] = new
        mask = self._mask(block.kinds["window"])
        if self.first:
            k, v = (each[:, :, :last] for each in self.buffers[layer])
        if mask is not None and heads != kv_heads:
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))  # no fast kernel has both
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=block.numbers["scaling"], enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2).reshape(self.batch * self.count, heads * dim)

    def _mask(self, window: int) -> Tensor | None:
        """Return which positions (1 or B, 1, T, first + T) each token sees, None: all from the first to its own."""
        last = self.first + self.count
        if not self.first and self.starts is None and (not window or last <= window):
            return None
        if window not in self._masks:
            keys = torch.arange(last, device=self.buffers[0].keys.device)
            queries = keys[self.first :, None]
            seen = keys <= queries
            if window:
                seen = seen & (keys > queries - window)
            if self.starts is not None:
                seen = seen & (keys >= self.starts[:, None, None])
            self._masks[window] = (seen | (keys == queries)).view(-1, 1, self.count, last)  # padding sees itself
        return self._masks[window]


class Prompts:
    """Prompts through a described model.

    Short ones into empty caches are padded on the right to a few lengths, whose graphs are replayed. Nothing sees that
    padding: attention is causal, and no other operator knows of other rows.

    Args:
        step: that of one token, and of fewer rows than FP8 activations take.
        pads: whether tokens behind a prompt cost and change nothing.
    """

    def __init__(self, step: TokenStep, pads: bool) -> None:
        self.model, self.pads = step.model, pads
        parts = (each for block in step.model.blocks for each in block.parts.values())
        is_fp8 = any(takes_fp8(each) for each in parts if isinstance(each, Linear))
        self._step, self._step_of_many_rows = step, TokenStep(step.model, is_fp8=True) if is_fp8 else step
        self._short = 2 * SHORT if is_fp8 else SHORT
        self._pool: Any = None
        self._memory: list[DenseBuffers] | None = None  # of each layer, which all kinds share
        self._kinds: dict[tuple[int, int, bool, bool], _Static] = {}

    def read(self, tokens: Tensor, positions: Tensor, starts: Tensor | None, cache: FixedCache, kept: int) -> Tensor:
        """Append prompts (B, T) to a cache, and return the logits (B, kept, vocabulary) of their last tokens.

        Args:
            positions: (1 or B, T), for the rotary embeddings.
            starts: int64 (B,), the first position that each text sees; None: 0.
        """
        batch, count = tokens.shape
        before = cache.layers[0].length
        self.make_room(cache, batch, before + count)
        if not before and self.pads and batch * _padded(count) <= self._short:
            logits = self._read_short(tokens, positions, starts, cache, kept)
        else:
            prompt = Prompt(buffers_of(cache), before, count, self._rotations(positions), starts)
            logits = _run(self._step_of(count), tokens, prompt, lambda x: x[:, -kept:])
        append(cache, count)
        return logits

    def _step_of(self, count: int) -> TokenStep:
        return self._step if count < FP8_ROWS else self._step_of_many_rows

    def _rotations(self, positions: Tensor) -> list[Rotation]:
        return [each.cos_sin(self.model.norm.weight, positions) for each in self.model.rotaries]

    def make_room(self, cache: FixedCache, batch: int, length: int) -> None:
        """Give all layers of a cache buffers for ``length`` tokens of each text."""
        for layer, block in zip(cache.layers, self.model.blocks, strict=True):
            if not layer.is_initialized:
                shape = batch, block.kinds["kv_heads"], length, block.kinds["dim"]
                new = self.model.embedding.new_empty(1).expand(shape)
                layer.lazy_initialization(new, new)
            layer.reserve(length)  # their capacities may differ

    def _read_short(
        self, tokens: Tensor, positions: Tensor, starts: Tensor | None, cache: FixedCache, kept: int
    ) -> Tensor:
        batch, count = tokens.shape
        key = batch, _padded(count), starts is not None, self._step_of(count) is self._step
        static = self._kinds.get(key)
        is_first = static is None
        if static is None:
            static = self._new(key, self._step_of(count), buffers_of(cache))
        static.tokens[:, :count].copy_(tokens)
        static.positions[:, :count].copy_(positions)
        static.last.fill_(count - 1)
        if starts is not None and static.starts is not None:
            static.starts.copy_(starts)
        if is_first or tokens.is_cpu or kept > 1:  # the first one of a length may be the last one
            logits = self._run_short(static, lambda x: x[:, count - kept : count])
        else:
            if static.replay is None:
                run = functools.partial(self._run_short, static, lambda x: x.index_select(1, static.last))
                static.replay = self._captured(run, tokens.device)
            logits = static.replay().clone()
        news = [each[:, :, :count] for pair in static.buffers for each in pair]
        torch._foreach_copy_([each[:, :, :count] for pair in buffers_of(cache) for each in pair], news)
        return logits

    def _run_short(self, static: _Static, kept: Callable[[Tensor], Tensor]) -> Tensor:
        rotations = self._rotations(static.positions)
        prompt = Prompt(static.buffers, 0, static.tokens.shape[1], rotations, static.starts)
        return _run(static.step, static.tokens, prompt, kept)

    def _captured(self, run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            return captured(run, device, self._pool)
        except Exception as error:  # of any kind: a model's router is its own code
            warn_user(f"prompts are not captured by CUDA graphs, which are faster: {error}")
            return run

    def _new(self, key: tuple[int, int, bool, bool], step: TokenStep, like: Sequence[DenseBuffers]) -> _Static:
        while len(self._kinds) >= KINDS:
            del self._kinds[next(iter(self._kinds))]
        with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
            if self._memory is None:
                self._memory = [
                    DenseBuffers(*(t.new_zeros(self._short * t.shape[1] * t.shape[3]) for t in each)) for each in like
                ]
            static = self._kinds[key] = _Static(step, *key[:3], like, self._memory)
        return static


def _run(step: TokenStep, tokens: Tensor, prompt: Prompt, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the logits (B, kept, vocabulary) of prompts (B, T); kept: the last states of (B, T, D) to go on with."""
    batch, count = tokens.shape
    total = step.blocks_of(step.embedded(tokens.flatten()), prompt.attend)
    x, residual = (None if t is None else kept(t.view(batch, count, -1)).flatten(0, 1) for t in total[:2])
    assert x is not None
    logits = step.logits(Sum(x, residual, total.first, total.multiplier))
    return logits.view(batch, -1, logits.shape[-1])


class _Static:
    """Inputs at fixed addresses of prompts (batch, count), and their keys and values, parts of ``memory``."""

    def __init__(
        self,
        step: TokenStep,
        batch: int,
        count: int,
        padded: bool,
        like: Sequence[DenseBuffers],
        memory: Sequence[DenseBuffers],
    ) -> None:
        self.step = step
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=like[0].keys.device)
        self.tokens, self.positions, self.last = zeros((batch, count)), zeros((batch, count)), zeros(1)
        self.starts = zeros(batch) if padded else None
        self.buffers = [
            DenseBuffers(*(_part(m, (batch, t.shape[1], count, t.shape[3])) for m, t in zip(*each, strict=True)))
            for each in zip(memory, like, strict=True)
        ]
        self.replay: Callable[[], Tensor] | None = None


def _part(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: math.prod(shape)].view(shape)


def _padded(count: int) -> int:
    """Return the least not below ``count`` of LEAST, 3/2 LEAST, 2 LEAST, ... 512, and then of multiples of 128."""
    if count > 512:
        return -(-count // 128) * 128
    power = max(LEAST, 1 << (count - 1).bit_length())
    return 3 * power // 4 if count <= 3 * power // 4 and power > LEAST else power
