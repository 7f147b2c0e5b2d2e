"""Map local operands to their global offsets, so that quantization does not depend on the number of ranks.

Tokens, output features and input features may each be sharded over process groups. x is (tokens, input), dy (tokens,
output), w (output, input). Amaxes are reduced over all ranks that share an operand, and random bits use global offsets
(contract, section 4). A rank has one range of the features, but may have several ranges of the tokens: some sequences
of a batch, and some chunks of each. A dimension that is not sharded has one rank and one range.
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
    """One dimension, split into ``ranks`` equal shards; this rank has shard number ``rank``, or else ``ranges``."""

    rank: int = 0
    ranks: int = 1
    groups: tuple[str, ...] = ()
    """Names of the process groups whose ranks share the dimension."""
    ranges: IndexRanges = ()

    def local_sizes(self, size: int) -> list[int]:
        """Return the sizes of this rank's ranges, ``size`` in total; an empty list if the dimension is not sharded."""
        return [length for _, length in self.ranges] or ([size] if self.ranks > 1 else [])


UNSHARDED_DIM = ShardedDim()


class TokenSharding(NamedTuple):
    """How tokens are sharded along ``dim`` of (batch, sequence)."""

    axis: ShardedDim
    dim: int = 0
    chunks: tuple[int, ...] = ()
    """The local chunks among ``len(chunks) * ranks`` equal ones, in local order; by default, this rank's one chunk."""

    def within(self, size: int, parent: IndexRanges) -> IndexRanges:
        """Return this rank's ranges, ``size`` in total; ``parent`` has the ranges of all ranks together.

        Raises:
            ValueError: if the number of chunks does not divide the size.
        """
        chunks = self.chunks or (self.axis.rank,)
        if size % len(chunks):
            raise ValueError(
                f"dimension {self.dim} of an input has {size} tokens on this rank, which is not a multiple of its "
                f"{len(chunks)} chunks: pad the dimension"
            )
        length = size // len(chunks)
        return tuple([found for chunk in chunks for found in _slice(parent, chunk * length, length)])


def _slice(ranges: IndexRanges, start: int, length: int) -> IndexRanges:
    """Return ``length`` indices of the concatenated ranges, beginning with index ``start``."""
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
    """Return the sharding of the rows of an input (*leading, features), flattened to (tokens, features).

    If one dimension has several shardings, each splits the shards of the one before it.

    Raises:
        ValueError: if the input lacks a sharded dimension, or chunks do not divide one.
    """
    ranks = math.prod([sharding.axis.ranks for sharding in shardings])  # no generators: dynamo traces this
    groups = tuple([group for sharding in shardings for group in sharding.axis.groups])
    if len(shardings) == 1 and shardings[0].dim == 0 and not shardings[0].chunks:
        return shardings[0].axis
    ranges: IndexRanges = ((0, 1),)
    for dim, size in enumerate(leading):
        nested = [sharding for sharding in shardings if sharding.dim == dim]
        sizes = [size * math.prod([sharding.axis.ranks for sharding in nested[i:]]) for i in range(len(nested) + 1)]
        inner: IndexRanges = ((0, sizes[0]),)
        for sharding, local_size in zip(nested, sizes[1:], strict=True):
            inner = sharding.within(local_size, inner)
        rows = [row for first, count in ranges for row in range(first, first + count)]
        ranges = _merge_adjacent([(row * sizes[0] + first, count) for row in rows for first, count in inner])
    missing = [sharding.dim for sharding in shardings if sharding.dim >= len(leading)]
    if missing:
        raise ValueError(
            f"set_token_sharding was called with dim={missing[0]}, but an input has tokens of shape {tuple(leading)}: "
            "use inputs (batch, sequence, features)"
        )
    return ShardedDim(0, ranks, groups, ranges) if ranks > 1 or len(ranges) > 1 else UNSHARDED_DIM


@dataclasses.dataclass(frozen=True)
class LinearSharding:
    """How a linear's tokens, outputs and inputs are sharded on this rank."""

    token_shardings: tuple[TokenSharding, ...] = ()
    """:meth:`for_input` derives ``tokens`` from these and the shape of an input."""
    outputs: ShardedDim = UNSHARDED_DIM
    inputs: ShardedDim = UNSHARDED_DIM
    sequence: TokenSharding | None = None
    """Set where inputs are sharded along the sequence, and gathered before the product (sequence parallelism)."""
    tokens: ShardedDim = UNSHARDED_DIM

    def for_input(self, leading: Sequence[int], local: bool = False) -> LinearSharding:
        """Return a copy with ``tokens`` for an input (*leading, features).

        local: whether the input is a sequence shard, before it is gathered.
        """
        shardings = self.token_shardings
        if local and self.sequence is not None:
            shardings = (*shardings, self.sequence)
        if not shardings:
            return self
        return dataclasses.replace(self, tokens=flatten_token_shardings(leading, shardings))

    def sequence_of(self, x: Tensor) -> TokenSharding | None:
        """Return the sequence sharding, or None if x (*leading, features) lacks the sharded dimension."""
        return self.sequence if self.sequence is not None and self.sequence.dim < x.dim() - 1 else None

    def with_tokens(self, sharding: TokenSharding) -> LinearSharding:
        """Return a copy with this sharding of tokens, which replaces one of the same dimension."""
        others = tuple(other for other in self.token_shardings if other.dim != sharding.dim)
        return dataclasses.replace(self, token_shardings=(*others, sharding))

    @property
    def x(self) -> MatrixSharding:
        """Return the sharding of the input."""
        return MatrixSharding(self.tokens, self.inputs)

    @property
    def dy(self) -> MatrixSharding:
        """Return the sharding of the output's gradient."""
        return MatrixSharding(self.tokens, self.outputs)

    @property
    def w(self) -> MatrixSharding:
        """Return the sharding of the weight."""
        return MatrixSharding(self.outputs, self.inputs)


class Tile(NamedTuple):
    """The elements in one range of rows and one range of columns, and their offset in the global matrix."""

    x: Tensor
    row0: int
    col0: int
    full_rows: int
    """The number of rows of the global matrix; 0 means that of ``x``."""
    full_width: int
    """The number of columns of the global matrix; 0 means that of ``x``."""

    @property
    def origin(self) -> tuple[int, int, int]:
        """Return the arguments (row0, col0, full_width) of most ops."""
        return self.row0, self.col0, self.full_width


class MatrixSharding(NamedTuple):
    """Row and column sharding of one matrix."""

    rows: ShardedDim
    columns: ShardedDim

    @property
    def t(self) -> MatrixSharding:
        """Return the sharding of the transpose."""
        return MatrixSharding(self.columns, self.rows)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks have other shards of the matrix, or the local ranges are not contiguous."""
        rows, columns = self
        return rows.ranks > 1 or columns.ranks > 1 or bool(rows.ranges or columns.ranges)

    @property
    def split_dim(self) -> int | None:
        """Return the dimension of which this rank has several ranges, or None."""
        return 0 if self.rows.ranges else 1 if self.columns.ranges else None

    def tiles(self, x: Tensor, *specs: QuantizeSpec) -> list[Tile]:
        """Split x (R, C) into ranges. Without stochastic specs x is one tile, because only random bits need offsets."""
        if not self.is_sharded:
            return [Tile(x, 0, 0, 0, 0)]
        rows, columns = x.shape
        full = self.rows.ranks * rows, self.columns.ranks * columns
        row0, col0 = self.rows.rank * rows, self.columns.rank * columns
        if self.split_dim is None or not any([spec.is_stochastic for spec in specs]):
            return [Tile(x, row0, col0, *full)]
        ranges = self.rows.ranges or self.columns.ranges
        slices = zip(x.split([length for _, length in ranges], self.split_dim), ranges, strict=True)
        if self.split_dim == 0:
            return [Tile(values, start, col0, *full) for values, (start, _) in slices]
        return [Tile(values.contiguous(), row0, start, *full) for values, (start, _) in slices]

    def fits(self, x: Tensor, spec: QuantizeSpec) -> bool:
        """Whether every range has complete blocks."""
        return not self._incomplete(x, spec)

    def check(self, x: Tensor, spec: QuantizeSpec, name: str) -> None:
        """Raise a ValueError that calls the matrix ``name`` if a range has incomplete blocks."""
        for size, what, ranks, multiple in self._incomplete(x, spec) if self.is_sharded else ():
            raise ValueError(
                f"{name} has {size} {what} in a range of one of {ranks} ranks, but {spec} quantizes groups of "
                f"{multiple}: give each range a multiple of {multiple} {what}"
            )

    def _incomplete(self, x: Tensor, spec: QuantizeSpec) -> list[tuple[int, str, int, int]]:
        """Return the size, dimension, ranks and multiple of each range with incomplete blocks."""
        rows, columns = self.rows, self.columns
        found = [(n, "columns", columns.ranks, spec.column_multiple) for n in columns.local_sizes(x.shape[1])]
        found += [(n, "rows", rows.ranks, spec.block_rows) for n in rows.local_sizes(x.shape[0])]
        return [each for each in found if each[0] % each[3]]


UNSHARDED = MatrixSharding(UNSHARDED_DIM, UNSHARDED_DIM)
UNSHARDED_LINEAR = LinearSharding()


def local_shard(t: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, differentiably; return any other tensor unchanged."""
    from torch.distributed.tensor import DTensor  # slow to import, and loaded already if a linear is sharded

    return t.to_local() if isinstance(t, DTensor) else t  # dynamo does not see this method of a DTensor of NVFP4


def all_reduce_amax(amax: Tensor, dims: tuple[ShardedDim, ...]) -> Tensor:
    """Return the maximum of amax (any shape) over all ranks that share the dimensions."""
    for dim in dims:
        for group in dim.groups if dim.ranks > 1 else ():
            collectives = torch.ops._c10d_functional
            amax = collectives.wait_tensor(collectives.all_reduce(amax, "max", group))
    return amax


def agree_on_amax(amax: Tensor, x: Tensor, sharding: MatrixSharding) -> Tensor:
    """Return the maximum of amax (n,) over the ranks.

    An asynchronous device-side assertion fails if ranks have unequal numbers of tokens, whose offsets would overlap.
    """
    if sharding.rows.ranks == 1:
        return all_reduce_amax(amax, sharding)
    rows = amax.new_full((1,), x.shape[0])
    *found, most, fewest = all_reduce_amax(torch.cat([amax, rows, -rows]), sharding).unbind()
    torch._assert_async(most == -fewest, "ranks have unequal numbers of tokens: give each rank as many rows")
    return torch.stack(found) if found else amax


def compare_token_counts(sharding: MatrixSharding, x: Tensor, *specs: QuantizeSpec | None) -> None:
    """Assert, before a gather, that all ranks have equally many rows: otherwise the gather would receive wrong bytes.

    Ranks that quantize compare their counts in the all-reduce of their amaxes. This function reduces equally many
    numbers, so that a rank with incomplete blocks, which gathers dense values, joins the same collective.
    """
    given = [spec for spec in specs if spec is not None]
    amaxes = 0 if any([spec.row_scaled for spec in given]) else len(given)
    agree_on_amax(x.new_zeros(amaxes, dtype=torch.float32), x, sharding)
