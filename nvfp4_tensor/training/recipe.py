"""Recipes: how each operand of a linear's three products is quantized while it trains (contract, section 8).

==========  ===================  ===================================
product     left operand         right operand
==========  ===================  ===================================
fprop       ``x``                ``w``
dgrad       ``dy``               w, read as ``w_for_dx`` says
wgrad       ``dy_t`` (dy^T)      ``x_t`` (x^T)
==========  ===================  ===================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    """The forward's codes, transposed: 16x16 blocks, whose scales serve both directions. FP4 products on Blackwell."""
    EXACT = 1
    """The values that the forward multiplied by, decoded: any blocks; the product is in bf16 values everywhere."""
    DENSE = 2
    """The weight as it is, unquantized."""


@pin
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A spec for each operand of the three products; None leaves that operand as it is.

    Args:
        name: what :func:`summary` prints.
        x, w: of fprop, ``y = x @ w^T``.
        dy: of dgrad, ``dx = dy @ w``.
        w_for_dx: how dgrad reads w, or a spec by which w^T is quantized anew for it.
        dy_t, x_t: of wgrad, ``dw = dy^T @ x``: both in blocks along the tokens.
        keep_w: whether the forward's codes of w live on until dgrad has read them; False: dgrad quantizes w again, to
            the same bits. Saves 0.56 bytes a weight, costs a pass over it.

    EDEN, which rotates, goes into both operands of a product, or into ``dy`` alone beside w_for_dx=EXACT or DENSE: its
    values are then rotated back, rounded to bfloat16.

    Raises:
        ValueError: transforms that would not cancel, CODES without 16x16 blocks in ``w``, CODES or EXACT without ``w``
            or with a transformed one, 16x16 blocks in anything but a weight.
        TypeError: a field of another kind.

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

    draws_in_forward: ClassVar[bool]
    """Whether what the forward quantizes takes random bits. Said once, since each call asks."""
    draws_in_backward: ClassVar[bool]
    """Whether the backward does."""

    def __post_init__(self) -> None:
        for operand in ("x", "w", "dy", "dy_t", "x_t"):
            spec = getattr(self, operand)
            if spec is not None and not isinstance(spec, QuantizeSpec):
                raise TypeError(f"{operand} of recipe {self.name!r} is a QuantizeSpec or None, not {spec!r}")
            if operand != "w" and spec is not None and spec.block_rows != 1:
                raise ValueError(f"{operand} of recipe {self.name!r} needs 1x16 blocks: 16x16 blocks are for weights")
        if not isinstance(self.w_for_dx, QuantizeSpec | WeightForDx):
            raise TypeError(
                f"w_for_dx of recipe {self.name!r} is a WeightForDx or a QuantizeSpec, not {self.w_for_dx!r}"
            )
        if not isinstance(self.keep_w, bool):
            raise TypeError(f"keep_w of recipe {self.name!r} is True or False, not {self.keep_w!r}")
        self._check_weight_for_dx()
        self._check_transforms()
        of_w = self.w_for_dx if isinstance(self.w_for_dx, QuantizeSpec) else None
        fix = object.__setattr__  # the dataclass is frozen
        fix(self, "draws_in_forward", draws(self.x, self.w, self.x_t))
        fix(self, "draws_in_backward", draws(self.dy, self.dy_t, of_w))

    def _check_weight_for_dx(self) -> None:
        if self.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT) and self.w is None:
            raise ValueError(
                f"recipe {self.name!r} has no spec for w, so dgrad has no codes to read: give w, or w_for_dx=DENSE"
            )
        if self.w_for_dx == WeightForDx.CODES and self.w is not None and self.w.block_rows != BLOCK:
            raise ValueError(
                f"w_for_dx=CODES of recipe {self.name!r} reads the codes of w transposed, which needs 16x16 blocks: "
                "give w block_rows=16, or choose w_for_dx=EXACT"
            )

        if self._reads_forward and rotation(self.w) is not None:
            raise ValueError(
                f"w of recipe {self.name!r} is transformed along its rows ({self.w}), which dgrad does not sum over: "
                "give w_for_dx=DENSE or a spec of its own"
            )

    @property
    def _reads_forward(self) -> bool:
        return self.w_for_dx in (WeightForDx.CODES, WeightForDx.EXACT)

    def _check_transforms(self) -> None:
        of_w = self.w_for_dx if isinstance(self.w_for_dx, QuantizeSpec) else None
        pairs = {"x and w": (self.x, self.w), "dy_t and x_t": (self.dy_t, self.x_t)}
        if not self.rotates_dy_back:
            pairs["dy and w_for_dx"] = self.dy, of_w
        for names, (a, b) in pairs.items():
            if rotation(a) != rotation(b):
                raise ValueError(
                    f"{names} of recipe {self.name!r} need the same transform, which only cancels in pairs: "
                    f"got {_transform(a)} and {_transform(b)}"
                )

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def with_hadamard_sign(self, sign: int) -> Recipe:
        """A copy whose transformed operands take this sign mask."""

        def signed(spec: Any) -> Any:
            transformed = isinstance(spec, QuantizeSpec) and spec.hadamard_sign is not None
            return spec.replace(hadamard_sign=sign) if transformed else spec

        return self.replace(**{name: signed(getattr(self, name)) for name in (*OPERANDS, "w_for_dx")})

    def dense_forward(self) -> Recipe:
        """A copy whose fprop is dense: dgrad, where it read the forward's codes, quantizes the weight for itself.

        Where it read the forward's values (EXACT), it reads those of this forward: the weight as it is.
        """
        w_for_dx = self.w_for_dx
        if w_for_dx == WeightForDx.EXACT:
            w_for_dx = WeightForDx.DENSE
        elif w_for_dx == WeightForDx.CODES:
            assert self.w is not None
            w_for_dx = self.w
        return self.replace(name=f"{self.name}, bf16 forward", x=None, w=None, w_for_dx=w_for_dx)

    def dense_backward(self) -> Recipe:
        """A copy whose dgrad and wgrad are dense."""
        changes: dict[str, Any] = dict(dy=None, dy_t=None, x_t=None, w_for_dx=WeightForDx.DENSE)
        return self.replace(name=f"{self.name}, bf16 backward", **changes)

    @property
    def is_dense(self) -> bool:
        """Whether nothing is quantized."""
        return self.w_for_dx == WeightForDx.DENSE and all(getattr(self, name) is None for name in OPERANDS)

    @property
    def rotates_dy_back(self) -> bool:
        """Whether dgrad takes EDEN's values of dy back into the basis of w."""
        return self.dy is not None and self.dy.is_eden and self.w_for_dx in (WeightForDx.EXACT, WeightForDx.DENSE)

    def __deepcopy__(self, memo: dict) -> Recipe:
        """Itself: nothing in it changes."""
        return self

    def __str__(self) -> str:
        dx = self.w_for_dx.name.lower() if isinstance(self.w_for_dx, WeightForDx) else f"({self.w_for_dx})"
        operands = {"x": self.x, "w": self.w, "dy": self.dy, "w_for_dx": dx, "dy_t": self.dy_t, "x_t": self.x_t}
        again = "" if self.keep_w else "; w quantized again for dx"
        return f"{self.name}: " + "; ".join(f"{k} {'dense' if v is None else v}" for k, v in operands.items()) + again


OPERANDS = ("x", "w", "dy", "dy_t", "x_t")


def draws(*specs: QuantizeSpec | None) -> bool:
    """Whether any of these takes random bits."""
    return any(spec is not None and spec.is_stochastic for spec in specs)


def rotation(spec: QuantizeSpec | None) -> object:
    """What transform a spec applies before it quantizes; equal ones cancel in a product."""
    if spec is None:
        return None
    return "EDEN" if spec.is_eden else spec.hadamard_sign


def _transform(spec: QuantizeSpec | None) -> str:
    transform = rotation(spec)
    return f"{transform:#06x}" if isinstance(transform, int) else str(transform)


# --- those that have names -------------------------------------------------------------------------------------------

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
"""The recipes that have names: what ``NVFP4TrainingConfig(recipe="nvidia")`` looks up."""


def resolve(recipe: Recipe | str) -> Recipe:
    """The recipe, or that of the name.

    Raises:
        ValueError: no recipe has that name.
        TypeError: neither a Recipe nor a name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"recipe is a Recipe or the name of one ({', '.join(RECIPES)}), not {recipe!r}")
    if recipe not in RECIPES:
        raise ValueError(f"unknown recipe {recipe!r}: use a Recipe or one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]
