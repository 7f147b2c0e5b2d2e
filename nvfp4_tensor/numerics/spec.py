"""QuantizeSpec: all options that determine the bits of a quantized tensor."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.choices import Choice, FourOverSix, RoundingMode, ScaleRounding, ScaleSearch
from nvfp4_tensor.numerics.layout import BLOCK, DEFAULT_HADAMARD_SIGN, ROTATION


@pin
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
    """How to quantize a tensor. Frozen and hashable; :meth:`pack` converts it to an integer for the ops.

    Args:
        round_mode: a :class:`RoundingMode`, or "rne", "even", "away", "zero", "stochastic", "eden".
            EDEN stores a tensor rotated in groups of 128 columns, for products of two tensors with equal rotations and
            for :func:`fake_quantize`, which inverts the rotation.
        block_rows: 1 for 1x16 blocks, or 16 for 16x16 tiles, whose scales are also those of the transposed tensor.
        scale_rounding: NEAREST (NVIDIA's rule) or UP (nothing clips, so stochastic rounding is unbiased).
        four_over_six: None, or the error ("mae" or "mse"; True is "mse") by which a block chooses 6 or 4 as the code of
            its largest element (Four Over Six, arXiv:2512.02010).
        scale_search: None, or the error ("mse" or True) by which a block chooses among the seven e4m3 numbers around
            its usual scale. Replaces four-over-six, whose two choices are among them.
        scale_ceiling: the largest block scale for which the per-tensor scale is computed, 448 or 256. Default: 256 with
            four-over-six, scale search or EDEN, otherwise 448.
        hadamard_sign: None, or the 16-bit sign mask of a random Hadamard transform of each 16 elements of a row before
            quantization; True is NVIDIA's mask 0xD7E8. The transformed tensor is stored.
        row_scaled: use one scale per row, from the amax of the row, instead of one per tensor. The bits of a row are
            then independent of the other rows, without a reduction over the tensor. For activations (a row is a token).
        random_bits: 16, or 8 for the resolution of Blackwell's ``cvt.rs`` (biased toward zero by up to 1/256 step).
        hardware_rounding: with STOCHASTIC and 8 bits, round with ``cvt.rs`` on sm_100a and sm_103a. This is the only
            option with which bits depend on the device: other devices use the contract's 8-bit rounding.

    Raises:
        ValueError: a value is not one of these; hardware_rounding without STOCHASTIC and 8 bits; scale_search with
            four_over_six; row_scaled with 16x16 tiles; or EDEN with options other than 1x16 blocks, 16 random bits,
            NEAREST scales and no other transform.
    """

    round_mode: RoundingMode = RoundingMode.RNE
    block_rows: int = 1
    scale_rounding: ScaleRounding = ScaleRounding.NEAREST
    four_over_six: FourOverSix | None = None
    scale_ceiling: int | None = None
    hadamard_sign: int | None = None
    random_bits: int = 16
    hardware_rounding: bool = False
    scale_search: ScaleSearch | None = None
    row_scaled: bool = False

    def __post_init__(self) -> None:
        fix = object.__setattr__  # the dataclass is frozen
        fix(self, "round_mode", RoundingMode.of(self.round_mode))
        fix(self, "scale_rounding", ScaleRounding.of(self.scale_rounding))
        fix(self, "four_over_six", FourOverSix.or_none(self.four_over_six))
        fix(self, "scale_search", ScaleSearch.or_none(self.scale_search))
        if self.scale_ceiling is None:
            fix(self, "scale_ceiling", self._default_ceiling)
        if self.hadamard_sign is True:
            fix(self, "hadamard_sign", DEFAULT_HADAMARD_SIGN)
        if self.block_rows not in (1, BLOCK):
            raise ValueError(f"block_rows must be 1 (1x16 blocks) or 16 (16x16 tiles), got {self.block_rows!r}")
        if self.scale_ceiling not in (448, 256):
            raise ValueError(f"scale_ceiling must be 448 or 256, got {self.scale_ceiling!r}")
        if self.random_bits not in (16, 8):
            raise ValueError(f"random_bits must be 16 or 8, got {self.random_bits!r}")
        sign = self.hadamard_sign
        if sign is not None and (isinstance(sign, bool) or not isinstance(sign, int) or not 0 <= sign <= 0xFFFF):
            raise ValueError(f"hadamard_sign must be None, True or a mask from 0 to 0xFFFF, got {sign!r}")
        if not isinstance(self.row_scaled, bool) or (self.row_scaled and self.block_rows != 1):
            raise ValueError(f"row_scaled must be False, or True with block_rows=1, got {self.row_scaled!r}")
        if self.hardware_rounding and (self.round_mode != RoundingMode.STOCHASTIC or self.random_bits != 8):
            raise ValueError("hardware_rounding needs round_mode=RoundingMode.STOCHASTIC and random_bits=8")
        if self.scale_search is not None and self.four_over_six is not None:
            raise ValueError(
                "scale_search and four_over_six are mutually exclusive: scale_search includes the other's choices"
            )
        if self.round_mode == RoundingMode.EDEN:
            self._check_eden()

    def _check_eden(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("round_mode", "scale_ceiling") and value != field.default:
                raise ValueError(f"round_mode='eden' needs {field.name}={field.default!s}, got {value!s}")

    @property
    def _default_ceiling(self) -> int:
        return 256 if self.four_over_six or self.scale_search or self.is_eden else 448

    @property
    def is_stochastic(self) -> bool:
        """Whether it uses random bits: for the codes (STOCHASTIC), or for rotation and block scales (EDEN)."""
        return self.round_mode in (RoundingMode.STOCHASTIC, RoundingMode.EDEN)

    @property
    def is_eden(self) -> bool:
        """Whether the mode is EDEN (contract, section 9)."""
        return self.round_mode == RoundingMode.EDEN

    @property
    def rotation(self) -> int | None:
        """Number of columns that are transformed together before quantization: 16 (Hadamard), 128 (EDEN) or None."""
        if self.is_eden:
            return ROTATION
        return None if self.hadamard_sign is None else BLOCK

    @property
    def column_multiple(self) -> int:
        """The stored columns are a multiple of this: 16, or 128 for EDEN."""
        return ROTATION if self.is_eden else BLOCK

    @property
    def largest_value(self) -> float:
        """6 * scale_ceiling: the largest code times the largest block scale."""
        assert self.scale_ceiling is not None  # __post_init__ has resolved it
        return 6.0 * self.scale_ceiling

    def replace(self, **changes: Any) -> QuantizeSpec:
        """Return a copy with some fields changed.

        Changing four_over_six or scale_search, or round_mode from or to EDEN, resets scale_ceiling to its default.
        """
        mode = RoundingMode.of(changes.get("round_mode", self.round_mode))
        if "four_over_six" in changes or "scale_search" in changes or self.is_eden != (mode == RoundingMode.EDEN):
            changes.setdefault("scale_ceiling", None)
        return dataclasses.replace(self, **changes)

    def with_round_mode(self, round_mode: RoundingMode | str) -> QuantizeSpec:
        """Return a copy with another rounding mode; STOCHASTIC also rounds scales up, so that nothing clips."""
        mode = RoundingMode.of(round_mode)
        if mode != RoundingMode.STOCHASTIC:
            return self.replace(round_mode=mode)
        return self.replace(round_mode=mode, scale_rounding=ScaleRounding.UP)

    def pack(self) -> int:
        """Return the spec as an integer for the ops; csrc/numerics/spec.h reads the same bits."""
        sign = self.hadamard_sign
        return (
            (1 << 12 if self.is_eden else int(self.round_mode))
            | (1 << 2 if self.block_rows == BLOCK else 0)
            | int(self.scale_rounding) << 3
            | int(self.four_over_six or 0) << 4
            | (1 << 6 if self.scale_ceiling == 256 else 0)
            | (1 << 7 if self.random_bits == 8 else 0)
            | (1 << 8 if self.hardware_rounding else 0)
            | (0 if sign is None else 1 << 9 | sign << 16)
            | int(self.scale_search or 0) << 10  # two bits, the upper one reserved
            | (1 << 13 if self.row_scaled else 0)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, of which ``QuantizeSpec(**fields)`` makes an equal spec."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.name.lower() if isinstance(value, Choice) else value for name, value in fields.items()}

    def __deepcopy__(self, memo: dict) -> QuantizeSpec:
        """Return self: it is immutable, and guards of compiled graphs compare identical objects faster."""
        return self

    @classmethod
    @functools.cache
    def unpack(cls, bits: int) -> QuantizeSpec:
        """Invert :meth:`pack`; raise a ValueError for any other integer."""
        choice, search = bits >> 4 & 3, bits >> 10 & 3
        spec = cls(
            round_mode=RoundingMode.EDEN if bits & 1 << 12 else RoundingMode(bits & 3),
            block_rows=BLOCK if bits & 1 << 2 else 1,
            scale_rounding=ScaleRounding(bits >> 3 & 1),
            four_over_six=FourOverSix(choice) if choice in (1, 2) else None,
            scale_ceiling=256 if bits & 1 << 6 else 448,
            random_bits=8 if bits & 1 << 7 else 16,
            hardware_rounding=bool(bits & 1 << 8),
            hadamard_sign=bits >> 16 & 0xFFFF if bits & 1 << 9 else None,
            scale_search=ScaleSearch(search) if search == 1 else None,
            row_scaled=bool(bits & 1 << 13),
        )
        if spec.pack() != bits:
            raise ValueError(f"spec must be a result of QuantizeSpec.pack(), got {bits}")
        return spec

    def __str__(self) -> str:
        """Describe what differs from the default spec: "stochastic, 16x16, scales up, 4/6 mse"."""
        words = [self.round_mode.name.lower(), f"{self.block_rows}x{BLOCK}"]
        if self.scale_rounding == ScaleRounding.UP:
            words.append("scales up")
        if self.four_over_six is not None:
            words.append(f"4/6 {self.four_over_six.name.lower()}")
        if self.scale_search is not None:
            words.append(f"search {self.scale_search.name.lower()}")
        if self.scale_ceiling != self._default_ceiling:
            words.append(f"ceiling {self.scale_ceiling}")
        if self.row_scaled:
            words.append("row scales")
        if self.hadamard_sign is not None:
            words.append(f"hadamard {self.hadamard_sign:#06x}")
        if self.round_mode == RoundingMode.STOCHASTIC and self.random_bits != 16:
            words.append(f"{self.random_bits} random bits" + (" (hardware)" if self.hardware_rounding else ""))
        return ", ".join(words)
