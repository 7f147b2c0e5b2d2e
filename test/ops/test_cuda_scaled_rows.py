"""Quantization with one scale per row on CUDA against the reference, bit for bit."""

import itertools

import pytest
import torch
from helpers.bits import EMPTY_SHAPES, MAGNITUDES, MODES, SHAPES, assert_same_bits, inputs, rng_state

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops import composite

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]
N = torch.ops.nvfp4
CHOICES = [
    {},
    {"scale_rounding": "up"},
    {"scale_ceiling": 256},
    {"four_over_six": "mse"},
    {"four_over_six": "mae", "scale_ceiling": 448},
    {"scale_search": "mse"},
    {"hadamard_sign": 0xD7E8},
]
# Columns: one block, part of a warp, several units in a thread block, clusters of 2 to 8, with one and with two blocks
# a lane, and rows that are read twice (on a GPU without clusters from 8208 on).
WIDE = [16, 256, 528, 1024, 2048, 4096, 4112, 8192, 8208, 14336, 16400, 28672, 65536, 65552]


def uneven(shape, dtype, magnitude=1.0, poison=True):
    """Rows of very different magnitudes, one of zeros and, if poison, one all of whose elements are not finite."""
    x = inputs(shape, dtype, magnitude, poison)
    rows = x.view(-1, x.shape[-1]).float() * torch.logspace(-3, 0, max(x[..., 0].numel(), 1))[:, None]
    if len(rows) > 4:
        rows[2] = 0
        rows[4] = float("inf") if poison else rows[4]
    return rows.view(shape).to(dtype)


def check(x, spec, amax=None, on_gpu=None, offsets=(0, 0, 0), stream=0):
    """Compare with the reference: on the CPU, but for large tensors, which would take it long."""
    state = rng_state()
    on_gpu = x.cuda() if on_gpu is None else on_gpu
    actual = N.quantize_rows(on_gpu, None if amax is None else amax.cuda(), state.cuda(), spec.pack(), *offsets, stream)
    if x.numel() > 1 << 20:
        x, state, amax = (None if t is None else t.cuda() for t in (x, state, amax))
    own = reference.row_amax(x, spec.hadamard_sign) if amax is None else amax
    expected = reference.quantize(x, own, state, spec, *offsets, stream)
    assert_same_bits(actual, [t.cpu() for t in expected], f"{spec}, {tuple(x.shape)}, {x.dtype}")


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_spec_and_shape(dtype, choice):
    for i, (shape, mode) in enumerate(itertools.product(SHAPES, MODES)):
        spec = QuantizeSpec(row_scaled=True, **choice, **mode)
        check(uneven(shape, dtype, MAGNITUDES[dtype][i % 4], poison=i % 2 == 0), spec)


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("columns", WIDE)
def test_every_share_of_columns(dtype, columns):
    for rows, mode in itertools.product((1, 2, 33, 129, 300), ({}, MODES[3])):
        check(uneven((rows, columns), dtype), QuantizeSpec(row_scaled=True, **mode))


def test_more_rows_than_the_machine_holds():
    """A thread block, or a cluster, has many units, one after the other."""
    for shape in ((70000, 64), (9000, 2048), (9000, 4096), (3000, 16384), (1500, 28672), (700, 70000)):
        check(uneven(shape, torch.bfloat16), QuantizeSpec(row_scaled=True, round_mode="stochastic"))


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("columns", [96, 4096, 16400, 65600])
def test_given_amaxes(dtype, columns):
    x = uneven((40, columns), dtype)
    amax = torch.logspace(-2, 1, 40)
    amax[7] = 0
    for mode in ({}, MODES[1], MODES[3]):
        spec = QuantizeSpec(row_scaled=True, **mode)
        check(x, spec, amax)
        given = N.quantize_rows(x.cuda(), -amax.cuda(), rng_state().cuda(), QuantizeSpec(row_scaled=True).pack())
        assert torch.equal(given[2].cpu(), reference.per_tensor_scale(amax, spec))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_offsets_views_and_empty_tensors(mode):
    spec = QuantizeSpec(row_scaled=True, **mode)
    x = uneven((70, 128), torch.bfloat16)
    check(x, spec, offsets=(16, 32, 500), stream=3)
    wide = x.cuda()
    check(x[:, :64], spec, on_gpu=wide[:, :64])
    check(x[:, 1:65], spec, on_gpu=wide[:, 1:65])
    check(x.t(), spec, on_gpu=wide.t())
    check(x[::2], spec, on_gpu=wide[::2])
    for shape in EMPTY_SHAPES:
        check(torch.ones(shape), spec)


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_activations(dtype, choice):
    shapes = [*SHAPES, (300, 4096), (5, 20480), (3, 66000)]
    for i, (shape, mode) in enumerate(itertools.product(shapes, (MODES[0], MODES[3]))):
        spec = QuantizeSpec(row_scaled=True, **choice, **mode)
        x, state = uneven(shape, dtype, poison=i % 2 == 0), rng_state()
        actual = N.quantize_activation(x.cuda(), state.cuda(), spec.pack(), torch.bfloat16)
        qdata, scale, factor = N.quantize_rows(x.cuda(), None, state.cuda(), spec.pack())
        columns = composite.columns_of_values(x.shape[-1], spec.pack())
        values = N.dequantize(qdata, scale, None, columns, torch.bfloat16)
        assert_same_bits(actual, (values.cpu(), factor.cpu()), f"{spec}, {shape}")


def test_repeats_bit_for_bit():
    x, state = uneven((3000, 14336), torch.bfloat16).cuda(), rng_state().cuda()
    spec = QuantizeSpec(row_scaled=True, round_mode="stochastic").pack()
    first = N.quantize_rows(x, None, state, spec)
    for _ in range(10):
        assert_same_bits(N.quantize_rows(x, None, state, spec), [t.cpu() for t in first])
