"""Element formats: their numbers, chances, and torch's and torchao's; ties and signs: test_brute_force.py."""

from fractions import Fraction

import pytest
import torch
from torchao.prototype.mx_formats import kernels

from nvfp4_tensor.emulation.elements import ELEMENTS, floor_log2, power_of_two
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.choices import RoundingMode

pytestmark = pytest.mark.slow

NEAREST = [RoundingMode.RNE, RoundingMode.AWAY, RoundingMode.ZERO]


def grid(element):
    """Return [(magnitude, code)] of all nonnegative numbers in ascending order."""
    codes = torch.arange(1 << element.bits - 1, dtype=torch.uint8)
    values = element.values(codes).tolist()
    return [(v, code) for code, v in enumerate(values) if v <= element.largest]


def interesting(element) -> torch.Tensor:
    """Return every number of the format, every midpoint, their float32 neighbours, large values and noise."""
    numbers = torch.tensor([value for value, _ in grid(element)])
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    points = torch.cat((numbers, midpoints, torch.tensor([1e-45, 1e-38, 3e38, element.largest * 1.07])))
    around = torch.cat((points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-torch.inf))))
    noise = torch.randn(500, generator=torch.Generator().manual_seed(1)) * element.largest
    around = torch.cat((around[around.isfinite()], noise))
    return torch.cat((around, -around))


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_numbers_of_the_format_stay(element):
    codes = torch.arange(1 << element.bits, dtype=torch.int32).to(torch.uint8)
    values = element.values(codes)
    kept = values.abs() <= element.largest
    assert kept.sum() >= 2 * len(grid(element)) - 1
    r16 = torch.full_like(codes, 0, dtype=torch.int32) + 65535
    for mode in RoundingMode:
        if mode != RoundingMode.EDEN:
            assert torch.equal(element.round(values, mode, r16)[kept], codes[kept])


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_stochastic_goes_up_as_often_as_it_must(element):
    """Over all 65,536 random values, rounding goes up floor(fraction * 2^16) times, by the definition."""
    numbers = [value for value, _ in grid(element)]
    r16 = torch.arange(65536, dtype=torch.int32)
    for below, above in [(numbers[0], numbers[1]), (numbers[-2], numbers[-1]), (numbers[3], numbers[4])]:
        for share in (0.0, 1 / 65536, 0.3, 0.5, 65535 / 65536):
            v = torch.tensor(below) + torch.tensor(share) * (above - below)
            values = element.values(element.round((-v).expand(65536), RoundingMode.STOCHASTIC, r16)).abs()
            fraction = (Fraction(v.item()) - Fraction(below)) / (Fraction(above) - Fraction(below))
            assert set(values.tolist()) <= {below, above}
            assert (values == above).sum().item() == int(fraction * 65536)


@pytest.mark.parametrize("mode", [*NEAREST, RoundingMode.STOCHASTIC], ids=lambda mode: mode.name)
def test_e2m1_is_the_contract(mode):
    v = interesting(ELEMENTS["e2m1"])
    r16 = torch.randint(0, 65536, v.shape, dtype=torch.int32, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ELEMENTS["e2m1"].round(v, mode, r16), reference.round_e2m1(v, mode, r16))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_float8_is_torchs(name):
    element = ELEMENTS[name]
    v = interesting(element).clamp(-element.largest, element.largest)
    assert torch.equal(element.round(v, RoundingMode.RNE), v.to(element.dtype).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(element.values(codes).nan_to_num(7), codes.view(element.dtype).float().nan_to_num(7))


@pytest.mark.parametrize(
    "name, encode, decode",
    [
        ("e2m1", kernels.f32_to_f4_unpacked, kernels.f4_unpacked_to_f32),
        ("e2m3", kernels.f32_to_f6_e2m3_unpacked, kernels.f6_e2m3_unpacked_to_f32),
        ("e3m2", kernels.f32_to_f6_e3m2_unpacked, kernels.f6_e3m2_unpacked_to_f32),
    ],
)
def test_small_floats_are_torchaos(name, encode, decode):
    element = ELEMENTS[name]
    v = interesting(element)
    codes = element.round(v, RoundingMode.RNE)
    assert torch.equal(codes, encode(v))
    assert torch.equal(element.values(codes), decode(codes))


def test_integers_are_twos_complement():
    codes = torch.tensor([0, 1, 127, 128, 129, 255], dtype=torch.uint8)
    assert ELEMENTS["int8"].values(codes).tolist() == [0, 1 / 64, 127 / 64, -2.0, -127 / 64, -1 / 64]
    assert ELEMENTS["int4"].round(torch.tensor([-9.0, -0.25, -0.0, 1.75]), RoundingMode.RNE).tolist() == [9, 15, 0, 7]


def test_powers_of_two_are_exact():
    exponents = torch.arange(-149, 128)
    assert power_of_two(exponents).tolist() == [2.0**e for e in range(-149, 128)]
    assert torch.equal(floor_log2(power_of_two(exponents)), exponents.int())
    below = power_of_two(exponents[24:]).nextafter(torch.tensor(0.0))
    assert torch.equal(floor_log2(below), exponents[24:].int() - 1)
