"""The reference against what pins it: TransformerEngine's golden cases, the contract's words, exact arithmetic."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.bits import equal_bits
from helpers.products import products
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import QuantizeSpec, RoundingMode
from nvfp4_tensor.numerics import hadamard, layout, philox, reference

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "transformer_engine.json").read_text())
E4M3 = sorted({float(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()})
STOCHASTIC_UP = QuantizeSpec(round_mode="stochastic", scale_rounding="up")


def golden_input(archive, case) -> torch.Tensor:
    x = archive[f"{case['case']:02d}/x"]
    if case["dtype"] == "float32":
        return torch.from_numpy(x.copy())
    return torch.from_numpy(x.view(np.int16).copy()).view(getattr(torch, case["dtype"]))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['case']}-{case['mode']}-{case['dtype']}")
@pytest.mark.parametrize("side", ["row", "col"])
def test_golden(case, side):
    spec = {"1d": QuantizeSpec(), "2d": QuantizeSpec(block_rows=16), "rht": QuantizeSpec()}.get(case["mode"])
    if spec is None:
        _, ceiling, error = case["mode"].split("_")
        spec = QuantizeSpec(four_over_six=error, scale_ceiling=int(ceiling))
    if case["mode"] == "rht" and side == "col":
        spec = spec.replace(hadamard_sign=True)
    with np.load(DATA / "transformer_engine.npz") as archive:
        x = golden_input(archive, case)
        codes, scales, amax = (
            torch.from_numpy(np.array(archive[f"{case['case']:02d}/{side}_{part}"]))
            for part in ("codes", "scales", "amax")
        )
    x = x if side == "row" else x.t()
    x_amax = torch.ops.nvfp4.amax(x, -1 if spec.hadamard_sign is None else spec.hadamard_sign)
    qdata, scale, per_tensor_scale = reference.quantize(x, x_amax, None, spec)
    linear = layout.unswizzle(scale, x.shape[0], x.shape[1] // 16).view(torch.uint8)
    assert x_amax == amax.flatten()[0]
    assert per_tensor_scale == x_amax / torch.tensor(6.0 * spec.scale_ceiling)
    assert torch.equal(linear, scales)
    compared = (scales != 0).repeat_interleave(8, dim=1)
    assert compared.float().mean() > 0.5
    assert torch.equal(qdata[compared], codes[compared])


def test_random16_is_the_contracts_window_of_the_128_bits():
    state = torch.tensor([0x299F31D0A4093822, 5 << 32 | 0x13198A2E])
    r16 = reference.random16(3, 40, state, stream=1, row0=7, col0=32, full_width=100)
    assert r16.shape == (3, 48)
    for row, block in ((0, 0), (2, 1), (1, 2)):
        index = (7 + row) * 7 + 2 + block
        words = philox.philox4x32_7(
            tuple(torch.tensor(word) for word in (index, 0, 0x13198A2E, 1)),
            (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)),
        )
        bits = sum(word.item() << 32 * i for i, word in enumerate(words))
        bits |= bits << 128
        assert r16[row, block * 16 : block * 16 + 16].tolist() == [bits >> 8 * e & 0xFFFF for e in range(16)]


@pytest.mark.parametrize(("mode", "codes"), [("rne", "0224466"), ("away", "1234567"), ("zero", "0123456")])
def test_ties(mode, codes):
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    for sign, values in ((0, ties), (8, -ties)):
        assert reference.round_e2m1(values, RoundingMode.of(mode)).tolist() == [int(code) | sign for code in codes]


@settings(max_examples=300, deadline=None)
@given(st.floats(-8, 8, width=32), st.integers(0, 0xFFFF))
def test_rounding_by_exact_arithmetic(value, draw):
    """Each mode rounds to the same neighbour as rational arithmetic."""
    grid = [Fraction(v) for v in layout.CODE_VALUES]
    a = min(abs(Fraction(value)), Fraction(6))
    low = max(code for code in range(8) if grid[code] <= a)
    high = low if grid[low] == a else low + 1
    fraction = Fraction(0) if high == low else (a - grid[low]) / (grid[high] - grid[low])
    nearest = low if fraction < Fraction(1, 2) else high
    tie = fraction == Fraction(1, 2)
    expected = {
        RoundingMode.RNE: (low if low % 2 == 0 else high) if tie else nearest,
        RoundingMode.AWAY: nearest,
        RoundingMode.ZERO: low if tie else nearest,
        RoundingMode.STOCHASTIC: high if math.floor(fraction * 2**16) + draw >= 2**16 else low,
    }
    v, r16 = torch.tensor([value]), torch.tensor([draw], dtype=torch.int32)
    sign = 8 if math.copysign(1, value) < 0 else 0
    for mode, code in expected.items():
        assert reference.round_e2m1(v, mode, r16).item() == code | sign
    coarse = high if math.floor(fraction * 2**8) + (draw >> 8) >= 2**8 else low
    assert reference.round_e2m1(v, RoundingMode.STOCHASTIC, r16, 8).item() == coarse | sign


@pytest.mark.parametrize("rounding", ["nearest", "up"])
def test_e4m3_by_search(rounding):
    v = torch.cat([torch.rand(500) * 500, torch.rand(500) * 0.05, torch.tensor(E4M3), torch.tensor([0.0, 1e-9, 1e30])])
    spec = QuantizeSpec(scale_rounding=rounding)
    got = reference.to_e4m3(v, spec.scale_rounding, v).view(torch.float8_e4m3fn).float()
    for value, result in zip(v.clamp(max=448).tolist(), got.tolist(), strict=True):
        if rounding == "up":
            assert result == min(e for e in E4M3 if e >= value)
        else:
            assert abs(result - value) == min(abs(e - value) for e in E4M3)


def test_up_scales_never_clip():
    x = torch.randn(64, 256)
    amax = reference.amax(x)
    for rounding, clipped in (("up", False), ("nearest", True)):
        spec = QuantizeSpec(scale_rounding=rounding)
        blocks = x.unflatten(-1, (-1, 16))
        bits = reference.block_scales(blocks, amax, spec)
        enc = reference.block_encode(bits.view(torch.float8_e4m3fn).float(), reference.encode_scale(amax, spec))
        largest = (blocks * enc.unsqueeze(-1)).abs().max()
        assert (largest > 6.0001) == clipped and largest < 6.376


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("block_rows", [1, 16])
def test_a_block_with_nan_or_inf_decodes_to_nan_and_touches_no_other(dtype, block_rows):
    x = torch.randn(40, 70).to(dtype)
    spec = QuantizeSpec(block_rows=block_rows)
    dirty = x.clone()
    dirty[3, 5], dirty[20, 69], dirty[39, 33] = math.nan, math.inf, -math.inf
    spoiled = torch.zeros(40, 70, dtype=torch.bool)
    for row, column in ((3, 5), (20, 69), (39, 33)):
        first = row // block_rows * block_rows
        spoiled[first : first + block_rows, column // 16 * 16 : column // 16 * 16 + 16] = True
    amax = reference.amax(dirty)
    x[spoiled & ~dirty.isfinite()] = 0
    assert amax == reference.amax(x) and amax.isfinite()
    clean = reference.dequantize(*reference.quantize(x, amax, None, spec), 70, torch.float32)
    decoded = reference.dequantize(*reference.quantize(dirty, amax, None, spec), 70, torch.float32)
    assert decoded[spoiled].isnan().all()
    assert torch.equal(decoded[~spoiled], clean[~spoiled])
    scales = layout.unswizzle(reference.quantize(dirty, amax, None, spec)[1], 40, 5).view(torch.uint8)
    assert (scales == 0x7F).sum() == spoiled[:, ::16].sum()


def test_zeros_keep_their_sign_and_their_value():
    x = torch.tensor([[0.0, -0.0] * 8, [1.0, -0.0] * 8])
    for rows in (x[:1], x):
        amax = reference.amax(rows)
        decoded = reference.dequantize(*reference.quantize(rows, amax, None, QuantizeSpec()), 16, torch.float32)
        assert torch.equal(decoded, rows) and torch.equal(decoded.signbit(), rows.signbit())
    assert reference.per_tensor_scale(torch.zeros(()), QuantizeSpec()) == 1


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-20, 1e-6, 1.0, 1e6, 1e20, 3e38])
@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(four_over_six=True), STOCHASTIC_UP], ids=str)
def test_extreme_magnitudes_stay_finite_and_close(magnitude, spec):
    x = torch.rand(4, 64).clamp(min=0.25) * magnitude
    state = torch.tensor([1, 2])
    amax = reference.amax(x)
    decoded = reference.dequantize(*reference.quantize(x, amax, state, spec), 64, torch.float32)
    assert decoded.isfinite().all()
    if magnitude >= 1e-35:  # below 2688 / FLT_MAX the contract's S_enc saturates, and values decode too small
        assert (decoded - x).abs().max() <= amax * (0.34 if spec.is_stochastic else 0.18)


@pytest.mark.smoke
def test_16x16_scales_serve_the_transpose():
    x = torch.randn(48, 80)
    amax, spec = reference.amax(x), QuantizeSpec(block_rows=16)
    direct = reference.dequantize(*reference.quantize(x, amax, None, spec), 80, torch.float32)
    transposed = reference.dequantize(*reference.quantize(x.t(), amax, None, spec), 48, torch.float32)
    assert torch.equal(direct, transposed.t())


def test_hadamard_is_orthogonal_and_is_the_matrix_of_the_contract():
    x = torch.randn(8, 48)
    sign = 0xD7E8
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]) * 0.25
    matrix = torch.diag(torch.tensor([-1.0 if sign >> i & 1 else 1.0 for i in range(16)])) @ matrix
    expected = (x.unflatten(-1, (-1, 16)).double() @ matrix.double()).flatten(-2)
    got = reference.hadamard(x, sign)
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).abs().max() <= expected.abs().max() * 2**-8
    torch.testing.assert_close(got.double().norm(), x.double().norm(), rtol=2e-3, atol=0)
    back = hadamard.inverse_hadamard(hadamard.float_hadamard(x, sign), sign)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    for size in (24, 64):  # of 24 elements of a head, 8 together
        keys = torch.randn(3, 2 * size)[:, :size]
        n = hadamard.rotation_size(size)
        signs = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)])
        turned = hadamard.rotate_heads(keys)
        right = (keys.unflatten(-1, (-1, n)) @ signs / n).flatten(-2)
        torch.testing.assert_close(turned, right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(hadamard.rotate_heads_back(turned), keys, rtol=1e-5, atol=1e-5)


def test_rows_are_quantized_alike_whatever_the_chunk(monkeypatch):
    x, state = torch.randn(50, 40), torch.tensor([3, 4])
    spec = QuantizeSpec(round_mode="stochastic", block_rows=16)
    whole = reference.quantize(x, reference.amax(x), state, spec)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 16 * 48)
    pieces = reference.quantize(x, reference.amax(x), state, spec)
    assert equal_bits(whole, pieces)


def test_matmul_applies_every_scale_once():
    x, w, bias = torch.randn(5, 40), torch.randn(24, 40), torch.randn(24)
    qdata, scale, factor = reference.quantize(w, reference.amax(w), None, QuantizeSpec())
    rows, ones, dy = torch.rand(5) + 0.5, torch.rand(24) + 0.5, torch.randn(5, 24)
    for x_scale, w_scale in ((None, factor), (rows[0], factor), (rows, factor), (rows, factor * ones)):
        for left, added, transposed in ((x, bias, False), (dy, None, True)):
            arguments = left, x_scale, qdata, scale, w_scale, added, 40, transposed
            y = reference.matmul(*arguments, torch.float32)
            torch.testing.assert_close(y.double(), products(*arguments)[0], rtol=1e-5, atol=1e-5)
    one, first = (reference.matmul(t, None, *arguments[2:5], bias, 40, False, torch.float32) for t in (x[0], x[:1]))
    assert torch.equal(one, first[0])  # a vector


def test_invalid_arguments_of_decoding_raise():
    x, spec = torch.randn(24, 48), QuantizeSpec()
    qdata, scale, factor = reference.quantize(x, torch.tensor(4.0), None, spec)
    for bad, message in (
        (scale.view(torch.float8_e5m2), "float8_e4m3fn or its bytes in uint8, not torch.float8_e5m2"),
        (scale.transpose(2, 3), r"\(1, 1, 32, 16\) for 24 rows of 48 codes, got \(1, 1, 16, 32\)"),
    ):
        with pytest.raises(ValueError, match=message):
            reference.dequantize(qdata, bad, factor, 48, torch.float32)
    with pytest.raises(ValueError, match=r"magnitude, not -4.0: give amax.abs\(\)"):
        reference.quantize(x, torch.tensor(-4.0), None, spec)
    with pytest.raises(ValueError, match="mask from 0 to 0xFFFF, not 65536"):
        reference.hadamard(x, 1 << 16)


def test_is_one_graph():
    """Nothing in it depends on a value, not even the error for a negative amax."""
    x, amax, spec = torch.randn(24, 48), torch.tensor(4.0), QuantizeSpec()
    traced = torch.compile(reference.quantize, fullgraph=True, dynamic=False, backend="eager")
    assert equal_bits(traced(x, amax, None, spec), reference.quantize(x, amax, None, spec))
