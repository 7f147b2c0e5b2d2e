"""The CUDA kernels that training adds, against the reference, bit for bit: scale search, EDEN, pairs as values."""

import itertools

import pytest
import torch
from helpers.bits import EMPTY_SHAPES, MAGNITUDES, MODES, SHAPES, assert_same_bits, equal_bits, inputs, rng_state

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import eden, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops import composite as ops

N = torch.ops.nvfp4
FAST_MODES = [MODES[0], MODES[3], MODES[4]]
WIDE_SHAPES = [*SHAPES, (5, 128), (260, 640), (9, 1000)]

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _cuda_kernels(request):
    if request.node.get_closest_marker("gpu") is not None:
        request.getfixturevalue("cuda_library")


# --- scale search ----------------------------------------------------------------------------------------------------


def search_specs(**common):
    for mode, scale_rounding, ceiling in itertools.product(MODES, ("nearest", "up"), (448, 256)):
        yield QuantizeSpec(scale_search="mse", scale_rounding=scale_rounding, scale_ceiling=ceiling, **mode, **common)


def check_search(x, spec, amax=None, offsets=(0, 0, 0)):
    state = rng_state()
    amax = ops.amax(x, -1 if spec.hadamard_sign is None else spec.hadamard_sign) if amax is None else amax
    expected = reference.quantize(x, amax, state, spec, *offsets)
    actual = N.quantize(x.cuda(), amax.cuda(), state.cuda(), spec.pack(), *offsets)
    assert_same_bits(actual, expected, f"{spec}, {tuple(x.shape)}, {x.dtype}")


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
def test_search_every_spec_shape_and_magnitude(dtype, block_rows):
    choices = itertools.cycle(search_specs(block_rows=block_rows))
    for shape, magnitude in itertools.product((*SHAPES, (64, 512)), MAGNITUDES[dtype]):
        for spec in itertools.islice(choices, 7):  # of 20: every one meets every shape's kind
            check_search(inputs(shape, dtype, magnitude), spec, offsets=(32, 16, 5000))


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("block_rows", [1, 16])
def test_search_of_what_its_scales_cannot_follow(dtype, block_rows):
    """Blocks of all sizes, ties, and an amax that saturates them, is zero, or is not finite."""
    x = torch.randn(256, 256) * torch.logspace(-7, 4, 256).unsqueeze(1).clamp(max=6e4)
    x[64:128] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64, 32)  # ties, whatever the scale is
    x[128:136, :64] = 0.0
    x = x.clamp(-6e4, 6e4).to(dtype)
    for amax in (x.float().abs().max().item(), 1.0, 1e-3, 1e-30, 0.0, float("inf"), float("nan")):
        for scale_rounding in ("nearest", "up"):
            spec = QuantizeSpec(scale_search="mse", scale_rounding=scale_rounding, block_rows=block_rows)
            check_search(x, spec, torch.tensor(amax))


@gpu
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_search_where_every_thread_has_several_blocks(mode, block_rows):
    """A matrix that does not begin on 16 bytes is the general kernel's."""
    spec = QuantizeSpec(block_rows=block_rows, scale_search="mse", **mode).pack()
    unaligned = torch.randn(8192 * 8192 + 1, device="cuda").bfloat16()[1:].view(8192, 8192)
    amax, state = N.amax(unaligned), rng_state().cuda()
    general, fast = (N.quantize(x, amax, state, spec) for x in (unaligned, unaligned.clone()))
    assert equal_bits(fast, general)


@gpu
@pytest.mark.parametrize("shape", [(33, 64), (130, 272), (1030, 1040)], ids=str)
def test_search_to_values_and_with_hadamard(shape):
    for block_rows, sign in itertools.product((1, 16), (None, 0xD7E8)):
        spec = QuantizeSpec(scale_search="mse", block_rows=block_rows, hadamard_sign=sign)
        x = inputs(shape, torch.bfloat16, 1.0)
        amax = ops.amax(x, -1 if sign is None else sign)
        for scaled in (True, False):
            expected = ops.fake_quantize(x, amax, None, spec.pack(), torch.bfloat16, scaled)
            assert_same_bits(
                N.fake_quantize(x.cuda(), amax.cuda(), None, spec.pack(), torch.bfloat16, scaled), expected
            )
        expected = ops.quantize_pair(x, amax, amax, None, spec.replace(hadamard_sign=None).pack(), spec.pack())
        actual = N.quantize_pair(
            x.cuda(), amax.cuda(), amax.cuda(), None, spec.replace(hadamard_sign=None).pack(), spec.pack()
        )
        assert_same_bits(actual, expected, f"pair, {spec}")


# --- EDEN ------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
def test_rotate_and_its_amax(dtype):
    for shape, magnitude in itertools.product(WIDE_SHAPES, MAGNITUDES[dtype]):
        x, state = inputs(shape, dtype, magnitude), rng_state()
        for col0 in (0, 1 << 40):
            y = eden.rotate(x, state, col0=col0)
            assert_same_bits([N.rotate(x.cuda(), state.cuda(), False, col0)], [y], f"{shape}, {magnitude}")
            expected = [eden.amax(x, state, col0)]
            assert_same_bits([N.amax_rotated(x.cuda(), state.cuda(), col0)], expected, f"{shape}, {magnitude}")
            assert_same_bits([N.rotate(y.cuda(), state.cuda(), True, col0)], [eden.rotate(y, state, True, col0)])


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("ceiling", [256, 448])
def test_eden_every_shape_and_magnitude(dtype, ceiling):
    spec = QuantizeSpec(round_mode="eden", scale_ceiling=ceiling)
    for shape, magnitude in itertools.product(WIDE_SHAPES, MAGNITUDES[dtype]):
        x, state = inputs(shape, dtype, magnitude, poison=magnitude != 1.0), rng_state()
        own = eden.amax(x, state, 256)
        for amax, offsets, stream in (
            (own, (7, 256, 1 << 20), 0),
            (own / 3, (0, 256, 0), 1),
            (own * 0, (0, 256, 0), 2),
        ):
            expected = reference.quantize(x, amax, state, spec, *offsets, stream)
            actual = N.quantize(x.cuda(), amax.cuda(), state.cuda(), spec.pack(), *offsets, stream)
            assert_same_bits(actual, expected, f"{spec}, {shape}, {magnitude}, {amax}")


@gpu
@pytest.mark.parametrize("amax", [float("inf"), float("nan"), 1e-38], ids=str)
def test_eden_by_an_amax_that_means_nothing(amax):
    x, state, amax = inputs((40, 300), torch.bfloat16, 1.0), rng_state(), torch.tensor(amax)
    spec = QuantizeSpec(round_mode="eden")
    expected = reference.quantize(x, amax, state, spec)
    assert_same_bits(N.quantize(x.cuda(), amax.cuda(), state.cuda(), spec.pack()), expected)


@gpu
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_eden_of_nothing(shape):
    x, state = torch.empty(shape, dtype=torch.bfloat16), rng_state()
    spec = QuantizeSpec(round_mode="eden").pack()
    assert_same_bits(N.quantize(x.cuda(), None, state.cuda(), spec), ops.quantize(x, None, state, spec))
    assert_same_bits([N.rotate(x.cuda(), state.cuda())], [eden.rotate(x, state)])


@gpu
def test_eden_finds_its_own_amax_and_decodes():
    x, state = inputs((130, 272), torch.bfloat16, 1.0), rng_state()
    spec, on_gpu = QuantizeSpec(round_mode="eden").pack(), (x.cuda(), state.cuda())
    amax = eden.amax(x, state)
    assert_same_bits(N.quantize(on_gpu[0], None, on_gpu[1], spec), ops.quantize(x, amax, state, spec))
    for scaled in (True, False):
        expected = ops.fake_quantize(x, amax, state, spec, torch.bfloat16, scaled)
        assert_same_bits(N.fake_quantize(on_gpu[0], amax.cuda(), on_gpu[1], spec, torch.bfloat16, scaled), expected)
    assert_same_bits(N.quantize_activation(*on_gpu, spec, torch.bfloat16), expected)


@gpu
def test_eden_does_not_depend_on_the_launch():
    """Every group of lanes has several rotations; the same rows a few at a time are the oracle."""
    x, state = torch.randn(6000, 4224, device="cuda").bfloat16(), rng_state().cuda()
    spec, amax = QuantizeSpec(round_mode="eden").pack(), N.amax_rotated(x, state)
    assert torch.equal(amax, N.rotate(x, state).abs().max())
    whole = N.dequantize(*N.quantize(x, amax, state, spec), 4224, torch.float32)
    for start in range(0, 6000, 1500):
        part = N.quantize(x[start : start + 1500], amax, state, spec, start)
        assert equal_bits([N.dequantize(*part, 4224, torch.float32)], [whole[start : start + 1500]])
    assert (N.rotate(whole, state, True)[:, :4224] - x).norm() < 0.12 * x.norm()


@gpu
@pytest.mark.parametrize("shape", [(128, 128), (300, 144), (33, 50)], ids=str)
def test_eden_pair(shape):
    x, state = inputs(shape, torch.bfloat16, 1.0), rng_state()
    spec = QuantizeSpec(round_mode="eden").pack()
    amaxes = eden.amax(x, state, 256), eden.amax(x.t(), state, 384)
    offsets = (384, 256, 4096, 1 << 20, 2)
    expected = ops.quantize_pair(x, *amaxes, state, spec, spec, *offsets)
    actual = N.quantize_pair(x.cuda(), *(a.cuda() for a in amaxes), state.cuda(), spec, spec, *offsets)
    assert_same_bits(actual, expected)


@gpu
def test_what_eden_refuses():
    x, state = torch.randn(4, 256, device="cuda").bfloat16(), rng_state().cuda()
    spec, amax = QuantizeSpec(round_mode="eden").pack(), N.amax(x)
    with pytest.raises(RuntimeError, match="col0 must be a multiple of 128"):
        N.quantize(x, amax, state, spec, 0, 16)
    with pytest.raises(RuntimeError, match="col0 must be a multiple of 128"):
        N.rotate(x, state, False, 64)
    with pytest.raises(RuntimeError, match="a multiple of 128 columns, not 200"):
        N.rotate(x[:, :200].float(), state, True)
    with pytest.raises(RuntimeError, match="needs rng_state"):
        N.quantize(x, None, None, spec)
    with pytest.raises(RuntimeError, match="needs rng_state"):
        N.amax_pair_by_spec(x, None, spec, spec)
    with pytest.raises(RuntimeError, match="col0 must be a multiple of 128"):
        N.quantize_pair_values(x, amax, amax, state, spec, spec, False, 16)
    with pytest.raises(RuntimeError, match="columns is at most the 256 of x, not 257"):
        N.rotate_back(x, state, 257)


# --- pairs as values -------------------------------------------------------------------------------------------------


def values_expected(x, amaxes, state, spec, spec_t, codes_t, offsets):
    """What plain torch makes of quantize_pair's codes."""
    how, how_t = QuantizeSpec.unpack(spec), QuantizeSpec.unpack(spec_t)
    qdata, scale, factor, *transposed = ops.quantize_pair(x, *amaxes, state, spec, spec_t, *offsets)
    columns, columns_t = (
        size if s.rotation is None else -(-size // s.rotation) * s.rotation
        for size, s in zip(reversed(x.shape), (how, how_t), strict=True)
    )
    values = reference.dequantize(qdata, scale, None, columns, torch.bfloat16)
    if codes_t:
        return values, factor, *transposed
    values_t = reference.dequantize(*transposed[:2], None, columns_t, torch.bfloat16)
    return values, factor, values_t, scale.new_empty((0,)), transposed[2]


@gpu
@pytest.mark.parametrize("codes_t", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (130, 272), (16, 16), (33, 50), (300, 144), (0, 32), (32, 0)], ids=str
)
def test_pair_values(dtype, shape, codes_t):
    for mode, sign, up in itertools.product(FAST_MODES, (None, 0xD7E8), ("nearest", "up")):
        x, state = inputs(shape, dtype, 1.0), rng_state()
        spec = QuantizeSpec(scale_rounding=up, **mode).pack()
        spec_t = QuantizeSpec(scale_rounding=up, hadamard_sign=sign, **mode).pack()
        amaxes = ops.amax_pair(x, -1 if sign is None else sign)
        for smaller, offsets in ((1.0, (64, 32, 4096, 1 << 20)), (0.01, (0, 0, 0, 0, 5))):
            given = [a * smaller for a in amaxes]
            expected = values_expected(x, given, state, spec, spec_t, codes_t, offsets)
            on_gpu = [a.cuda() for a in given]
            actual = N.quantize_pair_values(x.cuda(), *on_gpu, state.cuda(), spec, spec_t, codes_t, *offsets)
            assert_same_bits(actual, expected, f"{mode}, {sign}, {up}, {shape}, {dtype}, {codes_t}")


@gpu
@pytest.mark.parametrize("codes_t", [True, False])
@pytest.mark.parametrize("specs", ["four-over-six", "search, mixed", "eden, Hadamard", "away", "mixed"])
def test_pair_values_where_no_one_kernel_serves(specs, codes_t):
    spec, spec_t = {
        "four-over-six": (QuantizeSpec(four_over_six="mse"), QuantizeSpec(hadamard_sign=True)),
        "search, mixed": (QuantizeSpec(scale_search="mse"), QuantizeSpec(round_mode="stochastic")),
        "eden, Hadamard": (QuantizeSpec(round_mode="eden"), QuantizeSpec(hadamard_sign=True)),
        "away": (QuantizeSpec(round_mode="away"), QuantizeSpec(round_mode="away")),
        "mixed": (QuantizeSpec(), QuantizeSpec(round_mode="stochastic")),
    }[specs]
    x, state, amaxes = inputs((144, 272), torch.bfloat16, 1.0), rng_state(), (torch.tensor(0.9), torch.tensor(1.1))
    packed = spec.pack(), spec_t.pack()
    expected = values_expected(x, amaxes, state, *packed, codes_t, ())
    actual = N.quantize_pair_values(x.cuda(), *(a.cuda() for a in amaxes), state.cuda(), *packed, codes_t)
    assert_same_bits(actual, expected)


EDEN, SEARCH = QuantizeSpec(round_mode="eden"), QuantizeSpec(scale_search="mse")
PAIRS = {
    "eden": (EDEN, EDEN, False),
    "eden, ceilings": (EDEN.replace(scale_ceiling=448), EDEN, False),
    "search and eden": (SEARCH, EDEN, True),
    "nearest and eden": (QuantizeSpec(scale_rounding="up"), EDEN.replace(scale_ceiling=448), True),
    "search and Hadamard": (SEARCH, QuantizeSpec(hadamard_sign=True), True),
    "search, nearest": (SEARCH.replace(scale_ceiling=448, scale_rounding="up"), QuantizeSpec(), True),
    "search, values": (SEARCH, QuantizeSpec(hadamard_sign=True), False),
}
"""Pairs for which quantize_pair_values has a kernel, of the recipes accurate and accurate_eden and beside them."""


def check_pair(x, amaxes, spec, spec_t, codes_t, offsets=(), what=""):
    state, packed = rng_state(), (spec.pack(), spec_t.pack())
    expected = values_expected(x, amaxes, state, *packed, codes_t, offsets)
    actual = N.quantize_pair_values(x.cuda(), *(a.cuda() for a in amaxes), state.cuda(), *packed, codes_t, *offsets)
    assert_same_bits(actual, expected, f"{spec}, {spec_t}, {tuple(x.shape)}, {amaxes}, {what}")


@gpu
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (130, 272), (16, 16), (33, 50), (300, 144), (1, 1040), (0, 32), (32, 0)], ids=str
)
def test_search_and_eden_pairs(shape, pair):
    given = itertools.cycle(((1.0, (384, 256, 4096, 1 << 20, 2)), (0.01, ()), (0.0, (0, 0, 0, 0, 5))))
    for magnitude, (smaller, offsets) in zip(MAGNITUDES[torch.bfloat16], given, strict=False):
        x, state = inputs(shape, torch.bfloat16, magnitude), rng_state()
        own = N.amax_pair_by_spec(x, state, *(spec.pack() for spec in PAIRS[pair][:2]), *(offsets[:2] or (0, 0)))
        check_pair(x, [a * smaller for a in own], *PAIRS[pair], offsets, magnitude)


@gpu
@pytest.mark.parametrize("pair", PAIRS)
def test_search_and_eden_pairs_of_blocks_of_all_sizes(pair):
    """Blocks that saturate or vanish, ties, zeros, and amaxes that mean nothing."""
    x = torch.randn(256, 256) * torch.logspace(-7, 4, 256).unsqueeze(1).clamp(max=6e4)
    x[64:128] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64, 32)
    x[128:136, :64], x[:, 80] = 0.0, -0.0
    x[140] = x[140].sign() * 3e38  # sums of its rotation overflow
    for amax in (x.abs()[:140].max().item(), 1.0, 1e-3, 1e-30, 1e-38, 0.0, float("inf"), float("nan")):
        check_pair(x.bfloat16(), [torch.tensor(amax)] * 2, *PAIRS[pair])


@gpu
@pytest.mark.parametrize("pair", PAIRS)
def test_search_and_eden_pairs_do_not_depend_on_the_launch(pair):
    """Every thread block has several tiles; quantize_pair and dequantize are the oracle."""
    spec, spec_t, codes_t = PAIRS[pair]
    x, state = torch.randn(8000, 7056, device="cuda").bfloat16(), rng_state().cuda()
    packed = spec.pack(), spec_t.pack()
    amaxes = N.amax_pair_by_spec(x, state, *packed)
    qdata, scale, factor, *transposed = N.quantize_pair(x, *amaxes, state, *packed)
    expected = [N.dequantize(qdata, scale, None, 7168 if spec.is_eden else 7056, torch.bfloat16), factor, *transposed]
    if not codes_t:
        values_t = N.dequantize(*transposed[:2], None, 8064 if spec_t.is_eden else 8000, torch.bfloat16)
        expected = [*expected[:2], values_t, scale.new_empty((0,)), transposed[2]]
    assert equal_bits(N.quantize_pair_values(x, *amaxes, state, *packed, codes_t), expected)


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("spec", [EDEN, SEARCH, QuantizeSpec(hadamard_sign=True)], ids=str)
@pytest.mark.parametrize("spec_t", [EDEN, SEARCH, QuantizeSpec(hadamard_sign=True)], ids=str)
def test_amax_pair_by_spec(spec, spec_t, dtype):
    for shape, magnitude in itertools.product(((128, 128), (260, 640), (9, 1000), (0, 32)), MAGNITUDES[dtype]):
        x, state = inputs(shape, dtype, magnitude), rng_state()
        expected = ops.own_amax(x, spec, state, 256), ops.own_amax(x.t().contiguous(), spec_t, state, 128)
        actual = N.amax_pair_by_spec(x.cuda(), state.cuda(), spec.pack(), spec_t.pack(), 128, 256)
        assert_same_bits(actual, expected, f"{spec}, {spec_t}, {shape}, {magnitude}")


@gpu
@pytest.mark.parametrize("spec", [EDEN, SEARCH], ids=str)
def test_amax_pair_by_spec_of_a_matrix_that_fills_the_device(spec):
    x, state = torch.randn(8000, 7056, device="cuda").bfloat16(), rng_state().cuda()
    for place in ((7999, 7055), (0, 0), (4000, 129)):
        x[place] *= 50
        expected = ops.own_amax(x, spec, state), ops.own_amax(x.t().contiguous(), EDEN, state)
        assert equal_bits(N.amax_pair_by_spec(x, state, spec.pack(), EDEN.pack()), expected)


@gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
def test_rotate_back(dtype):
    for rows, columns, kept in ((7, 128, 128), (260, 640, 600), (9, 1024, 1000), (33, 256, 135), (8000, 7168, 7056)):
        x, state = inputs((rows, columns), dtype, 1.0), rng_state()
        expected = N.rotate(x, state, True, 256)[:, :kept].bfloat16()
        assert_same_bits([N.rotate_back(x.cuda(), state.cuda(), kept, 256)], [expected], f"{rows, columns, kept}")


@gpu
@pytest.mark.parametrize("codes_t", [True, False])
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_pair_values_of_a_matrix_that_fills_the_device(mode, codes_t):
    """Every thread block has several tiles; quantize_pair and dequantize are the oracle."""
    spec, spec_t = (QuantizeSpec(hadamard_sign=sign, **mode).pack() for sign in (None, 0xD7E8))
    x, state = torch.randn(8000, 7056, device="cuda").bfloat16(), rng_state().cuda()
    amaxes = N.amax_pair(x, 0xD7E8)
    qdata, scale, factor, *transposed = N.quantize_pair(x, *amaxes, state, spec, spec_t)
    expected = [N.dequantize(qdata, scale, None, 7056, torch.bfloat16), factor, *transposed]
    if not codes_t:
        values_t = N.dequantize(*transposed[:2], None, 8000, torch.bfloat16)
        expected = [*expected[:2], values_t, scale.new_empty((0,)), transposed[2]]
    assert equal_bits(N.quantize_pair_values(x, *amaxes, state, spec, spec_t, codes_t), expected)
