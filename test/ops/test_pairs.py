"""A matrix and its transpose in one pass: codes, values and amaxes have the bits of the reference of each side."""

import itertools

import pytest
import torch
from helpers.bits import MAGNITUDES, assert_same_bits, equal_bits, inputs, of_all_sizes, rng_state
from helpers.instruction_sets import assert_op, displaced, reference_amax

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops.composite.quantization import own_amax
from nvfp4_tensor.ops.schemas import plain

N = torch.ops.nvfp4
NEAREST, EDEN = QuantizeSpec(), QuantizeSpec(round_mode="eden")
STOCHASTIC, SEARCH = QuantizeSpec(round_mode="stochastic"), QuantizeSpec(scale_search="mse")
HADAMARD = QuantizeSpec(hadamard_sign=True)
SPECS = [
    NEAREST, HADAMARD, STOCHASTIC, QuantizeSpec(round_mode="stochastic", hadamard_sign=0x1234),
    QuantizeSpec(round_mode="stochastic", random_bits=8, scale_rounding="up"),
    QuantizeSpec(round_mode="away", scale_rounding="up"), QuantizeSpec(round_mode="zero", block_rows=16),
    QuantizeSpec(four_over_six="mse"), SEARCH,
    QuantizeSpec(scale_search="mse", scale_ceiling=448, scale_rounding="up"), EDEN,
    QuantizeSpec(round_mode="eden", scale_ceiling=448),
]  # fmt: skip
SHAPES = [
    (128, 128), (256, 384), (130, 272), (16, 16), (33, 50), (300, 144), (1, 1040), (5, 1), (0, 32), (32, 0), (40, 150),
]  # fmt: skip
OF_KERNELS = [  # one kernel makes values and codes: the recipes' and some beside them
    (NEAREST, HADAMARD),
    (STOCHASTIC, QuantizeSpec(round_mode="stochastic", hadamard_sign=0xD7E8)),
    (EDEN, EDEN),
    (EDEN.replace(scale_ceiling=448), EDEN),
    (SEARCH, EDEN),
    (QuantizeSpec(scale_rounding="up"), EDEN.replace(scale_ceiling=448)),
    (SEARCH, HADAMARD),
    (SEARCH.replace(scale_ceiling=448, scale_rounding="up"), NEAREST),
]
of_kernels = pytest.mark.parametrize("pair", OF_KERNELS, ids=lambda pair: f"{pair[0]} and {pair[1]}")


def expected_pair(x, amaxes, state, spec, spec_t, row0=0, col0=0, full_rows=0, full_width=0, stream_t=1, stream=0):
    left = reference.quantize(x, amaxes[0], state, spec, row0, col0, full_width, stream)
    return *left, *reference.quantize(x.t(), amaxes[1], state, spec_t, col0, row0, full_rows, stream_t)


def expected_values(x, pair, spec, spec_t, codes_t):
    columns, columns_t = (
        size if how.rotation is None else -(-size // how.rotation) * how.rotation
        for size, how in ((x.shape[1], spec), (x.shape[0], spec_t))
    )
    values = reference.dequantize(*pair[:2], None, columns, torch.bfloat16)
    if codes_t:
        return values, pair[2], *pair[3:]
    values_t = reference.dequantize(*pair[3:5], None, columns_t, torch.bfloat16)
    return values, pair[2], values_t, pair[1].new_empty((0,)), pair[5]


def check(device, x, spec, spec_t, *, there=None, state=None, smaller=None, offsets=()):
    """Codes and values, by the pair's own amaxes, which their op returns, or by smaller or given ones."""
    there, state = x if there is None else there, rng_state() if state is None else state
    bits = spec.pack(), spec_t.pack()
    row0, col0 = offsets[:2] or (0, 0)
    own = reference_amax(x, spec, state, col0), reference_amax(x.t(), spec_t, state, row0)
    assert_op(N.amax_pair, (there, state, *bits, row0, col0), own, device)
    amaxes = own if smaller is None else tuple(a * 0 + smaller if smaller > 1 else a * smaller for a in own)
    pair = expected_pair(x, amaxes, state, spec, spec_t, *offsets)
    for given_amaxes in (amaxes, (None, None)) if smaller is None else (amaxes,):
        assert_op(N.quantize_pair, (there, *given_amaxes, state, *bits, *offsets), pair, device)
        for codes_t in (True, False):
            arguments = there, *given_amaxes, state, *bits, codes_t, *offsets
            assert_op(N.quantize_pair_values, arguments, expected_values(x, pair, spec, spec_t, codes_t), device)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_pair_of_specs(kernels, spec):
    """Each pair with another shape, dtype, magnitude and place in a full tensor."""
    offsets = itertools.cycle(((), (384, 256, 4096, 1 << 20), (0, 0, 0, 0, 3, 5)))
    first = SPECS.index(spec)
    for i, spec_t in enumerate(SPECS):
        dtype = HIGH_PRECISION_DTYPES[(i + first) % 3]
        x = inputs(SHAPES[(first * 5 + i) % 11], dtype, MAGNITUDES[dtype][(first + i // 3) % 4])
        check(kernels, x, spec, spec_t, offsets=next(offsets), smaller=(None, 0.01, 0.0)[(i + first // 3) % 3])


@of_kernels
def test_pairs_that_one_kernel_makes(kernels, pair):
    for i, shape in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        how = {"smaller": 0.01 if i % 4 == 3 else None, "offsets": () if i % 3 else (128, 256, 4096, 1 << 20, 2)}
        check(kernels, inputs(shape, dtype, MAGNITUDES[dtype][i % 4]), *pair, **how)
        check(kernels, inputs(shape, torch.bfloat16, 1.0), *pair)


@of_kernels
def test_any_amax(kernels, pair):
    """Blocks that saturate or vanish, ties, zeros, and amaxes that mean nothing."""
    x, state = of_all_sizes(torch.bfloat16)[60:260], rng_state()
    for amax in (6e4, 1.0, 1e-3, 1e-30, 1e-38, 0.0, torch.inf, torch.nan):
        amaxes = torch.tensor(amax), torch.tensor(amax)
        codes = expected_pair(x, amaxes, state, *pair)
        for codes_t in (True, False):
            arguments = x, *amaxes, state, pair[0].pack(), pair[1].pack(), codes_t
            assert_op(N.quantize_pair_values, arguments, expected_values(x, codes, *pair, codes_t), kernels)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_pairs_at_any_address(kernels, offset):
    for dtype, pair in itertools.product(HIGH_PRECISION_DTYPES, OF_KERNELS[:3]):
        x = inputs((130, 80), dtype, 1.0)
        check(kernels, x, *pair, there=displaced(x, offset, kernels))
        check(kernels, x[::3, 5:69], *pair, there=displaced(x, offset, kernels)[::3, 5:69])


def test_plain_torch_makes_the_same_pairs():
    x, state = inputs((40, 150), torch.float32, 1.0), rng_state()
    for spec, spec_t in OF_KERNELS:
        amaxes, offsets = (torch.tensor(0.9), torch.tensor(1.1)), (128, 256, 1024, 2048, 3, 2)
        arguments = x, *amaxes, state, spec.pack(), spec_t.pack()
        expected = expected_pair(x, amaxes, state, spec, spec_t, *offsets)
        assert_same_bits(plain.quantize_pair(*arguments, *offsets), expected)
        for codes_t in (True, False):
            values = plain.quantize_pair_values(*arguments, codes_t, *offsets)
            assert_same_bits(values, expected_values(x, expected, spec, spec_t, codes_t))


@pytest.mark.gpu
@of_kernels
def test_a_matrix_that_fills_the_device(cuda_library, pair):
    """Every thread block has several tiles; the two sides alone are the oracle, and dequantize."""
    spec, spec_t = pair
    x, state, bits = torch.randn(8000, 7056, device="cuda").bfloat16(), rng_state().cuda(), (spec.pack(), spec_t.pack())
    for place in ((7999, 7055), (0, 0), (4000, 129)):
        x[place] *= 50
        amaxes = N.amax_pair(x, state, *bits)
        x_t = x.t().contiguous()
        assert equal_bits(amaxes, (own_amax(x, spec, state), own_amax(x_t, spec_t, state)))
    codes = *N.quantize(x, amaxes[0], state, bits[0]), *N.quantize(x_t, amaxes[1], state, bits[1], stream=1)
    assert equal_bits(N.quantize_pair(x, *amaxes, state, *bits), codes)
    values = N.dequantize(*codes[:2], None, 7168 if spec.is_eden else 7056, torch.bfloat16)
    assert equal_bits(N.quantize_pair_values(x, *amaxes, state, *bits, True), (values, codes[2], *codes[3:]))
    values_t = N.dequantize(*codes[3:5], None, 8064 if spec_t.is_eden else 8000, torch.bfloat16)
    expected = values, codes[2], values_t, codes[1].new_empty((0,)), codes[5]
    assert equal_bits(N.quantize_pair_values(x, *amaxes, state, *bits, False), expected)


@pytest.mark.gpu
@of_kernels
def test_own_amaxes_of_any_size(cuda_library, pair):
    """The bits of amaxes that are given, on several streams at once, too."""
    state, bits = rng_state().cuda(), [spec.pack() for spec in pair]
    tiles = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, columns in ((16, 16), (200, 336), (128 * tiles, 128), (128 * tiles + 16, 128), (2048, 16 * tiles + 16)):
        x = torch.randn(rows, columns + 16, device="cuda").bfloat16()[:, 16:]
        x[rows // 2, columns // 2], x[rows - 1, columns - 1] = torch.inf, -11
        for t, codes_t in itertools.product((x, x.contiguous()), (True, False)):
            expected = N.quantize_pair_values(t, *N.amax_pair(t, state, *bits), state, *bits, codes_t)
            assert equal_bits(N.quantize_pair_values(t, None, None, state, *bits, codes_t), expected)
    streams = [torch.cuda.Stream() for _ in range(4)]
    x = x[:1024, :1024].contiguous()
    expected = N.quantize_pair_values(x, None, None, state, *bits, True)
    torch.cuda.synchronize()
    results = []
    for stream in streams * 20:
        with torch.cuda.stream(stream):
            results.append(N.quantize_pair_values(x, None, None, state, *bits, True))
    torch.cuda.synchronize()
    for result in results:
        assert equal_bits(result, expected)


@pytest.mark.parametrize("implementation", [N, plain], ids=["the op", "plain torch"])
@pytest.mark.parametrize(
    "spec_t, offsets, message",
    [
        (NEAREST, (-16, 0, 0, 0), "row0 must be a multiple of 16, where a block of the transpose begins, not -16"),
        (NEAREST, (0, 0, -4, 64), "full_rows must not be negative, not -4"),
        (NEAREST, (0, 1 << 62, 1 << 20, 1 << 20), "blocks are numbered in 63 bits"),
        (EDEN, (16, 0, 64, 64), "multiple of 128, where a rotation begins, not 16"),
    ],
    ids=str,
)
def test_invalid_offsets_raise(device, implementation, spec_t, offsets, message):
    x, amax, state = torch.ones(4, 64, device=device), torch.ones((), device=device), rng_state().to(device)
    arguments = x, amax, amax, state, STOCHASTIC.pack(), spec_t.pack()
    with pytest.raises((RuntimeError, ValueError), match=message):
        implementation.quantize_pair(*arguments, *offsets)
    with pytest.raises((RuntimeError, ValueError), match=message):
        implementation.quantize_pair_values(*arguments, False, *offsets)


def test_what_belongs_together_is_given_together(device):
    x, amax = torch.ones(16, 32, device=device), torch.ones((), device=device)
    nearest, eden = NEAREST.pack(), EDEN.pack()
    for op, more in ((N.quantize_pair, ()), (N.quantize_pair_values, (False,))):
        with pytest.raises((ValueError, RuntimeError), match="are given together"):
            op(x, amax, None, None, nearest, nearest, *more)
        with pytest.raises((ValueError, RuntimeError), match="rng_state"):
            op(x, None, None, None, nearest, eden, *more)
    with pytest.raises((ValueError, RuntimeError), match="needs rng_state"):
        N.amax_pair(x, None, eden, eden)
