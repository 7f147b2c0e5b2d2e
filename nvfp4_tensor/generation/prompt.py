"""Prompts through a described model: the operators of a token's step for many rows, and torch's attention.

The host launches the operators of a short prompt more slowly than a GPU runs them, so :class:`Prompts` replays them
as a graph.
"""

from __future__ import annotations

import dataclasses
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
from nvfp4_tensor.generation.token_step import Attend, Rotation, Sum, TokenStep, head_norms, rotation_of, takes_fp8
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


def attention_of(
    buffers: Sequence[DenseBuffers], first: int, count: int, rotations: Sequence[Rotation], starts: Tensor | None
) -> Attend:
    """Return the attention of the tokens of prompts (B, count), which are ``first`` and following of these buffers."""
    batch, last = buffers[0].keys.shape[0], first + count
    turns: list[Any] = [[t.expand(batch, -1, -1).flatten(0, 1) for t in pair] for pair in rotations]

    @functools.cache
    def mask_of(window: int) -> Tensor | None:
        """Which positions (1 or B, 1, count, last) each token sees, None: all from the first to its own."""
        if not first and starts is None and (not window or last <= window):
            return None
        keys = torch.arange(last, device=buffers[0].keys.device)
        queries = keys[first:, None]
        seen = keys <= queries
        if window:
            seen = seen & (keys > queries - window)
        if starts is not None:
            seen = seen & (keys >= starts[:, None, None])
        return (seen | (keys == queries)).view(-1, 1, count, last)  # padding sees itself

    def attend(layer: int, block: Block, qkv: Tensor) -> Tensor:
        heads, kv_heads, dim = (block.kinds[name] for name in ("heads", "kv_heads", "dim"))
        parts = normed_and_rotated(qkv, *head_norms(block), *rotation_of(block, turns), heads, kv_heads, dim)
        q, k, v = (t.view(batch, count, -1, dim).transpose(1, 2) for t in parts)
        for buffer, new in zip(buffers[layer], (k, v), strict=True):
            buffer[:, :, first:last] = new
        mask = mask_of(block.kinds["window"])
        if first:
            k, v = (each[:, :, :last] for each in buffers[layer])
        if mask is not None and heads != kv_heads:
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))  # no fast kernel has both
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=block.numbers["scaling"], enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2).reshape(batch * count, heads * dim)

    return attend


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
        self._memory: list[list[Tensor]] = []  # of each layer, which all kinds share
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
            buffers, step = buffers_of(cache), self._step_of(count)
            logits = self._logits(step, tokens, positions, starts, buffers, before, lambda x: x[:, -kept:])
        append(cache, count)
        return logits

    def make_room(self, cache: FixedCache, batch: int, length: int) -> None:
        """Give all layers of a cache buffers for ``length`` tokens of each text."""
        for layer, block in zip(cache.layers, self.model.blocks, strict=True):
            if not layer.is_initialized:
                shape = batch, block.kinds["kv_heads"], length, block.kinds["dim"]
                new = self.model.embedding.new_empty(1).expand(shape)
                layer.lazy_initialization(new, new)
            layer.reserve(length)  # their capacities may differ

    def _step_of(self, count: int) -> TokenStep:
        return self._step if count < FP8_ROWS else self._step_of_many_rows

    def _logits(
        self,
        step: TokenStep,
        tokens: Tensor,
        positions: Tensor,
        starts: Tensor | None,
        buffers: Sequence[DenseBuffers],
        before: int,
        kept: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Append prompts (B, T) behind ``before`` tokens, and return the logits (B, kept, vocabulary).

        kept: from states (B, T, D) to those that have logits.
        """
        batch, count = tokens.shape
        rotations = [each.cos_sin(self.model.norm.weight, positions) for each in self.model.rotaries]
        attend = attention_of(buffers, before, count, rotations, starts)
        total = step.blocks_of(step.embedded(tokens.flatten()), attend)
        x, residual = (None if t is None else kept(t.view(batch, count, -1)).flatten(0, 1) for t in total[:2])
        assert x is not None
        logits = step.logits(Sum(x, residual, total.first, total.multiplier))
        return logits.view(batch, -1, logits.shape[-1])

    def _read_short(
        self, tokens: Tensor, positions: Tensor, starts: Tensor | None, cache: FixedCache, kept: int
    ) -> Tensor:
        (batch, count), step, buffers = tokens.shape, self._step_of(tokens.shape[1]), buffers_of(cache)
        key = batch, _padded(count), starts is not None, step is self._step
        is_first = key not in self._kinds
        static = self._new(key, buffers) if is_first else self._kinds[key]
        static.tokens[:, :count].copy_(tokens)
        static.positions[:, :count].copy_(positions)
        static.last.fill_(count - 1)
        if starts is not None and static.starts is not None:
            static.starts.copy_(starts)
        run = functools.partial(self._logits, step, static.tokens, static.positions, static.starts, static.buffers, 0)
        if is_first or tokens.is_cpu or kept > 1:  # the first one of a length may be the last one
            logits = run(lambda x: x[:, count - kept : count])
        else:
            if static.replay is None:
                run = functools.partial(run, lambda x: x.index_select(1, static.last))
                static.replay = self._captured(run, tokens.device)
            logits = static.replay().clone()
        news = [each[:, :, :count] for pair in static.buffers for each in pair]
        torch._foreach_copy_([each[:, :, :count] for pair in buffers for each in pair], news)
        return logits

    def _captured(self, run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            return captured(run, device, self._pool)
        except Exception as error:  # of any kind: a model's router is its own code
            warn_user(f"prompts are not captured by CUDA graphs, which are faster: {error}")
            return run

    def _new(self, key: tuple[int, int, bool, bool], like: Sequence[DenseBuffers]) -> _Static:
        while len(self._kinds) >= KINDS:
            del self._kinds[next(iter(self._kinds))]
        batch, count, padded, _ = key
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=like[0].keys.device)
        with torch.inference_mode(False):  # inference tensors could not be written to outside of that mode
            if not self._memory:
                self._memory = [[t.new_zeros(self._short * t.shape[1] * t.shape[3]) for t in each] for each in like]
            shapes = [[(batch, t.shape[1], count, t.shape[3]) for t in each] for each in like]
            buffers = [
                DenseBuffers(*(t[: math.prod(shape)].view(shape) for t, shape in zip(*each, strict=True)))
                for each in zip(self._memory, shapes, strict=True)
            ]
            starts = zeros(batch) if padded else None
            static = _Static(zeros((batch, count)), zeros((batch, count)), starts, zeros(1), buffers)
        self._kinds[key] = static
        return static


@dataclasses.dataclass(eq=False)
class _Static:
    """Inputs of prompts (batch, count) at fixed addresses, and their keys and values, parts of the memory of all."""

    tokens: Tensor
    positions: Tensor
    starts: Tensor | None
    last: Tensor
    buffers: list[DenseBuffers]
    replay: Callable[[], Tensor] | None = None


def _padded(count: int) -> int:
    """Return the least not below ``count`` of LEAST, 3/2 LEAST, 2 LEAST, ... 512, and then of multiples of 128."""
    if count > 512:
        return -(-count // 128) * 128
    power = max(LEAST, 1 << (count - 1).bit_length())
    return 3 * power // 4 if count <= 3 * power // 4 and power > LEAST else power
