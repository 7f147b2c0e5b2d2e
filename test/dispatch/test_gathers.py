"""Rows that an index takes, against dense tensors: the same values and errors, at a cost by the rows taken."""

import random
import re

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.functional import embedding
from torch.profiler import ProfilerActivity, profile

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.dispatch.table import UnsupportedError, dense

SPECS = [
    QuantizeSpec(), QuantizeSpec(row_scaled=True), QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six=True),
    QuantizeSpec(hadamard_sign=True),
]  # fmt: skip
SHAPES = [(300, 80), (37, 41), (1, 32), (0, 32), (4, 40, 64), (3, 130, 50), (2, 5, 7, 48)]


def any_tensor(shape, spec, rng):
    x = torch.randn(shape) * 2.0 ** torch.randint(-3, 4, (*shape[:-1], 1))
    if len(shape) == 3 and not spec.row_scaled and rng.random() < 0.5:
        t = quantize_experts(x, spec)
    else:
        t = quantize(x, spec)
    if len(shape) > 2 and rng.random() < 0.3:
        return t.transpose(-2, -1)
    if len(t) and rng.random() < 0.3:
        return t[rng.randrange(len(t)) :, ..., rng.choice([0, 16]) :]
    return t


def any_index(size, rng):
    """Return an index of a dimension: integers of any number of dimensions, none or few, also negative; a mask."""
    shape = rng.choice([(), (0,), (1,), (5,), (2, 3), (2, 0), (2, 1, 2)])
    low = rng.choice([0, -size, -size - 1])  # in the last case some are out of range
    if rng.random() < 0.2:
        return torch.rand(max(size, 1)) < 0.5
    index = torch.randint(low, max(size + rng.choice([0, 0, 0, 2]), low + 1), shape)
    return index.int() if rng.random() < 0.3 else index


def any_take(t, rng):
    """Return a function that takes rows of t, or tries to."""
    dim = rng.randrange(t.dim())
    index, others = any_index(t.shape[dim], rng), [slice(None)] * dim
    if rng.random() < 0.3 and dim:
        others[-1] = any_index(t.shape[dim - 1], rng)
    return rng.choice([
        lambda x: x.index_select(dim, index), lambda x: x[(*others, index)], lambda x: x[index],
        lambda x: embedding(index.long(), x),
    ])  # fmt: skip


def outcome(take, t):
    """Return what ``take`` returns for t, or its error."""
    try:
        return take(t)
    except (IndexError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("seed", range(4))
def test_random_indices(seed):
    """An error is of the class that it has for a dense tensor; indices that reach the blocks are refused."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    taken = 0
    for _ in range(300):
        t = any_tensor(rng.choice(SHAPES), rng.choice(SPECS), rng)
        take = any_take(t, rng)
        got, want = outcome(take, t), outcome(take, t.dequantize())
        if isinstance(got, UnsupportedError):
            assert re.search("blocks? |matrix that is not transposed", str(got))
        elif isinstance(want, Exception):
            assert isinstance(got, type(want)) or "out of" in str(got), (got, want)  # index_select has two errors
        else:
            values = dense(got)
            assert values.shape == want.shape and torch.equal(values, want), t
            taken += 1
    assert taken > 90


TAKES = {
    "embedding": lambda t, index: embedding(index % len(t), t),
    "index": lambda t, index: t[index],
    "index_select": lambda t, index: t.index_select(0, index.flatten() % len(t)),
    "index of matrices": lambda t, index: t.view(-1, 8, 64)[index // 8, index % 8],
}


@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(row_scaled=True)])
@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_the_cost_is_of_the_rows_taken(take, spec):
    """As many bytes are allocated for a table of 16 times as many rows."""
    index, allocated = torch.tensor([[-3, 5], [9, 5]]), []
    for rows in (1024, 16384):
        t = quantize(torch.randn(rows, 64), spec)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            got = dense(take(t, index))
        allocated.append(sum(max(each.self_cpu_memory_usage, 0) for each in found.events()))
        assert torch.equal(got, take(t.dequantize(), index))
    assert 0 < allocated[0] == allocated[1] < 8000, allocated


@pytest.mark.parametrize(
    "take", [TAKES["embedding"], TAKES["index"], lambda t, index: t[index]], ids=["embedding", "index", "mask"]
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_in_a_graph(take):
    """Without a break, and with one graph for all lengths of the index, which may also be a mask."""
    torch.compiler.reset()
    graphs, is_mask = [], take not in TAKES.values()
    backend = lambda graph, inputs: graphs.append(graph) or lookup_backend("aot_eager")(graph, inputs)  # noqa: E731
    compiled = torch.compile(lambda t, index: dense(take(t, index)), fullgraph=True, backend=backend, dynamic=True)
    t = quantize(torch.randn(160, 64), QuantizeSpec(row_scaled=True))
    for count in (5, 3, 40):
        index = torch.arange(160) % count == 1 if is_mask else torch.randint(-160, 160, (2, count))
        assert torch.equal(compiled(t, index), take(t.dequantize(), index))
    assert len(graphs) == 1
