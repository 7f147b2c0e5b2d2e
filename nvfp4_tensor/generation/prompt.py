"""Prompts through a described model: the operators of a token's step for many rows, and torch's attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_tensor.generation.architectures import Attention, Model
from nvfp4_tensor.generation.fixed_cache import FixedCache, buffers_of
from nvfp4_tensor.generation.token_step import Rotation, Sum, TokenStep
from nvfp4_tensor.ops.composite.step import normed_and_rotated


def fits(model: Model) -> bool:
    """Return whether torch's attention is that of all blocks: without soft caps and sinks."""
    return all(not each.attention.softcap and each.attention.sinks is None for each in model.blocks)


class Prompt:
    """What the tokens of prompts (B, T) have in common in all layers."""

    def __init__(self, cache: FixedCache, rotations: Sequence[Rotation], starts: Tensor | None, count: int) -> None:
        self.first, self.count, self.starts = cache.layers[0].length, count, starts
        self.keys, self.values = buffers_of(cache)
        self.batch = self.keys[0].shape[0]
        self.rotations = [tuple(t.expand(self.batch, -1, -1).flatten(0, 1) for t in pair) for pair in rotations]
        self._masks: dict[int, Tensor | None] = {}

    def attend(self, layer: int, attention: Attention, qkv: Tensor) -> Tensor:
        """Append keys and values, and return what queries attend to (B * T, heads * head_dim)."""
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        cos, sin = (None, None) if attention.rotary is None else self.rotations[attention.rotary]
        norms = attention.q_norm, attention.k_norm
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        norm = norms[0]
        how = (0.0, 0.0, True) if norm is None else (norm.eps, norm.offset, norm.rounds_before_weight)
        parts = normed_and_rotated(qkv, q_weight, k_weight, how, cos, sin, (heads, kv_heads, dim))
        q, k, v = (t.view(self.batch, self.count, -1, dim).transpose(1, 2) for t in parts)
        last = self.first + self.count
        for buffer, new in ((self.keys[layer], k), (self.values[layer], v)):
            buffer[:, :, self.first : last] = new
        mask = self._mask(attention.window)
        if self.first:
            k, v = self.keys[layer][:, :, :last], self.values[layer][:, :, :last]
        if mask is not None and heads != kv_heads:
            k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))  # no fast kernel has both
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=attention.scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2).reshape(self.batch * self.count, heads * dim)

    def _mask(self, window: int) -> Tensor | None:
        """Return which positions (1 or B, 1, T, first + T) each token sees, None: all from the first to its own."""
        last = self.first + self.count
        if not self.first and self.starts is None and (not window or last <= window):
            return None
        if window not in self._masks:
            keys = torch.arange(last, device=self.keys[0].device)
            queries = keys[self.first :, None]
            seen = keys <= queries
            if window:
                seen = seen & (keys > queries - window)
            if self.starts is not None:
                seen = seen & (keys >= self.starts[:, None, None])
            self._masks[window] = (seen | (keys == queries)).view(-1, 1, self.count, last)  # padding sees itself
        return self._masks[window]


def read(
    step: TokenStep, tokens: Tensor, cache: FixedCache, rotations: Sequence[Rotation], starts: Tensor | None, kept: int
) -> Tensor:
    """Append prompts to a cache, and return the logits (B, kept, vocabulary) of their last tokens.

    Args:
        tokens: int64 (B, T).
        cache: with room for them, at any length.
        rotations: cos and sin (1 or B, T, rotary) for each of the model's rotary embeddings.
        starts: int64 (B,), the first position that each text sees; None: 0.
    """
    batch, count = tokens.shape
    prompt = Prompt(cache, rotations, starts, count)
    total = step.blocks_of(step.embedded(tokens.flatten()), prompt.attend)
    x, residual = (None if t is None else t.view(batch, count, -1)[:, -kept:].flatten(0, 1) for t in total[:2])
    assert x is not None
    logits = step.logits(Sum(x, residual, total.first, total.multiplier))
    for layer in cache.layers:
        layer.append(count)
    return logits.view(batch, kept, -1)


def make_room(cache: FixedCache, model: Model, batch: int, length: int) -> None:
    """Give all layers of a cache buffers for ``length`` tokens of each text."""
    for layer, block in zip(cache.layers, model.blocks, strict=True):
        if not layer.is_initialized:
            attention, like = block.attention, model.embedding
            new = like.new_empty(1).expand(batch, attention.kv_heads, length, attention.head_dim)
            layer.lazy_initialization(new, new)
        layer.reserve(length)  # their capacities may differ
