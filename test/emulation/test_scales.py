"""Scale modes against a search by their definitions in exact arithmetic, and against torchao's MX."""

from fractions import Fraction

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation.elements import ELEMENTS
from nvfp4_tensor.emulation.modes import POWERS_OF_TWO, ScaleMode
from nvfp4_tensor.emulation.scales import SCALES

pytestmark = pytest.mark.slow

FLOATS = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]


def exponents_searched(m: Fraction, element, mode: ScaleMode) -> int:
    """Return e of 2^(e - emax) by the definition, trying one exponent after the other."""
    exponents = range(-151, 130)
    largest = Fraction(element.largest)

    def scaled(e):
        return m / Fraction(2) ** (e - element.emax)

    if mode == ScaleMode.FLOOR:  # the largest power of two that m reaches
        return max(e for e in exponents if Fraction(2) ** e <= m)
    if mode == ScaleMode.CEIL:  # the smallest power of two that reaches m
        return min(e for e in exponents if Fraction(2) ** e >= m)
    if mode == ScaleMode.TOPBINADE:  # the smallest scale by which nothing clips
        return min(e for e in exponents if scaled(e) <= largest)
    f = exponents_searched(m, element, ScaleMode.FLOOR)
    if mode == ScaleMode.MIDMAX:  # nearer to the next binade than to the largest value
        return f + (
            abs(Fraction(2) ** (element.emax + 1) - scaled(f)) < abs(largest - scaled(f)) and scaled(f) > largest
        )
    step = Fraction(2) ** (f - element.mantissa)
    rounded = round(m / step) * step  # Python rounds a Fraction to nearest even
    return exponents_searched(rounded, element, ScaleMode.FLOOR)


def magnitudes(element) -> torch.Tensor:
    r = [1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.984375, element.largest / 2.0**element.emax]
    points = torch.tensor(r)
    points = torch.cat((points, points.nextafter(torch.tensor(2.0)), points.nextafter(torch.tensor(0.5))))
    points = torch.cat([points * 2.0**e for e in (-130, -126, -20, 0, 3, 100, 126)])
    return torch.cat((points, torch.tensor([2.0**-149, 3 * 2.0**-149, torch.finfo(torch.float32).max])))


@pytest.mark.parametrize("mode", POWERS_OF_TWO, ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", FLOATS)
def test_powers_of_two_are_what_a_search_finds(name, mode):
    element, m = ELEMENTS[name], magnitudes(ELEMENTS[name])
    scale = SCALES["e8m0"].of_blocks(m, torch.ones(()), element, mode)
    wanted = [exponents_searched(Fraction(value), element, mode) - element.emax for value in m.tolist()]
    assert scale.view(torch.uint8).tolist() == [min(max(e, -127), 127) + 127 for e in wanted]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_take_floor(name):
    m = magnitudes(ELEMENTS[name])
    scale = SCALES["e8m0"].of_blocks(m, torch.ones(()), ELEMENTS[name], ScaleMode.FLOOR)
    wanted = [exponents_searched(Fraction(value), ELEMENTS[name], ScaleMode.FLOOR) for value in m.tolist()]
    assert scale.view(torch.uint8).tolist() == [min(max(e, -127), 127) + 127 for e in wanted]


def test_e2m1_as_its_table_says():
    """e - f of each mode, for r = 1, 1.5, 1.75 and just above each."""
    above = torch.tensor([1.0, 1.0001, 1.5, 1.5001, 1.75, 1.7501, 1.9999])
    rows = {
        "floor": [0, 0, 0, 0, 0, 0, 0],
        "ceil": [0, 1, 1, 1, 1, 1, 1],
        "midmax": [0, 0, 0, 0, 0, 1, 1],
        "option3": [0, 0, 0, 0, 1, 1, 1],
        "topbinade": [0, 0, 0, 1, 1, 1, 1],
    }
    for mode, row in rows.items():
        scale = SCALES["e8m0"].of_blocks(above, torch.ones(()), ELEMENTS["e2m1"], ScaleMode.of(mode))
        assert (scale.view(torch.uint8).int() - 125).tolist() == row


@pytest.mark.parametrize("mode", [ScaleMode.NEAREST, ScaleMode.UP], ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "float16", "bfloat16"])
def test_scales_with_a_mantissa_are_what_a_search_finds(name, mode):
    scale, element = SCALES[name], ELEMENTS["e2m1"]
    bits = torch.arange(1 << (scale.bits - 1), dtype=torch.int32)
    numbers = bits.to(torch.uint8 if scale.bits == 8 else torch.int16).view(scale.dtype).float()
    numbers = numbers[numbers.isfinite()].sort().values
    v = torch.rand(400, generator=torch.Generator().manual_seed(3)).exp2() * 10.0 ** torch.randint(-7, 5, (400,))
    m = torch.cat((v, torch.tensor([0.0, 1e-30, min(scale.largest * 6, 3.4e38), 3e38])))
    sixth = (m * torch.tensor(1 / 6)).clamp(max=scale.largest)
    place = torch.searchsorted(numbers, sixth)  # the first number at or above it
    if mode == ScaleMode.UP:
        wanted = numbers[place]
    else:
        below, above = numbers[(place - 1).clamp(min=0)], numbers[place]
        nearer_above = above.double() - sixth.double() < sixth.double() - below.double()
        tie = above.double() - sixth.double() == sixth.double() - below.double()
        wanted = torch.where(nearer_above | (tie & (place % 2 == 0)), above, below)
    assert torch.equal(scale.of_blocks(m, torch.ones(()), element, mode).float(), wanted)


def test_blocks_that_are_not_finite_have_nan_scales():
    m = torch.tensor([torch.inf, torch.nan, 1.0])
    for scale in SCALES.values():
        mode = scale.checked_mode(None, ELEMENTS["e2m1"])
        got = scale.of_blocks(m, torch.ones(()), ELEMENTS["e2m1"], mode).float()
        assert got.isnan().tolist() == [True, True, False], scale.name


# --- torchao ---------------------------------------------------------------------------------------------------------

THEIRS = {
    ScaleMode.FLOOR: ScaleCalculationMode.FLOOR,
    ScaleMode.CEIL: ScaleCalculationMode.CEIL,
    ScaleMode.OPTION3: ScaleCalculationMode.EVEN,
    ScaleMode.TOPBINADE: ScaleCalculationMode.RCEIL,
}
"""Our modes and torchao's; midmax has no counterpart."""
FORMATS = {
    "mxfp4": torch.float4_e2m1fn_x2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("mode", THEIRS, ids=lambda mode: mode.value)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torchao_has_the_same_bits(format, mode, dtype):
    generator = torch.Generator().manual_seed(4)
    # From 2^-110 to 2^110. Below 2^-126 / 2^emax torchao keeps a scale of 2^-127 and divides by 2^-126 all the same.
    x = torch.randn(4096, 64, generator=generator) * 2.0 ** torch.randint(-110, 110, (4096, 1), generator=generator)
    x[:9] = magnitudes(ELEMENTS["e2m1"])[27 * 3 : 27 * 3 + 9].unsqueeze(1) * torch.rand(9, 64, generator=generator)
    x[9] = 0
    x = x.to(dtype)
    scale, data = to_mx(x, FORMATS[format], 32, THEIRS[mode])
    ours = emulation.cast(x, format, scale_mode=mode, cast_mode="compressed" if format == "mxfp4" else "actual")
    assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.data, data.view(torch.uint8))


@pytest.mark.parametrize("mode", THEIRS, ids=lambda mode: mode.value)
def test_torchao_agrees_on_every_bfloat16(mode):
    """Use every magnitude as a block's largest, except those with torchao's smallest scale."""
    m = torch.arange(0x0500, 0x7F80, dtype=torch.int16).view(torch.bfloat16).unsqueeze(1).repeat(1, 32)
    scale, _ = to_mx(m, torch.float4_e2m1fn_x2, 32, THEIRS[mode])
    ours = emulation.cast(m, "mxfp4", scale_mode=mode, cast_mode="actual")
    assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))


def test_midmax_is_none_of_torchaos():
    x = torch.tensor([1.75]).repeat(32)  # the tie, which option3 takes up and midmax leaves
    assert emulation.cast(x, "mxfp4", scale_mode="midmax").tolist() == [1.5] * 32
    assert emulation.cast(x, "mxfp4", scale_mode="option3").tolist() == [2.0] * 32
