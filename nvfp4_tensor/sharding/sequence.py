"""Sequence parallelism: gather tokens that are sharded over ranks for a product that needs all of them.

Tokens are sent as codes and block scales if the product reads nothing else: 0.28 of bfloat16's bytes for x, and as many
for x^T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.sharding.layout import LinearSharding, TokenSharding, compare_token_counts

_functional = torch.ops._c10d_functional


class GatheredShape(NamedTuple):
    """The shape that an input has once all ranks' shards are joined."""

    leading: tuple[int, ...]
    """(batch, sequence) of all ranks."""
    sharding: TokenSharding

    @classmethod
    def of(cls, x: Tensor, sharding: TokenSharding) -> GatheredShape:
        """Return the gathered shape of x (*leading, features), one rank's shard."""
        leading = list(x.shape[:-1])
        leading[sharding.dim] *= sharding.axis.ranks
        return cls(tuple(leading), sharding)

    def join(self, shards: Sequence[Tensor], tokens: int) -> Tensor:
        """Join all ranks' shards along ``tokens``, their dimension that flattens (batch, sequence).

        Its unit can be one token, a byte with two, or a block.
        """
        shape, outer = shards[0].shape, math.prod(self.leading[: self.sharding.dim])
        unflattened = (*shape[:tokens], outer, shape[tokens] // max(outer, 1), *shape[tokens + 1 :])
        return torch.cat([shard.reshape(unflattened) for shard in shards], tokens + 1).flatten(tokens, tokens + 1)


class _Gather(torch.autograd.Function):
    """All-gather along a token dimension, or only return a tensor of that shape; the backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: TokenSharding, shape_only: bool) -> Tensor:
        ctx.sharding = sharding
        dim, (_, ranks, groups, _) = sharding.dim, sharding.axis
        if shape_only:
            shape = [size * ranks if i == dim else size for i, size in enumerate(x.shape)]
            return x.new_zeros(()).expand(shape)
        shards = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), ranks, groups[0]))
        return shards if dim == 0 else torch.cat(shards.chunk(ranks), dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        dim, (_, ranks, groups, _) = ctx.sharding.dim, ctx.sharding.axis
        shards = dx.contiguous() if dim == 0 else torch.cat(dx.chunk(ranks, dim))
        return _functional.wait_tensor(_functional.reduce_scatter_tensor(shards, "sum", ranks, groups[0])), None, None


def gather_tokens(x: Tensor, sharding: TokenSharding) -> Tensor:
    """Gather all ranks' shards of x (*leading, features), differentiably."""
    return _Gather.apply(x, sharding, False)


def gather_if_sharded(x: Tensor, sharding: LinearSharding) -> Tensor:
    """Compare the ranks' numbers of tokens and gather x if it is sharded along its sequence."""
    sequence = sharding.sequence_of(x)
    if sequence is None:
        return x
    compare_token_counts(sharding.for_input(x.shape[:-1], local=True).x, x.reshape(-1, x.shape[-1]))
    return gather_tokens(x, sequence)


def gather_shape_only(x: Tensor, sharding: TokenSharding) -> Tensor:
    """Return a tensor with the shape and the gradient of :func:`gather_tokens`, without its values or memory.

    Products that read quantized operands use it.
    """
    return _Gather.apply(x, sharding, True)


def gather_operands(x: Codes, x_t: Codes | None, gathered: GatheredShape) -> tuple[Codes, Codes | None]:
    """Gather x (tokens, C) and x^T (C, tokens), quantized by amaxes that all ranks share, in one collective."""
    sent = _unswizzled_bytes(x)
    if x.per_tensor_scale.dim():  # one per row
        sent.append(x.per_tensor_scale.view(torch.uint8))
    if x_t is not None:
        sent += _unswizzled_bytes(x_t)
    message = torch.cat([t.flatten() for t in sent])
    ranks, group = gathered.sharding.axis.ranks, gathered.sharding.axis.groups[0]
    received = _functional.wait_tensor(_functional.all_gather_into_tensor(message, ranks, group)).view(ranks, -1)
    by_tensor = received.split([t.numel() for t in sent], dim=1)
    shards = [[shard.view(t.shape) for shard in of_ranks] for of_ranks, t in zip(by_tensor, sent, strict=True)]
    scale = x.per_tensor_scale
    if scale.dim():
        scale = gathered.join([shard.clone().view(torch.float32) for shard in shards[2]], 0)
    gathered_x = Codes(gathered.join(shards[0], 0), _swizzled(gathered.join(shards[1], 0)), scale)
    if x_t is None:
        return gathered_x, None
    qdata, scales = shards[-2:]
    return gathered_x, Codes(gathered.join(qdata, 1), _swizzled(gathered.join(scales, 1)), x_t.per_tensor_scale)


def _unswizzled_bytes(codes: Codes) -> list[Tensor]:
    """Return the packed codes, and the block scales in row order."""
    rows, blocks = codes.qdata.shape[0], codes.columns // BLOCK
    return [codes.qdata, layout.unswizzle(codes.scale, rows, blocks).view(torch.uint8)]


def _swizzled(scale: Tensor) -> Tensor:
    return layout.swizzle(scale).view(torch.float8_e4m3fn)
