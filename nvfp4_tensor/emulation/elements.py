"""Element formats: small floats and integers, rounded, encoded and decoded in plain torch.

Each format is a grid of magnitudes ``q * 2^(max(exponent, emin) - mantissa)`` with integer q. An integer format has a
single binade, with exponent 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nvfp4_tensor.numerics.choices import RoundingMode


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent exactly as float32, for an integer tensor with values from -149 to 127."""
    exponent = exponent.int()
    normal = (exponent + 127).clamp(min=0) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)


def floor_log2(a: Tensor) -> Tensor:
    """Return floor(log2 a) of positive finite float32 values, including subnormals, as int32; -1 for 0."""
    return torch.frexp(a).exponent - 1


@dataclasses.dataclass(frozen=True)
class Element:
    """A format of elements with codes of ``bits`` bits.

    Attributes:
        name: the name in :data:`ELEMENTS`.
        bits: the number of bits of a code, 2 to 8.
        mantissa: the number of mantissa bits without the leading one; for integers, the bits below the leading one.
        emin, emax: the exponents of the smallest normal value and of the largest value.
        largest: the largest magnitude. Codes of larger magnitudes, if the format has any, are Inf and NaN.
        is_integer: two's complement instead of sign and magnitude. The most negative code is never produced.
        dtype: the torch dtype with these bits, if one exists.
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
            raise ValueError(f"an element must have 2 to 8 bits, not {self.bits!r}: a code is stored in a byte")

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    def round(self, v: Tensor, mode: RoundingMode, r16: Tensor | None = None) -> Tensor:
        """Return the codes (uint8) of finite float32 values, already divided by their scales. Large values saturate.

        r16: 16 random bits per value, int32 in the shape of v, for stochastic rounding.
        """
        a = v.abs().clamp(max=self.largest)
        exponent = torch.where(a == 0, self.emin, floor_log2(a).clamp(min=self.emin))
        # The quotient and its fraction are exact: both are shifted bits of a.
        q = a * power_of_two(self.mantissa - exponent)
        floor = q.floor()
        steps = floor.int() + _goes_up(q - floor, floor, mode, r16).int()
        code = steps + (exponent - self.emin << self.mantissa)
        if self.is_integer:
            return torch.where(v < 0, -code, code).bitwise_and((1 << self.bits) - 1).to(torch.uint8)
        return (code | torch.signbit(v).int() * self.sign_bit).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        """Return the float32 values of codes (uint8), including NaN and Inf."""
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
    """Return whether a value ``fraction`` above ``floor`` rounds up (numerics contract, section 3)."""
    if mode == RoundingMode.STOCHASTIC:
        assert r16 is not None
        return (fraction * 65536).int() + r16 >= 65536
    tie = {
        RoundingMode.RNE: floor.remainder(2) == 1,  # a code has the parity of its number of steps
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
"""The element formats by name. Integers have a binary point after the leading bit, as in OCP's MXINT8: up to 127/64."""
