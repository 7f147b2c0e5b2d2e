"""Sequence parallelism: tokens sharded over ranks, gathered for a product that needs all of them.

They are sent as codes and block scales where a product reads nothing else: 0.28 of bfloat16's bytes for x, as much
again for x^T.
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
        """Of x (*leading, features), one rank's shard."""
        leading = list(x.shape[:-1])
        leading[sharding.dim] *= sharding.axis.ranks
        return cls(tuple(leading), sharding)

    def join(self, shards: Sequence[Tensor], tokens: int) -> Tensor:
        """Join all ranks' shards; their dimension ``tokens`` flattens (batch, sequence), in tokens, pairs or blocks."""
        shape, outer = shards[0].shape, math.prod(self.leading[: self.sharding.dim])
        unflattened = (*shape[:tokens], outer, shape[tokens] // max(outer, 1), *shape[tokens + 1 :])
        return torch.cat([shard.reshape(unflattened) for shard in shards], tokens + 1).flatten(tokens, tokens + 1)


class _Gather(torch.autograd.Function):
    """All-gather along a token dimension, whose backward is a reduce-scatter; or a tensor of that shape alone."""

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
    """All ranks' shards of x (*leading, features), joined; differentiable."""
    return _Gather.apply(x, sharding, False)


def gather_if_sharded(x: Tensor, sharding: LinearSharding) -> Tensor:
    """:func:`gather_tokens` where x is sharded along its sequence, after comparing the ranks' numbers of tokens."""
    sequence = sharding.sequence_of(x)
    if sequence is None:
        return x
    compare_token_counts(sharding.for_input(x.shape[:-1], local=True).x, x.reshape(-1, x.shape[-1]))
    return gather_tokens(x, sequence)


def gather_shape_only(x: Tensor, sharding: TokenSharding) -> Tensor:
    """A tensor with the shape and the gradient of :func:`gather_tokens`, without values or memory.

    For products that read quantized operands instead.
    """
    return _Gather.apply(x, sharding, True)


def gather_operands(x: Codes, x_t: Codes | None, gathered: GatheredShape) -> tuple[Codes, Codes | None]:
    """Gather x (tokens, C) and x^T (C, tokens), quantized by amaxes that all ranks share, in one collective."""
    of_x = _unswizzled_bytes(x)
    if x.per_tensor_scale.dim():  # one per row
        of_x.append(x.per_tensor_scale.view(torch.uint8))
    sent = of_x if x_t is None else [*of_x, *_unswizzled_bytes(x_t)]
    message = torch.cat([part.flatten() for part in sent])
    ranks, group = gathered.sharding.axis.ranks, gathered.sharding.axis.groups[0]
    received = _functional.wait_tensor(_functional.all_gather_into_tensor(message, ranks, group)).view(ranks, -1)
    parts = received.split([part.numel() for part in sent], dim=1)
    found = [[shard.view(like.shape) for shard in part] for part, like in zip(parts, sent, strict=True)]
    factor = x.per_tensor_scale
    if factor.dim():
        factor = gathered.join([shard.clone().view(torch.float32) for shard in found[2]], 0)
    of_x_gathered = Codes(gathered.join(found[0], 0), _swizzled(gathered.join(found[1], 0)), factor)
    if x_t is None:
        return of_x_gathered, None
    codes, scales = found[-2:]
    of_t = Codes(gathered.join(codes, 1), _swizzled(gathered.join(scales, 1)), x_t.per_tensor_scale)
    return of_x_gathered, of_t


def _unswizzled_bytes(codes: Codes) -> list[Tensor]:
    """Codes, and block scales in row order."""
    rows, blocks = codes.qdata.shape[0], codes.columns // BLOCK
    return [codes.qdata, layout.unswizzle(codes.scale, rows, blocks).view(torch.uint8)]


def _swizzled(scale: Tensor) -> Tensor:
    return layout.swizzle(scale).view(torch.float8_e4m3fn)
