"""Rows of activations and weights rounded to e4m3, by the definition (numerics contract, section 13)."""

import math

import pytest
import torch

from nvfp4_tensor import quantize
from nvfp4_tensor.numerics import fp8 as reference
from nvfp4_tensor.numerics.layout import swizzle, unswizzle


def by_hand(v: float, p: int) -> float:
    """v * 2^-p rounded to e4m3 by its definition, for |v * 2^-p| <= 448: steps of 2^-9, or 1/8 of the binade."""
    scaled = v * 2.0**-p
    step = 2.0 ** (max(math.floor(math.log2(abs(scaled))), -6) - 3) if scaled else 1.0
    return round(scaled / step) * step  # Python rounds a tie to even


def exponent_by_hand(a: float) -> int:
    p = -126
    while a > 448 * 2.0**p:
        p += 1
    return p if a else 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_x_by_the_definition(dtype, monkeypatch):
    """From the least to the largest of the dtype; an element that is not finite is NaN and affects no other."""
    x = (torch.randn(48, 50) * torch.randn(48, 1).mul(5).exp2()).to(dtype)
    x[0] = 0
    x[1] = 1.75 * 2.0**3  # just 448 * 2^-5
    x[2, 0] = x[2].float().abs().max() * 2
    info = torch.finfo(dtype)
    for row, largest in enumerate((info.smallest_normal * info.eps, info.smallest_normal, 1.0, info.max), 3):
        x[row], x[row, 7], x[row, 8], x[row, 9] = 0.0, largest, -largest / 2, -0.0
    x[8, 5], x[9, 5], x[10, 5] = torch.nan, torch.inf, -torch.inf
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 50 * 7)
    values, scale = reference.quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == (48, 64) and scale.shape == (48,)
    for row, got, s in zip(x.tolist(), values.float().tolist(), scale.tolist(), strict=True):
        p = exponent_by_hand(max(abs(v) for v in row if math.isfinite(v)))
        assert s == 2.0**p and (not any(row) or max(abs(v) for v in got if v == v) > 223 or p == -126)
        expected = [by_hand(v, p) if math.isfinite(v) else math.nan for v in row] + [0.0] * 14
        assert [v if v == v else "nan" for v in got] == [v if v == v else "nan" for v in expected]
    assert values.view(torch.uint8)[8:11, 5].tolist() == [0x7F] * 3
    assert values.view(torch.uint8)[3, 9:11].tolist() == [0x80, 0x00]


def all_scales():
    """A row for each byte as its largest block scale, each with codes of every kind in 32 blocks."""
    scale = torch.randint(0, 0x7F, (256, 32), dtype=torch.uint8)
    scale = torch.minimum(scale, torch.arange(256).clamp(max=0x7E).to(torch.uint8).unsqueeze(1))
    scale[:, 7] = torch.arange(256)
    return torch.randint(0, 256, (256, 256), dtype=torch.uint8), swizzle(scale).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("per_row", [False, True])
def test_a_weight_by_the_definition(per_row, monkeypatch):
    qdata, scale = all_scales()
    per_tensor_scale = torch.rand(256) if per_row else torch.tensor(0.0123)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 512 * 100)
    values, factor = reference.of_codes(qdata, scale, per_tensor_scale)
    s = unswizzle(scale, 256, 32).view(torch.uint8).long()
    s = torch.where(s < 0x7F, s.to(torch.uint8).view(torch.float8_e4m3fn).float(), torch.nan)
    decoded = torch.ops.nvfp4.dequantize(qdata, scale, None, 512, torch.float32)
    for row in range(256):
        p = exponent_by_hand(6 * s[row].nan_to_num(0).max().item())
        assert factor[row] == per_tensor_scale.expand(256)[row] * 2.0**p
        expected = torch.tensor([by_hand(v, p) if v == v else v for v in decoded[row].tolist()])
        assert torch.equal(values[row].float().nan_to_num(-1e9), expected.nan_to_num(-1e9))
        assert torch.equal(values[row].float().isnan(), s[row].isnan().repeat_interleave(16))
    assert torch.equal(values.view(torch.uint8) >> 7, torch.stack((qdata >> 3 & 1, qdata >> 7), -1).flatten(1))


def test_only_codes_of_one_and_a_half_are_rounded():
    """Magnitudes 0.5, 1, 2 and 4 move an e4m3 number by a power of two; those of 1.5, 3 and 6 lose up to 1/16."""
    w = quantize(torch.randn(64, 512))
    values, factor = reference.of_codes(w.qdata, w.scale, w.per_tensor_scale)
    exact, got = w.dequantize(torch.float32), values.float() * factor.unsqueeze(1)
    code = torch.stack((w.qdata & 7, w.qdata >> 4 & 7), -1).flatten(1)
    rounded = (code == 3) | (code == 5) | (code == 7)
    error = (got - exact).abs() / exact.abs().clamp(min=1e-30)
    assert error[~rounded].max() <= 2.0**-23 and 0.01 < error[rounded].max() <= 1 / 16
    assert (got - exact).norm() / exact.norm() < 0.023


def test_products_apply_both_scales_once(monkeypatch):
    x, w = torch.randn(9, 48), quantize(torch.randn(40, 48))
    values, factor = reference.of_codes(w.qdata, w.scale, w.per_tensor_scale)
    (left, x_scale), bias = reference.quantize_rows(x), torch.randn(40)
    expected = (left.double() * x_scale.double()[:, None]) @ (values.double() * factor.double()[:, None]).t()
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 48 * 7)
    for given in (None, bias, torch.randn(9, 1)):
        y = reference.matmul(left, x_scale, values.view(torch.uint8), factor, given, torch.float32)
        right = expected if given is None else expected + given.double()
        torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
