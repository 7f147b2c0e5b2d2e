"""Kernels that quantize and decode against the reference, bit for bit: on each instruction set, and on a GPU.

`make sanitize` runs these over a library with sanitizers. What was undefined behaviour before stops there: the memset
of the null pointers of empty outputs, the overflow of a block's number, and loads of numbers that do not begin on a
multiple of their size, which torch.frombuffer makes of any file.
"""

import itertools

import pytest
import torch
from helpers.bits import (
    EMPTY_SHAPES,
    MAGNITUDES,
    MODES,
    SHAPES,
    assert_same_bits,
    equal_bits,
    inputs,
    of_all_sizes,
    rng_state,
)
from helpers.instruction_sets import assert_op, displaced, each_instruction_set, needs_library, reference_amax, sample
from helpers.repeats import captured

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES, TILE_ROWS
from nvfp4_tensor.ops.composite.quantization import columns_of_values, own_amax
from nvfp4_tensor.ops.schemas import plain

N = torch.ops.nvfp4
SCALES = (
    {},
    {"scale_rounding": "up"},
    {"scale_ceiling": 256},
    {"four_over_six": "mae"},
    {"four_over_six": "mse", "scale_rounding": "up"},
    {"four_over_six": "mse", "scale_ceiling": 448},
    {"scale_search": "mse"},
    {"scale_search": "mse", "scale_rounding": "up", "scale_ceiling": 448},
)
LAYOUTS = (
    {},
    {"block_rows": 16},
    {"hadamard_sign": 0xD7E8},
    {"block_rows": 16, "hadamard_sign": 0x1234},
    {"row_scaled": True},
    {"row_scaled": True, "hadamard_sign": 0xD7E8},
)
PLAIN, STOCHASTIC, EDEN = QuantizeSpec(), QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="eden")
FEW_SPECS = (
    PLAIN, STOCHASTIC, QuantizeSpec(block_rows=16, round_mode="stochastic"), QuantizeSpec(four_over_six="mse"),
    QuantizeSpec(scale_search="mse", block_rows=16), QuantizeSpec(hadamard_sign=0xD7E8),
    QuantizeSpec(row_scaled=True, round_mode="stochastic"), EDEN,
)  # fmt: skip
MOST = (1 << 63) - 1


def check(device, x, spec, *, there=None, state=None, amax=None, dtype=torch.bfloat16, scaled=True,
          offsets=(0, 0, 0), stream=0):  # fmt: skip
    """Compare every op of x, or of ``there``, which is x elsewhere in memory; by its own amax if none is given."""
    there, state, bits = x if there is None else there, rng_state() if state is None else state, spec.pack()
    own = reference_amax(x, spec, state, offsets[1])
    if spec.is_eden:
        assert_op(N.amax_rotated, (there, state, offsets[1]), (own,), device)
    elif not spec.row_scaled:
        assert_op(N.amax, (there, -1 if spec.hadamard_sign is None else spec.hadamard_sign), (own,), device)
    used = own if amax is None else amax
    expected = reference.quantize(x, used, state, spec, *offsets, stream)
    quantize = N.quantize_rows if spec.row_scaled else N.quantize
    for given_amax in (used, None) if amax is None else (used,):
        assert_op(quantize, (there, given_amax, state, bits, *offsets, stream), expected, device)
    columns = columns_of_values(x.shape[-1], bits)
    arguments = *expected[:2], expected[2] if scaled else None, columns, dtype
    values = reference.dequantize(*arguments)
    assert_op(N.dequantize, arguments, (values,), device)
    if stream == 0 and not spec.row_scaled:
        assert_op(N.fake_quantize, (there, used, state, bits, dtype, scaled, *offsets), (values, expected[2]), device)
    if stream == 0 and offsets == (0, 0, 0) and amax is None:
        values = reference.dequantize(*expected[:2], None, columns, dtype)
        assert_op(N.quantize_activation, (there, state, bits, dtype), (values, expected[2]), device)
    return expected


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [*MODES, {"round_mode": "eden"}], ids=str)
def test_every_spec(kernels, mode):
    """Each with another shape, dtype, magnitude, amax, offset, stream and result, so that all pairs of these meet."""
    offsets = ((0, 0, 0), (7, 256, 1 << 20), (1 << 33, 128, 5000))
    kinds = itertools.product(LAYOUTS, SCALES)
    if mode["round_mode"] == "eden":
        kinds = [({}, {"scale_ceiling": ceiling}) for ceiling in (256, 448)] * 12
    for i, (choices, scale) in enumerate(kinds):
        spec, dtype = QuantizeSpec(**choices, **mode, **scale), HIGH_PRECISION_DTYPES[i % 3]
        x = inputs(SHAPES[i % 11], dtype, MAGNITUDES[dtype][i // 11 % 4], poison=i % 2 == 0)
        state = rng_state()
        # x exceeds a smaller one: it saturates
        amax = reference_amax(x, spec, state) * (0.3, 0.01, 0.0)[i % 3] if i % 5 > 2 else None
        how = {"dtype": HIGH_PRECISION_DTYPES[i // 4 % 3], "scaled": i // 2 % 2 == 0}
        how |= {"offsets": offsets[i // 7 % 3], "stream": (0, 1, 0, 3)[i // 9 % 4]}
        check(kernels, x, spec, state=state, amax=amax, **how)


@pytest.mark.parametrize("spec", FEW_SPECS, ids=str)
def test_any_amax(kernels, spec):
    """One that saturates all, makes scales vanish, or belongs to no tensor: NaN, infinities and -0."""
    x = of_all_sizes(torch.bfloat16)[60:260]
    for amax in (6e4, 1.0, 1e-3, 1e-30, 1e-38, 0.0, -0.0, torch.inf, torch.nan):
        amax = torch.full((len(x),), amax) if spec.row_scaled else torch.tensor(amax)
        expected = check(kernels, x, spec, amax=amax)
        finite = reference.dequantize(*expected, 256, torch.float32).isfinite()
        assert finite[:70].all() if amax.isfinite().all() else not finite.any()


def test_scales_that_vanish_are_rounded_up(kernels):
    """Those of blocks of 1e-20 beside 1e38, in float32 too, and of blocks of zeros."""
    x = torch.randn(32, 64, dtype=torch.float32) * 1e-20
    x[0, 0], x[3] = 1e38, 0.0
    for spec in (QuantizeSpec(scale_rounding="up", round_mode=mode) for mode in ("rne", "stochastic")):
        rows = layout.unswizzle(check(kernels, x, spec)[1], 32, 4).view(torch.uint8)
        assert (rows[1:3] == 1).all() and (rows[3] == 0).all()


VIEWS = (
    lambda t: t[::2, 16:336], lambda t: t[5:9, 3:50], lambda t: t.t(), lambda t: t[:, ::3], lambda t: t[:1, 7:],
    lambda t: t[3], lambda t: t.view(4, 24, 400)[:, 1], lambda t: t[:1].expand(2, 5, 400),
)  # fmt: skip


@pytest.mark.parametrize("spec", FEW_SPECS, ids=str)
def test_views_at_any_address(kernels, spec):
    for i, view in enumerate(VIEWS):
        offset = (0, 1, 3, 8)[(i + FEW_SPECS.index(spec)) % 4]
        x = inputs((96, 400), HIGH_PRECISION_DTYPES[i % 3], 1.0)
        check(kernels, view(x), spec, there=view(displaced(x, offset, kernels)))
        check(kernels, x[:50, :100], spec, there=displaced(x[:50, :100], offset, kernels))


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_other_operands_at_any_address(kernels, offset):
    x, state = inputs((40, 100), torch.float32, 1.0), rng_state()
    amax = reference_amax(x, PLAIN)
    qdata, scale, factor = reference.quantize(x, amax, state, STOCHASTIC)
    odd = [displaced(t, offset, kernels) for t in (x, amax, state, qdata, scale.view(torch.uint8), factor)]
    assert_op(N.quantize, (*odd[:3], STOCHASTIC.pack()), (qdata, scale, factor), kernels)
    values = (reference.dequantize(qdata, scale, factor, 100, torch.bfloat16),)
    for scales in (odd[4], odd[4].view(torch.float8_e4m3fn)):
        assert_op(N.dequantize, (odd[3], scales, odd[5], 100, torch.bfloat16), values, kernels)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_nothing_is_quantized_to_nothing(kernels, shape):
    for spec in FEW_SPECS:
        check(kernels, torch.empty(shape, dtype=torch.bfloat16), spec)
    assert_op(N.hadamard, (torch.empty(shape), 0), (reference.hadamard(torch.empty(shape), 0),), kernels)


@pytest.mark.parametrize(
    "offsets",
    [(0, 0, MOST), ((1 << 59) - 80, 16, 160), (0, 16 * ((1 << 59) - 9), 64), (2**31 + 5, 16, 2**33), (0, 2**20, 2**24)],
    ids=str,
)
def test_the_largest_offsets(kernels, offsets):
    check(kernels, sample((8 if offsets[2] == MOST else 40, 80), torch.float32), STOCHASTIC, offsets=offsets)


@pytest.mark.parametrize("spec", FEW_SPECS, ids=str)
def test_neither_threads_nor_the_launch_change_a_bit(kernels, spec):
    """A part of the rows alone has the codes that it has within a matrix that fills the device many times over."""
    shape = (1000, 528) if kernels == "cpu" else (6008, 4224)
    x, state = torch.randn(shape, device=kernels).bfloat16(), rng_state().to(kernels)
    quantize = N.quantize_rows if spec.row_scaled else N.quantize
    amax = None if spec.row_scaled else own_amax(x, spec, state)
    first = None
    for _ in each_instruction_set() if kernels == "cpu" else (kernels,):
        for threads in (1, 2, 3) if kernels == "cpu" else (1,):
            torch.set_num_threads(threads)
            results = quantize(x, None, state, spec.pack())
            results += (N.dequantize(*results, results[0].shape[1] * 2, torch.float32),)
            first = results if first is None else first
            assert equal_bits(results, first)
        for start, stop in ((0, 16), (496, 512), (len(x) - 8, len(x))):
            part = quantize(x[start:stop], amax, state, spec.pack(), start)
            assert torch.equal(part[0], first[0][start:stop])


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 256], ids=["one by one", "by table"])
def test_every_scale_byte_decodes(kernels, rows):
    """Each row has one scale, of all 256 bytes; those from 0x7F on mean NaN. float16 overflows and is subnormal."""
    dtypes = (*HIGH_PRECISION_DTYPES, torch.float64) if kernels == "cpu" else HIGH_PRECISION_DTYPES
    factors = torch.tensor(2.0**-9), torch.tensor(1.7), None, torch.logspace(-9, 9, rows)
    for start, columns, factor, dtype in itertools.product(range(0, 256, rows), (144, 140), factors, dtypes):
        scale = torch.arange(start, start + rows).to(torch.uint8).unsqueeze(-1).expand(-1, 9).clone()
        codes = torch.randint(0, 256, (rows, 72), dtype=torch.uint8)
        arguments = codes, layout.swizzle(scale).view(torch.float8_e4m3fn), factor, columns, dtype
        expected = reference.dequantize(*arguments)
        assert_op(N.dequantize, arguments, (expected,), kernels)
        assert torch.equal(expected.isnan(), (scale[:, :1] >= 0x7F).expand(-1, columns))


@needs_library
@pytest.mark.parametrize("payload", [0x7FFFFFFF, 0x7FFF8000, -1, -0x8000, 0x7F800001, 0x7FC00000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_nan_of_any_payload_stays_one(payload, dtype):
    """Rounded to bfloat16 by adding to its bits, an NVIDIA GPU's NaN would become -0, and its block zeros."""
    x = torch.ones(48, 64)
    x.view(torch.int32)[1, 3] = payload
    if dtype == torch.float16:  # x86's conversion makes it quiet and keeps the rest
        bits = (payload >> 13 & 0x3FF) | (0x7C00 if payload > 0 else -0x400)
        x = torch.ones(48, 64, dtype=dtype)
        x.view(torch.int16)[1, 3] = bits | (0x200 if bits & 0x3FF == 0 else 0)
    assert x[1, 3].isnan() and x.isnan().sum() == 1
    spec, amax = QuantizeSpec(hadamard_sign=0xD7E8), torch.tensor(4.0)
    assert_op(N.hadamard, (x, 0xD7E8), (reference.hadamard(x, 0xD7E8),))
    decoded = reference.dequantize(*check("cpu", x, spec, amax=amax), 64, torch.float32)
    assert decoded.isnan().sum() == 16 and decoded[1, :16].isnan().all()
    for name in each_instruction_set():
        for rows in (1, 300):  # decoded one by one, and by a table
            codes, scale, factor = N.quantize(torch.ones(rows, 256), None, None, 0)
            factor.view(torch.int32).fill_(payload)
            assert N.dequantize(codes, scale, factor, 256, torch.bfloat16).isnan().all(), name


# --- kernels of a GPU that only some sizes reach ---------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("scale", [{}, {"four_over_six": "mse"}, {"scale_search": "mse"}], ids=str)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_fast_kernels_make_the_bits_of_the_general_one(cuda_library, mode, scale, block_rows):
    """Where every thread has several blocks; a matrix that does not begin on 16 bytes is the general kernel's."""
    spec = QuantizeSpec(block_rows=block_rows, **scale, **mode).pack()
    unaligned = torch.randn(8192 * 16384 + 1, device="cuda").bfloat16()[1:].view(8192, 16384)
    amax, state = N.amax(unaligned), rng_state().cuda()
    general, fast = (N.quantize(x, amax, state, spec) for x in (unaligned, unaligned.clone()))
    assert equal_bits(fast, general)
    qdata, scale, factor = fast
    values, last = N.dequantize(*fast, 16384, torch.bfloat16), slice(8192 - TILE_ROWS, 8192)
    assert equal_bits([N.dequantize(qdata[last], scale[-1:], factor, 16384, torch.bfloat16)], [values[last]])


@pytest.mark.gpu
@pytest.mark.parametrize("block_rows", [1, 16])
@pytest.mark.parametrize("scale", [{}, {"four_over_six": "mse"}, {"scale_search": "mse"}], ids=str)
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_own_amax_of_any_size(cuda_library, dtype, scale, block_rows):
    """The bits of an amax that is given, in a CUDA graph too."""
    spec = QuantizeSpec(block_rows=block_rows, **scale).pack()
    limit = 128 * torch.cuda.get_device_properties(0).multi_processor_count
    for rows, columns in ((16, 16), (200, 336), (limit, 128), (limit + 16, 128), (1024, limit + 48)):
        x = torch.randn(rows, columns + 16, device="cuda").to(dtype)[:, 16:]
        x[rows // 2, columns // 2] = 9 if rows % 16 else torch.inf
        x[rows - 1, columns - 1] = -11
        for t in (x, x.contiguous()):
            expected = N.quantize(t, N.amax(t), None, spec)
            assert equal_bits(N.quantize(t, None, None, spec), expected)
    graph, replayed = captured(lambda: N.quantize(x[:256, :512], None, None, spec))
    for factor in (1, 3):
        x *= factor
        graph.replay()
        assert equal_bits(replayed, N.quantize(x[:256, :512], N.amax(x[:256, :512]), None, spec))


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [True, False])
def test_fake_quantize_of_a_large_tensor(cuda_library, scaled):
    """Large enough to be quantized and decoded by two kernels, where one does not serve."""
    x, state = torch.randn(1024, 1040, device="cuda").bfloat16(), rng_state().cuda()
    for choices in ({"four_over_six": "mae"}, {"scale_search": "mse"}, {"block_rows": 16}, {"hadamard_sign": True}, {}):
        spec = QuantizeSpec(round_mode="stochastic", **choices).pack()
        quantized = N.quantize(x, N.amax(x), state, spec)
        for dtype in (torch.bfloat16, torch.float32):
            values = N.dequantize(*quantized[:2], quantized[2] if scaled else None, x.shape[1], dtype)
            assert equal_bits(N.fake_quantize(x, N.amax(x), state, spec, dtype, scaled), (values, quantized[2]))


# Columns: one block, part of a warp, several units in a thread block, clusters of 2 to 8, with one and with two blocks
# a lane, and rows that are read twice (on a GPU without clusters from 8208 on).
WIDE = [16, 256, 528, 1024, 2048, 4096, 4112, 8192, 8208, 14336, 16400, 28672, 65536, 65552]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [
    *((rows, columns) for columns in WIDE for rows in (1, 33, 300)),
    # more than the machine holds: a thread block, or a cluster, has many units, one after the other
    (70000, 64), (9000, 2048), (9000, 4096), (3000, 16384), (1500, 28672), (700, 70000),
], ids=str)  # fmt: skip
def test_rows_of_any_width(cuda_library, shape):
    """The reference too computes on the GPU."""
    for dtype, mode in itertools.product(HIGH_PRECISION_DTYPES if shape[0] < 500 else [torch.bfloat16], MODES[::3]):
        x = inputs(shape, dtype, 1.0).float() * torch.logspace(-3, 0, shape[0])[:, None]
        x[shape[0] // 3] *= shape[0] == 1  # zeros, but for a single row
        spec, on_gpu, state = QuantizeSpec(row_scaled=True, **mode), x.to("cuda", dtype), rng_state().cuda()
        expected = reference.quantize(on_gpu, reference.row_amax(on_gpu), state, spec)
        for _ in range(3):
            assert_same_bits(N.quantize_rows(on_gpu, None, state, spec.pack()), expected, f"{spec}, {dtype}")
        given = reference.row_amax(on_gpu) * 0.3
        expected = reference.quantize(on_gpu, given, state, spec)
        assert_same_bits(N.quantize_rows(on_gpu, -given, state, spec.pack()), expected)  # its sign is left out
        values, factor = N.quantize_activation(on_gpu, state, spec.pack(), torch.bfloat16)
        expected = N.quantize_rows(on_gpu, None, state, spec.pack())
        decoded = N.dequantize(*expected[:2], None, shape[1], torch.bfloat16)
        assert_same_bits((values, factor), (decoded, expected[2]))


# Among them a cluster of 2, 4 and 8 thread blocks, one that it fills, two kernels, and too many for these.
OF_ACTIVATIONS = [(1, 16), (1, 4096), (2, 8192), (3, 8192), (8, 8192), (9, 8192), (63, 14336), (512, 8192), (513, 8192)]


@pytest.mark.gpu
def test_small_activations_have_a_kernel_of_their_own(cuda_library):
    """It supports some specs: the others must not reach it."""
    for shape in ((1, 128), (8, 4096), (300, 512)):
        for choices, mode, scale in itertools.product(LAYOUTS[:4], MODES[::3], SCALES[::2]):
            check("cuda", inputs(shape, torch.bfloat16, 1.0), QuantizeSpec(**choices, **mode, **scale))
    for shape, dtype in itertools.product((*OF_ACTIVATIONS, (5, 7, 48), (4, 50)), HIGH_PRECISION_DTYPES):
        x = torch.randn(shape, device="cuda").to(dtype) * torch.rand(shape[-1], device="cuda").to(dtype)
        up = QuantizeSpec(scale_rounding="up")
        for spec, special in ((PLAIN, 1.0), (PLAIN, torch.nan), (up, torch.inf), (PLAIN, 0)):
            x[..., -5] = special
            if special == 0:
                x.zero_()
            qdata, scale, factor = reference.quantize(x, reference.amax(x), None, spec)
            expected = reference.dequantize(qdata, scale, None, shape[-1], dtype), factor
            assert_same_bits(N.quantize_activation(x, None, spec.pack(), dtype), expected, f"{spec}, {shape}, {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 9, 63, 300])
def test_largest_of_an_activation_anywhere(cuda_library, rows):
    """In strided rows; at positions that all warps, loads and thread blocks of the search read."""
    wide = torch.randn(rows, 8192 + 16, device="cuda").bfloat16()
    x = wide[:, :8192]
    wide[:, 8192:] = 1e30  # not of x
    blocks = rows * 512  # of 16
    places = {0, blocks - 1, *range(blocks - 9 * 32, blocks, 32), *range(77, blocks, blocks // 40)}
    for n, block in enumerate(sorted(place for place in places if place >= 0)):
        at = block // 512, block % 512 * 16 + n % 16
        kept = x[at].clone()
        x[at] = -100 - n
        values, scale = N.quantize_activation(x, None, PLAIN.pack(), torch.bfloat16)
        qdata, s, factor = reference.quantize(x, reference.amax(x), None, PLAIN)
        assert equal_bits((values, scale), (reference.dequantize(qdata, s, None, 8192, torch.bfloat16), factor))
        x[at] = kept


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0xC0400000, 0xFFC00000, 0xFF800000, 0x80000000], ids=["-3", "-nan", "-inf", "-0"])
def test_a_gpu_leaves_out_the_sign_of_amax(cuda_library, bits):
    """It would make block scales of 0x80 and more, beyond the kernels' tables of 128."""
    amax = torch.tensor(bits - (1 << 32), dtype=torch.int32).view(torch.float32)
    specs = *FEW_SPECS[:6], *(QuantizeSpec(**mode, **SCALES[5]) for mode in MODES)
    for dtype, shape, spec in itertools.product(HIGH_PRECISION_DTYPES, ((200, 320), (33, 50)), specs):
        x, state, packed = inputs(shape, dtype, 1.0), rng_state(), spec.pack()
        expected = reference.quantize(x, amax.abs(), state, spec)
        assert_op(N.quantize, (x, amax, state, packed), expected, "cuda")
        values = reference.dequantize(*expected, columns_of_values(shape[-1], packed), dtype)
        assert_op(N.fake_quantize, (x, amax, state, packed, dtype), (values, expected[2]), "cuda")
    on_gpu = [t.cuda() for t in (x, amax, amax)]
    assert_same_bits(reference.quantize(*on_gpu[:2], None, PLAIN), reference.quantize(x, amax.abs(), None, PLAIN))
    pair = plain.quantize_pair(x, amax.abs(), amax.abs(), None, PLAIN.pack(), PLAIN.pack())
    assert_same_bits(N.quantize_pair(*on_gpu, None, PLAIN.pack(), PLAIN.pack()), pair)


@pytest.mark.gpu
def test_a_replayed_graph_draws_what_rng_state_holds(cuda_library):
    x, state = torch.randn(256, 512).bfloat16(), rng_state()
    on_gpu, on_gpu_state = x.cuda(), state.cuda()
    N.quantize(on_gpu, N.amax(on_gpu), on_gpu_state, STOCHASTIC.pack())
    torch.cuda.synchronize()
    graph, replayed = captured(lambda: N.quantize(on_gpu, N.amax(on_gpu), on_gpu_state, STOCHASTIC.pack()))
    seen = []
    for _ in range(2):
        on_gpu_state.copy_(state)
        graph.replay()
        assert_same_bits(replayed, reference.quantize(x, plain.amax(x), state, STOCHASTIC))
        seen.append(replayed[0].cpu())
        state = rng_state()
    assert not torch.equal(*seen)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", [N, plain], ids=["the op", "plain torch"])
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
def test_invalid_offsets_raise(device, implementation, offsets, message):
    x, amax, state = torch.ones(4, 64, device=device), torch.ones((), device=device), rng_state().to(device)
    for spec in (PLAIN.pack(), STOCHASTIC.pack()):
        for call in (
            lambda spec=spec: implementation.quantize(x, amax, state, spec, *offsets),
            lambda spec=spec: implementation.fake_quantize(x, amax, state, spec, torch.float32, True, *offsets),
        ):
            with pytest.raises((RuntimeError, ValueError), match=message):
                call()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_invalid_arguments_raise(kernels):
    x, amax, nearest = torch.ones(4, 256, device=kernels), torch.ones((), device=kernels), PLAIN.pack()
    state = rng_state().to(kernels)
    for call, message in (
        (lambda: N.quantize(x.double(), amax, None, nearest), "bfloat16, float16 or float32"),
        (lambda: N.quantize(x, amax, None, STOCHASTIC.pack()), "rng_state"),
        (lambda: N.quantize(x, None, None, EDEN.pack()), "EDEN needs rng_state"),
        (lambda: N.quantize_activation(x, None, EDEN.pack(), torch.bfloat16), "EDEN needs rng_state"),
        (lambda: N.quantize(x, amax, state, EDEN.pack(), 0, 16, 512), "multiple of 128, where a rotation begins"),
        (lambda: N.quantize(x, amax, state, QuantizeSpec(row_scaled=True).pack()), "QuantizeSpec|quantize_rows"),
        (lambda: plain.quantize(x, amax, state, QuantizeSpec(row_scaled=True).pack()), "use quantize_rows"),
        *((lambda op=op, sign=sign: op(x[:, :4], sign), f"mask from 0 to 0xFFFF, not {sign}")
          for op, sign in itertools.product((N.amax, N.hadamard, plain.amax), (1 << 16, 1 << 40, -2))),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
            call()
    if kernels == "cuda":
        with pytest.raises(RuntimeError, match="amax"):
            N.quantize(x, amax.cpu(), None, nearest)
        with pytest.raises(RuntimeError, match="x is on the CPU"):
            N.quantize(x.cpu(), amax, None, nearest)


NO_SPECS = [3 << 4, 1 << 11, 1 << 10 | 1 << 4, 1 << 8, 1 << 8 | 1 << 7, 1 << 16, 1 << 32 | 1 << 9, -(1 << 63), -1]
NO_SPECS += [1 << 12 | bits for bits in (1, 3, 1 << 3, 1 << 7, 1 << 10)]


@pytest.mark.parametrize("bits", NO_SPECS)
def test_an_integer_that_is_no_packed_spec_raises(kernels, bits):
    """Four-over-six by an unknown error, unknown bits, hardware rounding of another mode, a sign of no transform."""
    x, amax, state = torch.ones(16, 16, device=kernels), torch.ones((), device=kernels), rng_state().to(kernels)
    for call in (
        lambda: N.quantize(x, amax, state, bits),
        lambda: N.quantize(x, None, state, bits),
        lambda: N.quantize_pair(x, amax, amax, state, PLAIN.pack(), bits),
        lambda: N.fake_quantize(x, amax, state, bits, torch.float32),
        lambda: N.quantize_activation(x, state, bits, torch.float32),
    ):
        with pytest.raises(RuntimeError, match=r"QuantizeSpec\.pack"):
            call()


def test_codes_and_scales_that_do_not_fit_raise(kernels):
    codes = torch.zeros(256, 64, dtype=torch.uint8, device=kernels)
    scale = torch.zeros(2, 2, 32, 16, dtype=torch.uint8, device=kernels)
    x, one = torch.ones(1, 128, device=kernels).bfloat16(), torch.ones((), device=kernels)
    cases = [
        (codes, scale[:, :, :1, :1], "32, 16"),
        (codes, scale.transpose(2, 3), "scale must be swizzled"),
        (codes, scale[:1], r"\(2, 2, 32, 16\) for qdata of 256 rows of 8 blocks"),
        (codes, torch.cat((scale, scale), dim=1), r"not Byte \(2, 4, 32, 16\)"),
        (codes, scale.view(torch.float8_e5m2), "float8_e4m3fn or its bytes in uint8, not Float8_e5m2"),
        (codes.view(torch.int8), scale, "qdata must be uint8"),
        (codes[:, :60].contiguous(), scale, "whole blocks of 8 bytes"),
    ]
    if kernels == "cuda":
        cases += [(codes, scale.cpu(), "scale is not on the device of qdata"), (codes.cpu(), scale, "qdata is")]
    for bad, bad_scale, message in cases:
        with pytest.raises(RuntimeError, match=message):
            N.dequantize(bad, bad_scale, None, 128, torch.float32)
        with pytest.raises(RuntimeError, match=message):
            N.matmul(x, None, bad, bad_scale, one, None, 128, False, torch.float32)
        if kernels == "cuda":
            with pytest.raises(RuntimeError, match=message):
                offs = torch.ones(1, dtype=torch.int32, device="cuda")
                N.grouped_linear(x, None, bad[None], bad_scale, one, offs, torch.float32)


@needs_library
def test_messages_have_the_fix_and_name_no_source_file():
    x, amax, below, nearest = torch.ones(16, 16), torch.ones(()), torch.tensor(-3.0), PLAIN.pack()
    for call in (
        lambda: N.quantize(x, below, None, nearest),
        lambda: N.quantize_pair(x, amax, below, None, nearest, nearest),
        lambda: N.fake_quantize(x, below, None, nearest, torch.float32),
    ):
        with pytest.raises(RuntimeError, match=r"magnitude, not -3: give amax.abs\(\)"):
            call()
    with pytest.raises(RuntimeError) as caught:
        N.matmul(torch.ones(2, 32), None, *N.quantize(x, None, None, nearest), None, 16, False, torch.float32)
    assert str(caught.value) == "x must have 16 columns to be multiplied with this weight"
