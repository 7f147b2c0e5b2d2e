"""Quantize x, w and dy by a recipe, with the reference implementation only."""

from typing import NamedTuple

import torch
from torch import Tensor

from helpers.instruction_sets import reference_amax
from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.training import WeightForDx


class Stored(NamedTuple):
    """A matrix quantized by the reference."""

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor

    def values(self, columns=None):
        """Return the decoded values without the per-tensor scale, float64."""
        columns = self.qdata.shape[-1] * 2 if columns is None else columns
        return reference.dequantize(self.qdata, self.scale, None, columns, torch.float32).double()


def quantized(x: Tensor, spec: QuantizeSpec, rng_state, stream: int) -> Stored:
    """Quantize x (R, C) by its amax, or those of its rows."""
    return Stored(*reference.quantize(x, reference_amax(x, spec, rng_state), rng_state, spec, stream=stream))


def expected_products(x, w, dy, recipe, rng_state):
    """Return the operands (left, right) of fprop, dgrad and wgrad, each of which is left @ right^T.

    An operand is :class:`Stored`, or a dense tensor.
    """

    def operand(t, spec, stream):
        return t if spec is None else quantized(t, spec, rng_state, stream)

    w_operand = operand(w, recipe.w, 4)
    if isinstance(recipe.w_for_dx, QuantizeSpec):
        w_for_dx = quantized(w.t(), recipe.w_for_dx, rng_state, 2)
    else:
        w_for_dx = w if recipe.w_for_dx == WeightForDx.DENSE else w_operand
    return {
        "fprop": (operand(x, recipe.x, 5), w_operand),
        "dgrad": (operand(dy, recipe.dy, 0), w_for_dx),
        "wgrad": (operand(dy.t(), recipe.dy_t, 1), operand(x.t(), recipe.x_t, 3)),
    }


def wide(operand, columns=None):
    """Return (values, per-tensor scale) of a stored or a dense operand, both float64."""
    if isinstance(operand, Tensor):
        return operand.double(), 1.0
    return operand.values(columns), operand.per_tensor_scale.double()


def multiplied(left, right):
    """Return left @ right^T of float64 values and scales, and the sum of its summands' magnitudes."""
    (a, fa), (b, fb) = left, right
    fa = torch.as_tensor(fa).view(-1, 1)
    columns = min(a.shape[1], b.shape[1])
    a, b = a[:, :columns], b[:, :columns]
    return (a @ b.t()) * fa * fb, (a.abs() @ b.abs().t()) * fa * fb
