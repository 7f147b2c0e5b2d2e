"""A table of how each linear of a model trains."""

from __future__ import annotations

import dataclasses

from torch import nn

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe, WeightForDx


@dataclasses.dataclass(frozen=True)
class Row:
    """One linear of a summary."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    """The name of its recipe. For a linear that does not train in NVFP4: "dense" or "NVFP4 weight"."""
    forward: str
    backward: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The linears of a model in order. ``str`` returns a table, with each product as left operand x right operand."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        cells = [("linear", "N x K", "recipe", "forward", "backward")]
        cells += [
            (row.name or "(model)", " x ".join(map(str, row.shape)), row.recipe, row.forward, row.backward)
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in cells) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        recipes = sorted({row.recipe for row in self.rows})
        weights = {r: sum(_size(row) for row in self.rows if row.recipe == r) for r in recipes}
        total = sum(weights.values())
        counts = [
            f"{sum(row.recipe == r for row in self.rows)} {r} ({weights[r] / max(total, 1):.1%} of the weights)"
            for r in recipes
        ]
        return "\n".join([*lines, *counts])


def _size(row: Row) -> int:
    size = 1
    for n in row.shape:
        size *= n
    return size


def summary(model: nn.Module) -> Summary:
    """Summarize how each linear of the model trains, in NVFP4 or dense."""
    return Summary(tuple(_row(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)))


def _row(name: str, linear: nn.Linear) -> Row:
    shape = tuple(linear.weight.shape)
    if not isinstance(linear, NVFP4TrainingLinear):
        kind = "NVFP4 weight" if isinstance(linear.weight, NVFP4Tensor) else "dense"
        return Row(name, shape, kind, "-", "-")
    recipe = linear.active_recipe
    return Row(name, shape, linear.recipe.name, _forward(recipe), _backward(recipe))


def _forward(recipe: Recipe) -> str:
    return "bf16" if recipe.x is None and recipe.w is None else f"{_short(recipe.x)} x {_short(recipe.w)}"


def _backward(recipe: Recipe) -> str:
    if recipe.w_for_dx == WeightForDx.DENSE and recipe.dy is recipe.dy_t is recipe.x_t is None:
        return "bf16"
    w = recipe.w_for_dx
    dx = f"w {w.name.lower()}" if isinstance(w, WeightForDx) else f"w anew {_short(w)}"
    return f"dx: {_short(recipe.dy)} x {dx}; dw: {_short(recipe.dy_t)} x {_short(recipe.x_t)}"


def _short(spec: QuantizeSpec | None) -> str:
    """Describe a spec without 1x16 blocks, which most have, and without the sign mask."""
    if spec is None:
        return "dense"
    words = [word for word in str(spec).split(", ") if word != "1x16"]
    return "+".join("hadamard" if word.startswith("hadamard") else word for word in words)
