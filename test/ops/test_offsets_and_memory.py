"""Offsets of a shard in a full tensor, and addresses in memory.

What was undefined behaviour before, so that `make sanitize` stops where it comes back: the memset of the null pointers
of empty outputs (here and in test_native.py), the overflow of a block's number, and loads of numbers that do not begin
on a multiple of their size, which torch.frombuffer makes of any file.
"""

import pytest
import torch
from helpers.instruction_sets import assert_op, at_byte, needs_library, sample

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops import composite

OPS = torch.ops.nvfp4
PLAIN = QuantizeSpec().pack()
STOCHASTIC = QuantizeSpec(round_mode="stochastic").pack()
RNG_STATE = torch.tensor([5, 7])
MOST = (1 << 63) - 1


@pytest.mark.parametrize(
    "offsets, message",
    [
        ((-1, 0, 64), "must not be negative, not -1, 0 and 64"),
        ((0, -16, 64), "must not be negative, not 0, -16 and 64"),
        ((0, 0, -64), "must not be negative, not 0, 0 and -64"),
        ((0, 8, 128), "col0 must be a multiple of 16, where a block begins, not 8"),
        ((1 << 62, 0, 1 << 20), "blocks are numbered in 63 bits: row0 4611686018427387904"),
        ((MOST, 0, 64), "blocks are numbered in 63 bits"),
        ((32, 0, MOST), "blocks are numbered in 63 bits"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", [OPS, composite], ids=["the op", "plain torch"])
@pytest.mark.parametrize("spec", [PLAIN, STOCHASTIC], ids=["nearest", "stochastic"])
def test_invalid_offsets_raise(device, implementation, offsets, message, spec):
    x, amax, state = torch.ones(4, 64, device=device), torch.ones((), device=device), RNG_STATE.to(device)
    for call in (
        lambda: implementation.quantize(x, amax, state, spec, *offsets),
        lambda: implementation.fake_quantize(x, amax, state, spec, torch.float32, True, *offsets),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            call()


@pytest.mark.parametrize(
    "offsets, message",
    [
        ((-16, 0, 0, 0), "row0 must be a multiple of 16, where a block of the transpose begins, not -16"),
        ((8, 0, 64, 64), "row0 must be a multiple of 16, where a block of the transpose begins, not 8"),
        ((0, 0, -4, 64), "full_rows must not be negative, not -4"),
        ((0, -16, 4, 64), "must not be negative, not"),
        ((0, 8, 4, 128), "col0 must be a multiple of 16"),
        ((0, 0, 4, -64), "must not be negative"),
        ((0, 1 << 62, 1 << 20, 1 << 20), "blocks are numbered in 63 bits"),
    ],
    ids=str,
)
@pytest.mark.parametrize("implementation", [OPS, composite], ids=["the op", "plain torch"])
def test_invalid_offsets_of_a_pair_raise(device, implementation, offsets, message):
    x, amax, state = torch.ones(4, 64, device=device), torch.ones((), device=device), RNG_STATE.to(device)
    with pytest.raises((RuntimeError, ValueError), match=message):
        implementation.quantize_pair(x, amax, amax, state, STOCHASTIC, PLAIN, *offsets)


@needs_library
@pytest.mark.parametrize("offsets", [(0, 0, MOST), ((1 << 59) - 80, 16, 160), (0, 16 * ((1 << 59) - 9), 64)], ids=str)
def test_the_largest_offsets_have_the_bits_of_the_reference(offsets):
    x, amax = sample((40, 80), torch.float32), torch.tensor(9.0)
    spec = QuantizeSpec(round_mode="stochastic")
    if offsets[2] == MOST:
        x = x[:8]
    expected = reference.quantize(x, amax, RNG_STATE, spec, *offsets)
    assert_op(OPS.quantize, (x, amax, RNG_STATE, STOCHASTIC, *offsets), expected)


@needs_library
@pytest.mark.parametrize("shape", [(5, 0), (0, 48), (3, 0, 2), (0,)], ids=str)
def test_nothing_is_quantized_to_nothing(shape):
    x, amax = torch.empty(shape), torch.ones(())
    for spec in (QuantizeSpec(), QuantizeSpec(block_rows=16, hadamard_sign=True)):
        expected = reference.quantize(x, amax, None, spec)
        assert_op(OPS.quantize, (x, amax, None, spec.pack()), expected)
        if len(shape) == 2:
            both = (*expected, *reference.quantize(x.t(), amax, None, spec))
            assert_op(OPS.quantize_pair, (x, amax, amax, None, spec.pack(), spec.pack()), both)


@needs_library
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("sign", [-1, 0xD7E8])
def test_a_tensor_that_begins_at_an_odd_byte(dtype, sign):
    aligned = sample((40, 100), dtype)
    spec = QuantizeSpec(round_mode="stochastic", hadamard_sign=None if sign < 0 else sign)
    assert at_byte(aligned, 1).data_ptr() % aligned.element_size()
    for x, same in ((at_byte(aligned, 1), aligned), (at_byte(aligned, 1)[::3, 5:69], aligned[::3, 5:69])):
        amax = reference.amax(same if sign < 0 else reference.hadamard(same, sign))
        expected = reference.quantize(same, amax, RNG_STATE, spec)
        assert_op(OPS.amax, (x, sign), (amax,))
        assert_op(OPS.quantize, (x, at_byte(amax, 3), at_byte(RNG_STATE, 5), spec.pack()), expected)
        pair = (*expected, *reference.quantize(same.t(), amax, RNG_STATE, spec, stream=1))
        assert_op(OPS.quantize_pair, (x, amax, amax, RNG_STATE, spec.pack(), spec.pack()), pair)
        if sign >= 0:
            assert_op(OPS.hadamard, (x, sign), (reference.hadamard(same, sign),))
        else:
            assert_op(OPS.amax_pair, (x, sign), (amax, amax))


@needs_library
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_operands_that_begin_at_an_odd_byte(dtype, rows):
    """Products differ in the order of their sums between ways to multiply, but not with where their operands lie."""
    x, bias, factors = sample((rows, 80), dtype), sample((48,), torch.float32, 1), torch.rand(48)
    codes, scale, _ = reference.quantize(sample((48, 80), torch.float32, 2), torch.tensor(9.0), None, QuantizeSpec())
    odd_codes, odd_scale = at_byte(codes, 1), at_byte(scale, 1)
    x_scale, dtypes = torch.rand(rows), (dtype, torch.float32)
    for out_dtype in dtypes:
        decoded = OPS.dequantize(codes, scale, factors, 80, out_dtype)
        assert torch.equal(OPS.dequantize(odd_codes, odd_scale, at_byte(factors, 1), 80, out_dtype), decoded)
        plain = OPS.matmul(x, x_scale, codes, scale, factors, bias, 80, False, out_dtype)
        odd = [at_byte(t, 1) for t in (x, x_scale, factors, bias)]
        y = OPS.matmul(odd[0], odd[1], odd_codes, odd_scale, odd[2], odd[3], 80, False, out_dtype)
        assert torch.equal(y, plain) and plain.isfinite().all() and plain.any()
