"""Map local operands to their global offsets, so that quantization does not depend on the number of ranks.

Tokens, output features and input features may each be sharded over process groups. x is (tokens, input), dy (tokens,
output), w (output, input). Amaxes are reduced over all ranks that share an operand, and random bits use global offsets
(contract, section 4). A rank has one range of the features. Its tokens may be several ranges: some sequences of a
batch, and some chunks of each. What is not sharded is the ordinary case: one rank, one range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.numerics.spec import QuantizeSpec

IndexRanges: TypeAlias = "tuple[tuple[int, int], ...]"
"""(start, length) ranges of the global dimension, in local order."""


class ShardedDim(NamedTuple):
    """One dimension, split into ``ranks`` equal shards of which this rank has ``rank``, or else ``ranges``."""

    rank: int = 0
    ranks: int = 1
    groups: tuple[str, ...] = ()
    """Names of the process groups whose ranks share the dimension."""
    ranges: IndexRanges = ()

    def local_sizes(self, size: int) -> list[int]:
        """The sizes of this rank's ranges, ``size`` in total; none where the dimension is not sharded."""
        return [length for _, length in self.ranges] or ([size] if self.ranks > 1 else [])


UNSHARDED_DIM = ShardedDim()


class TokenSharding(NamedTuple):
    """How tokens are sharded along ``dim`` of (batch, sequence); ``chunks`` lists the local chunks."""

    axis: ShardedDim
    dim: int = 0
    chunks: tuple[int, ...] = ()
    """Of ``len(chunks) * ranks`` equal chunks, in local order; by default the one of this rank."""

    def within(self, size: int, parent: IndexRanges) -> IndexRanges:
        """This rank's ranges, ``size`` in total, of the ranges that all sharing ranks have together.

        Raises:
            ValueError: the chunks do not divide the size.
        """
        chunks = self.chunks or (self.axis.rank,)
        if size % len(chunks):
            raise ValueError(
                f"dimension {self.dim} of an input has {size} tokens on this rank, which {len(chunks)} equal chunks "
                "do not divide: give it a multiple of the number of chunks"
            )
        length = size // len(chunks)
        return tuple([found for chunk in chunks for found in _slice(parent, chunk * length, length)])


def _slice(ranges: IndexRanges, start: int, length: int) -> IndexRanges:
    """``length`` indices from ``start`` on of the concatenated ranges."""
    found = []
    for first, count in ranges:
        begin, end = max(start, 0), min(start + length, count)
        if begin < end:
            found.append((first + begin, end - begin))
        start -= count
    return tuple(found)


def _merge_adjacent(ranges: Sequence[tuple[int, int]]) -> IndexRanges:
    found: list[tuple[int, int]] = []
    for first, count in ranges:
        if found and sum(found[-1]) == first:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((first, count))
    return tuple(found)


def flatten_token_shardings(leading: Sequence[int], shardings: Sequence[TokenSharding]) -> ShardedDim:
    """The sharding of the rows of an input (*leading, features), flattened to (tokens, features).

    Several shardings of one dimension nest: those that come first are split by those that follow.

    Raises:
        ValueError: the input lacks a dimension that is sharded, or chunks do not divide one.
    """
    ranks = math.prod([sharding.axis.ranks for sharding in shardings])  # no generators: dynamo traces this
    groups = tuple([group for sharding in shardings for group in sharding.axis.groups])
    if len(shardings) == 1 and shardings[0].dim == 0 and not shardings[0].chunks:
        return shardings[0].axis
    ranges: IndexRanges = ((0, 1),)
    for dim, size in enumerate(leading):
        of_dim = [sharding for sharding in shardings if sharding.dim == dim]
        sizes = [size * math.prod([sharding.axis.ranks for sharding in of_dim[i:]]) for i in range(len(of_dim) + 1)]
        inner: IndexRanges = ((0, sizes[0]),)
        for sharding, local_size in zip(of_dim, sizes[1:], strict=True):
            inner = sharding.within(local_size, inner)
        rows = [row for first, count in ranges for row in range(first, first + count)]
        ranges = _merge_adjacent([(row * sizes[0] + first, count) for row in rows for first, count in inner])
    missing = [sharding.dim for sharding in shardings if sharding.dim >= len(leading)]
    if missing:
        raise ValueError(
            f"set_token_sharding sharded dimension {missing[0]}, but an input has tokens {tuple(leading)}: give inputs "
            "(batch, sequence, features)"
        )
    return ShardedDim(0, ranks, groups, ranges) if ranks > 1 or len(ranges) > 1 else UNSHARDED_DIM


@dataclasses.dataclass(frozen=True)
class LinearSharding:
    """How a linear's tokens, outputs and inputs are sharded on this rank."""

    token_shardings: tuple[TokenSharding, ...] = ()
    """They become ``tokens`` once the shape of an input is known: see :meth:`for_input`."""
    outputs: ShardedDim = UNSHARDED_DIM
    inputs: ShardedDim = UNSHARDED_DIM
    sequence: TokenSharding | None = None
    """Set where inputs are sharded along the sequence, and gathered before the product (sequence parallelism)."""
    tokens: ShardedDim = UNSHARDED_DIM

    def for_input(self, leading: Sequence[int], local: bool = False) -> LinearSharding:
        """The same with ``tokens`` of an input (*leading, features); ``local``: before the sequence is gathered."""
        shardings = self.token_shardings
        if local and self.sequence is not None:
            shardings = (*shardings, self.sequence)
        if not shardings:
            return self
        return dataclasses.replace(self, tokens=flatten_token_shardings(leading, shardings))

    def sequence_of(self, x: Tensor) -> TokenSharding | None:
        """The sequence sharding of x (*leading, features), if it has the dimension that is sharded."""
        return self.sequence if self.sequence is not None and self.sequence.dim < x.dim() - 1 else None

    def with_tokens(self, sharding: TokenSharding) -> LinearSharding:
        """With this sharding of tokens, in place of the one of the same dimension."""
        others = tuple(other for other in self.token_shardings if other.dim != sharding.dim)
        return dataclasses.replace(self, token_shardings=(*others, sharding))

    @property
    def x(self) -> MatrixSharding:
        """Of the input."""
        return MatrixSharding(self.tokens, self.inputs)

    @property
    def dy(self) -> MatrixSharding:
        """Of the output's gradient."""
        return MatrixSharding(self.tokens, self.outputs)

    @property
    def w(self) -> MatrixSharding:
        """Of the weight."""
        return MatrixSharding(self.outputs, self.inputs)


class Tile(NamedTuple):
    """One range of rows and one of columns, with its offset in the global matrix."""

    x: Tensor
    row0: int
    col0: int
    full_rows: int
    """Rows of the global matrix; 0 where it has those of ``x``."""
    full_width: int
    """Columns of the global matrix; 0 where it has those of ``x``."""

    @property
    def origin(self) -> tuple[int, int, int]:
        """The arguments (row0, col0, full_width) of most ops."""
        return self.row0, self.col0, self.full_width


class MatrixSharding(NamedTuple):
    """Row and column sharding of one matrix."""

    rows: ShardedDim
    columns: ShardedDim

    @property
    def t(self) -> MatrixSharding:
        """Of the transpose."""
        return MatrixSharding(self.columns, self.rows)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have other parts of the matrix, or its ranges are not contiguous."""
        return any([dim.ranks > 1 or dim.ranges for dim in self])

    @property
    def split_dim(self) -> int | None:
        """The dimension of which this rank has several ranges, if there is one."""
        return 0 if self.rows.ranges else 1 if self.columns.ranges else None

    def tiles(self, x: Tensor, *specs: QuantizeSpec) -> list[Tile]:
        """x (R, C) by ranges; as one tile where the specs draw no random bits, which depend on the offset."""
        if not self.is_sharded:
            return [Tile(x, 0, 0, 0, 0)]
        rows, columns = x.shape
        full = self.rows.ranks * rows, self.columns.ranks * columns
        row0, col0 = self.rows.rank * rows, self.columns.rank * columns
        if self.split_dim is None or not any([spec.is_stochastic for spec in specs]):
            return [Tile(x, row0, col0, *full)]
        ranges = self.rows.ranges or self.columns.ranges
        parts = x.split([length for _, length in ranges], self.split_dim)
        starts = [start for start, _ in ranges]
        if self.split_dim == 0:
            return [Tile(part, start, col0, *full) for part, start in zip(parts, starts, strict=True)]
        return [Tile(part.contiguous(), row0, start, *full) for part, start in zip(parts, starts, strict=True)]

    def fits(self, x: Tensor, spec: QuantizeSpec) -> bool:
        """Whether every range begins with a block."""
        columns, rows = self.columns.local_sizes(x.shape[1]), self.rows.local_sizes(x.shape[0])
        return not any([size % spec.column_multiple for size in columns] + [size % spec.block_rows for size in rows])

    def check(self, x: Tensor, spec: QuantizeSpec, name: str) -> None:
        """Raises a ValueError where a range would begin inside a block."""
        for size in self.columns.local_sizes(x.shape[1]):
            if size % spec.column_multiple:
                raise ValueError(
                    f"{name}: each of {self.columns.ranks} ranks has {size} columns, but {spec} quantizes groups of "
                    f"{spec.column_multiple}: give each rank a multiple of it"
                )
        for size in self.rows.local_sizes(x.shape[0]):
            if size % spec.block_rows:
                raise ValueError(
                    f"{name}: {size} rows per rank are not a multiple of {spec.block_rows}, the rows of a block"
                )


UNSHARDED = MatrixSharding(UNSHARDED_DIM, UNSHARDED_DIM)
UNSHARDED_LINEAR = LinearSharding()


def local_shard(t: Tensor) -> Tensor:
    """This rank's shard of a DTensor, differentiable; any other tensor unchanged."""
    from torch.distributed.tensor import DTensor  # slow to import, and loaded already where a linear is sharded

    return t.to_local() if isinstance(t, DTensor) else t  # dynamo does not see the method of a DTensor of NVFP4


def all_reduce_amax(amax: Tensor, dims: tuple[ShardedDim, ...]) -> Tensor:
    """The maximum of amax (any shape) over all ranks that share the dimensions."""
    for dim in dims:
        for group in dim.groups if dim.ranks > 1 else ():
            collectives = torch.ops._c10d_functional
            amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", group))
    return amax


def agree_on_amax(amax: Tensor, x: Tensor, sharding: MatrixSharding) -> Tensor:
    """amax (n,) over the ranks; an asynchronous device-side assertion fails where ranks have unequal numbers of tokens.

    Their offsets would overlap.
    """
    if sharding.rows.ranks == 1:
        return all_reduce_amax(amax, sharding)
    rows = amax.new_full((1,), x.shape[0])
    *found, most, fewest = all_reduce_amax(torch.cat([amax, rows, -rows]), sharding).unbind()
    torch._assert_async(most == -fewest, "ranks have unequal numbers of tokens: give each rank as many rows")
    return torch.stack(found) if found else amax


def compare_token_counts(sharding: MatrixSharding, x: Tensor, *specs: QuantizeSpec | None) -> None:
    """Assert, before a gather, that all ranks have equally many rows: otherwise it would receive wrong bytes.

    A rank that quantizes compares by the all-reduce of its amaxes; this one reduces as many numbers, so that a rank
    whose rows fill no complete blocks, and which gathers dense values, takes part in the same collective.
    """
    given = [spec for spec in specs if spec is not None]
    amaxes = 0 if any([spec.row_scaled for spec in given]) else len(given)
    agree_on_amax(x.new_zeros(amaxes, dtype=torch.float32), x, sharding)
