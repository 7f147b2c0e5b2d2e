"""adamw_step and adamw_step_codes: kernels against plain torch bit for bit, and what a step does to its arguments."""

import itertools
import math

import pytest
import torch
from helpers.optimizer_steps import assert_same, hyper, moments, run, vector_step, weight_of

from nvfp4_tensor import QuantizeSpec, quantize
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.ops.schemas import plain

SHAPES = [(1, 16), (3, 40), (5, 1), (130, 64), (257, 1008)]
FLOATS = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kind", ["codes", torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, columns", SHAPES)
def test_kernels_have_the_bits_of_plain_torch(rows, columns, kind, kernels):
    """Eight steps of sparse and dense gradients, NaN, infinity, overflow, large and tiny ones, from a later row on."""
    weight, state = weight_of(kind, rows, columns), moments(rows, columns)
    for step in range(1, 9):
        grad = (torch.randn(rows, columns) * 0.01 * torch.rand(rows, columns) ** 8).to(FLOATS[(step + rows) % 2])
        if step == 2:
            grad[:, :20] = 0
        if step == 4:
            grad[0, 0] = math.nan
        if step == 5:
            grad[-1, -1] = math.inf
        if step == 6:
            grad[rows // 2, columns // 2] = -1e25  # overflows v, and so does this:
            grad[-1, 0] = 3e38
        lr = 10.0**-step * (50 if step < 3 else 1)
        got = run(torch.ops.nvfp4, weight, grad, state, step, kernels, 7, lr)
        weight, state = run(plain, weight, grad, state, step, "cpu", 7, lr)
        assert_same(got, (weight, state))


def test_scales_grow_by_chance(kernels):
    """Steps of a tenth of a weight: of 8,192 blocks in rows of many magnitudes, some outgrow their scales."""
    values = torch.randn(128, 1024) * 2.0 ** -torch.arange(128).div(16, rounding_mode="floor")[:, None]
    w = quantize(values, QuantizeSpec())
    weight, state, grad = [w.qdata, w.scale, w.per_tensor_scale], moments(128, 1024), torch.randn(128, 1024)
    got = run(torch.ops.nvfp4, weight, grad, state, 1, kernels, lr=0.1)
    expected = run(plain, weight, grad, state, 1, lr=0.1)
    assert_same(got, expected)
    before, after = (layout.unswizzle(t, 128, 64).float() for t in (w.scale, expected[0][1]))
    assert 2000 < (after == 2 * before).sum() < 3000 and (after == before).sum() > 2000


@pytest.mark.parametrize("dtype, grad_dtype", [*itertools.product(FLOATS, FLOATS)])
def test_vectors_have_the_bits_of_plain_torch(dtype, grad_dtype, kernels):
    """Five steps of gradients of all magnitudes, of zeros, NaN and infinity; then a shard of the last step."""
    for count in (0, 1, 576, 5003):
        weight, state = (torch.randn(count) * 0.05).to(dtype), [torch.zeros(count), torch.zeros(count)]
        for step in range(1, 6):
            grad = (torch.randn(count) * 10.0 ** (torch.rand(count) * 60 - 40)).to(grad_dtype)
            grad[::3] = 0
            if step == 3 and count:
                grad[0], grad[-1] = math.nan, math.inf
                grad[count // 2] = 1e25
            before = weight, state
            got = vector_step(torch.ops.nvfp4, weight, grad, state, step, kernels, 1000)
            (weight,), state = vector_step(plain, weight, grad, state, step, "cpu", 1000)
            assert_same(got, ([weight], state))
    rows = slice(100, count)
    part = vector_step(torch.ops.nvfp4, before[0][rows], grad[rows], [m[rows] for m in before[1]], 5, kernels, 1100)
    assert_same(part, ([weight], state), rows)


@pytest.mark.parametrize("kind", ["codes", torch.bfloat16])
def test_neither_shards_of_rows_nor_threads_change_a_bit(kind, device):
    rows, columns = 513, 512
    state, grad = moments(rows, columns), torch.randn(rows, columns)
    values = torch.randn(rows, columns) * 0.05
    amax = values.abs().amax()

    def part(first, last):
        if kind != "codes":
            return [values[first:last].to(kind)]
        w = quantize(values[first:last], QuantizeSpec(), amax=amax)
        return [w.qdata, w.scale, w.per_tensor_scale]

    whole = run(torch.ops.nvfp4, part(0, rows), grad, state, 1, device)
    torch.set_num_threads(3)
    assert_same(run(torch.ops.nvfp4, part(0, rows), grad, state, 1, device), whole)
    for first, last in ((0, 50), (50, 384), (384, 513)):
        shard = part(first, last), grad[first:last], [t[first:last] for t in state]
        weight, moved = run(torch.ops.nvfp4, *shard, 1, device, first)
        assert_same(([weight[0]], moved), ([whole[0][0]], whole[1]), slice(first, last))


REST = {"hyper": hyper(1), "row0": 0}
MATRIX = {"weight": torch.zeros(8, 32), "grad": torch.zeros(8, 32), "moments": moments(8, 32), **REST}
VECTOR = {"weight": torch.zeros(4), "grad": torch.zeros(4), "moments": [torch.zeros(4)] * 2, **REST}
BYTES = torch.zeros(8, 8, dtype=torch.uint8)


@pytest.mark.parametrize("ops", [torch.ops.nvfp4, plain], ids=["native", "plain"])
@pytest.mark.parametrize("given, change, message", [
    (MATRIX, {"grad": torch.zeros(4, 16)}, "matrices of one shape"),
    (MATRIX, {"grad": torch.zeros(8, 32).half()}, "grad must be bfloat16 or float32"),
    (MATRIX, {"weight": torch.zeros(8, 32).half()}, "weight must be bfloat16 or float32"),
    (MATRIX, {"moments": [BYTES, *moments(8, 32)[1:]]}, "r must be bytes"),
    (MATRIX, {"hyper": torch.zeros(7)}, "hyper must be float32"),
    (MATRIX, {"row0": -1}, "must not be negative"),
    (VECTOR, {"grad": torch.zeros(5)}, "must"),
    (VECTOR, {"grad": torch.zeros(4).double()}, "must"),
    (VECTOR, {"weight": torch.zeros(4).half()}, "must"),
    (VECTOR, {"moments": [torch.zeros(4).bfloat16(), torch.zeros(4)]}, "must"),
    (VECTOR, {"moments": [torch.zeros(4), torch.zeros(3)]}, "must"),
    (VECTOR, {"hyper": torch.zeros(7)}, "must"),
    (VECTOR, {"weight": torch.zeros(2, 2), "grad": torch.zeros(2, 2)}, "must"),
])  # fmt: skip
def test_arguments_that_do_not_fit(ops, given, change, message):
    weight, grad, states, numbers, row0 = {**given, **change}.values()
    step = ops.adamw_step if given is MATRIX else ops.adamw_step_vector
    with pytest.raises((ValueError, RuntimeError), match=message):
        step(weight, grad, *states, numbers, torch.tensor([1, 1]), row0)
