"""Random specs of random tensors, however they lie in memory: the reference's bits on each instruction set.

`make sanitize` runs these over a library with sanitizers, for which empty tensors, strides and odd addresses are drawn.
"""

import torch
from helpers.instruction_sets import assert_op, at_byte, needs_library, reference_amax, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES

pytestmark = needs_library

OPS = torch.ops.nvfp4

specs = st.builds(
    QuantizeSpec,
    round_mode=st.sampled_from(["rne", "away", "zero", "stochastic"]),
    block_rows=st.sampled_from([1, 16]),
    scale_rounding=st.sampled_from(["nearest", "up"]),
    four_over_six=st.sampled_from([None, "mae", "mse"]),
    scale_ceiling=st.sampled_from([None, 448, 256]),
    hadamard_sign=st.none() | st.integers(0, 0xFFFF),
    random_bits=st.sampled_from([16, 8]),
)
words = st.integers(-(1 << 63), (1 << 63) - 1)
rng_states = st.tuples(words, words).map(torch.tensor)


@st.composite
def matrices(draw):
    """Plain, with strided rows or columns, transposed, or at any byte; empty ones, and some that are not finite."""
    rows, columns = draw(st.integers(0, 40)), draw(st.integers(0, 300))
    dtype, seed = draw(st.sampled_from(HIGH_PRECISION_DTYPES)), draw(st.integers(0, 1 << 20))
    way = draw(st.sampled_from(["plain", "rows", "columns", "transposed", "at a byte"]))
    steps = {"rows": (2, 1), "columns": (1, 3)}.get(way, (1, 1))
    size = (rows * steps[0], columns * steps[1] + 5 * (way == "rows"))
    x = sample(size[::-1] if way == "transposed" else size, dtype, seed) * draw(st.sampled_from([1.0, 1e-4, 1e4]))
    if x.numel() and draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([float("nan"), float("inf")]))
    if way == "transposed":
        return x.t()
    if way == "at a byte":
        return at_byte(x, draw(st.integers(1, 7)))
    return x[:: steps[0], : columns * steps[1] : steps[1]]


@given(x=matrices(), spec=specs, state=rng_states, block=st.integers(0, 8), row0=st.integers(0, 1 << 40))
@settings(max_examples=40, deadline=None)
def test_quantize_and_back(x, spec, state, block, row0):
    amax = reference_amax(x, spec)
    assert_op(OPS.amax, (x, -1 if spec.hadamard_sign is None else spec.hadamard_sign), (amax,))
    offsets = row0, 16 * block, 16 * block + x.shape[1]
    expected = reference.quantize(x, amax, state, spec, *offsets, 1)
    assert_op(OPS.quantize, (x, amax, state, spec.pack(), *offsets, 1), expected)
    assert_op(OPS.quantize, (x, None, state, spec.pack(), *offsets, 1), expected)
    columns = x.shape[1] if spec.hadamard_sign is None else expected[0].shape[1] * 2
    values = reference.dequantize(*expected, columns, x.dtype)
    assert_op(OPS.dequantize, (*expected, columns, x.dtype), (values,))
    fake = reference.quantize(x, amax, state, spec, *offsets)
    values = reference.dequantize(*fake, columns, torch.float32)
    assert_op(OPS.fake_quantize, (x, amax, state, spec.pack(), torch.float32, True, *offsets), (values, fake[2]))


@given(x=matrices(), spec=specs, spec_t=specs, state=rng_states, band=st.integers(0, 5), block=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_a_matrix_and_its_transpose(x, spec, spec_t, state, band, block):
    row0, col0 = 16 * band, 16 * block
    amax, amax_t = reference_amax(x, spec), reference_amax(x.t(), spec_t)
    expected = (
        *reference.quantize(x, amax, state, spec, row0, col0, 1024, 0),
        *reference.quantize(x.t(), amax_t, state, spec_t, col0, row0, 512, 1),
    )
    assert_op(OPS.quantize_pair, (x, amax, amax_t, state, spec.pack(), spec_t.pack(), row0, col0, 512, 1024), expected)
