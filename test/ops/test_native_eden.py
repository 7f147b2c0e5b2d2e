"""EDEN's CPU kernels against the reference, bit for bit, on each instruction set."""

import itertools
import math

import pytest
import torch
from helpers.instruction_sets import assert_op, assert_same_bits, each_instruction_set, needs_library, sample

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import eden, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops import composite as ops

pytestmark = needs_library

OPS = torch.ops.nvfp4
STATE = torch.tensor([-7046029254386353131, 1442695040888963407])
SPECS = [QuantizeSpec(round_mode="eden", scale_ceiling=ceiling) for ceiling in (256, 448)]
EDEN = SPECS[0]
SHAPES = ((1, 128), (33, 50), (20, 256), (5, 300), (3, 640), (2, 3, 130), (7,), (130, 384), (1, 4100))


@pytest.fixture(autouse=True)
def one_thread():
    """The reference's small tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(x, spec=EDEN, amax=None, offsets=(0, 0, 0), stream=0):
    own = eden.amax(x, STATE, offsets[1])
    assert_op(OPS.amax_rotated, (x, STATE, offsets[1]), (own,))
    rotated = eden.rotate(x, STATE, col0=offsets[1])
    assert_op(OPS.rotate, (x, STATE, False, offsets[1]), (rotated,))
    assert_op(OPS.rotate, (rotated, STATE, True, offsets[1]), (eden.rotate(rotated, STATE, True, offsets[1]),))
    expected = reference.quantize(x, own if amax is None else amax, STATE, spec, *offsets, stream)
    assert_op(OPS.quantize, (x, amax, STATE, spec.pack(), *offsets, stream), expected)


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype(shape, dtype):
    x = sample(shape, dtype)
    for spec in SPECS:
        check(x, spec)
    check(x, offsets=(1 << 33, 256, 1 << 20), stream=3)


def test_strides():
    x = sample((64, 400), torch.bfloat16)
    for y in (x.t(), x[::2], x[:, 3:300], x[:, ::2], x[:, :256], x.expand(2, 64, 400), x[5:6]):
        check(y)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-38, 1e-30, 1e-5, 1e4, 1e30, 1e37, 3e38])
def test_magnitudes(scale):
    x = sample((12, 300), torch.float32).clamp(-1, 1) * scale
    check(x)
    check(x, amax=torch.tensor(scale / 100))
    check(x, amax=torch.tensor(0.0))


def test_what_is_not_finite():
    x = sample((9, 520), torch.float32)
    x[1, 3], x[2, 200], x[3, 519], x[8, 300] = math.nan, -math.inf, math.inf, -math.nan
    x[4] = -0.0
    for dtype in HIGH_PRECISION_DTYPES:
        check(x.to(dtype))
    check(x, amax=torch.tensor(math.nan))
    check(x, amax=torch.tensor(math.inf))


@pytest.mark.parametrize("shape", [(0,), (0, 128), (5, 0), (3, 0, 32)], ids=str)
def test_empty_tensors(shape):
    check(torch.empty(shape))


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_pairs(dtype):
    others = QuantizeSpec(), QuantizeSpec(round_mode="stochastic", hadamard_sign=True), EDEN
    for shape, other, eden_first in itertools.product(((40, 150), (300, 530)), others, (True, False)):
        x = sample(shape, dtype)
        spec, spec_t = (EDEN, other) if eden_first else (other, EDEN)
        amax, amax_t = (torch.tensor(6.0), torch.tensor(5.0))
        for offsets, stream in (((0, 0, 0, 0), 1), ((128, 256, 1024, 2048), 3)):
            args = x, amax, amax_t, STATE, spec.pack(), spec_t.pack(), *offsets, stream
            assert_op(OPS.quantize_pair, args, ops.quantize_pair(*args))


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_fake_quantize_and_activations(dtype):
    x = sample((20, 300), dtype)
    amax = eden.amax(x, STATE)
    qdata, scale, factor = reference.quantize(x, amax, STATE, EDEN)
    for out_dtype, scaled in itertools.product(HIGH_PRECISION_DTYPES, (True, False)):
        values = reference.dequantize(qdata, scale, factor if scaled else None, 384, out_dtype)
        assert_op(OPS.fake_quantize, (x, amax, STATE, EDEN.pack(), out_dtype, scaled), (values, factor))
    values = reference.dequantize(qdata, scale, None, 384, torch.bfloat16)
    assert_op(OPS.quantize_activation, (x, STATE, EDEN.pack(), torch.bfloat16), (values, factor))


def test_threads_do_not_matter():
    x = sample((512, 640), torch.bfloat16)
    expected = reference.quantize(x, eden.amax(x, STATE), STATE, EDEN)
    for _ in each_instruction_set():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for actual, right in zip(OPS.quantize(x, None, STATE, EDEN.pack()), expected, strict=True):
                assert_same_bits(actual, right)


def test_what_is_refused():
    x = torch.zeros(4, 256)
    with pytest.raises(RuntimeError, match="EDEN needs rng_state"):
        OPS.quantize(x, None, None, EDEN.pack())
    with pytest.raises(RuntimeError, match="EDEN needs rng_state"):
        OPS.quantize_activation(x, None, EDEN.pack(), torch.bfloat16)
    with pytest.raises(RuntimeError, match="multiple of 128, where a rotation begins, not 16"):
        OPS.quantize(x, None, STATE, EDEN.pack(), 0, 16, 512)
    with pytest.raises(RuntimeError, match="multiple of 128, where a rotation begins, not 16"):
        OPS.quantize_pair(x, x.sum(), x.sum(), STATE, QuantizeSpec().pack(), EDEN.pack(), 16)
    with pytest.raises(RuntimeError, match="multiple of 128, where a rotation begins, not -128"):
        OPS.amax_rotated(x, STATE, -128)
    with pytest.raises(RuntimeError, match="rng_state must be int64"):
        OPS.rotate(x, STATE[:1])
    with pytest.raises(RuntimeError, match="a multiple of 128 columns, not 200"):
        OPS.rotate(x[:, :200], STATE, True)
    for bits in (1 << 12 | 1, 1 << 12 | 1 << 3, 1 << 12 | 1 << 7, 1 << 12 | 1 << 10, 1 << 10 | 1 << 4, 1 << 11):
        with pytest.raises(RuntimeError, match=r"QuantizeSpec\.pack"):
            OPS.quantize(x, None, STATE, bits)
