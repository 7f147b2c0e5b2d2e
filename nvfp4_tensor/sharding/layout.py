"""Where a rank's tensors lie in those of the whole step, so that codes and random bits do not know the ranks.

A step has three dimensions: tokens, and the output and input features of each linear. Each can be shared by a group of
ranks. An operand lies along two of them: x (tokens, input), dy (tokens, output), w (output, input), and their
transposes. Its amax is the largest over the ranks that share it, and its blocks draw the bits of their place in the
whole (contract, section 4).

A rank has one range of the features. Its tokens can be several: some sequences of a batch, and some chunks of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.numerics.spec import QuantizeSpec

Runs: TypeAlias = "tuple[tuple[int, int], ...]"
"""Ranges of the whole, (first, count), in the order in which a rank has them."""


class Axis(NamedTuple):
    """One dimension, of which this rank has piece ``rank`` of ``ranks`` equal ones; or ``runs``, if there are."""

    rank: int = 0
    ranks: int = 1
    groups: tuple[str, ...] = ()
    """The names of the groups whose ranks share it."""
    runs: Runs = ()


WHOLE = Axis()
"""All of it."""


class Share(NamedTuple):
    """What ranks share of the tokens: dimension ``dim`` of (batch, sequence), of which this rank has some chunks."""

    axis: Axis
    dim: int = 0
    chunks: tuple[int, ...] = ()
    """Of ``len(chunks) * ranks`` equal ones, in the order in which this rank has them; by default one."""

    def within(self, size: int, parent: Runs) -> Runs:
        """The runs of this rank, of which it has ``size`` in all, where those that share them have the parent's."""
        chunks = self.chunks or (self.axis.rank,)
        if size % len(chunks):
            raise ValueError(
                f"dimension {self.dim} of an input has {size} tokens on this rank, which are not {len(chunks)} equal "
                "chunks, as share_tokens was told: give it a multiple of that"
            )
        part = size // len(chunks)
        return tuple([run for chunk in chunks for run in _cut(parent, chunk * part, part)])


def _cut(runs: Runs, first: int, count: int) -> Runs:
    """``count`` from ``first`` on of what the runs have, one behind the other."""
    found = []
    for start, length in runs:
        begin, end = max(first, 0), min(first + count, length)
        if begin < end:
            found.append((start + begin, end - begin))
        first -= length
    return tuple(found)


def _merged(runs: Sequence[tuple[int, int]]) -> Runs:
    """The same, where one run goes on as the next does as one."""
    found: list[tuple[int, int]] = []
    for first, count in runs:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return tuple(found)


def tokens_of(leading: Sequence[int], shares: Sequence[Share]) -> Axis:
    """The rows of an input (*leading, features), flattened, in those of the whole that ranks share.

    shares: of one dimension, those that stand first are cut by those behind them.

    Raises:
        ValueError: an input without the dimension that is shared, or one that its chunks do not divide.
    """
    ranks = math.prod([share.axis.ranks for share in shares])  # no generators: dynamo reads this
    groups = tuple([group for share in shares for group in share.axis.groups])
    if len(shares) == 1 and shares[0].dim == 0 and not shares[0].chunks:
        return shares[0].axis
    runs: Runs = ((0, 1),)
    for dim, size in enumerate(leading):
        of_dim = [share for share in shares if share.dim == dim]
        sizes = [size * math.prod([share.axis.ranks for share in of_dim[i:]]) for i in range(len(of_dim) + 1)]
        inner: Runs = ((0, sizes[0]),)
        for share, part in zip(of_dim, sizes[1:], strict=True):
            inner = share.within(part, inner)
        rows = [row for first, count in runs for row in range(first, first + count)]
        runs = _merged([(row * sizes[0] + first, count) for row in rows for first, count in inner])
    missing = [share.dim for share in shares if share.dim >= len(leading)]
    if missing:
        raise ValueError(
            f"share_tokens was told that ranks share dimension {missing[0]}, and an input has tokens {tuple(leading)}: "
            "give inputs (batch, sequence, features)"
        )
    return Axis(0, ranks, groups, runs) if ranks > 1 or len(runs) > 1 else WHOLE


@dataclasses.dataclass(frozen=True)
class Place:
    """Which pieces of the tokens, and of a linear's output and input features, this rank has."""

    shares: tuple[Share, ...] = ()
    """Of the tokens: what they come to is known with the shape of an input, see :meth:`at`."""
    outputs: Axis = WHOLE
    inputs: Axis = WHOLE
    sequence: Share | None = None
    """What an input is a piece of, which is gathered before its product (sequence parallelism)."""
    tokens: Axis = WHOLE

    def at(self, leading: Sequence[int], piece: bool = False) -> Place:
        """The same for an input (*leading, features); ``piece``: as it comes, before it is gathered."""
        shares = (*self.shares, self.sequence) if piece and self.sequence is not None else self.shares
        return dataclasses.replace(self, tokens=tokens_of(leading, shares)) if shares else self

    def sequence_of(self, x: Tensor) -> Share | None:
        """What x (*leading, features) is a piece of: nothing where the dimension that is shared is its features."""
        return self.sequence if self.sequence is not None and self.sequence.dim < x.dim() - 1 else None

    def sharing(self, share: Share) -> Place:
        """With one share more, in place of that of the same dimension."""
        others = tuple(other for other in self.shares if other.dim != share.dim)
        return dataclasses.replace(self, shares=(*others, share))

    @property
    def x(self) -> Region:
        """Of the input."""
        return Region(self.tokens, self.inputs)

    @property
    def dy(self) -> Region:
        """Of the output's gradient."""
        return Region(self.tokens, self.outputs)

    @property
    def w(self) -> Region:
        """Of the weight."""
        return Region(self.outputs, self.inputs)


class Piece(NamedTuple):
    """One range of rows and one of columns, and where it lies."""

    x: Tensor
    row0: int
    col0: int
    full_rows: int
    full_width: int

    @property
    def place(self) -> tuple[int, int, int]:
        """As most ops take it."""
        return self.row0, self.col0, self.full_width


class Region(NamedTuple):
    """Where a matrix lies: the axis of its rows, and that of its columns."""

    rows: Axis
    columns: Axis

    @property
    def t(self) -> Region:
        """Of the transpose."""
        return Region(self.columns, self.rows)

    @property
    def cut(self) -> int | None:
        """The dimension of which a matrix has several ranges here, if there is one."""
        return 0 if self.rows.runs else 1 if self.columns.runs else None

    def pieces(self, x: Tensor, *specs: QuantizeSpec) -> list[Piece]:
        """x (R, C) in its ranges; in one, where the specs draw no bits by place."""
        rows, columns = x.shape
        full = self.rows.ranks * rows, self.columns.ranks * columns
        row0, col0 = self.rows.rank * rows, self.columns.rank * columns
        if self.cut is None or not any(spec.is_stochastic for spec in specs):
            return [Piece(x, row0, col0, *full)]
        runs = self.rows.runs or self.columns.runs
        parts = x.split([count for _, count in runs], self.cut)
        firsts = [first for first, _ in runs]
        if self.cut == 0:
            return [Piece(part, first, col0, *full) for part, first in zip(parts, firsts, strict=True)]
        return [Piece(part.contiguous(), row0, first, *full) for part, first in zip(parts, firsts, strict=True)]

    def fits(self, x: Tensor, spec: QuantizeSpec) -> bool:
        """Whether every piece begins with a block."""
        columns, rows = _sizes(self.columns, x.shape[1]), _sizes(self.rows, x.shape[0])
        return not any([size % spec.column_multiple for size in columns] + [size % spec.block_rows for size in rows])

    def check(self, x: Tensor, spec: QuantizeSpec, name: str) -> None:
        """Raises a ValueError where a piece would begin within a block."""
        for size in _sizes(self.columns, x.shape[1]):
            if size % spec.column_multiple:
                raise ValueError(
                    f"{name}: {self.columns.ranks} ranks share {size} each of what is quantized in groups of "
                    f"{spec.column_multiple} ({spec}), which cannot be cut: give each rank a multiple of that"
                )
        for size in _sizes(self.rows, x.shape[0]):
            if size % spec.block_rows:
                raise ValueError(f"{name}: {size} rows a rank are no multiple of {spec.block_rows}, its blocks' rows")


def _sizes(axis: Axis, size: int) -> list[int]:
    """What pieces there are of an axis that is shared, of which this rank has ``size``."""
    return [count for _, count in axis.runs] or ([size] if axis.ranks > 1 else [])


def local(t: Tensor) -> Tensor:
    """This rank's piece of a DTensor, differentiable; any other tensor as it is."""
    from torch.distributed.tensor import DTensor  # whoever has a place has imported it; others need not

    return t.to_local() if isinstance(t, DTensor) else t  # dynamo does not see the method of a DTensor of NVFP4


def largest(amax: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """amax (any shape) over all ranks that share the axes."""
    for axis in axes:
        for group in axis.groups if axis.ranks > 1 else ():
            collectives = torch.ops._c10d_functional
            amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", group))
    return amax
