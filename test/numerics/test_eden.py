"""EDEN's reference against brute force in float64, and how unbiased it is (numerics contract, section 9)."""

import itertools
import math

import pytest
import torch
from helpers.instruction_sets import assert_same_bits, sample

from nvfp4_tensor import QuantizeSpec, fake_quantize, quantize
from nvfp4_tensor.numerics import eden, layout, philox, reference
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES

EDEN = QuantizeSpec(round_mode="eden")
STATE = torch.tensor([-7046029254386353131, 1442695040888963407])
SHAPES = ((1, 128), (3, 16), (5, 130), (2, 3, 300), (7,), (4, 256))


def signs_of(groups, state, col0=0):
    """+-1, float64 (groups, 128): each bit of the four words of a rotation's number."""
    words = philox.words(torch.arange(col0 // 128, col0 // 128 + groups), state, 256).tolist()
    return torch.tensor([[1.0 - 2 * (row[j // 32] >> j % 32 & 1) for j in range(128)] for row in words]).double()


HADAMARD = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(128)] for i in range(128)], dtype=torch.float64)


def in_groups(x):
    x = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % 128))
    return x.unflatten(-1, (-1, 128))


# --- the rotation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape, dtype", [*zip(SHAPES, HIGH_PRECISION_DTYPES * 2, strict=True)], ids=str)
def test_rotation_is_signs_and_a_hadamard_matrix(shape, dtype):
    x = sample(shape, dtype)
    y = eden.rotate(x, STATE, col0=256)
    groups = in_groups(x)
    exact = groups * signs_of(groups.shape[-2], STATE, 256) @ HADAMARD * 2**-3.5
    bound = 8 * 2**-24 * groups.abs().sum(-1, keepdim=True) * 2**-3.5
    assert y.dtype == torch.float32 and y.shape == (*shape[:-1], groups.shape[-2] * 128)
    assert ((y.double().unflatten(-1, (-1, 128)) - exact).abs() <= bound).all()
    back = eden.rotate(y, STATE, inverse=True, col0=256)
    assert ((back.double() - groups.flatten(-2)).abs() <= 16 * 2**-24 * groups.norm(dim=-1).amax()).all()


def test_amax_is_that_of_the_rotation_and_leaves_out_what_is_not_finite():
    x = sample((6, 300), torch.float32)
    assert eden.amax(x, STATE).item() == eden.rotate(x, STATE).abs().max().item()
    kept = eden.rotate(x, STATE).unflatten(-1, (-1, 128))
    kept[2, 1] = kept[4, 2] = 0
    x[2, 130], x[4, 299] = math.inf, math.nan
    assert eden.amax(x, STATE).item() == kept.abs().max().item()
    assert eden.amax(torch.full((1, 128), 3e38), STATE).item() == 0  # sums overflow


# --- codes and scales ------------------------------------------------------------------------------------------------


def parts(x, amax, spec=EDEN, state=STATE, *offsets):
    """Codes (rows, K) and scale bytes (rows, K/16)."""
    qdata, scale, factor = reference.quantize(x, amax, state, spec, *offsets)
    rows = qdata.shape[:-1].numel()
    codes = layout.unpack(qdata.reshape(rows, -1))
    return codes, layout.unswizzle(scale, rows, codes.shape[1] // 16).view(torch.uint8), factor


@pytest.mark.parametrize("dtype, magnitude, ceiling", [
    (torch.bfloat16, 1.0, 256), (torch.float16, 1.0, 448), (torch.float32, 1e-30, 448), (torch.float32, 1e30, 256),
], ids=str)  # fmt: skip
def test_codes_and_corrections_are_those_of_float64(dtype, magnitude, ceiling):
    """The codes are exact; of the scale, the two neighbours of t in float64, but where t lies at a number of e4m3."""
    spec = EDEN.replace(scale_ceiling=ceiling)
    x = sample((16, 300), dtype) * magnitude
    y, amax = eden.rotate(x, STATE), eden.amax(x, STATE)
    codes, bits, factor = parts(x, amax, spec)
    s_enc = reference.encode_scale(amax, spec)
    blocks = y.unflatten(-1, (-1, 8, 16))
    s1 = (blocks.abs().amax(-1) * (s_enc * (1.0625 * 0.93 / 6))).clamp(max=448).to(torch.float8_e4m3fn).float()
    enc = reference.block_encode(s1, s_enc).unsqueeze(-1)
    right = reference.round_e2m1((blocks * enc), reference.RoundingMode.RNE)
    assert torch.equal(codes, right.flatten(1))
    v, w = blocks.double() * s_enc.double(), layout.code_values(right).double() * s1.double().unsqueeze(-1)
    correction = (v * v).sum((-1, -2)) / (v * w).sum((-1, -2))
    t = (s1.double() * correction.nan_to_num(1).unsqueeze(-1)).clamp(max=448)
    stored = bits.view(torch.float8_e4m3fn).double().view_as(t)
    step = torch.where(t < 2**-6, 2.0**-9, 2.0 ** (t.clamp(min=2**-6).log2().floor() - 3))
    assert ((stored - t).abs() < step * (1 + 1e-4)).all()
    assert factor.item() == (amax / (6 * ceiling)).item()


def test_every_scale_rounds_to_its_neighbours_in_proportion():
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    draws = torch.arange(1 << 16, dtype=torch.int32)
    for byte, quarter in itertools.product((0, 1, 6, 7, 8, 60, 125), (0.0, 0.25, 0.75)):
        t = values[byte] + (values[byte + 1] - values[byte]) * quarter
        up = eden.round_scales(t.expand(1 << 16), draws) == byte + 1
        assert up.sum().item() == quarter * (1 << 16)
        assert ((eden.round_scales(t.expand(1 << 16), draws) == byte) == ~up).all()
    assert (eden.round_scales(torch.tensor(448.0).expand(1 << 16), draws) == 126).all()


# --- the public ways -------------------------------------------------------------------------------------------------


def test_fake_quantize_takes_the_rotation_back_and_passes_gradients_through():
    x = torch.randn(5, 200, dtype=torch.bfloat16, requires_grad=True)
    y = fake_quantize(x, EDEN, rng_state=STATE)
    qdata, scale, factor = reference.quantize(x.detach(), eden.amax(x.detach(), STATE), STATE, EDEN)
    rotated = reference.dequantize(qdata, scale, factor, 256, torch.float32)
    right = eden.rotate(rotated, STATE, inverse=True)[:, :200].bfloat16()
    assert_same_bits(y.detach(), right)
    gradient = torch.randn(5, 200, dtype=torch.bfloat16)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)
    with pytest.raises(ValueError, match="EDEN cannot create an NVFP4Tensor"):
        quantize(x.detach(), EDEN)
    with pytest.raises(ValueError, match="multiple of 128"):
        fake_quantize(x, EDEN, origin=(0, 16), full_width=512)
    with pytest.raises(ValueError, match="EDEN needs rng_state"):
        reference.quantize(x.detach(), x.detach().abs().max(), None, EDEN)


# --- how unbiased ----------------------------------------------------------------------------------------------------

DRAWS = 2048
BOUND = 6.5
"""Standard errors of a mean of 2,048 draws. Of 512 means (4 rows of 128), each about normal, none passes 6.5 but with a
probability below 512 * 8.1e-11 = 4.2e-8; tails heavier than the normal's have room up to 1e-6."""


def inputs():
    """Rows in which no few elements outweigh the rest: normal, heavy-tailed, sixteen alone, a row of the matrix."""
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(5))
    x[1] = x[1] ** 3
    x[2, 16:] = 0
    x[3] = HADAMARD[37].float()
    return x


def largest_z(x, draw):
    """The largest deviation of the mean of the draws from x, in standard errors of that mean."""
    total, squares = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    for i in range(DRAWS):
        error = (draw(x, torch.tensor([i, 77])) - x).double()
        total += error
        squares += error * error
    mean = total / DRAWS
    return (mean / ((squares / DRAWS - mean * mean).clamp(min=1e-18) / DRAWS).sqrt()).abs().max().item()


def test_the_mean_of_draws_is_the_tensor():
    assert largest_z(inputs(), lambda x, state: fake_quantize(x, EDEN, rng_state=state)) < BOUND


def bias(row):
    """Of the mean of 512 draws, each by signs of its own, relative to the norm of a row of 128."""
    x = torch.tensor(row + [0.0] * (128 - len(row))).repeat(1, 64)
    total = sum((fake_quantize(x, EDEN, rng_state=torch.tensor([i, 3])) - x).double() for i in range(8))
    return (total.view(64, 128).mean(0) / 8).norm().item() / x[0, :128].norm().item()


@pytest.mark.parametrize(("row", "low", "high"), [
    ([1.0, 0.1], 0.07, 0.11), ([1.0, 0.5, 0.25], 0.05, 0.08), ([1.0, 0.6, 0.4, 0.3], 0.03, 0.06),
    ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], 0.0, 0.03),
])  # fmt: skip
def test_what_bias_is_left_where_a_few_elements_outweigh_the_rest(row, low, high):
    """Their rotation has a few magnitudes, the same for all signs: what moves them by less than a step is lost."""
    assert low <= bias(row) < high


def test_the_error_is_six_tenths_of_stochastic_roundings():
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(7))
    of_eden, of_stochastic = (
        (fake_quantize(x, spec, rng_state=STATE) - x).double().square().mean().item()
        for spec in (EDEN, QuantizeSpec(round_mode="stochastic"))
    )
    assert of_eden < 0.6 * of_stochastic
    assert of_eden < 0.0103
