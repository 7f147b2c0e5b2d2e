"""Sequence parallelism: tokens that ranks have pieces of, gathered for a product that takes all of them.

They travel as codes and block scales where that is less: 0.28 of bfloat16's bytes for x, as much again for x^T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.sharding.layout import Place, Share
from nvfp4_tensor.training.linear.operands import Operand
from nvfp4_tensor.training.linear.sharded_operands import compare_tokens

_functional = torch.ops._c10d_functional


class Whole(NamedTuple):
    """What the pieces of an input come to."""

    leading: tuple[int, ...]
    """(batch, sequence) of all ranks."""
    share: Share

    @classmethod
    def of(cls, x: Tensor, share: Share) -> Whole:
        """Of x (*leading, features), one rank's piece."""
        leading = list(x.shape[:-1])
        leading[share.dim] *= share.axis.ranks
        return cls(tuple(leading), share)

    def join(self, pieces: Sequence[Tensor], tokens: int) -> Tensor:
        """Of all ranks' pieces, whose dimension ``tokens`` flattens (batch, sequence), in tokens, pairs or blocks."""
        shape, outer = pieces[0].shape, math.prod(self.leading[: self.share.dim])
        apart = (*shape[:tokens], outer, shape[tokens] // max(outer, 1), *shape[tokens + 1 :])
        return torch.cat([piece.reshape(apart) for piece in pieces], tokens + 1).flatten(tokens, tokens + 1)


class _Gathered(torch.autograd.Function):
    """All ranks' pieces, whose gradient is the sum of what all ranks have for each; or no more than its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share, shape_alone: bool) -> Tensor:
        ctx.share = share
        dim, (_, ranks, groups, _) = share.dim, share.axis
        if shape_alone:
            shape = [size * ranks if i == dim else size for i, size in enumerate(x.shape)]
            return x.new_zeros(()).expand(shape)
        pieces = _functional.wait_tensor(_functional.all_gather_into_tensor(x.contiguous(), ranks, groups[0]))
        return pieces if dim == 0 else torch.cat(pieces.chunk(ranks), dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        dim, (_, ranks, groups, _) = ctx.share.dim, ctx.share.axis
        pieces = dx.contiguous() if dim == 0 else torch.cat(dx.chunk(ranks, dim))
        return _functional.wait_tensor(_functional.reduce_scatter_tensor(pieces, "sum", ranks, groups[0])), None, None


def gathered(x: Tensor, share: Share) -> Tensor:
    """The whole of x (*leading, features), this rank's piece; differentiable."""
    return _Gathered.apply(x, share, False)


def whole_of(x: Tensor, place: Place | None) -> Tensor:
    """:func:`gathered`, if x is a piece of a sequence; an error in the stream where the ranks' pieces are unequal."""
    sequence = None if place is None else place.sequence_of(x)
    if place is None or sequence is None:
        return x
    compare_tokens(place.at(x.shape[:-1], piece=True).x, x.reshape(-1, x.shape[-1]))
    return gathered(x, sequence)


def whole_in_name(x: Tensor, share: Share) -> Tensor:
    """The same in shape and gradient, without its values and without memory: for products that take the operands."""
    return _Gathered.apply(x, share, True)


def gathered_operands(x: Operand, x_t: Operand | None, whole: Whole) -> tuple[Operand, Operand | None]:
    """The whole of x (tokens, C) and x^T (C, tokens), this rank's pieces by amaxes that all have: in one collective."""
    of_x = _linear(x)
    if x.per_tensor_scale.dim():  # one a row
        of_x.append(x.per_tensor_scale.view(torch.uint8))
    sent = of_x if x_t is None else [*of_x, *_linear(x_t)]
    message = torch.cat([part.flatten() for part in sent])
    ranks, group = whole.share.axis.ranks, whole.share.axis.groups[0]
    received = _functional.wait_tensor(_functional.all_gather_into_tensor(message, ranks, group)).view(ranks, -1)
    parts = received.split([part.numel() for part in sent], dim=1)
    found = [[piece.view(like.shape) for piece in part] for part, like in zip(parts, sent, strict=True)]
    factor = x.per_tensor_scale
    if factor.dim():
        factor = whole.join([piece.clone().view(torch.float32) for piece in found[2]], 0)
    first = Operand(whole.join(found[0], 0), _swizzled(whole.join(found[1], 0)), factor)
    if x_t is None:
        return first, None
    codes, scales = found[-2:]
    return first, Operand(whole.join(codes, 1), _swizzled(whole.join(scales, 1)), x_t.per_tensor_scale)


def _linear(operand: Operand) -> list[Tensor]:
    """Codes, and block scales in the order of the rows; bytes."""
    rows, blocks = operand.qdata.shape[0], operand.columns // BLOCK
    return [operand.qdata, layout.unswizzle(operand.scale, rows, blocks).view(torch.uint8)]


def _swizzled(scale: Tensor) -> Tensor:
    return layout.swizzle(scale).view(torch.float8_e4m3fn)
