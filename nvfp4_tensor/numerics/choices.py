"""Enums for the options of specs and configs. Checkpoints contain them."""

from __future__ import annotations

import enum
import re
from typing import TypeVar

from nvfp4_tensor._compat.pickles import pin

C = TypeVar("C", bound="Choice")


class Choice(enum.IntEnum):
    """An enum that is pickled as its class and value, so that torch.load(weights_only=True) accepts it.

    Python 3.11.0 to 3.11.3 pickle enums by ``getattr``, which it does not accept.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[type[Choice], tuple[int]]:
        return type(self), (self.value,)

    @classmethod
    def of(cls: type[C], value: object) -> C:
        """Return the member for a member or its name in any case; raise a ValueError with the names for anything else.

        A traced member arrives as its integer.
        """
        if isinstance(value, int) and not isinstance(value, bool) and value in cls._value2member_map_:
            return cls(value)
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        names = ", ".join(repr(name.lower()) for name in cls.__members__)
        raise ValueError(f"unknown {cls._option()} {value!r}: use a member of {cls.__name__} or one of {names}")

    @classmethod
    def or_none(cls: type[C], value: object) -> C | None:
        """Return None for None and False, the last member for True, and :meth:`of` anything else."""
        if value is None or value is False:
            return None
        return list(cls)[-1] if value is True else cls.of(value)

    @classmethod
    def _option(cls) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


@pin
class RoundingMode(Choice):
    """How a scaled value is rounded to one of its two E2M1 neighbours (numerics contract, section 3)."""

    RNE = 0
    """Round to nearest, ties to the even code; also EVEN."""
    AWAY = 1
    """Round to nearest, ties away from zero."""
    ZERO = 2
    """Round to nearest, ties toward zero."""
    STOCHASTIC = 3
    """Round up with the probability that makes the expectation equal the value, to the random bits' resolution."""
    EDEN = 4
    """Rotate, round to nearest, correct the block scales and round them stochastically (contract, section 9)."""

    EVEN = RNE

    @classmethod
    def _option(cls) -> str:
        return "round_mode"


@pin
class ScaleRounding(Choice):
    """How a block scale is rounded to an e4m3 number (numerics contract, section 2)."""

    NEAREST = 0
    """NVIDIA's rule. About half the blocks of a Gaussian tensor clip their largest element."""
    UP = 1
    """Round up: nothing clips, so stochastic rounding is unbiased everywhere (to 1/65536 of a step)."""


@pin
class FourOverSix(Choice):
    """The error that four-over-six minimizes when it maps a block's largest element to 6 or to 4."""

    MAE = 1
    MSE = 2


@pin
class ScaleSearch(Choice):
    """The error that a block minimizes over the e4m3 numbers around its usual scale (contract, section 2)."""

    MSE = 1


@pin
class ProductBackend(Choice):
    """The backend of products of NVFP4 weights and quantized activations (W4A4, and FP8 activations)."""

    AUTO = 0
    """scaled_mm on devices with FP4 tensor cores, decoded operands elsewhere."""
    SCALED_MM = 1
    """cuBLASLt through torch's scaled_mm; raises an error on a device without FP4 tensor cores."""
    FBGEMM = 2
    """fbgemm's f4f4bf16, only in bfloat16; raises an error without fbgemm or a device of compute capability 10."""
    FP8 = 3
    """Of a weight-only tensor: many rows of activations and the weight are rounded to e4m3 (contract, section 13)."""


@pin
class Activations(Choice):
    """How a weight-only model multiplies many rows of its activations (numerics contract, section 13)."""

    FP8 = 1
    """As e4m3 numbers with a scale per row, by the weight rounded to e4m3, on FP8 tensor cores. Fewer rows stay."""


@pin
class FP8Activations(Choice):
    """How products with an FP8Tensor scale the operand that they round to e4m3."""

    TENSOR = 1
    """By one scale: the static ``input_scale``, or the amax of the call / 448."""
    TOKEN = 2
    """By one scale per row, amax / 448."""
    GROUP = 3
    """By one scale per row and per block of columns of the weight, amax / 448."""
