"""The CUDA kernels against the reference, bit for bit, over dtypes, modes, shapes, strides and magnitudes.

What the reference computes on the CPU is the oracle; every comparison is of bits (NaN equal to NaN).
"""

import itertools

import pytest
import torch
from helpers.bits import EMPTY_SHAPES, MAGNITUDES, MODES, SHAPES, assert_same_bits, equal_bits, inputs, rng_state

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES, TILE_ROWS
from nvfp4_tensor.ops import composite as ops
from nvfp4_tensor.testing import selftest

N = torch.ops.nvfp4
gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cuda_kernels(request):
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("cuda_library")


def specs(**common):
    """Every rounding mode with every way to choose scales that ``common`` leaves open."""
    for mode, scale_rounding, four_over_six, ceiling in itertools.product(
        MODES, ("nearest", "up"), (None, "mae", "mse"), (448, 256)
    ):
        yield QuantizeSpec(
            scale_rounding=scale_rounding, four_over_six=four_over_six, scale_ceiling=ceiling, **mode, **common
        )


def amax_of(x, spec):
    return ops.amax(x, -1 if spec.hadamard_sign is None else spec.hadamard_sign)


def check_quantize(x, spec, on_gpu=None, offsets=(0, 0, 0), stream=0):
    state, amax = rng_state(), amax_of(x, spec)
    expected = reference.quantize(x, amax, state, spec, *offsets, stream)
    on_gpu = x.cuda() if on_gpu is None else on_gpu
    actual = N.quantize(on_gpu, amax.cuda(), state.cuda(), spec.pack(), *offsets, stream)
    assert_same_bits(actual, expected, f"{spec}, {tuple(x.shape)}, {x.dtype}")


# --- quantize --------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("hadamard_sign", [None, 0xD7E8])
def test_quantize_every_spec(dtype, block_rows, hadamard_sign):
    for i, spec in enumerate(specs(block_rows=block_rows, hadamard_sign=hadamard_sign)):
        check_quantize(inputs(SHAPES[i % len(SHAPES)], dtype, 1.0, poison=i % 2 == 0), spec)


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_quantize_every_shape_and_magnitude(dtype, mode):
    for shape, block_rows in itertools.product(SHAPES, (1, 16)):
        for magnitude in MAGNITUDES[dtype]:
            check_quantize(inputs(shape, dtype, magnitude), QuantizeSpec(block_rows=block_rows, **mode))


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("four_over_six", ["mae", "mse"])
def test_four_over_six_every_shape_and_magnitude(dtype, four_over_six):
    for shape, block_rows, mode in itertools.product(SHAPES, (1, 16), MODES[::3]):
        for magnitude in MAGNITUDES[dtype]:
            spec = QuantizeSpec(block_rows=block_rows, four_over_six=four_over_six, **mode)
            check_quantize(inputs(shape, dtype, magnitude), spec)


@gpu
@pytest.mark.parametrize("shape", EMPTY_SHAPES)
def test_empty(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    check_quantize(x, QuantizeSpec())
    assert N.amax(x.cuda()).item() == 0


@gpu
def test_strided_and_unaligned_rows():
    for padding, offset, columns in itertools.product((0, 3, 16), (0, 1, 8), (64, 50)):
        storage = inputs((offset + 40 * (columns + padding),), torch.bfloat16, 1.0)
        for spec in (QuantizeSpec(), QuantizeSpec(round_mode="stochastic", block_rows=16)):
            view = storage[offset:].view(40, columns + padding)[:, :columns]
            on_gpu = storage.cuda()[offset:].view(40, columns + padding)[:, :columns]
            check_quantize(view, spec, on_gpu)
            assert_same_bits([N.amax(on_gpu)], [ops.amax(view)])
    x = inputs((48, 80), torch.bfloat16, 1.0)
    check_quantize(x.t(), QuantizeSpec(), x.cuda().t())


@gpu
def test_random_bits_follow_the_offset_in_the_full_tensor():
    spec = QuantizeSpec(round_mode="stochastic")
    x, state = torch.randn(200, 320).bfloat16(), rng_state()
    amax = ops.amax(x)
    whole = N.quantize(x.cuda(), amax.cuda(), state.cuda(), spec.pack())[0].cpu()
    for rows, columns in ((slice(0, 37), slice(0, 320)), (slice(37, 200), slice(64, 208))):
        piece = x[rows, columns].cuda()
        offsets = (rows.start, columns.start, 320)
        got = N.quantize(piece, amax.cuda(), state.cuda(), spec.pack(), *offsets)[0].cpu()
        assert torch.equal(got, whole[rows, columns.start // 2 : columns.stop // 2])
    for offsets in ((2**31 + 5, 16, 2**33), (0, 2**20, 2**24)):
        check_quantize(x[:20], spec, offsets=offsets, stream=1)


@gpu
def test_bits_do_not_depend_on_the_launch():
    """One row alone, and the same row within a matrix that fills the device many times over."""
    spec = QuantizeSpec(round_mode="stochastic")
    x, state = torch.randn(5000, 4096, device="cuda").bfloat16(), rng_state().cuda()
    amax = N.amax(x)
    whole = N.quantize(x, amax, state, spec.pack())[0]
    for row in (0, 1, 2499, 4999):
        assert torch.equal(N.quantize(x[row : row + 1], amax, state, spec.pack(), row)[0], whole[row : row + 1])


@gpu
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("four_over_six", [None, "mse"])
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_fast_kernels_make_the_bits_of_the_general_one(mode, four_over_six, block_rows):
    """Where every thread has several blocks; a matrix that does not begin on 16 bytes is the general kernel's."""
    spec = QuantizeSpec(block_rows=block_rows, four_over_six=four_over_six, **mode).pack()
    unaligned = torch.randn(8192 * 16384 + 1, device="cuda").bfloat16()[1:].view(8192, 16384)
    amax, state = N.amax(unaligned), rng_state().cuda()
    general, fast = (N.quantize(x, amax, state, spec) for x in (unaligned, unaligned.clone()))
    assert equal_bits(fast, general)
    qdata, scale, factor = fast
    values, last = N.dequantize(*fast, 16384, torch.bfloat16), slice(8192 - TILE_ROWS, 8192)
    assert equal_bits([N.dequantize(qdata[last], scale[-1:], factor, 16384, torch.bfloat16)], [values[last]])


@gpu
def test_cuda_graph_replay_draws_what_rng_state_holds():
    spec = QuantizeSpec(round_mode="stochastic")
    x, state = torch.randn(256, 512).bfloat16(), rng_state()
    on_gpu, on_gpu_state = x.cuda(), state.cuda()
    N.quantize(on_gpu, N.amax(on_gpu), on_gpu_state, spec.pack())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = N.quantize(on_gpu, N.amax(on_gpu), on_gpu_state, spec.pack())
    seen = []
    for _ in range(2):
        on_gpu_state.copy_(state)
        graph.replay()
        assert_same_bits(replayed, reference.quantize(x, ops.amax(x), state, spec))
        seen.append(replayed[0].cpu())
        state = rng_state()
    assert not torch.equal(*seen)


# --- pair, amax, Hadamard --------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (130, 272), (16, 16), (33, 50), (300, 144), (0, 32), (32, 0)], ids=str
)
def test_pair(dtype, shape):
    for mode, mode_t, sign in itertools.product(MODES, MODES, (None, 0xD7E8, 0x1234)):
        if mode != mode_t and sign == 0x1234:
            continue
        x, state = inputs(shape, dtype, 1.0), rng_state()
        spec, spec_t = QuantizeSpec(**mode), QuantizeSpec(hadamard_sign=sign, **mode_t)
        amaxes = ops.amax_pair(x, -1 if sign is None else sign)
        assert_same_bits(N.amax_pair(x.cuda(), -1 if sign is None else sign), amaxes, "amax_pair")
        offsets = (64, 32, 4096, 1 << 20)
        expected = ops.quantize_pair(x, *amaxes, state, spec.pack(), spec_t.pack(), *offsets)
        on_gpu = [a.cuda() for a in amaxes]
        actual = N.quantize_pair(x.cuda(), *on_gpu, state.cuda(), spec.pack(), spec_t.pack(), *offsets)
        assert_same_bits(actual, expected, f"{spec} and {spec_t}, {shape}, {dtype}")


@gpu
@pytest.mark.parametrize("sign", [None, 0xD7E8])
def test_pair_of_a_matrix_that_fills_the_device(sign):
    """Every thread block has several tiles; the two sides alone are the oracle."""
    spec, spec_t = (QuantizeSpec(round_mode="stochastic", hadamard_sign=s).pack() for s in (None, sign))
    x, state = torch.randn(8000, 7056, device="cuda").bfloat16(), rng_state().cuda()
    amaxes = N.amax_pair(x, -1 if sign is None else sign)
    x_t = x.t().contiguous()
    assert torch.equal(amaxes[1], N.amax(x_t, -1 if sign is None else sign))
    alone = *N.quantize(x, amaxes[0], state, spec), *N.quantize(x_t, amaxes[1], state, spec_t, stream=1)
    pair = N.quantize_pair(x, *amaxes, state, spec, spec_t)
    assert equal_bits(pair, alone)


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
def test_amax_and_hadamard(dtype):
    for shape, magnitude in itertools.product(SHAPES, MAGNITUDES[dtype]):
        x = inputs(shape, dtype, magnitude)
        assert_same_bits([N.amax(x.cuda())], [ops.amax(x)])
        assert_same_bits([N.amax(x.cuda(), 0xD7E8)], [ops.amax(x, 0xD7E8)])
        assert_same_bits([N.hadamard(x.cuda(), 0xD7E8)], [reference.hadamard(x, 0xD7E8)])


# --- dequantize, fake quantize ---------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("out_dtype", HIGH_PRECISION_DTYPES)
def test_fake_quantize_and_dequantize(dtype, out_dtype):
    for shape, mode, block_rows, sign in itertools.product((*SHAPES, (3, 4112)), MODES, (1, 16), (None, 0xD7E8)):
        spec = QuantizeSpec(block_rows=block_rows, hadamard_sign=sign, **mode)
        x, state = inputs(shape, dtype, 1.0), rng_state()
        amax, scaled = amax_of(x, spec), block_rows == 1
        quantized = reference.quantize(x, amax, state, spec)
        columns = quantized[0].shape[-1] * 2 if sign is not None else x.shape[-1]
        factor = quantized[2] if scaled else None
        values = reference.dequantize(*quantized[:2], factor, columns, out_dtype)
        on_gpu = [None if t is None else t.cuda() for t in (*quantized[:2], factor)]
        assert_same_bits([N.dequantize(*on_gpu, columns, out_dtype)], [values], f"dequantize {shape}")
        actual = N.fake_quantize(x.cuda(), amax.cuda(), state.cuda(), spec.pack(), out_dtype, scaled)
        assert_same_bits(actual, (values, quantized[2]), f"fake_quantize {spec}, {shape}")


@gpu
@pytest.mark.parametrize("scaled", [True, False])
def test_fake_quantize_of_a_large_tensor(scaled):
    """Large enough to be quantized and decoded by two kernels, where one does not serve."""
    x, state = torch.randn(1024, 1040, device="cuda").bfloat16(), rng_state().cuda()
    for choices in ({"four_over_six": "mae"}, {"block_rows": 16}, {"hadamard_sign": True}, {}):
        spec = QuantizeSpec(round_mode="stochastic", **choices).pack()
        quantized = N.quantize(x, N.amax(x), state, spec)
        for dtype in (torch.bfloat16, torch.float32):
            values = N.dequantize(*quantized[:2], quantized[2] if scaled else None, x.shape[1], dtype)
            fake = N.fake_quantize(x, N.amax(x), state, spec, dtype, scaled)
            assert equal_bits(fake, (values, quantized[2]))


@gpu
def test_dequantize_with_a_factor_a_row():
    qdata, scale, _ = reference.quantize(torch.randn(71, 96), torch.tensor(4.0), None, QuantizeSpec())
    factors = torch.rand(71)
    expected = reference.dequantize(qdata, scale, factors, 96, torch.bfloat16)
    assert_same_bits([N.dequantize(qdata.cuda(), scale.cuda(), factors.cuda(), 96, torch.bfloat16)], [expected])


@gpu
@pytest.mark.parametrize("columns", [144, 140])
def test_scale_bytes_from_0x7f_on_mean_nan(columns):
    """Each row has one scale, of all 256 bytes."""
    scale = layout.swizzle(torch.arange(256, dtype=torch.uint8).unsqueeze(-1).expand(-1, 9).clone())
    codes = torch.randint(0, 256, (256, 72), dtype=torch.uint8)
    for dtype, factor in itertools.product(HIGH_PRECISION_DTYPES, (torch.tensor(2.0**-9), None, torch.rand(256))):
        expected = reference.dequantize(codes, scale, factor, columns, dtype)
        on_gpu = codes.cuda(), scale.cuda(), None if factor is None else factor.cuda()
        assert_same_bits([N.dequantize(*on_gpu, columns, dtype)], [expected], f"{dtype}")
        assert expected[0x7F:].isnan().all()


@gpu
@pytest.mark.parametrize("bits", [0xC0400000, 0xFFC00000, 0xFF800000, 0x80000000], ids=["-3", "-nan", "-inf", "-0"])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_the_sign_of_amax_is_left_out(bits, block_rows):
    """It would make block scales of 0x80 and more, beyond the kernels' tables of 128."""
    amax = torch.tensor(bits - (1 << 32), dtype=torch.int32).view(torch.float32)
    for dtype, shape in itertools.product(HIGH_PRECISION_DTYPES, ((200, 320), (33, 50))):
        x, state = inputs(shape, dtype, 1.0), rng_state()
        on_gpu = x.cuda(), amax.cuda(), state.cuda()
        for spec in list(specs(block_rows=block_rows))[::7]:
            expected = reference.quantize(x, amax.abs(), state, spec)
            assert_same_bits(N.quantize(*on_gpu, spec.pack()), expected, f"{spec}, {shape}, {dtype}")
            values = reference.dequantize(*expected, shape[-1], dtype)
            actual = N.fake_quantize(*on_gpu, spec.pack(), dtype)
            assert_same_bits(actual, (values, expected[2]), f"fake_quantize, {spec}, {shape}, {dtype}")
        plain = QuantizeSpec()
        assert_same_bits(reference.quantize(*on_gpu, plain), reference.quantize(x, amax.abs(), state, plain))
        pair = N.quantize_pair(on_gpu[0], amax.cuda(), amax.cuda(), None, plain.pack(), plain.pack())
        column = reference.quantize(x.t(), amax.abs(), None, plain, stream=1)
        assert_same_bits(pair, (*reference.quantize(x, amax.abs(), None, plain), *column), f"pair, {shape}, {dtype}")


@gpu
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_dequantize_at_any_address(at_offset, offset):
    quantized = reference.quantize(torch.randn(130, 80), torch.tensor(4.0), None, QuantizeSpec())
    expected = reference.dequantize(*quantized, 80, torch.bfloat16)
    for codes, scales in ((offset, 0), (0, offset), (offset, offset)):
        qdata, scale = at_offset(quantized[0], codes), at_offset(quantized[1].view(torch.uint8), scales)
        factor = at_offset(quantized[2], offset)
        for scale_or_bytes in (scale, scale.view(torch.float8_e4m3fn)):
            assert_same_bits([N.dequantize(qdata, scale_or_bytes, factor, 80, torch.bfloat16)], [expected])


@gpu
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_quantize_at_any_address(at_offset, offset):
    for dtype, sign in itertools.product(HIGH_PRECISION_DTYPES, (None, 0xD7E8)):
        x, state = inputs((130, 80), dtype, 1.0), rng_state()
        spec, spec_t = QuantizeSpec(), QuantizeSpec(round_mode="stochastic", hadamard_sign=sign)
        on_gpu = at_offset(x, offset)
        for way in (spec, spec_t, QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six="mse")):
            check_quantize(x, way, on_gpu)
        amaxes = ops.amax_pair(x, -1 if sign is None else sign)
        assert_same_bits(N.amax_pair(on_gpu, -1 if sign is None else sign), amaxes)
        own = [at_offset(a, offset) for a in amaxes]
        expected = ops.quantize_pair(x, *amaxes, state, spec.pack(), spec_t.pack())
        packed = spec.pack(), spec_t.pack()
        assert_same_bits(N.quantize_pair(on_gpu, *own, at_offset(state, offset), *packed), expected)
        fake, _ = N.fake_quantize(on_gpu, own[0], None, spec.pack(), dtype)
        assert_same_bits([fake], [reference.dequantize(*expected[:3], 80, dtype)])
        activation, _ = N.quantize_activation(on_gpu, None, spec.pack(), dtype)
        assert_same_bits([activation], [reference.dequantize(*expected[:2], None, 80, dtype)])


@gpu
@pytest.mark.parametrize("spec", selftest.SPECS, ids=str)
@pytest.mark.parametrize("shape", [(1, 128), (8, 4096), (300, 512)], ids=str)
def test_activations_of_every_spec(spec, shape):
    """Small activations have a kernel of their own, which supports some specs: the others must not reach it."""
    for magnitude in (1e-3, 1.0):
        x, state = inputs(shape, torch.bfloat16, magnitude), rng_state()
        expected = ops.quantize_activation(x, state, spec.pack(), torch.bfloat16)
        assert_same_bits(N.quantize_activation(x.cuda(), state.cuda(), spec.pack(), torch.bfloat16), expected)


@gpu
def test_invalid_codes_and_scales_raise():
    codes = torch.zeros(256, 64, dtype=torch.uint8, device="cuda")
    scale = torch.zeros(2, 2, 32, 16, dtype=torch.uint8, device="cuda")
    x, one = torch.ones(1, 128, device="cuda").bfloat16(), torch.ones((), device="cuda")
    for bad_codes, bad_scale, message in (
        (codes, scale.cpu(), "scale is not on the device of qdata"),
        (codes.cpu(), scale, "qdata is"),
        (codes, scale.view(torch.float8_e5m2), "not Float8_e5m2"),
        (codes, scale.transpose(2, 3), "swizzled"),
        (codes, torch.cat((scale, scale), dim=1), "swizzled"),
        (codes[:, :60].contiguous(), scale, "whole blocks of 8 bytes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            N.dequantize(bad_codes, bad_scale, None, 128, torch.float32)
        with pytest.raises(RuntimeError, match=message):
            N.matmul(x, None, bad_codes, bad_scale, one, None, 128, False, torch.float32)
        with pytest.raises(RuntimeError, match=message):
            offs = torch.ones(1, dtype=torch.int32, device="cuda")
            N.grouped_linear(x, None, bad_codes[None], bad_scale, one, offs, torch.float32)


@gpu
def test_invalid_arguments_raise():
    x, amax = torch.randn(16, 32, device="cuda"), torch.tensor(1.0, device="cuda")
    with pytest.raises(RuntimeError, match="rng_state"):
        N.quantize(x, amax, None, QuantizeSpec(round_mode="stochastic").pack())
    with pytest.raises(RuntimeError, match="bfloat16, float16 or float32"):
        N.quantize(x.double(), amax, None, QuantizeSpec().pack())
    with pytest.raises(RuntimeError, match="amax"):
        N.quantize(x, torch.tensor(1.0), None, QuantizeSpec().pack())
    with pytest.raises(RuntimeError, match="x is on the CPU"):
        N.quantize(x.cpu(), amax, None, QuantizeSpec().pack())
    with pytest.raises(RuntimeError, match="is what QuantizeSpec"):
        N.quantize(x, amax, None, 1 << 13)
    with pytest.raises(RuntimeError, match="mask from 0 to 0xFFFF"):
        N.amax(x, 1 << 31)
