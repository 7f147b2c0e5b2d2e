"""The choices of a cast: how scales are selected, what is returned, and what computes it."""

from __future__ import annotations

import enum
from typing import TypeVar

_Mode = TypeVar("_Mode", bound="_Named")


class _Named(enum.Enum):
    """A choice that its value, a word, names too."""

    @classmethod
    def of(cls: type[_Mode], mode: _Mode | str) -> _Mode:
        """The mode itself, or the one that a word names; ValueError with the list of words for any other."""
        for member in cls:
            if mode is member or (isinstance(mode, str) and mode.lower() == member.value):
                return member
        what = {"ScaleMode": "scale_mode", "CastMode": "cast_mode", "ComputeMode": "compute_mode"}[cls.__name__]
        words = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"unknown {what} {mode!r}: use a {cls.__name__} or one of {words}")


class ScaleMode(_Named):
    """How a block's largest magnitude m becomes its scale.

    Five of them give a power of two, 2^(e - emax), where emax is the exponent of the element's largest value. With
    f = floor(log2 m) and r = m / 2^f, from 1 to under 2, e is:
    """

    FLOOR = "floor"
    """f: the OCP's rule. What exceeds the largest value, scaled, clips."""
    CEIL = "ceil"
    """f + 1 unless m is a power of two: nothing clips, and the largest values of the element stay unused."""
    MIDMAX = "midmax"
    """f + 1 where m, scaled, is nearer to the binade above the largest value than to that value."""
    OPTION3 = "option3"
    """floor(log2) of m rounded to the element's mantissa bits, ties to even; torchao calls it even."""
    TOPBINADE = "topbinade"
    """f + 1 where m, scaled, exceeds the largest value: the smallest scale that clips nothing; torchao's rceil."""
    NEAREST = "nearest"
    """Scales with a mantissa: m over the largest value, rounded to nearest even (NVIDIA's rule for NVFP4)."""
    UP = "up"
    """Scales with a mantissa: the next number at or above m over the largest value; nothing clips."""


POWERS_OF_TWO = (ScaleMode.FLOOR, ScaleMode.CEIL, ScaleMode.MIDMAX, ScaleMode.OPTION3, ScaleMode.TOPBINADE)


class CastMode(_Named):
    """What :func:`cast` returns."""

    VIRTUAL = "virtual"
    """The decoded values, in the shape and dtype of the input (fake quantization)."""
    ACTUAL = "actual"
    """A BlockTensor with one code an element, in uint8."""
    COMPRESSED = "compressed"
    """A BlockTensor whose codes are packed without gaps: two of 4 bits a byte, four of 6 bits in three."""


class ComputeMode(_Named):
    """What computes the codes."""

    TORCH = "torch"
    """Plain torch, for every format."""
    NATIVE = "native"
    """The operators of this package, which know NVFP4; for anything else torch, with a warning."""
