"""The CPU kernels against the reference, bit for bit, and the account that info() gives of them."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from helpers.instruction_sets import (
    assert_op,
    assert_same_bits,
    each_instruction_set,
    needs_library,
    reference_amax,
    sample,
)

from nvfp4_tensor import QuantizeSpec, info, quantize
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.ops import native

pytestmark = needs_library

OPS = torch.ops.nvfp4
RNG_STATE = torch.tensor([-7046029254386353131, 1442695040888963407])
ROUNDINGS = (
    {"round_mode": "rne"},
    {"round_mode": "away"},
    {"round_mode": "zero"},
    {"round_mode": "stochastic"},
    {"round_mode": "stochastic", "random_bits": 8},
)
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
SPECS = [
    QuantizeSpec(block_rows=block_rows, hadamard_sign=sign, **rounding, **scale)
    for block_rows, sign, rounding, scale in itertools.product((1, 16), (None, 0xD7E8), ROUNDINGS, SCALES)
]
SHAPES = ((1, 16), (64, 64), (130, 272), (33, 50), (1, 4112), (16, 1000), (3, 5, 48), (7,), (300, 37))
EMPTY_SHAPES = ((0,), (0, 16), (5, 0), (3, 0, 32))


@pytest.fixture(autouse=True)
def one_thread():
    """The reference's small tensors gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_quantize(x, spec, amax=None, offsets=(0, 0, 0), stream=0):
    expected_amax = reference_amax(x, spec)
    assert_op(OPS.amax, (x, -1 if spec.hadamard_sign is None else spec.hadamard_sign), (expected_amax,))
    amax = expected_amax if amax is None else amax
    expected = reference.quantize(x, amax, RNG_STATE, spec, *offsets, stream)
    assert_op(OPS.quantize, (x, amax, RNG_STATE, spec.pack(), *offsets, stream), expected)
    return expected


def check_decoding(x, spec, quantized, amax, dtype):
    columns = x.shape[-1] if spec.hadamard_sign is None else quantized[0].shape[-1] * 2
    for scaled in (True, False):
        factor = quantized[2] if scaled else None
        expected = reference.dequantize(*quantized[:2], factor, columns, dtype)
        assert_op(OPS.dequantize, (*quantized[:2], factor, columns, dtype), (expected,))
        assert_op(OPS.fake_quantize, (x, amax, RNG_STATE, spec.pack(), dtype, scaled), (expected, quantized[2]))


def check_all(x, spec, dtype):
    check_decoding(x, spec, check_quantize(x, spec), reference_amax(x, spec), dtype)


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_every_spec_has_the_bits_of_the_reference(dtype):
    for spec in SPECS:
        x = sample((35, 312), dtype)
        check_all(x, spec, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_has_the_bits_of_the_reference(shape):
    for dtype, block_rows, mode in itertools.product(HIGH_PRECISION_DTYPES, (1, 16), ("rne", "stochastic")):
        x = sample(shape, dtype)
        spec = QuantizeSpec(block_rows=block_rows, round_mode=mode)
        check_all(x, spec, torch.bfloat16)
        check_quantize(x, spec, offsets=(1 << 33, 160, 1 << 20), stream=1)


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty_tensors(shape):
    x = torch.empty(shape)
    for spec in (QuantizeSpec(), QuantizeSpec(block_rows=16), QuantizeSpec(hadamard_sign=True)):
        check_all(x, spec, torch.bfloat16)
    assert OPS.hadamard(x, 0).shape == reference.hadamard(x, 0).shape


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-5, 1.0, 1e4, 1e30, 3e38])
def test_magnitudes(scale):
    x = (sample((48, 80), torch.float32).clamp(-1, 1) * scale).requires_grad_(False)
    x[5, 16:32] = 0
    for dtype, options in itertools.product((torch.float32, torch.bfloat16), ({}, *SCALES[1:])):
        spec = QuantizeSpec(**options)
        y = x.to(dtype)
        check_all(y, spec, dtype)
        check_quantize(y, spec, amax=reference_amax(y, spec) / 3)  # an amax that x exceeds: codes saturate
        check_quantize(y, spec, amax=torch.zeros(()))


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_values_that_are_not_finite(dtype):
    x = sample((40, 100), dtype)
    x[0, 3], x[17, 40], x[18, 99], x[39, 0], x[39, 15] = float("nan"), float("inf"), -float("inf"), -float("nan"), -0.0
    x[20, 32:48] = -0.0
    for spec in SPECS[:: 5 if dtype != torch.bfloat16 else 1]:
        check_all(x, spec, dtype)
    nothing_finite = torch.full((4, 32), float("nan"), dtype=dtype)
    check_quantize(nothing_finite, QuantizeSpec())


def test_strided_input():
    base = sample((96, 400), torch.bfloat16)
    views = (
        base[::2, 16:336],
        base[5:9, 3:50],
        base.t(),
        base[:, ::3],
        base[:1, 7:],
        base[3],
        base.view(4, 24, 400)[:, 1],
    )
    for x, spec in itertools.product(views, (QuantizeSpec(), QuantizeSpec(block_rows=16, round_mode="stochastic"))):
        check_all(x, spec, torch.float32)


@pytest.mark.parametrize("shape", [(48, 64), (300, 37), (257, 600), (5, 1), (0, 16)], ids=str)
def test_a_matrix_and_its_transpose_in_one_pass(shape):
    pairs = (
        (QuantizeSpec(), QuantizeSpec(hadamard_sign=True)),
        (QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="stochastic", hadamard_sign=0x1234)),
        (QuantizeSpec(block_rows=16, four_over_six="mse"), QuantizeSpec(block_rows=16, scale_rounding="up")),
    )
    for dtype, (spec, spec_t) in itertools.product(HIGH_PRECISION_DTYPES, pairs):
        x = sample(shape, dtype)
        amax, amax_t = reference_amax(x, spec), reference_amax(x.t(), spec_t)
        sign = -1 if spec_t.hadamard_sign is None else spec_t.hadamard_sign
        assert_op(OPS.amax_pair, (x, sign), (amax, amax_t))
        args = (x, amax, amax_t, RNG_STATE, spec.pack(), spec_t.pack(), 32, 48, 1024, 4096)
        expected = (
            *reference.quantize(x, amax, RNG_STATE, spec, 32, 48, 4096, 0),
            *reference.quantize(x.t(), amax_t, RNG_STATE, spec_t, 48, 32, 1024, 1),
        )
        assert_op(OPS.quantize_pair, args, expected)


def test_hadamard_and_factors_per_row():
    for dtype, shape in itertools.product(HIGH_PRECISION_DTYPES, ((3, 5, 40), (20, 256), (1, 16))):
        x = sample(shape, dtype)
        assert_op(OPS.hadamard, (x, 0xD7E8), (reference.hadamard(x, 0xD7E8),))
        quantized = reference.quantize(x, reference.amax(x), None, QuantizeSpec())
        factors = torch.rand(x.shape[:-1].numel()) * 1e3
        for out_dtype in HIGH_PRECISION_DTYPES:  # float16 overflows, and has subnormals, in some rows
            args = (*quantized[:2], factors * 1e-6 if shape[0] == 3 else factors * 1e3, shape[-1], out_dtype)
            assert_op(OPS.dequantize, args, (reference.dequantize(*args),))


@pytest.mark.smoke
def test_every_scale_byte_decodes():
    """Enough of them that the kernels decode by table."""
    scale = torch.arange(2048, dtype=torch.int64).remainder(256).to(torch.uint8).view(4, 1, 32, 16)
    qdata = torch.arange(512 * 32, dtype=torch.int64).remainder(251).to(torch.uint8).view(512, 32)
    args = (qdata, scale.view(torch.float8_e4m3fn), torch.tensor(1.7), 64)
    for dtype in (*HIGH_PRECISION_DTYPES, torch.float64):
        assert_op(OPS.dequantize, (*args, dtype), (reference.dequantize(*args, dtype),))


def test_results_do_not_depend_on_the_thread_count():
    x = sample((1000, 528), torch.bfloat16)
    spec, spec_t = QuantizeSpec(round_mode="stochastic"), QuantizeSpec(round_mode="stochastic", hadamard_sign=True)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        amax, amax_t = OPS.amax_pair(x, 0xD7E8)
        pair = OPS.quantize_pair(x, amax, amax_t, RNG_STATE, spec.pack(), spec_t.pack())
        decoded = OPS.dequantize(*pair[:3], 528, torch.float32)
        results.append((amax, amax_t, *pair, decoded, *check_quantize(x, spec)))
    for one, two in zip(*results, strict=True):
        assert_same_bits(one, two)


def test_errors_have_the_fix():
    amax = torch.ones(())
    for x in (torch.ones(4, 16, dtype=torch.float64), torch.ones(4, 16, dtype=torch.int64)):
        with pytest.raises((RuntimeError, TypeError), match="cast"):
            OPS.quantize(x, amax, None, QuantizeSpec().pack())
    with pytest.raises((RuntimeError, ValueError), match="rng_state"):
        OPS.quantize(torch.ones(4, 16), amax, None, QuantizeSpec(round_mode="stochastic").pack())
    with pytest.raises(ValueError, match="not available"):
        native.set_instruction_set("mmx")
    w = quantize(torch.ones(16, 64))
    with pytest.raises(RuntimeError) as caught:
        OPS.matmul(torch.ones(2, 32), None, w.qdata, w.scale, w.per_tensor_scale, None, 64, False, torch.float32)
    assert str(caught.value) == "x must have 64 columns to be multiplied with this weight"  # no name of a source


def test_info_tells_what_serves():
    now = info()
    assert now.cpu == "native" and now.cpu_instruction_set == native.instruction_set()
    assert "torch" in now.versions and f"native, {now.cpu_instruction_set}" in str(now)


def run_with(**environment: str) -> list[str]:
    """What a fresh interpreter prints: what serves, on which instructions, and a hash of what it quantizes."""
    code = (
        "import hashlib, torch, nvfp4_tensor\n"
        "x = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))\n"
        "q = torch.ops.nvfp4.quantize(x, torch.ops.nvfp4.amax(x), None, 0)\n"
        "print(nvfp4_tensor.info().cpu); print(nvfp4_tensor.info().cpu_instruction_set)\n"
        "print(hashlib.sha256(b''.join(t.view(torch.uint8).numpy().tobytes() for t in q[:2])).hexdigest())"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:nvfp4_tensor", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


@pytest.mark.slow
def test_switched_off_plain_torch_serves_the_same_bits():
    off, on = run_with(NVFP4_TENSOR_NATIVE="0"), run_with(NVFP4_TENSOR_NATIVE="1")
    assert off[:2] == ["plain torch (disabled by NVFP4_TENSOR_NATIVE=0)", "torch"]
    assert on[0] == "native" and on[2] == off[2]
    portable = run_with(NVFP4_TENSOR_ISA="portable")
    assert portable == ["native", "portable", off[2]]


def test_without_a_library_it_warns_once(monkeypatch):
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "find", lambda name: None)
    with pytest.warns(UserWarning, match="libnvfp4_cpu.so was not built.*pip install") as seen:
        native.load()
        native.load()
    assert len(seen) == 1


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
    spec = QuantizeSpec(hadamard_sign=True)
    amax = torch.tensor(4.0)
    assert_op(OPS.hadamard, (x, 0xD7E8), (reference.hadamard(x, 0xD7E8),))
    assert_op(OPS.quantize, (x, amax, None, spec.pack()), reference.quantize(x, amax, None, spec, 0, 0, 0, 0))
    for name in each_instruction_set():
        values, _ = OPS.fake_quantize(x, amax, None, spec.pack(), torch.bfloat16)
        assert values.isnan().sum() == 16 and values[1, :16].isnan().all(), name
        pair = OPS.quantize_pair(x, amax, amax, None, QuantizeSpec().pack(), spec.pack())
        assert OPS.dequantize(*pair[3:], 48, torch.float32).isnan().sum() == 16, name
        for rows in (1, 300):  # decoded one by one, and by a table
            codes, scale, factor = OPS.quantize(torch.ones(rows, 256), None, None, 0)
            factor.view(torch.int32).fill_(payload)
            assert OPS.dequantize(codes, scale, factor, 256, torch.bfloat16).isnan().all(), name


def test_codes_and_scales_of_other_shapes_raise():
    codes, scale = torch.zeros(256, 64, dtype=torch.uint8), torch.zeros(2, 2, 32, 16, dtype=torch.uint8)
    x, one = torch.ones(1, 128), torch.tensor(1.0)
    for bad_codes, bad_scale, message in (
        (codes, scale[:, :, :1, :1], "32, 16"),
        (codes, scale.transpose(2, 3), "32, 16"),
        (codes, scale[:1], r"\(2, 2, 32, 16\) for qdata of 256 rows of 8 blocks"),
        (codes, torch.cat((scale, scale), dim=1), r"not Byte \(2, 4, 32, 16\)"),
        (codes, scale.view(torch.float8_e5m2), "float8_e4m3fn or its bytes in uint8, not Float8_e5m2"),
        (codes.view(torch.int8), scale, "qdata must be uint8"),
        (codes[:, :60].contiguous(), scale, "whole blocks of 8 bytes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS.dequantize(bad_codes, bad_scale, None, 128, torch.float32)
        with pytest.raises(RuntimeError, match=message):
            OPS.matmul(x, None, bad_codes, bad_scale, one, None, 128, False, torch.float32)


@pytest.mark.parametrize(
    "bits",
    [
        3 << 4,
        1 << 11,
        1 << 10 | 1 << 4,
        1 << 12 | 3,
        1 << 12 | 1 << 10,
        1 << 8,
        1 << 8 | 1 << 7,
        1 << 16,
        1 << 32 | 1 << 9,
        -(1 << 63),
        -1,
    ],
)
def test_an_integer_that_is_no_packed_spec_raises(bits):
    """Four-over-six by an unknown error, unknown bits, hardware rounding of another mode, a sign of no transform."""
    x, amax, plain = torch.ones(16, 16), torch.ones(()), QuantizeSpec().pack()
    for call in (
        lambda: OPS.quantize(x, amax, RNG_STATE, bits),
        lambda: OPS.quantize(x, None, RNG_STATE, bits),
        lambda: OPS.quantize_pair(x, amax, amax, RNG_STATE, plain, bits),
        lambda: OPS.fake_quantize(x, amax, RNG_STATE, bits, torch.float32),
        lambda: OPS.quantize_activation(x, RNG_STATE, bits, torch.float32),
    ):
        with pytest.raises(RuntimeError, match=f"QuantizeSpec.pack.* never {bits}"):
            call()


@pytest.mark.parametrize("sign", [1 << 16, 1 << 31, 1 << 40, -2])
def test_a_sign_of_more_than_16_bits_raises(sign):
    """An int of 2^31 is negative, and a negative one means no transform."""
    x = torch.ones(16, 16)
    for op in (OPS.amax, OPS.amax_pair, OPS.hadamard):
        with pytest.raises(RuntimeError, match=f"mask from 0 to 0xFFFF, not {sign}"):
            op(x, sign)


def test_a_negative_amax_raises():
    x, amax, below = torch.ones(16, 16), torch.ones(()), torch.tensor(-3.0)
    plain = QuantizeSpec().pack()
    for call in (
        lambda: OPS.quantize(x, below, None, plain),
        lambda: OPS.quantize_pair(x, amax, below, None, plain, plain),
        lambda: OPS.fake_quantize(x, below, None, plain, torch.float32),
        lambda: quantize(x, amax=below),
    ):
        with pytest.raises(RuntimeError, match=r"magnitude, not -3: give amax.abs\(\)"):
            call()


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7F800000, -0x80000000], ids=["nan", "-nan", "inf", "-0"])
def test_an_amax_that_no_tensor_has_means_the_same_everywhere(bits):
    """NaN and infinity, whatever their sign, leave no finite number behind; -0 is 0."""
    amax = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    x = sample((35, 80), torch.float32)
    for spec in SPECS[::7]:
        expected = check_quantize(x, spec, amax=amax)
        finite = reference.dequantize(*expected, 80, torch.float32).isfinite()
        assert finite.all() if amax == 0 else not finite.any()


@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES)
@pytest.mark.parametrize("repeats", [1, 20])  # decoded one by one, and by a table
def test_scale_bytes_from_0x7f_on_mean_nan(dtype, repeats):
    """In what is decoded and in products, along and across the blocks; each row has one scale, of all 256."""
    plain = torch.arange(256, dtype=torch.uint8).repeat(repeats).unsqueeze(-1).expand(-1, 9).clone()
    codes = torch.randint(0, 256, (len(plain), 72), dtype=torch.uint8)
    scale, factor = layout.swizzle(plain).view(torch.float8_e4m3fn), torch.tensor(2.0**-9)
    nan = plain[:, 0] >= 0x7F
    for factors in (factor, None, torch.full((len(plain),), 2.0**-9)):
        arguments = codes, scale, factors, 140, dtype
        assert_op(OPS.dequantize, arguments, (reference.dequantize(*arguments),))
        assert torch.equal(OPS.dequantize(*arguments).isnan().all(1), nan)
    x = torch.randn(3, 140).to(dtype)
    for name in each_instruction_set():
        y = OPS.matmul(x, None, codes, scale, factor, None, 140, False, torch.float32)
        assert torch.equal(y.isnan(), nan.expand(3, -1)), name
        y = OPS.matmul(torch.ones(3, len(plain)).to(dtype), None, codes, scale, factor, None, 140, True, torch.float32)
        assert y.isnan().all(), name
