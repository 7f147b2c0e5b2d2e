"""Sharding layouts: the global ranges of local rows, tiles with their offsets, and the errors for incomplete blocks."""

import itertools
import math
import random

import pytest
import torch
from helpers.refusals import refuses

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.sharding.layout import (
    UNSHARDED_DIM,
    LinearSharding,
    MatrixSharding,
    ShardedDim,
    TokenSharding,
    flatten_token_shardings,
)
from nvfp4_tensor.sharding.sequence import GatheredShape

STOCHASTIC = QuantizeSpec(round_mode="stochastic")
NEAREST, EDEN, TILES = QuantizeSpec(), QuantizeSpec(round_mode="eden"), QuantizeSpec(block_rows=16)


def on(rank, ranks, name="group"):
    return ShardedDim(rank, ranks, (name,))


# --- ranges of tokens ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_batch_in_the_order_of_ranks_needs_no_ranges():
    axis = on(1, 4)
    assert flatten_token_shardings((2, 8), [TokenSharding(axis)]) is axis
    assert axis.local_sizes(16) == [16] and UNSHARDED_DIM.local_sizes(16) == []
    assert flatten_token_shardings((2, 8), [TokenSharding(UNSHARDED_DIM, dim=1)]) == UNSHARDED_DIM


def check_tiles(sharding, indices, tokens):
    """Each tile of a rank's rows, and of its second half of six columns, has the elements that its offsets name."""
    numbered = torch.arange(6 * tokens).view(tokens, 6)
    mine = numbered[indices, 3:]
    for of_x, x, whole in ((sharding, mine, numbered), (sharding.t, mine.t(), numbered.t())):
        tiles = of_x.tiles(x, NEAREST, STOCHASTIC)
        for tile in tiles:
            rows, columns = tile.x.shape
            assert torch.equal(tile.x, whole[tile.row0 : tile.row0 + rows, tile.col0 : tile.col0 + columns])
            assert (tile.full_rows, tile.full_width) == whole.shape and (len(tiles) == 1 or tile.x.is_contiguous())
        assert torch.equal(torch.cat([tile.x for tile in tiles], of_x.split_dim or 0), x)
        assert of_x.tiles(x, NEAREST)[0].x is x  # no random bits, which depend on the offset


@pytest.mark.parametrize("seed", range(40))
def test_ranges_are_those_of_a_numbered_batch(seed):
    """Batches and sequences over ranks, in chunks of any order, and shards of shards: rows of each rank."""
    draw, found = random.Random(seed), []
    axes = [(draw.randint(0, 1), draw.randint(1, 3), draw.randint(1, 2)) for _ in range(draw.randint(1, 3))]
    sizes = [2 * math.prod(ranks * count for dim, ranks, count in axes if dim == own) for own in (0, 1)]
    orders = [draw.sample(range(ranks * count), ranks * count) for _, ranks, count in axes]
    full = torch.arange(math.prod(sizes)).view(sizes)
    for ranks_of_axes in itertools.product(*(range(ranks) for _, ranks, _ in axes)):
        local, shardings = full, []
        for (dim, ranks, count), order, rank in zip(axes, orders, ranks_of_axes, strict=True):
            chunks = tuple(order[rank * count : (rank + 1) * count])
            local = torch.cat([local.chunk(ranks * count, dim)[chunk] for chunk in chunks], dim)
            shardings.append(TokenSharding(on(rank, ranks), dim, () if chunks == (rank,) else chunks))
        rows = flatten_token_shardings(local.shape, shardings)
        assert rows.ranks == math.prod(ranks for _, ranks, _ in axes)
        assert rows is UNSHARDED_DIM or rows.groups == ("group",) * len(axes)
        ranges = rows.ranges or ((rows.rank * local.numel(), local.numel()),)
        assert rows.local_sizes(local.numel()) in ([length for _, length in ranges], [])
        indices = [i for first, length in ranges for i in range(first, first + length)]
        assert indices == local.flatten().tolist()
        check_tiles(MatrixSharding(rows, on(1, 2)), indices, full.numel())
        found += indices
    assert sorted(found) == list(range(full.numel()))


def flattened(*leading):
    return flatten_token_shardings(leading, [TokenSharding(on(0, 2), dim=1, chunks=(0, 3))])


test_shardings_that_do_not_fit_raise = refuses(
    (lambda: flattened(2, 7), "dimension 1 of an input has 7 tokens .* not a multiple of its 2 chunks"),
    (lambda: flattened(64), r"dim=1, but an input has tokens of shape \(64,\): use inputs \(batch"),
)


# --- linears ---------------------------------------------------------------------------------------------------------


def test_a_sequence_is_gathered_only_where_inputs_have_one():
    linear = LinearSharding(sequence=TokenSharding(on(0, 2), dim=1))
    x = torch.zeros(3, 8, 16)
    assert linear.sequence_of(x) == linear.sequence and linear.sequence_of(x[0]) is None
    assert GatheredShape.of(x, linear.sequence).leading == (3, 16)


# --- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, columns, spec, message",
    [
        (on(0, 2), on(0, 2), NEAREST, None),
        (on(0, 2), UNSHARDED_DIM, TILES, "operand has 40 rows in a range of one of 2 ranks.* 16 rows"),
        (UNSHARDED_DIM, on(0, 2), EDEN, "operand has 48 columns in a range of one of 2 ranks.* a multiple of 128"),
        (UNSHARDED_DIM, ShardedDim(0, 2, (), ((0, 24), (72, 24))), NEAREST, "operand has 24 columns.* of 16"),
        (ShardedDim(0, 2, (), ((0, 24), (56, 16))), UNSHARDED_DIM, TILES, "operand has 24 rows"),
        (ShardedDim(0, 2, (), ((0, 24), (56, 16))), UNSHARDED_DIM, NEAREST, None),
        (UNSHARDED_DIM, UNSHARDED_DIM, EDEN, None),
    ],
)
def test_ranges_need_complete_blocks(rows, columns, spec, message):
    x, sharding = torch.zeros(40, 48), MatrixSharding(rows, columns)
    assert sharding.fits(x, spec) == (message is None)
    if message is None:
        return sharding.check(x, spec, "operand")
    with pytest.raises(ValueError, match=message):
        sharding.check(x, spec, "operand")
