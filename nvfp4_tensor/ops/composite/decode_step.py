"""One token of each text through the blocks of a language model, in plain torch, and the layout of the op's arguments.

A block has the tensors of PARTS that its first kind says, in this order, a weight as three tensors (qdata, scale,
per_tensor_scale). KINDS and NUMBERS name the columns of the integers and floats of a block. What follows the last block
(its norm) is one more row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntFlag

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_tensor.ops.composite.step import Activation, attend_one, gated, normed
from nvfp4_tensor.ops.schemas import op

PARTS = (
    "norm_before_attention", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm", "k_norm", "sinks", "o", "o_bias",
    "norm_after_attention", "norm_before_feed_forward", "router", "router_bias", "gate", "gate_bias", "up", "up_bias",
    "down", "down_bias", "norm_after_feed_forward",
)  # fmt: skip
"""The tensors of a block, of which some are absent. Without k and v, q has the rows of all three; without up, gate has
the rows of both. q_norm and k_norm are for each head (dim elements) or for all heads."""

WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")
"""Those of PARTS in NVFP4: matrices (N, K), or with a router experts (E, N, K). The router is dense (E, K)."""

KINDS = ("parts", "heads", "kv_heads", "dim", "window", "rotary", "norm", "activation", "chosen", "routing")
"""Integers of a block: bit i of ``parts`` is set if PARTS[i] is present; ``window``: the number of tokens that a token
sees, 0 for all; ``rotary``: an index into cos and sin, -1 for none; ``norm``: NormStyle; ``activation``: Activation,
whose clamped one has rows of gate and up that alternate; ``chosen``: experts of a token; ``routing``: Routing."""

NUMBERS = ("eps", "scaling", "softcap", "residual", "alpha", "limit")
"""Floats of a block: ``scaling`` of queries times keys; ``softcap`` of attention, 0 for none; ``residual``: a factor of
what is added to the residual stream; ``alpha`` and ``limit`` of the clamped activation."""


class NormStyle(IntFlag):
    """How a norm multiplies by its weight."""

    PLUS_ONE = 1
    """The factor is weight + 1."""
    ROUND_ONCE = 2
    """The product is float32 and rounded once. Otherwise the normalized x is rounded before."""


class Routing(IntFlag):
    """How router logits become weights of the chosen experts. By default the softmax of all, in float32."""

    OF_CHOSEN = 1
    """The softmax of the chosen logits."""
    NORMALIZED = 2
    """Weights are divided by their sum."""
    ROUNDED = 4
    """Weights are rounded to the dtype of x."""


class Block:
    """The tensors (None where absent), integers and floats of one block by name."""

    def __init__(self, tensors: Iterator[Tensor], kinds: Sequence[int], numbers: Sequence[float]) -> None:
        self.kinds, self.numbers = dict(zip(KINDS, kinds, strict=True)), dict(zip(NUMBERS, numbers, strict=True))
        style = self.kinds["norm"]
        plus_one, rounds_once = bool(style & NormStyle.PLUS_ONE), bool(style & NormStyle.ROUND_ONCE)
        self.norm = self.numbers["eps"], float(plus_one), not rounds_once
        self.parts: dict[str, tuple[Tensor, ...] | None] = {}
        for i, name in enumerate(PARTS):
            count = 3 if name in WEIGHTS else 1
            present = self.kinds["parts"] >> i & 1
            self.parts[name] = tuple(next(tensors) for _ in range(count)) if present else None

    def tensor(self, name: str) -> Tensor | None:
        part = self.parts[name]
        return None if part is None else part[0]

    def normed(self, x: Tensor, name: str) -> Tensor:
        """Return the RMS norm of x, or x where the block has no norm of this name."""
        weight = self.tensor(name)
        return x if weight is None else normed(x, weight, *self.norm)

    def product(self, x: Tensor, name: str) -> Tensor:
        part = self.parts[name]
        assert part is not None
        return torch.ops.nvfp4.matmul(x, None, *part, self.tensor(f"{name}_bias"), x.shape[-1], False, x.dtype)

    def products(self, x: Tensor, *names: str) -> Tensor:
        return torch.cat([self.product(x, name) for name in names if self.parts[name] is not None], -1)


def unflatten(weights: Sequence[Tensor], kinds: Tensor, numbers: Tensor) -> list[Block]:
    """Return the blocks, and a last one that has only a norm."""
    tensors = iter(weights)
    return [Block(tensors, *row) for row in zip(kinds.tolist(), numbers.tolist(), strict=True)]


@op(mutates_args=("keys", "values"))
def decode_step(
    x: Tensor,
    weights: Sequence[Tensor],
    kinds: Tensor,
    numbers: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    cos: Sequence[Tensor],
    sin: Sequence[Tensor],
    position: int,
    starts: Tensor | None = None,
) -> Tensor:
    """Run one token x (B, D) of each of B texts through all blocks and the last norm: (B, D), bfloat16.

    Rounds where a model in PyTorch does, except in attention, which is float32 from the queries to the sums. A text has
    the same bits alone as among others, where the products have: on a CPU up to 31 texts with AVX-512's bfloat16
    products (12 without, 8 on AVX2 and Arm, 1 with AMX), of experts up to as many rows that share one, and where no
    text has numbers beyond the range of bfloat16 products, for which all run in float32.

    Args:
        weights: the present PARTS of each block, then the weight of the last norm.
        kinds: int64 (blocks + 1, len(KINDS)) on the CPU.
        numbers: float64 (blocks + 1, len(NUMBERS)) on the CPU.
        keys, values: caches (B, kv_heads, length, dim) per block. This token is written at ``position``, or at the end
            of a cache whose ``window`` tokens are full, which moves by one token.
        cos, sin: one or more rotations of this token's position: (rotated,) or (1, rotated) for all texts, or
            (B, rotated), bfloat16, or float32 if the model rotates in float32. A head may have more elements, which are
            not rotated.
        position: the number of tokens before this one, padding included.
        starts: int64 (B,), contiguous: the first position that a text sees, 0 to ``position``: what is before is
            padding. None: all see everything.

    Raises:
        ValueError: the position is outside of a cache, or a start outside of 0 to ``position``.
    """
    *blocks, last = unflatten(weights, kinds, numbers)
    rotations = [*zip(cos, sin, strict=True)]
    if starts is not None and not all(0 <= each <= position for each in starts.tolist()):
        raise ValueError(f"a text must start at 0 to {position}, not {starts.tolist()}")
    for block, k_cache, v_cache in zip(blocks, keys, values, strict=True):
        residual = block.numbers["residual"]
        rotation = (None, None) if block.kinds["rotary"] < 0 else rotations[block.kinds["rotary"]]
        y = _attention(block, block.normed(x, "norm_before_attention"), k_cache, v_cache, rotation, position, starts)
        x = _add(x, block.normed(y, "norm_after_attention"), residual)
        y = _feed_forward(block, block.normed(x, "norm_before_feed_forward"))
        x = _add(x, block.normed(y, "norm_after_feed_forward"), residual)
    return last.normed(x, "norm_before_attention")


def _add(x: Tensor, y: Tensor, factor: float) -> Tensor:
    return x + (y if factor == 1 else y * factor)


def _attention(
    block: Block,
    x: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    rotation: tuple[Tensor | None, Tensor | None],
    position: int,
    starts: Tensor | None,
) -> Tensor:
    """Append keys and values of x (B, D) to the caches and return the attention's output (B, D)."""
    length, window = k_cache.shape[2], block.kinds["window"]
    if not 0 <= position < length and window != length:
        raise ValueError(f"position {position} is outside of a cache of {length}")
    moved = max(position - length + 1, 0)
    if moved:
        for cache in (k_cache, v_cache):
            cache.copy_(cache.roll(-1, 2))
        starts = None if starts is None else starts - moved
    at = torch.tensor([position - moved], dtype=torch.int64, device=x.device)
    norms = block.tensor("q_norm"), block.tensor("k_norm"), *block.norm
    y = attend_one(
        block.products(x, "q", "k", "v"), *norms, *rotation, k_cache, v_cache, at, block.kinds["heads"],
        block.numbers["scaling"], window, block.numbers["softcap"], block.tensor("sinks"), starts,
    )  # fmt: skip
    return block.product(y, "o")


def _feed_forward(block: Block, x: Tensor) -> Tensor:
    if block.parts["router"] is None:
        return block.product(_gated(block, block.products(x, "gate", "up")), "down")
    experts, weights = _route(block, x)
    repeated, chosen = x.repeat_interleave(experts.shape[1], 0), experts.flatten()
    hidden = _gated(block, _expert_products(block, repeated, "gate", chosen))
    products = _expert_products(block, hidden, "down", chosen).view(*experts.shape, -1) * weights.unsqueeze(-1)
    return products.float().sum(1).to(x.dtype)


def _gated(block: Block, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up (.., I) of (.., 2 I)."""
    kind, numbers = block.kinds["activation"], block.numbers
    return gated(gate_up, kind, numbers["limit"], numbers["alpha"], kind == Activation.CLAMPED_GLU)


def _route(block: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen experts (B, chosen) of x (B, D) and their weights."""
    router, kind = block.tensor("router"), block.kinds["routing"]
    assert router is not None
    logits = functional.linear(x, router, block.tensor("router_bias")).float()
    scores = logits if kind & Routing.OF_CHOSEN else torch.softmax(logits, -1)
    weights, experts = torch.topk(scores, block.kinds["chosen"])
    if kind & Routing.OF_CHOSEN:
        weights = torch.softmax(weights, -1)
    if kind & Routing.NORMALIZED:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights.to(x.dtype) if kind & Routing.ROUNDED else weights


def _expert_products(block: Block, x: Tensor, name: str, experts: Tensor) -> Tensor:
    """Return row i of x (rows, K) times expert experts[i]: (rows, N)."""
    part, bias = block.parts[name], block.tensor(f"{name}_bias")
    assert part is not None
    order = experts.argsort()
    counts = torch.bincount(experts, minlength=len(part[0]))
    offs = counts.cumsum(0, dtype=torch.int32)
    y = torch.ops.nvfp4.grouped_linear(x[order].contiguous(), None, *part, offs, x.dtype)[order.argsort()]
    return y if bias is None else y + bias[experts]
