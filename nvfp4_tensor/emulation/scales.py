"""Scale formats, and the computation of a block's scale from its largest magnitude."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nvfp4_tensor.emulation.elements import Element, floor_log2, power_of_two
from nvfp4_tensor.emulation.modes import POWERS_OF_TWO, ScaleMode
from nvfp4_tensor.numerics.layout import FLOAT32_MAX


@dataclasses.dataclass(frozen=True)
class Scale:
    """A format of block scales.

    Attributes:
        name: the name in :data:`SCALES`.
        dtype: the torch dtype of a scale.
        largest: the largest scale.
        ceiling: the scale of the block with the largest magnitude, in formats with a tensor scale.
    """

    name: str
    dtype: torch.dtype
    largest: float
    ceiling: float

    @property
    def is_power_of_two(self) -> bool:
        return self.dtype == torch.float8_e8m0fnu

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    @property
    def _bits_dtype(self) -> torch.dtype:
        return torch.uint8 if self.bits == 8 else torch.int16

    @property
    def _nan(self) -> int:
        return int(torch.tensor(torch.nan, dtype=torch.float32, device="cpu").to(self.dtype).view(self._bits_dtype))

    def checked_mode(self, mode: ScaleMode | str | None, element: Element) -> ScaleMode:
        """Return the mode, or for None the default: floor for powers of two, nearest for scales with a mantissa.

        Raises:
            ValueError: the scale format does not support the mode; integer elements support only floor.
        """
        if mode is None:
            return ScaleMode.FLOOR if self.is_power_of_two else ScaleMode.NEAREST
        mode = ScaleMode.of(mode)
        allowed: tuple[ScaleMode, ...] = POWERS_OF_TWO if self.is_power_of_two else (ScaleMode.NEAREST, ScaleMode.UP)
        if self.is_power_of_two and element.is_integer:
            allowed = (ScaleMode.FLOOR,)
        if mode not in allowed:
            words = ", ".join(repr(one.value) for one in allowed)
            raise ValueError(
                f"scale_mode {mode.value!r} is not supported for {self.name} scales of {element.name} elements: use "
                f"{words}"
            )
        return mode

    def of_blocks(self, block_amax: Tensor, encode: Tensor, element: Element, mode: ScaleMode) -> Tensor:
        """Return the scales (self.dtype) of blocks with the given largest magnitudes; NaN for nonfinite blocks.

        block_amax: float32 (...).
        encode: float32 0-d, the factor that multiplies the tensor before block scaling; 1 without a tensor scale.
        """
        finite = block_amax <= FLOAT32_MAX
        block_amax = torch.where(finite, block_amax, 0.0)
        if self.is_power_of_two:
            scale = _power_of_two((block_amax * encode).clamp(max=FLOAT32_MAX), element, mode)
        else:
            scale = self._with_mantissa(block_amax, encode, element, mode)
        # A cast of NaN has different bits on a GPU and on a CPU: use the CPU's.
        bits = scale.to(self.dtype).view(self._bits_dtype).masked_fill(~finite, self._nan)
        return bits.view(self.dtype)

    def _with_mantissa(self, block_amax: Tensor, encode: Tensor, element: Element, mode: ScaleMode) -> Tensor:
        """Return the scale, computed as amax * (encode / largest), in the contract's order (section 2)."""
        v = (block_amax * (encode * encode.new_full((), 1 / element.largest))).clamp(max=self.largest)
        scale = v.to(self.dtype)
        if mode == ScaleMode.NEAREST:
            return scale
        bits = scale.view(self._bits_dtype)
        below = (scale.float() < v) | ((bits == 0) & (block_amax > 0))
        return (bits + below.to(bits.dtype)).view(self.dtype)


def _power_of_two(m: Tensor, element: Element, mode: ScaleMode) -> Tensor:
    """Return 2^(e - emax) for m >= 0 (see :class:`ScaleMode`), clamped to [2^-127, 2^127]: float32."""
    f = floor_log2(m)
    # r = m / 2^f, from 1 to 2, in two exact steps, because 2^-f overflows for a subnormal m.
    half = f.div(2, rounding_mode="floor")
    r = m * power_of_two(-half) * power_of_two(half - f)
    threshold = _threshold(element, mode)
    up = r >= threshold if mode == ScaleMode.OPTION3 else r > threshold
    e = f + up.int()
    return power_of_two(torch.where(m == 0, -127, e - element.emax).clamp(-127, 127))


def _threshold(element: Element, mode: ScaleMode) -> float:
    """Return the value in [1, 2] above which the exponent is increased by one."""
    largest = element.largest / 2.0**element.emax
    return {
        ScaleMode.FLOOR: 2.0,
        ScaleMode.CEIL: 1.0,
        ScaleMode.MIDMAX: (largest + 2) / 2,
        ScaleMode.OPTION3: 2 - 2.0 ** -(element.mantissa + 1),  # the tie between the last number of a binade and 2
        ScaleMode.TOPBINADE: largest,
    }[mode]


SCALES = {
    scale.name: scale
    for scale in (
        Scale("e8m0", torch.float8_e8m0fnu, largest=2.0**127, ceiling=1.0),
        Scale("e4m3", torch.float8_e4m3fn, largest=448.0, ceiling=448.0),
        Scale("e5m2", torch.float8_e5m2, largest=57344.0, ceiling=57344.0),
        Scale("float16", torch.float16, largest=65504.0, ceiling=1.0),
        Scale("bfloat16", torch.bfloat16, largest=torch.finfo(torch.bfloat16).max, ceiling=1.0),
    )
}
"""The scale formats by name. Grouped integers usually have 16-bit scales."""
