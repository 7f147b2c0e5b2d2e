"""EDEN's rotation and its inverse against the reference, bit for bit; the codes of a rotation: test_quantize.py."""

import itertools

import pytest
import torch
from helpers.bits import EMPTY_SHAPES, MAGNITUDES, SHAPES, assert_same_bits, inputs, rng_state
from helpers.instruction_sets import assert_op

from nvfp4_tensor.numerics import eden
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops.schemas import plain

N = torch.ops.nvfp4


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_rotate_and_its_amax(kernels, dtype):
    col0s = itertools.cycle((0, 256, 1 << 40))
    for shape, magnitude in itertools.product((*SHAPES, (260, 640), *EMPTY_SHAPES), (*MAGNITUDES[dtype], 0.0)):
        x, state, col0 = inputs(shape, dtype, magnitude), rng_state(), next(col0s)
        y = eden.rotate(x, state, col0=col0)
        assert_op(N.rotate, (x, state, False, col0), (y,), kernels)
        assert_op(N.amax_rotated, (x, state, col0), (eden.amax(x, state, col0),), kernels)
        assert_op(N.rotate, (y, state, True, col0), (eden.rotate(y, state, True, col0),), kernels)


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_rotate_back_is_rounded_and_cut(device, dtype):
    sizes = [(7, 128, 128), (260, 640, 600), (9, 1024, 1000), (33, 256, 135), (5, 256, 0)]
    for rows, columns, kept in (*sizes, *([(8000, 7168, 7056)] if device == "cuda" else [])):
        x, state = inputs((rows, columns), dtype, 1.0), rng_state()
        expected = eden.rotate(x, state, True, 256)[:, :kept].bfloat16()
        back = N.rotate_back(x.to(device), state.to(device), kept, 256)
        assert back.is_contiguous()
        assert_same_bits([back], [expected], f"{rows, columns, kept}")


@pytest.mark.gpu
def test_a_rotation_does_not_depend_on_the_launch(cuda_library):
    """Every group of lanes has several rotations; the same rows a few at a time are the oracle."""
    x, state = torch.randn(6000, 4224, device="cuda").bfloat16(), rng_state().cuda()
    y = N.rotate(x, state)
    assert torch.equal(N.amax_rotated(x, state), y.abs().max())
    for start in range(0, 6000, 1500):
        assert torch.equal(N.rotate(x[start : start + 1500], state), y[start : start + 1500])


@pytest.mark.parametrize("implementation", [N, plain], ids=["the op", "plain torch"])
def test_what_is_refused(device, implementation):
    x, state = torch.zeros(4, 256, device=device), rng_state().to(device)
    for call, message in (
        (lambda: implementation.rotate(x, state, False, 64), "col0 must be a multiple of 128.*not 64"),
        (lambda: implementation.amax_rotated(x, state, -128), "multiple of 128, where a rotation begins, not -128"),
        (lambda: implementation.rotate(x[:, :200], state, True), "a multiple of 128 columns, not 200"),
        (lambda: implementation.rotate_back(x, state, 300), "columns is at most the 256 of x, not 300"),
        (lambda: implementation.rotate_back(x, state, -1), "columns is at most the 256 of x, not -1"),
        (lambda: implementation.rotate(x[0, 0], state), "at least one dimension"),
        (lambda: N.rotate(x, state[:1]), "rng_state must be int64|out of bounds|out of range"),
    ):
        with pytest.raises((RuntimeError, ValueError, IndexError), match=message):
            call()
