"""Recipes: how each operand of a training linear's three products is quantized (contract, section 8).

==========  ===================  ===================================
product     left operand         right operand
==========  ===================  ===================================
fprop       ``x``                ``w``
dgrad       ``dy``               w, read according to ``w_for_dx``
wgrad       ``dy_t`` (dy^T)      ``x_t`` (x^T)
==========  ===================  ===================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.numerics.choices import Choice, RoundingMode, ScaleRounding, ScaleSearch
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec


@pin
class WeightForDx(Choice):
    """How dgrad reads the weight."""

    CODES = 0
    """The forward's codes, transposed. Requires 16x16 blocks. On Blackwell, the product is FP4."""
    EXACT = 1
    """The forward's codes, decoded. Supports all blocks. The product is bfloat16 on all devices."""
    DENSE = 2
    """The unquantized weight."""


@pin
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A spec for each operand of the three products; an operand whose spec is None stays dense.

    Args:
        name: the name that :func:`summary` prints.
        x, w: the specs of fprop's operands, ``y = x @ w^T``.
        dy: the spec of dgrad's left operand, ``dx = dy @ w``.
        w_for_dx: how dgrad reads w, or a spec to quantize w^T for dgrad.
        dy_t, x_t: the specs of wgrad's operands, ``dw = dy^T @ x``, both with blocks along the tokens.
        keep_w: whether to save the forward's codes of w for dgrad. If False, dgrad quantizes w again, to the same
            codes. This saves 0.56 bytes per weight and costs one pass over the weights.

    EDEN, which rotates, has to be the rounding mode of both operands of a product, or only of ``dy`` together with
    w_for_dx=EXACT or DENSE. In the latter case its values are rotated back and rounded to bfloat16.

    Raises:
        ValueError: if the transforms of two operands do not cancel; for CODES without 16x16 blocks in ``w``; for CODES
            or EXACT without ``w`` or with a transformed ``w``; or for 16x16 blocks in an operand other than the weight.
        TypeError: if a field has the wrong type.

    >>> recipe = RECIPES["nvidia"].replace(name="mine", dy=QuantizeSpec(round_mode="stochastic", scale_rounding="up"))
    """

    name: str = "custom"
    x: QuantizeSpec | None = None
    w: QuantizeSpec | None = None
    dy: QuantizeSpec | None = None
    w_for_dx: WeightForDx | QuantizeSpec = WeightForDx.DENSE
    dy_t: QuantizeSpec | None = None
    x_t: QuantizeSpec | None = None
    keep_w: bool = True

    is_stochastic_forward: ClassVar[bool]
    """Whether quantization in the forward uses random bits; computed once, because each call reads it."""
    is_stochastic_backward: ClassVar[bool]
    """Whether quantization in the backward uses random bits."""
    packed: ClassVar[tuple[int, ...]]
    """The recipe as integers, which an op's schema supports: :meth:`QuantizeSpec.pack` of x, w, dy, dy_t and x_t, or -1
    for a dense operand; and ``w_for_dx``, a packed spec or ``-2 - value`` of the enum. The name is left out."""
    is_coded: ClassVar[bool]
    """Whether all products read codes with one per-tensor scale, and dgrad those that the forward made of w."""
    is_dense: ClassVar[bool]
    """Whether all operands are dense."""
    for_any_blocks: ClassVar[Recipe]
    """This recipe, with w_for_dx=EXACT instead of CODES: for a weight that is given as codes, in whatever blocks."""

    def __post_init__(self) -> None:
        for operand in ("x", "w", "dy", "dy_t", "x_t"):
            spec = getattr(self, operand)
            if spec is not None and not isinstance(spec, QuantizeSpec):
                raise TypeError(f"{operand} of recipe {self.name!r} is a QuantizeSpec or None, not {spec!r}")
            if operand != "w" and spec is not None and spec.block_rows != 1:
                raise ValueError(f"{operand} of recipe {self.name!r} needs 1x16 blocks: only weights have 16x16 blocks")
        if not isinstance(self.w_for_dx, QuantizeSpec | WeightForDx):
            raise TypeError(
                f"w_for_dx of recipe {self.name!r} is a WeightForDx or a QuantizeSpec, not {self.w_for_dx!r}"
            )
        if not isinstance(self.keep_w, bool):
            raise TypeError(f"keep_w of recipe {self.name!r} is True or False, not {self.keep_w!r}")
        self._check_weight_for_dx()
        self._check_transforms()
        set_field = object.__setattr__  # the dataclass is frozen
        set_field(self, "is_stochastic_forward", any_stochastic(self.x, self.w, self.x_t))
        set_field(self, "is_stochastic_backward", any_stochastic(self.dy, self.dy_t, self._spec_for_dx))
        specs = [getattr(self, name) for name in OPERANDS]
        w = self.w_for_dx
        for_dx = w.pack() if isinstance(w, QuantizeSpec) else -2 - int(w)
        set_field(self, "packed", (*(-1 if spec is None else spec.pack() for spec in specs), for_dx))
        one_scale = not any(spec is None or spec.row_scaled for spec in specs)
        set_field(self, "is_coded", one_scale and self.dgrad_reads_codes)
        set_field(self, "is_dense", not any(specs) and self.w_for_dx == WeightForDx.DENSE)
        reads_tiles = self.w_for_dx == WeightForDx.CODES
        set_field(self, "for_any_blocks", self.replace(w_for_dx=WeightForDx.EXACT) if reads_tiles else self)

    @classmethod
    def unpack(cls, packed: Sequence[int], **fields: Any) -> Recipe:
        """Return the recipe that :attr:`packed` encodes, with further fields."""
        *specs, for_dx = packed
        operands: list[Any] = [None if bits == -1 else QuantizeSpec.unpack(bits) for bits in specs]
        w_for_dx = WeightForDx(-2 - for_dx) if for_dx < -1 else QuantizeSpec.unpack(for_dx)
        return cls(w_for_dx=w_for_dx, **dict(zip(OPERANDS, operands, strict=True)), **fields)

    def _check_weight_for_dx(self) -> None:
        if self.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT) and self.w is None:
            raise ValueError(
                f"recipe {self.name!r} has no spec for w, so dgrad has no codes to read: give w, or w_for_dx=DENSE"
            )
        if self.w_for_dx == WeightForDx.CODES and self.w is not None and self.w.block_rows != BLOCK:
            raise ValueError(
                f"w_for_dx=CODES of recipe {self.name!r} reads the codes of w transposed, which needs 16x16 blocks: "
                "give w block_rows=16, or use w_for_dx=EXACT"
            )

        if self.dgrad_reads_codes and transform_of(self.w) is not None:
            raise ValueError(
                f"w of recipe {self.name!r} is transformed along its rows ({self.w}), which dgrad does not sum over: "
                "use w_for_dx=DENSE or a spec for w_for_dx"
            )

    @property
    def dgrad_reads_codes(self) -> bool:
        """Whether dgrad reads the forward's codes of w."""
        return self.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT)

    @property
    def _spec_for_dx(self) -> QuantizeSpec | None:
        return self.w_for_dx if isinstance(self.w_for_dx, QuantizeSpec) else None

    def _check_transforms(self) -> None:
        pairs = {"x and w": (self.x, self.w), "dy_t and x_t": (self.dy_t, self.x_t)}
        if not self.rotates_dy_back:
            pairs["dy and w_for_dx"] = self.dy, self._spec_for_dx
        for names, (a, b) in pairs.items():
            if transform_of(a) != transform_of(b):
                raise ValueError(
                    f"{names} of recipe {self.name!r} need the same transform, which only cancels in pairs: "
                    f"got {transform_of(a)} and {transform_of(b)}"
                )

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def dense_forward(self) -> Recipe:
        """Return a copy whose fprop is dense.

        With w_for_dx=CODES, dgrad now quantizes the weight itself. With EXACT, it now reads the weight that the dense
        forward multiplied by: the unquantized one.
        """
        w_for_dx = self.w_for_dx
        if w_for_dx == WeightForDx.EXACT:
            w_for_dx = WeightForDx.DENSE
        elif w_for_dx == WeightForDx.CODES:
            assert self.w is not None
            w_for_dx = self.w
        return self.replace(name=f"{self.name}, bf16 forward", x=None, w=None, w_for_dx=w_for_dx)

    def dense_backward(self) -> Recipe:
        """Return a copy whose dgrad and wgrad are dense."""
        changes: dict[str, Any] = dict(dy=None, dy_t=None, x_t=None, w_for_dx=WeightForDx.DENSE)
        return self.replace(name=f"{self.name}, bf16 backward", **changes)

    @property
    def rotates_dy_back(self) -> bool:
        """Whether dgrad undoes EDEN's rotation of dy, because w is not rotated."""
        return self.dy is not None and self.dy.is_eden and self.w_for_dx in (WeightForDx.EXACT, WeightForDx.DENSE)

    def __deepcopy__(self, memo: dict) -> Recipe:
        """Return this object, which is immutable."""
        return self

    def __str__(self) -> str:
        dx = self.w_for_dx.name.lower() if isinstance(self.w_for_dx, WeightForDx) else f"({self.w_for_dx})"
        operands = {"x": self.x, "w": self.w, "dy": self.dy, "w_for_dx": dx, "dy_t": self.dy_t, "x_t": self.x_t}
        again = "" if self.keep_w else "; w quantized again for dx"
        return f"{self.name}: " + "; ".join(f"{k} {'dense' if v is None else v}" for k, v in operands.items()) + again


OPERANDS = ("x", "w", "dy", "dy_t", "x_t")


def any_stochastic(*specs: QuantizeSpec | None) -> bool:
    """Whether any of these specs uses random bits."""
    return any(spec is not None and spec.is_stochastic for spec in specs)


def transform_of(spec: QuantizeSpec | None) -> str | None:
    """Return the name of a spec's transform: equal transforms cancel in a product. None for none."""
    if spec is None or (spec.hadamard_sign is None and not spec.is_eden):
        return None
    return "EDEN" if spec.is_eden else f"{spec.hadamard_sign:#06x}"


# --- named recipes ---------------------------------------------------------------------------------------------------

_NEAREST = QuantizeSpec()
_TILES = QuantizeSpec(block_rows=BLOCK)
_STOCHASTIC = QuantizeSpec(round_mode=RoundingMode.STOCHASTIC)
_UNCLIPPED = _STOCHASTIC.replace(scale_rounding=ScaleRounding.UP)
_SEARCHED = QuantizeSpec(scale_search=ScaleSearch.MSE)
_EDEN = QuantizeSpec(round_mode=RoundingMode.EDEN)


def _transformed(spec: QuantizeSpec) -> QuantizeSpec:
    return spec.replace(hadamard_sign=True)


_NVIDIA = Recipe(
    name="nvidia",
    x=_NEAREST,
    w=_TILES,
    dy=_STOCHASTIC,
    w_for_dx=WeightForDx.CODES,
    dy_t=_transformed(_STOCHASTIC),
    x_t=_transformed(_NEAREST),
)
_ACCURATE = Recipe(
    name="accurate",
    x=_SEARCHED,
    w=_SEARCHED,
    dy=_UNCLIPPED,
    w_for_dx=WeightForDx.EXACT,
    dy_t=_transformed(_UNCLIPPED),
    x_t=_transformed(_NEAREST),
)
_NAMED = (
    _NVIDIA,
    _NVIDIA.replace(name="nvidia_4over6", x=_NEAREST.replace(four_over_six=True), w=_TILES.replace(four_over_six=True)),
    _NVIDIA.replace(name="unbiased", dy=_UNCLIPPED, dy_t=_transformed(_UNCLIPPED)),
    _ACCURATE,
    _ACCURATE.replace(name="accurate_eden", dy=_EDEN, dy_t=_EDEN, x_t=_EDEN),
    Recipe(name="forward_only", x=_NEAREST, w=_NEAREST, w_for_dx=WeightForDx.EXACT),
    Recipe(name="weight_only", w=_NEAREST, w_for_dx=WeightForDx.EXACT),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _NAMED})
"""The named recipes, which ``NVFP4TrainingConfig(recipe="nvidia")`` looks up."""


def resolve(recipe: Recipe | str) -> Recipe:
    """Return the recipe, or the named recipe for a string.

    Raises:
        ValueError: if no recipe has that name.
        TypeError: if the argument is neither a Recipe nor a name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe is a Recipe or the name of one ({', '.join(RECIPES)}), not {recipe!r}")
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: use a Recipe or one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]
