"""A table of how each linear of a model trains."""

from __future__ import annotations

import dataclasses
import math

from torch import nn

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.model_plan import Kind, Matrix, aligned
from nvfp4_tensor.quantization.whole_model import matrices_of
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe, WeightForDx


@dataclasses.dataclass(frozen=True)
class Row:
    """One matrix of a summary."""

    name: str
    shape: tuple[int, ...]
    recipe: str
    """The name of its recipe. For a matrix that does not train in NVFP4: "dense" or "NVFP4 weight" if it is a linear,
    or what it is instead ("experts", "Embedding")."""
    forward: str
    backward: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The matrices of a model in order. ``str`` returns a table, with each product as left operand x right operand."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        cells = [("linear", "N x K", "recipe", "forward", "backward")]
        cells += [
            (row.name or "(model)", " x ".join(map(str, row.shape)), row.recipe, row.forward, row.backward)
            for row in self.rows
        ]
        recipes = sorted({row.recipe for row in self.rows})
        weights = {r: sum(math.prod(row.shape) for row in self.rows if row.recipe == r) for r in recipes}
        total = sum(weights.values())
        counts = [
            f"{sum(row.recipe == r for row in self.rows)} {r} ({weights[r] / max(total, 1):.1%} of the weights)"
            for r in recipes
        ]
        return "\n".join([*aligned(cells), *counts])


def summary(model: nn.Module) -> Summary:
    """Summarize how each matrix of the model trains: linears in NVFP4 or dense, others as they are.

    A shared weight is counted once.
    """
    modules = dict(model.named_modules())
    return Summary(tuple(_row(modules[each.name.rpartition(".")[0]], each) for each in matrices_of(model)))


def _row(linear: nn.Module, matrix: Matrix) -> Row:
    name, shape = matrix.name.removesuffix("weight").removesuffix("."), matrix.shape
    if matrix.kind is not Kind.LINEAR:
        return Row(name, shape, matrix.note or matrix.kind.value, "-", "-")
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
