"""GPTQ's rounding of one weight: rounding to nearest for uncorrelated inputs, the textbook's for correlated ones."""

import itertools

import pytest
import torch

from nvfp4_tensor import QuantizeSpec, quantize
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, code_values
from nvfp4_tensor.quantization.accuracy.gptq.rounding import Factor, moved_to_inputs, round_weight

SPECS = [
    QuantizeSpec(),
    QuantizeSpec(scale_rounding="up"),
    QuantizeSpec(scale_ceiling=256),
    QuantizeSpec(four_over_six=True),
    QuantizeSpec(scale_search="mse"),
    QuantizeSpec(scale_search="mse", scale_ceiling=448),
]


def correlated(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 4, columns, generator=generator)
    return torch.randn(rows, columns // 4, generator=generator) @ mix + 0.3 * torch.randn(
        rows, columns, generator=generator
    )


def loss(weight, quantized, hessian):
    difference = (weight - quantized).double()
    return (difference @ hessian.double() * difference).sum().item()


def test_nearest_is_that_of_the_codes():
    u = torch.cat((torch.linspace(-7, 7, 20_001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0, 1e30])))
    codes = reference.round_e2m1(u, RoundingMode.RNE)
    assert torch.equal(reference.nearest_value(u), code_values(codes))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_without_correlation_it_is_the_spec(spec):
    torch.manual_seed(0)
    for columns in (256, 40):
        w = torch.randn(33, columns)
        w[3, :16] = 0
        factor = Factor.of(torch.eye(-(-columns // BLOCK) * BLOCK), 0.01, act_order=True)
        own, plain = round_weight(w, factor, spec, w.abs().amax()), quantize(w, spec)
        assert torch.equal(own.per_tensor_scale, plain.per_tensor_scale)
        same = (own.unswizzled_scale().view(torch.uint8) == plain.unswizzled_scale().view(torch.uint8)).float().mean()
        assert same > 0.995  # two candidates of all but equal error may be told apart by the order of a sum
        decoded, expected = own.dequantize(), plain.dequantize()
        assert (decoded == expected).float().mean() > 0.99
        assert (decoded - w).square().sum() == pytest.approx((expected - w).square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_correlation_is_made_use_of(spec):
    torch.manual_seed(0)
    w, x = torch.randn(32, 160), correlated(1000, 160)
    for act_order in (False, True):
        own = round_weight(w, Factor.of(x.T @ x, 0.01, act_order=act_order), spec, w.abs().amax()).dequantize()
        assert loss(w, own, x.T @ x) < 0.55 * loss(w, quantize(w, spec).dequantize(), x.T @ x)


@pytest.mark.parametrize("spec", [SPECS[3], SPECS[-1]], ids=str)
def test_row_scales_are_those_of_each_row_alone(spec):
    torch.manual_seed(0)
    w, x = torch.randn(6, 80) * torch.logspace(-6, 6, 6).unsqueeze(1), correlated(400, 80)
    factor = Factor.of(x.T @ x, 0.01, act_order=True)
    own = round_weight(w, factor, spec.replace(row_scaled=True), w.abs().amax(dim=1))
    for i, row in enumerate(w):
        alone = round_weight(row[None], factor, spec, row.abs().amax())
        assert torch.equal(own.dequantize()[i], alone.dequantize()[0]) and alone.dequantize().any()


def test_it_is_the_textbook_algorithm():
    """Optimal brain quantization in its first form: the inverse of the rest of H, recomputed for each column. Then each
    column is moved twice to the value at which the loss, a parabola of it, is least."""
    torch.manual_seed(0)
    w, x = torch.randn(4, 160), correlated(1000, 160)  # 128 columns are rounded before the others change
    hessian = x.T @ x
    spec, amax = QuantizeSpec(), w.abs().amax()
    factor = Factor.of(hessian, 0.01, act_order=True)
    own = round_weight(w, factor, spec, amax)
    damped = hessian.double() + 0.01 * hessian.diagonal().double().mean() * torch.eye(160, dtype=torch.float64)
    left, decoded = w.double().clone(), torch.empty(4, 160, dtype=torch.float64)
    scale = own.unswizzled_scale().float().double() * own.per_tensor_scale.double()
    order = factor.order.tolist()
    for i, column in enumerate(order):
        rest = order[i:]
        inverse = torch.linalg.inv(damped[rest][:, rest])
        s = scale[:, column // BLOCK]
        decoded[:, column] = reference.nearest_value((left[:, column] / s).float()).double() * s
        error = (left[:, column] - decoded[:, column]) / inverse[0, 0]
        left[:, rest] -= error[:, None] * inverse[0]
    for column in (*range(160), *range(160)):
        slope = (w - decoded) @ damped[:, column]
        s = scale[:, column // BLOCK]
        best = decoded[:, column] + slope / damped[column, column]
        decoded[:, column] = reference.nearest_value((best / s).float()).double() * s
    assert torch.allclose(own.dequantize().double(), decoded, rtol=1e-5, atol=1e-7)


def test_heavy_blocks_come_first():
    hessian = torch.eye(64) * torch.tensor([1.0, 9.0, 4.0, 2.0]).repeat_interleave(16)
    hessian[20, 20] = 100
    order = Factor.of(hessian, 0.01, act_order=True).order
    assert order[::16].tolist() == [20, 32, 48, 0]
    assert sorted(order.tolist()) == list(range(64))
    for block in order.view(-1, 16):
        assert len(set((block // 16).tolist())) == 1
    assert Factor.of(hessian, 0.01, act_order=False).order.tolist() == list(range(64))


def test_the_scale_chosen_is_the_best_of_its_candidates():
    """Try every candidate of one block explicitly, with the feedback inside the block."""
    torch.manual_seed(0)
    w, x, spec = torch.randn(8, 16), correlated(200, 16), QuantizeSpec(scale_search="mse")
    amax, factor = w.abs().amax(), Factor.of(x.T @ x, 0.01, act_order=False)
    own, upper = round_weight(w, factor, spec, amax).dequantize(), factor.upper.double()
    unit = reference.per_tensor_scale(amax, spec).double()
    for row, step in itertools.product(range(8), range(-1, 6)):
        block_amax = w[row].abs().amax()
        scaled = block_amax * reference.encode_scale(amax, spec) * (1 / 6)
        base = reference.to_e4m3(scaled, spec.scale_rounding, block_amax)
        s = (base.int() + step).to(torch.uint8).view(torch.float8_e4m3fn).double() * unit
        left, cost = w[row].double().clone(), 0.0
        for i in range(16):
            q = reference.nearest_value((left[i] / s).float()).double() * s
            e = (left[i] - q) / upper[i, i]
            cost += float(e * e)
            left[i:] -= e * upper[i, i:]
        chosen = (w[row] - own[row]).double()
        assert float(chosen @ torch.linalg.inv(upper.T @ upper) @ chosen) <= cost * (1 + 1e-4)


def test_weights_move_to_the_inputs_they_meet():
    """With Z = X M, the weight whose output on X is W Z is W M^T."""
    torch.manual_seed(0)
    x, mix = torch.randn(4000, 32), torch.eye(32) + 0.2 * torch.randn(32, 32)
    z, w = x @ mix, torch.randn(8, 32)
    factor = Factor.of(x.T @ x, 1e-6, act_order=True)
    moved = moved_to_inputs(w, z.T @ x, x.T @ x, factor)
    assert torch.allclose(moved, w @ mix.T, atol=1e-3)
    assert torch.equal(moved_to_inputs(w, x.T @ x, x.T @ x, factor), w)


def test_columns_that_were_never_fed_and_hessians_that_cannot_be_used():
    torch.manual_seed(0)
    x = correlated(300, 64)
    x[:, 5] = 0
    x[:, 16:32] = 0
    w = torch.randn(4, 64)
    own = round_weight(w, Factor.of(x.T @ x, 0.01, act_order=True), QuantizeSpec(), w.abs().amax())
    assert torch.equal(own.dequantize()[:, 16:32], quantize(w).dequantize()[:, 16:32])
    with pytest.raises(ValueError, match="NaN or Inf"):
        Factor.of(torch.full((16, 16), float("nan")), 0.01, act_order=True)
    with pytest.raises(ValueError, match="larger damping"):
        Factor.of(torch.eye(16) - 2 * torch.ones(16, 16), 0.01, act_order=True)
