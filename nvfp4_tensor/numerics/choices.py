"""The choices that a spec and a config are made of: enums that a checkpoint carries."""

from __future__ import annotations

import enum

from nvfp4_tensor._compat.pickles import pin


class Choice(enum.IntEnum):
    """A choice that a checkpoint carries: pickled as its class and value, which torch.load(weights_only=True) takes.

    Enums of Python 3.11.0 to 3.11.3 pickle by ``getattr``, which it does not.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[type[Choice], tuple[int]]:
        return type(self), (self.value,)


@pin
class RoundingMode(Choice):
    """How a scaled value becomes one of its two E2M1 neighbours (numerics contract, section 3)."""

    RNE = 0
    """To nearest, ties to the even code."""
    AWAY = 1
    """To nearest, ties away from zero."""
    ZERO = 2
    """To nearest, ties toward zero."""
    STOCHASTIC = 3
    """Up with the probability that makes the expectation the value itself (to the random bits' resolution)."""
    EDEN = 4
    """Rotated, to nearest, the block scales corrected and rounded stochastically (numerics contract, section 9)."""

    @classmethod
    def of(cls, mode: RoundingMode | str) -> RoundingMode:
        """The mode itself, or the one that a string names; ValueError with the list of names for any other."""
        if isinstance(mode, int) and not isinstance(mode, bool) and mode in cls._value2member_map_:
            return cls(mode)  # a traced RoundingMode arrives as its integer
        if isinstance(mode, str) and (name := mode.lower()) in _ROUNDING_NAMES:
            return _ROUNDING_NAMES[name]
        raise ValueError(
            f"unknown round_mode {mode!r}: use a RoundingMode or one of "
            + ", ".join(repr(name) for name in _ROUNDING_NAMES)
        )


_ROUNDING_NAMES = {
    "rne": RoundingMode.RNE,
    "even": RoundingMode.RNE,
    "away": RoundingMode.AWAY,
    "zero": RoundingMode.ZERO,
    "stochastic": RoundingMode.STOCHASTIC,
    "eden": RoundingMode.EDEN,
}


@pin
class ScaleRounding(Choice):
    """How a block scale becomes an e4m3 number (numerics contract, section 2)."""

    NEAREST = 0
    """NVIDIA's rule. About half the blocks of a Gaussian tensor clip their largest element."""
    UP = 1
    """The next e4m3 above: nothing clips, so stochastic rounding is unbiased everywhere (to 1/65536 of a step)."""


@pin
class FourOverSix(Choice):
    """The error by which four-over-six chooses between mapping a block's largest element to 6 or to 4."""

    MAE = 1
    MSE = 2


@pin
class ScaleSearch(Choice):
    """The error by which a block chooses among the e4m3 numbers around its usual scale (contract, section 2)."""

    MSE = 1


@pin
class ProductBackend(Choice):
    """What multiplies an NVFP4 weight by quantized activations (W4A4)."""

    AUTO = 0
    """scaled_mm where the device has FP4 tensor cores, decoded operands elsewhere."""
    SCALED_MM = 1
    """cuBLASLt through torch's scaled_mm; an error on a device without FP4 tensor cores."""
    FBGEMM = 2
    """fbgemm's f4f4bf16, bfloat16 models only; an error where it, or a device of compute capability 10, is missing."""

    @classmethod
    def of(cls, backend: ProductBackend | str) -> ProductBackend:
        """The backend itself, or the one that a string names; ValueError with the list of names for any other."""
        if isinstance(backend, int) and not isinstance(backend, bool) and backend in cls._value2member_map_:
            return cls(backend)
        if isinstance(backend, str) and backend.upper() in cls.__members__:
            return cls[backend.upper()]
        names = ", ".join(repr(member.name.lower()) for member in cls)
        raise ValueError(f"unknown product_backend {backend!r}: use a ProductBackend or one of {names}")
