"""All blocks of a Llama for one token as one kernel, where there is one: on Hopper and later, for a batch of one.

The cache is dense, or one of codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.generation.architectures import Activation, Attention, Block, FeedForward, Model, Norm
from nvfp4_tensor.generation.ring import Buffer, GraphBuffers, Place
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class FusedLayers:
    """The blocks and the last norm of a described model, with the buffers of one cache.

    It keeps the kernel's descriptors of weights and buffers, and its scratch memory: 0.2 MB for a model of 8B. One call
    at a time may use them.

    Args:
        model: a model for which :func:`fits` is True.
        keys, values: per layer (1, kv_heads, length, head_dim), or both what a step reads and writes of a cache of
            codes.
    """

    def __init__(self, model: Model, keys: Sequence[Buffer], values: Sequence[Buffer]) -> None:
        attention = model.blocks[0].attention
        self.weights = _weights(model)
        self.constants = model.norm.eps, attention.scaling
        self.rotary: int = attention.rotary or 0
        tensors, self.coding = _cache(keys, values)
        self.plan: Tensor = torch.ops.nvfp4.decode_layers_plan(model.norm.weight, *self.weights, *tensors)

    @classmethod
    def of(cls, model: Model, keys: Sequence[Buffer], values: Sequence[Buffer]) -> FusedLayers | None:
        """Return the layers as one kernel, or None where there is none for the model, the buffers or the device."""
        first = keys[0] if isinstance(keys[0], Tensor) else keys[0].ring.keys
        if not fits(model) or first.shape[0] != 1 or not first.is_cuda:
            return None
        layers = cls(model, keys, values)
        return layers if layers.plan.numel() else None

    def __call__(
        self,
        x: Tensor,
        place: Place,
        rotations: Sequence[tuple[Tensor, Tensor]],
        keys: Sequence[Buffer],
        values: Sequence[Buffer],
    ) -> Tensor:
        """Return the hidden states (1, D) after the last norm of one embedded token x (1, D).

        Args:
            place: of the token, whose position is less than the length of the buffers; without ``starts``.
            rotations: cos and sin (1, head_dim) for each of the model's rotary embeddings.
            keys, values: those that this object was made for.
        """
        cos, sin = (each.flatten() for each in rotations[self.rotary])
        tensors, _ = _cache(keys, values)
        hidden: Tensor = torch.ops.nvfp4.decode_layers(
            x, self.plan, *self.weights, *tensors, cos, sin, place.position, *self.constants, *self.coding
        )
        return hidden


def fits(model: Model) -> bool:
    """Return whether the op ``decode_layers`` computes the blocks of this model."""
    first = model.blocks[0].attention
    return all(_is_plain(norm, model.norm.eps) for norm in _norms(model)) and all(
        _is_llama(block) and _alike(block.attention, first, model) for block in model.blocks
    )


def _cache(keys: Sequence[Buffer], values: Sequence[Buffer]) -> tuple[tuple[Sequence[Tensor], ...], tuple[int, bool]]:
    """Return keys, values, codes and front, and how codes are made, as arguments of ``nvfp4::decode_layers``."""
    layers = [each for each in keys if isinstance(each, GraphBuffers)]
    if not layers:
        return (keys, values, [], []), (0, False)  # type: ignore[return-value]
    codes = [t for each in layers for t in each.coded]
    front = [t for each in layers if each.sink for t in (each.keys.front, each.values.front)]
    ring = [each.ring.keys for each in layers], [each.ring.values for each in layers]
    return (*ring, codes, front), (layers[0].spec, layers[0].is_rotated)


def _norms(model: Model) -> Iterator[Norm | None]:
    for block in model.blocks:
        yield block.pre_attention
        yield block.pre_feed_forward
    yield model.norm


def _is_plain(norm: Norm | None, eps: float) -> bool:
    return (
        norm is not None
        and norm.eps == eps
        and norm.offset == 0.0
        and norm.rounds_before_weight
        and norm.weight.dtype == torch.bfloat16
    )


def _is_llama(block: Block) -> bool:
    attention, layer = block.attention, block.feed_forward
    if not isinstance(layer, FeedForward) or len(layer.gate_up) != 2 or len(attention.qkv) != 3:
        return False
    others = (attention.o, *layer.gate_up, layer.down)
    return (
        layer.activation == Activation.SILU
        and block.post_attention is None
        and block.post_feed_forward is None
        and block.residual_multiplier == 1.0
        and all(each.bias is None for each in others)
        and len({each.bias is None for each in attention.qkv}) == 1
        and all(each.is_weight_only and _has_one_scale(each.weight) for each in (*attention.qkv, *others))
    )


def _has_one_scale(weight: Any) -> bool:
    return bool(weight.per_tensor_scale.numel() == 1)


def _alike(attention: Attention, first: Attention, model: Model) -> bool:
    """Return whether attention is over all tokens, rotated as in the first block."""
    norms = attention.q_norm, attention.k_norm
    rotary = None if attention.rotary is None else model.rotaries[attention.rotary]
    return (
        rotary is not None
        and attention.rotary == first.rotary
        and rotary.dim == attention.head_dim
        and not rotary.wide
        and (attention.window, attention.softcap, attention.sinks) == (0, 0.0, None)
        and attention.scaling == first.scaling
        and not attention.norms_span_heads
        and len({norm is None for norm in (*norms, first.q_norm)}) == 1
        and all(norm is None or _is_plain(norm, model.norm.eps) for norm in norms)
    )


def _weights(model: Model) -> tuple[list[Tensor], ...]:
    """Return the weights in the order of the arguments of ``nvfp4::decode_layers``."""
    linears = [
        linear
        for block in model.blocks
        if isinstance(block.feed_forward, FeedForward)
        for linear in (*block.attention.qkv, block.attention.o, *block.feed_forward.gate_up, block.feed_forward.down)
    ]
    weights = [linear.weight for linear in linears if isinstance(linear.weight, NVFP4Tensor)]
    head_norms = chain.from_iterable((block.attention.q_norm, block.attention.k_norm) for block in model.blocks)
    return (
        [norm.weight.detach() for norm in _norms(model) if norm is not None],
        [weight.qdata for weight in weights],
        [weight.scale for weight in weights],
        [weight.per_tensor_scale for weight in weights],
        [linear.bias.detach() for linear in linears if linear.bias is not None],
        [norm.weight.detach() for norm in head_norms if norm is not None],
    )
