"""The modes of a cast: how scales are computed, what is returned, and which implementation computes it."""

from __future__ import annotations

import enum
from typing import TypeVar

_Mode = TypeVar("_Mode", bound="_Named")


class _Named(enum.Enum):
    """An enum whose members can also be given by their value."""

    @classmethod
    def of(cls: type[_Mode], mode: _Mode | str) -> _Mode:
        """Return ``mode``, or the member with that value; raise a ValueError with the list of values for others."""
        for member in cls:
            if mode is member or (isinstance(mode, str) and mode.lower() == member.value):
                return member
        what = {"ScaleMode": "scale_mode", "CastMode": "cast_mode", "ComputeMode": "compute_mode"}[cls.__name__]
        words = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"unknown {what} {mode!r}: use a {cls.__name__} or one of {words}")


class ScaleMode(_Named):
    """How a block's scale is computed from its largest magnitude m.

    Five modes give a power of two, 2^(e - emax), where emax is the exponent of the element's largest value. With
    f = floor(log2 m), the exponent e is:
    """

    FLOOR = "floor"
    """f, the OCP's rule. Scaled values above the largest value clip."""
    CEIL = "ceil"
    """f + 1 unless m is a power of two. Nothing clips, and the largest values of the element stay unused."""
    MIDMAX = "midmax"
    """f + 1 if the scaled m is nearer to the next power of two than to the largest value, otherwise f."""
    OPTION3 = "option3"
    """floor(log2) of m rounded to the element's mantissa bits, ties to even. torchao calls it even."""
    TOPBINADE = "topbinade"
    """f + 1 if the scaled m exceeds the largest value, otherwise f: the smallest scale without clipping. torchao calls
    it rceil."""
    NEAREST = "nearest"
    """For scales with a mantissa: m / largest value, rounded to nearest even (NVIDIA's rule for NVFP4)."""
    UP = "up"
    """For scales with a mantissa: m / largest value, rounded up. Nothing clips."""


POWERS_OF_TWO = (ScaleMode.FLOOR, ScaleMode.CEIL, ScaleMode.MIDMAX, ScaleMode.OPTION3, ScaleMode.TOPBINADE)


class CastMode(_Named):
    """The result of :func:`cast`."""

    VIRTUAL = "virtual"
    """The decoded values, in the shape and dtype of the input (fake quantization)."""
    ACTUAL = "actual"
    """A BlockTensor with one uint8 code per element."""
    COMPRESSED = "compressed"
    """A BlockTensor with packed codes: two 4-bit codes per byte, four 6-bit codes per three bytes."""


class ComputeMode(_Named):
    """The implementation that computes the codes."""

    TORCH = "torch"
    """Plain torch, for every format."""
    NATIVE = "native"
    """The operators of this package, for NVFP4. Other formats use torch, with a warning."""
