"""QuantizeSpec: everything that decides which bits a tensor becomes, in one frozen object."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nvfp4_tensor.numerics.choices import FourOverSix, RoundingMode, ScaleRounding
from nvfp4_tensor.numerics.layout import BLOCK, DEFAULT_HADAMARD_SIGN
from nvfp4_tensor.pickles import pin


@pin
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
    """How to quantize: hashable, comparable, and one integer for the ops (:meth:`pack`).

    Args:
        round_mode: a :class:`RoundingMode`, or "rne", "even", "away", "zero", "stochastic".
        block_rows: 1 for 1x16 blocks, 16 for 16x16 tiles, whose scales serve the transposed tensor too.
        scale_rounding: NEAREST (NVIDIA's rule) or UP (nothing clips, so stochastic rounding is unbiased).
        four_over_six: None, or by which error ("mae", "mse"; True is "mse") a block chooses between 6 and 4 as the
            code of its largest element (Four Over Six, arXiv:2512.02010).
        scale_ceiling: the largest block scale that the per-tensor scale allows for, 448 or 256; by default 448, and
            256 with four-over-six.
        hadamard_sign: None, or the 16-bit sign mask of a random Hadamard transform applied to each 16 elements of a
            row before quantization; True is NVIDIA's mask 0xD7E8. What is stored is the transformed tensor.
        random_bits: 16, or 8 for the resolution of Blackwell's ``cvt.rs`` (biased toward zero by up to 1/256 step).
        hardware_rounding: with STOCHASTIC and 8 bits, let sm_100a and sm_103a round by ``cvt.rs`` itself. The only
            setting whose bits depend on the device: elsewhere it means the contract's 8-bit rounding.

    Raises:
        ValueError: a value outside these, or hardware_rounding without its two companions.
    """

    round_mode: RoundingMode = RoundingMode.RNE
    block_rows: int = 1
    scale_rounding: ScaleRounding = ScaleRounding.NEAREST
    four_over_six: FourOverSix | None = None
    scale_ceiling: int | None = None
    hadamard_sign: int | None = None
    random_bits: int = 16
    hardware_rounding: bool = False

    def __post_init__(self) -> None:
        fix = object.__setattr__  # the dataclass is frozen
        fix(self, "round_mode", RoundingMode.of(self.round_mode))
        fix(self, "scale_rounding", _scale_rounding(self.scale_rounding))
        fix(self, "four_over_six", _four_over_six(self.four_over_six))
        if self.scale_ceiling is None:
            fix(self, "scale_ceiling", 256 if self.four_over_six else 448)
        if self.hadamard_sign is True:
            fix(self, "hadamard_sign", DEFAULT_HADAMARD_SIGN)
        if self.block_rows not in (1, BLOCK):
            raise ValueError(f"block_rows is 1 (1x16 blocks) or 16 (16x16 tiles), got {self.block_rows!r}")
        if self.scale_ceiling not in (448, 256):
            raise ValueError(f"scale_ceiling is 448 or 256, got {self.scale_ceiling!r}")
        if self.random_bits not in (16, 8):
            raise ValueError(f"random_bits is 16 or 8, got {self.random_bits!r}")
        sign = self.hadamard_sign
        if sign is not None and (isinstance(sign, bool) or not isinstance(sign, int) or not 0 <= sign <= 0xFFFF):
            raise ValueError(f"hadamard_sign is None, True or a mask from 0 to 0xFFFF, got {sign!r}")
        if self.hardware_rounding and (self.round_mode != RoundingMode.STOCHASTIC or self.random_bits != 8):
            raise ValueError("hardware_rounding needs round_mode=RoundingMode.STOCHASTIC and random_bits=8")

    @property
    def is_stochastic(self) -> bool:
        """Whether it takes random bits."""
        return self.round_mode == RoundingMode.STOCHASTIC

    @property
    def largest_value(self) -> float:
        """6 * scale_ceiling: what the largest code times the largest block scale comes to."""
        assert self.scale_ceiling is not None  # __post_init__ has resolved it
        return 6.0 * self.scale_ceiling

    def replace(self, **changes: Any) -> QuantizeSpec:
        """A copy with some fields changed; a change of four_over_six resets scale_ceiling to its default."""
        if "four_over_six" in changes:
            changes.setdefault("scale_ceiling", None)
        return dataclasses.replace(self, **changes)

    def pack(self) -> int:
        """The spec as one integer, what the ops take; csrc/numerics/spec.h reads the same bits."""
        sign = self.hadamard_sign
        return (
            int(self.round_mode)
            | (1 << 2 if self.block_rows == BLOCK else 0)
            | int(self.scale_rounding) << 3
            | int(self.four_over_six or 0) << 4
            | (1 << 6 if self.scale_ceiling == 256 else 0)
            | (1 << 7 if self.random_bits == 8 else 0)
            | (1 << 8 if self.hardware_rounding else 0)
            | (0 if sign is None else 1 << 9 | sign << 16)
        )

    def __deepcopy__(self, memo: dict) -> QuantizeSpec:
        """Itself: nothing in it changes, and a compiled graph's guards compare identical objects without Python."""
        return self

    @classmethod
    @functools.cache
    def unpack(cls, bits: int) -> QuantizeSpec:
        """The inverse of :meth:`pack`; ValueError for an integer that no spec packs to."""
        choice = bits >> 4 & 3
        spec = cls(
            round_mode=RoundingMode(bits & 3),
            block_rows=BLOCK if bits & 1 << 2 else 1,
            scale_rounding=ScaleRounding(bits >> 3 & 1),
            four_over_six=FourOverSix(choice) if choice in (1, 2) else None,
            scale_ceiling=256 if bits & 1 << 6 else 448,
            random_bits=8 if bits & 1 << 7 else 16,
            hardware_rounding=bool(bits & 1 << 8),
            hadamard_sign=bits >> 16 & 0xFFFF if bits & 1 << 9 else None,
        )
        if spec.pack() != bits:
            raise ValueError(f"spec is what QuantizeSpec.pack() gives, and that is never {bits}")
        return spec

    def __str__(self) -> str:
        """What differs from the plain spec, in a few words: "stochastic, 16x16, scales up, 4/6 mse"."""
        words = [self.round_mode.name.lower(), f"{self.block_rows}x{BLOCK}"]
        if self.scale_rounding == ScaleRounding.UP:
            words.append("scales up")
        if self.four_over_six is not None:
            words.append(f"4/6 {self.four_over_six.name.lower()}")
        if self.scale_ceiling != (256 if self.four_over_six else 448):
            words.append(f"ceiling {self.scale_ceiling}")
        if self.hadamard_sign is not None:
            words.append(f"hadamard {self.hadamard_sign:#06x}")
        if self.is_stochastic and self.random_bits != 16:
            words.append(f"{self.random_bits} random bits" + (" (hardware)" if self.hardware_rounding else ""))
        return ", ".join(words)


def _scale_rounding(value: ScaleRounding | str) -> ScaleRounding:
    if isinstance(value, int) and value in ScaleRounding._value2member_map_:
        return ScaleRounding(value)
    if isinstance(value, str) and value.upper() in ScaleRounding.__members__:
        return ScaleRounding[value.upper()]
    raise ValueError(f"unknown scale_rounding {value!r}: use a ScaleRounding or one of 'nearest', 'up'")


def _four_over_six(value: FourOverSix | str | bool | None) -> FourOverSix | None:
    if value is None or value is False:
        return None
    if value is True:
        return FourOverSix.MSE
    if isinstance(value, int) and value in FourOverSix._value2member_map_:
        return FourOverSix(value)
    if isinstance(value, str) and value.upper() in FourOverSix.__members__:
        return FourOverSix[value.upper()]
    raise ValueError(f"unknown four_over_six {value!r}: use None, True, a FourOverSix or one of 'mae', 'mse'")
