"""Element formats: small floats and integers, rounded, coded and decoded bit by bit in plain torch.

Every format here is a grid of magnitudes ``q * 2^(max(exponent, emin) - mantissa)``, q a whole number. An integer
format is the case with one binade: its exponent is 0 whatever the value.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nvfp4_tensor.numerics.choices import RoundingMode


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, exactly: float32 of an integer tensor with values from -149 to 127."""
    exponent = exponent.int()
    normal = (exponent + 127).clamp(min=0) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)


def floor_log2(a: Tensor) -> Tensor:
    """floor(log2 a) of positive finite float32 values, subnormals included: int32; -1 for 0."""
    return torch.frexp(a).exponent - 1


@dataclasses.dataclass(frozen=True)
class Element:
    """What one code of ``bits`` bits may be.

    Attributes:
        bits: of a code, 2 to 8.
        mantissa: bits of it, without the leading one (of an integer: all bits below the leading one).
        emin, emax: the exponents of the smallest normal and of the largest value.
        largest: the largest magnitude. Codes of larger magnitudes, where the format has them, are Inf and NaN.
        is_integer: two's complement instead of sign and magnitude; the most negative code is never written.
        dtype: torch's own dtype of these bits, if it has one.
    """

    name: str
    bits: int
    mantissa: int
    emin: int
    emax: int
    largest: float
    is_integer: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise ValueError(f"an element has 2 to 8 bits, not {self.bits!r}: a code is kept in a byte")

    @staticmethod
    def of(element: Element | str) -> Element:
        """The element itself, or the one of :data:`ELEMENTS` that a word names; ValueError for any other."""
        if isinstance(element, Element):
            return element
        if isinstance(element, str) and element in ELEMENTS:
            return ELEMENTS[element]
        raise ValueError(f"unknown element {element!r}: use one of {', '.join(map(repr, ELEMENTS))}")

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    def round(self, v: Tensor, mode: RoundingMode, r16: Tensor | None = None) -> Tensor:
        """Codes (uint8) of finite float32 values that are divided by their scales already; saturates.

        r16: the 16 random bits of each value, int32 of the shape of v, where the mode is stochastic.
        """
        a = v.abs().clamp(max=self.largest)
        exponent = torch.where(a == 0, self.emin, floor_log2(a).clamp(min=self.emin))
        # The quotient is exact, and so is its fraction: both are a's own bits, shifted.
        q = a * power_of_two(self.mantissa - exponent)
        floor = q.floor()
        steps = floor.int() + _goes_up(q - floor, floor, mode, r16).int()
        code = steps + (exponent - self.emin << self.mantissa)
        if self.is_integer:
            return torch.where(v < 0, -code, code).bitwise_and((1 << self.bits) - 1).to(torch.uint8)
        return (code | torch.signbit(v).int() * self.sign_bit).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """float32 values of codes (uint8); NaN and Inf for the codes that mean them."""
        if self.dtype is not None:
            return codes.view(self.dtype).float()
        code = codes.int()
        if self.is_integer:
            return (code - (code & self.sign_bit) * 2).float() * 2.0**-self.mantissa
        magnitude = code & (self.sign_bit - 1)
        field = magnitude >> self.mantissa
        q = (magnitude & (1 << self.mantissa) - 1) + (field > 0).int() * (1 << self.mantissa)
        value = q.float() * power_of_two(field.clamp(min=1) - 1 + self.emin - self.mantissa)
        return torch.where(code >= self.sign_bit, -value, value)


def _goes_up(fraction: Tensor, floor: Tensor, mode: RoundingMode, r16: Tensor | None) -> Tensor:
    """Whether a value ``fraction`` above ``floor`` goes to the step above (numerics contract, section 3)."""
    if mode == RoundingMode.STOCHASTIC:
        assert r16 is not None
        return (fraction * 65536).int() + r16 >= 65536
    tie = {
        RoundingMode.RNE: floor.remainder(2) == 1,  # codes are as even or odd as the whole number of steps
        RoundingMode.AWAY: torch.ones_like(floor, dtype=torch.bool),
        RoundingMode.ZERO: torch.zeros_like(floor, dtype=torch.bool),
    }[mode]
    return (fraction > 0.5) | ((fraction == 0.5) & tie)


ELEMENTS = {
    element.name: element
    for element in (
        Element("e2m1", bits=4, mantissa=1, emin=0, emax=2, largest=6.0),
        Element("e2m3", bits=6, mantissa=3, emin=0, emax=2, largest=7.5),
        Element("e3m2", bits=6, mantissa=2, emin=-2, emax=4, largest=28.0),
        Element("e4m3", bits=8, mantissa=3, emin=-6, emax=8, largest=448.0, dtype=torch.float8_e4m3fn),
        Element("e5m2", bits=8, mantissa=2, emin=-14, emax=15, largest=57344.0, dtype=torch.float8_e5m2),
        Element("int8", bits=8, mantissa=6, emin=0, emax=0, largest=127 / 64, is_integer=True),
        Element("int4", bits=4, mantissa=2, emin=0, emax=0, largest=7 / 4, is_integer=True),
    )
}
"""The element formats by name. Integers have the OCP's binary point behind the leading bit: from -127/64 to 127/64."""
