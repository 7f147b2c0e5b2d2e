"""A write into an NVFP4 tensor: unbiased, still where nothing is updated, the same bits everywhere."""

import math

import pytest
import torch
from helpers.bits import stored_bits
from helpers.refusals import refuses

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.training import write_back

pytestmark = pytest.mark.slow

SPECS = {
    "1x16": QuantizeSpec(),
    "16x16": QuantizeSpec(block_rows=16),
    "4/6": QuantizeSpec(four_over_six=True),
}
SHAPE = 33, 50


def case(spec, dtype=torch.float32, device="cpu"):
    """w with rows of zeros, and updates from far below a step to far above the block's largest element."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SHAPE, generator=generator)
    x[:3] = 0
    update = torch.randn(SHAPE, generator=generator) * 0.05
    update[10:20] *= 20
    return quantize(x.to(device, dtype), spec), update.to(device)


def rng(seed, offset=0, device="cpu"):
    return torch.tensor([seed, offset], device=device)


def values(w):
    return w.dequantize(torch.float32)


@pytest.mark.parametrize("mode", ["stochastic", "rne"])
@pytest.mark.parametrize("spec, dtype", zip(SPECS, [torch.float32, torch.bfloat16, torch.float32], strict=True))
def test_elements_without_an_update_do_not_change(spec, mode, dtype):
    """Quantizing again does change them, which is why write_back keeps the grid."""
    w, update = case(SPECS[spec], dtype)
    w = write_back(w, update, rng_state=rng(1))  # blocks of every kind: grown, shrunk, filled
    tiles = w.unswizzled_scale().float()[:32].view(2, 16, -1)
    assert bool((tiles == tiles[:, :1]).all()) == (spec == "16x16")
    for i in range(4):
        again = write_back(w, torch.zeros(SHAPE), round_mode=mode, rng_state=rng(i))
        assert torch.equal(values(again), values(w))
    again = quantize(values(w), QuantizeSpec(round_mode="stochastic", scale_rounding="up"), rng_state=rng(2))
    assert (values(again) != values(w)).float().mean() > 0.1


def units(w):
    """Block scale times per-tensor scale, for each element."""
    scale = layout.unswizzle(w.scale, SHAPE[0], -(-SHAPE[1] // 16)).float() * w.per_tensor_scale
    return scale.repeat_interleave(16, dim=1)[:, : SHAPE[1]]


DRAWS = 400
LIMIT = 5.5
"""Standard errors: of 1,650 elements and two specs, a normal deviate beyond it comes once in 8,000 runs."""


def bias_in_errors(w, update, writer):
    """(largest, pooled) deviation of the mean of DRAWS writes from w + update, in standard errors.

    A draw more, off by the longest step of its block, is counted into each variance: elements that hardly ever move
    have none observed.
    """
    steps = 2 * units(write_back(w, update, rng_state=rng(1))).double()
    total = torch.zeros(SHAPE, dtype=torch.float64)
    squares = torch.zeros_like(total)
    target = values(w).double() + update.double()
    for i in range(DRAWS):
        error = values(writer(w, update, rng(7919 * i + 13, i))).double() - target
        total += error
        squares += error * error
    mean = total / DRAWS
    errors = ((squares + steps.square()) / DRAWS**2).sqrt()
    return (mean / errors).abs().max().item(), (mean.sum() / errors.square().sum().sqrt()).abs().item()


@pytest.mark.parametrize("spec", ["1x16", "16x16"])
def test_the_mean_of_writes_is_the_updated_value(spec):
    largest, pooled = bias_in_errors(*case(SPECS[spec]), lambda w, u, r: write_back(w, u, rng_state=r))
    assert largest < LIMIT and pooled < 4


def test_a_planted_bias_is_caught():
    largest, _ = bias_in_errors(*case(QuantizeSpec()), lambda w, u, r: write_back(w, u * 0.9, rng_state=r))
    assert largest > 2 * LIMIT


def means_where_one_element_dominates(largest, rows=20_000):
    """Whether the others keep their mean where one element may outgrow the scale of its block.

    Of 16 means, none is outside of 6.8 standard errors in all but one of 6 billion seeds.
    """
    values = torch.full((rows, 16), 0.5)
    values[:, largest] = 6.0
    update = torch.full((rows, 16), 0.07)
    update[:, largest] = 0.7
    w = quantize(values, amax=48.0)
    written = write_back(w, update, rng_state=torch.tensor([7, 1]))
    grown = (written.dequantize()[:, largest] > 7).double().mean()
    assert 0.3 < grown < 0.4
    error = (written.dequantize() - (values + update)).double()
    return bool((error.mean(dim=0).abs() < 6.8 * error.std(dim=0) / rows**0.5 + 1e-6).all())


@pytest.mark.parametrize("largest", [0, 5, 15])
def test_where_one_element_dominates_the_others_keep_their_mean(largest, monkeypatch):
    assert means_where_one_element_dominates(largest)
    if largest == 5:
        draw = reference.random16
        monkeypatch.setattr(reference, "random16", lambda *args, stream=0, **more: draw(*args, stream=0, **more))
        assert not means_where_one_element_dominates(largest)  # growth by the bits of element 0


@pytest.mark.parametrize("direction, cells", [(1, 0.25), (-1, 0.5)], ids=["outward", "inward"])
def test_updates_below_2_to_the_minus_16_of_a_step_keep_their_mean(direction, cells):
    """Codes move with the probability cells * 2^-16, which 16 random bits can only make a multiple of 2^-16.

    In 15 of 16 * 2^24 draws that is 60 or 120 moves, Poisson distributed: 6 standard deviations off by chance in one of
    10 million runs. With 16 bits there are 0 moves outward and 240 inward.
    """
    codes = torch.tensor([6.0] + [0.5, -1.0, 1.5, -3.0, 1.0] * 3).repeat(512, 32)
    w = quantize(codes)
    step = torch.where(codes.abs() == 3, 1.0, 0.5) * (codes.abs() < 6)
    update = direction * cells * 2**-16 * step * codes.sign()
    before, moves = values(w), 0
    for i in range(64):
        moves += (values(write_back(w, update, rng_state=rng(i, 5))) != before).sum().item()
    expected = cells * 2**-16 * 64 * (step > 0).sum().item()
    assert abs(moves - expected) < 6 * expected**0.5


@pytest.mark.parametrize("spec", SPECS)
def test_to_nearest_is_within_half_a_step(spec):
    w, update = case(SPECS[spec])
    new = write_back(w, update, round_mode="rne")
    target = values(w) + update
    # a step is 2 units at most, and a block grows only where its largest is nearer to 8 than to 6
    assert ((values(new) - target).abs() <= units(new) * 1.001).all()


@pytest.mark.parametrize("spec, mode", zip(SPECS, ["stochastic", "rne", "stochastic"], strict=True))
def test_updates_of_extreme_size(spec, mode):
    """Quotients of scales would overflow, and the exponent that frexp gives of infinity depends on the device."""
    options = {"round_mode": mode, "rng_state": rng(1)}
    tiny = write_back(quantize(torch.zeros(16, 32), SPECS[spec]), torch.full((16, 32), 3e-36), **options)
    assert torch.allclose(values(tiny), torch.full((16, 32), 3e-36), rtol=0.4, atol=0)
    x, update = torch.ones(16, 32), torch.zeros(16, 32)
    x[:, 16:], update[:, 16:] = 1e-4, 1e35
    large = write_back(quantize(x, SPECS[spec]), update, **options)
    assert torch.allclose(values(large)[:, 16:], update[:, 16:], rtol=0.4)


def test_per_tensor_scale_follows_by_powers_of_two():
    """A thousandfold growth and back keep block scales within e4m3 and lose nothing beyond a step."""
    w, _ = case(QuantizeSpec())
    large = write_back(w, values(w) * 1023, rng_state=rng(1))
    ratio = math.log2((large.per_tensor_scale / w.per_tensor_scale).item())
    assert ratio == round(ratio) and 9 <= ratio <= 11
    assert large.scale.float().max() <= 448
    small = write_back(large, values(large) * (1 / 1024 - 1), rng_state=rng(2))
    assert (values(small) - values(w))[3:].norm() < 0.2 * values(w).norm()


def test_not_finite_updates_make_their_blocks_nan():
    w, update = case(QuantizeSpec())
    update[5, 0], update[6, 17] = torch.nan, torch.inf
    new = values(write_back(w, update, rng_state=rng(1)))
    expected = torch.zeros(SHAPE, dtype=torch.bool)
    expected[5, :16] = expected[6, 16:32] = True
    assert torch.equal(new.isnan(), expected)
    assert write_back(quantize(torch.empty(0, 32)), torch.empty(0, 32), rng_state=rng(1)).shape == (0, 32)


def test_experts_and_joined_rows_keep_their_own_scales():
    x = torch.randn(3, 20, 40) * torch.tensor([1.0, 100.0, 1e-3]).view(3, 1, 1)
    experts = quantize_experts(x)
    update = x * 0.01
    new = write_back(experts, update, rng_state=rng(1))
    for e in range(3):
        alone = write_back(quantize(x[e]), torch.zeros(20, 40), rng_state=rng(1))
        assert torch.equal(values(experts)[e], values(alone))
        step = x[e].abs().max() / 3
        assert ((values(new)[e] - values(experts)[e] - update[e]).abs() <= step).all()


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
def test_the_same_bits_on_a_gpu(spec):
    results = []
    for device in ("cpu", "cuda"):
        w, update = case(SPECS[spec], device=device)
        results.append(stored_bits(write_back(w, update, rng_state=rng(5, 6, device))).cpu())
    assert torch.equal(*results)


def written(w, **options):
    return write_back(w, torch.zeros(4, 32), **{"rng_state": rng(1), **options})


test_errors = refuses(
    (lambda: written(quantize(torch.randn(4, 32), QuantizeSpec(hadamard_sign=True))), "Hadamard"),
    (lambda: written(quantize(torch.randn(32, 4)).mT), "transposed"),
    (lambda: written(quantize(torch.randn(260, 32))[:4]), "part of another tensor"),
    (lambda: written(quantize(torch.randn(4, 32)), rng_state=None), "rng_state"),
    (lambda: written(quantize(torch.randn(4, 32)), round_mode="away"), "'stochastic' or 'rne'"),
    (lambda: written(quantize(torch.randn(4, 33))), r"\(4, 32\) and w \(4, 33\)"),
)


def test_a_scale_that_cannot_halve_exactly_stays():
    w = quantize(torch.full((1, 32), 6.0), amax=2688.0)
    w.qdata[:, 8:], w.scale.view(-1)[1] = 0x11, 3 * 2.0**-9  # a block of 0.5 times three of e4m3's smallest steps
    w.scale.view(-1)[0] = 448
    new = write_back(w, torch.zeros(1, 32), round_mode="rne")
    assert torch.equal(values(new), values(w)) and values(w)[0, 16] == 0.5 * 3 * 2**-9
    assert torch.equal(new.unswizzled_scale().float(), w.unswizzled_scale().float())
