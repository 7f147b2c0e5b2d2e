"""The scale search of the reference, and the exact fma it stands on (numerics contract, section 2)."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from helpers.instruction_sets import reference_amax, sample

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.fma import fma
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES

SEARCH = QuantizeSpec(scale_search="mse")
SHAPES = ((1, 16), (5, 48), (33, 50), (16, 7), (40, 160))


# --- fma -------------------------------------------------------------------------------------------------------------


def nearest_float32(value: Fraction) -> float:
    """The float32 nearest to a fraction, ties to even; infinite where that is beyond the largest."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)) if magnitude > 2**-300 else -200, -126)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while magnitude < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    step = Fraction(2) ** (exponent - 23)
    rounded = round(magnitude / step) * step  # Python rounds halves to even
    if rounded >= Fraction(2) ** 128:
        return math.copysign(math.inf, value)
    return math.copysign(float(rounded), value)


def check_fma(a, b, c):
    got = fma(a, b, c).tolist()
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert got == [nearest_float32(value) for value in exact]


def bits_of_random_floats(count, seed):
    bits = torch.randint(
        -(2**31), 2**31 - 1, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    values = bits.view(torch.float32)
    return torch.where(values.isfinite(), values, 1.0)


def test_fma_is_exact():
    """For random bits; sums that cancel or are subnormal; ties, and a hair beside them: what rounds twice is wrong."""
    a, b, c = (bits_of_random_floats(3_000, seed) for seed in range(3))
    check_fma(a, b, c)
    a = torch.where(a.abs() < 2.0**-126, 1.0, a)
    check_fma(a, 1 / a, c.sign())  # sums of like size
    a, b = torch.randn(3_000), torch.randn(3_000)
    check_fma(a, b, -(a * b))
    whole = torch.randint(1 << 23, 1 << 24, (500,)).float()
    for hair in (0.0, 2.0**-40, -(2.0**-40), 2.0**-140, -(2.0**-140)):
        check_fma(torch.ones_like(whole), torch.full_like(whole, 0.5), whole)
        check_fma(torch.full_like(whole, hair), torch.ones_like(whole), whole + 0.5)
    tie = whole * 2**-100
    for hair in (2.0**-149, -(2.0**-149)):
        check_fma(torch.full_like(tie, 2.0**-101), torch.ones_like(tie), tie)
        check_fma(torch.full_like(tie, hair), torch.ones_like(tie), tie)
    # a * b lies halfway between two float32 once c, which is tiny, is left out: only c decides.
    near, tiny, largest = 1 + 2.0**-12, 2.0**-149, torch.finfo(torch.float32).max
    a = torch.tensor([near, near, near, 3.0, tiny, 2.0**-75, 2.0**-75, largest, largest, -largest, 2.0**-126])
    b = torch.tensor([near, near, near, 3.0, 0.5, 2.0**-75, 1.5 * 2.0**-75, 2.0, 1.0, 1.0, 0.75])
    c = torch.tensor([2.0**-60, -(2.0**-60), 0.0, 2.0**-100, 0.0, 0.0, tiny, 0.0, 2.0**103, -(2.0**102), tiny])
    check_fma(a, b, c)
    u = torch.full((2,), 1448 * 2.0**-24)  # a hair less than two float64 steps below a tie, and above one
    check_fma(1 - u, (1 + u) / 2, torch.tensor([2.0**23 + 1, -(2.0**23) - 3]))
    inf, nan = math.inf, math.nan
    a, b, c = torch.tensor([[inf, 1.0, inf, 0.0, nan], [2.0, 2.0, 1.0, inf, 1.0], [1.0, inf, -inf, 1.0, 1.0]])
    assert fma(a, b, c)[:2].tolist() == [inf, inf] and fma(a, b, c)[2:].isnan().all()


# --- the search ------------------------------------------------------------------------------------------------------


def scales_of(x, spec, amax=None):
    amax = reference_amax(x, spec) if amax is None else amax
    _, scale, _ = reference.quantize(x, amax, torch.tensor([1, 2]), spec)
    return layout.unswizzle(scale, x.shape[0], -(-x.shape[1] // 16)).view(torch.uint8), amax


def errors_in_float64(x, spec, amax):
    """(126, rows, blocks): the squared error of each block (or tile), times S_enc^2, with each e4m3 byte 1..126."""
    columns = -(-x.shape[1] // 16) * 16
    blocks = torch.nn.functional.pad(x.float(), (0, columns - x.shape[1])).unflatten(1, (-1, 16))
    s_enc = reference.encode_scale(amax, spec)
    errors = []
    for byte in range(1, 127):
        s = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        enc = reference.block_encode(s, s_enc)
        u = (blocks.abs() * enc).double()
        grid = torch.tensor(layout.CODE_VALUES, dtype=torch.float64)
        distance = (u.unsqueeze(-1) - grid).abs().amin(-1)
        error = distance.square().sum(-1) * s.double() ** 2
        if spec.block_rows == 16:
            rows = error.shape[0]
            tiles = torch.nn.functional.pad(error, (0, 0, 0, -rows % 16)).unflatten(0, (-1, 16)).sum(1)
            error = tiles.repeat_interleave(16, 0)[:rows]
        errors.append(error)
    return torch.stack(errors)


def nearest_base(x, spec, amax):
    return scales_of(x, spec.replace(scale_search=None, scale_ceiling=spec.scale_ceiling), amax)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scale_is_the_best_of_the_seven(shape):
    kinds = itertools.product((1, 16), ("nearest", "up"), (256, 448))
    for i, (block_rows, rounding, ceiling) in enumerate(kinds):
        spec = QuantizeSpec(scale_search="mse", block_rows=block_rows, scale_rounding=rounding, scale_ceiling=ceiling)
        dtype = HIGH_PRECISION_DTYPES[(i + shape[0]) % 3]
        x = sample(shape, dtype) * (1e-30, 1.0, 1e30)[i // 2 % 3 if dtype == torch.float32 else 1]
        bits, amax = scales_of(x, spec)
        base = nearest_base(x, spec, amax).long()
        errors = errors_in_float64(x, spec, amax)
        first = 0 if rounding == "up" else -1
        candidates = (base + torch.arange(first, first + 7).view(7, 1, 1)).clamp(1, 126)
        least = errors.gather(0, candidates - 1).amin(0)
        zero = base == 0
        assert (bits[zero & (least == 0)] <= 1).all()
        chosen = errors.gather(0, (bits.long() - 1).clamp(min=0).unsqueeze(0))[0]
        of_interest = bits > 0
        assert (chosen[of_interest] <= least[of_interest] * (1 + 1e-5) + 1e-30).all()
        assert (candidates == bits.long()).any(0)[of_interest].all()


def test_zeros_keep_a_scale_of_zero_and_ties_take_the_smaller():
    x = torch.zeros(2, 32)
    x[0, 16:] = 6.0  # every scale that divides 6's grid is exact: 6 = 6 * s = 4 * 1.5 s = ...
    bits, amax = scales_of(x, SEARCH)
    assert bits.tolist()[1] == [0, 0] and bits.tolist()[0][0] == 0
    exact = errors_in_float64(x, SEARCH, amax)[:, 0, 1] == 0
    base = nearest_base(x, SEARCH, amax)[0, 1].item()
    assert bits[0, 1].item() == min(b for b in range(base - 1, base + 6) if exact[b - 1])
    assert scales_of(torch.full((1, 16), 100.0), SEARCH, torch.tensor(1.0))[0].item() == 126  # a given amax saturates


def test_normal_data_are_kept_better_than_by_four_over_six():
    x = torch.randn(128, 1024, generator=torch.Generator().manual_seed(0))
    errors = []
    for kind, block_rows in itertools.product(("scale_search", "four_over_six"), (1, 16)):
        spec = QuantizeSpec(**{kind: "mse"}, block_rows=block_rows)
        decoded = reference.dequantize(*reference.quantize(x, reference.amax(x), None, spec), 1024, torch.float32)
        errors.append(((decoded - x).square().mean() / x.square().mean()).sqrt().item())
    assert errors[0] < 0.082 and errors[2] > 0.0865 and errors[1] < errors[3]
