"""Elements: their numbers and chances, and torchao's casts; ties, signs and scales: test_brute_force.py."""

from fractions import Fraction

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from nvfp4_tensor import emulation
from nvfp4_tensor.emulation.elements import ELEMENTS, floor_log2, power_of_two
from nvfp4_tensor.emulation.modes import ScaleMode
from nvfp4_tensor.numerics.choices import RoundingMode

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=list(ELEMENTS))
def test_stochastic_goes_up_as_often_as_it_must(element):
    """Over all 65,536 random values, rounding goes up floor(fraction * 2^16) times, by the definition."""
    values = element.values(torch.arange(1 << element.bits - 1, dtype=torch.uint8)).tolist()
    numbers = [value for value in values if value <= element.largest]
    r16 = torch.arange(65536, dtype=torch.int32)
    for below, above in [(numbers[0], numbers[1]), (numbers[-2], numbers[-1]), (numbers[3], numbers[4])]:
        for share in (0.0, 1 / 65536, 0.3, 0.5, 65535 / 65536):
            v = torch.tensor(below) + torch.tensor(share) * (above - below)
            values = element.values(element.round((-v).expand(65536), RoundingMode.STOCHASTIC, r16)).abs()
            fraction = (Fraction(v.item()) - Fraction(below)) / (Fraction(above) - Fraction(below))
            assert set(values.tolist()) <= {below, above}
            assert (values == above).sum().item() == int(fraction * 65536)


def test_powers_of_two_are_exact():
    exponents = torch.arange(-149, 128)
    assert power_of_two(exponents).tolist() == [2.0**e for e in range(-149, 128)]
    assert torch.equal(floor_log2(power_of_two(exponents)), exponents.int())
    below = power_of_two(exponents[24:]).nextafter(torch.tensor(0.0))
    assert torch.equal(floor_log2(below), exponents[24:].int() - 1)


# --- torchao ---------------------------------------------------------------------------------------------------------

THEIRS = {
    ScaleMode.FLOOR: ScaleCalculationMode.FLOOR,
    ScaleMode.CEIL: ScaleCalculationMode.CEIL,
    ScaleMode.OPTION3: ScaleCalculationMode.EVEN,
    ScaleMode.TOPBINADE: ScaleCalculationMode.RCEIL,
}
"""Our modes and torchao's; midmax has no counterpart."""
FORMATS = {
    "mxfp4": torch.float4_e2m1fn_x2, "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2",
    "mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("mode", THEIRS, ids=lambda mode: mode.value)
@pytest.mark.parametrize("format", FORMATS)
def test_torchao_has_the_same_bits(format, mode):
    generator = torch.Generator().manual_seed(4)
    # From 2^-110 to 2^110. Below 2^-126 / 2^emax torchao keeps a scale of 2^-127 and divides by 2^-126 all the same.
    x = torch.randn(4096, 64, generator=generator) * 2.0 ** torch.randint(-110, 110, (4096, 1), generator=generator)
    x[0] = 0
    for dtype in (torch.bfloat16, torch.float32):
        scale, data = to_mx(x.to(dtype), FORMATS[format], 32, THEIRS[mode])
        how = {"scale_mode": mode, "cast_mode": "compressed" if format == "mxfp4" else "actual"}
        ours = emulation.cast(x.to(dtype), format, **how)
        assert torch.equal(ours.scale.view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(ours.data, data.view(torch.uint8))
