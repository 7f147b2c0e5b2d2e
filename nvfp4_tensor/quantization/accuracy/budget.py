"""Choose which linears stay dense so that the average number of bits per element is within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter
from nvfp4_tensor.quantization.accuracy.sensitivity import sensitivity
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of quantizing only one group of weights.

    Attributes:
        weights: the names of the weights.
        loss: the Kullback-Leibler divergence of the next-token distributions from those of the dense model, in nats per
            token.
        elements: the number of elements of the weights.
        dense: whether the group stays dense.
    """

    weights: tuple[str, ...]
    loss: float
    elements: int
    dense: bool


@dataclasses.dataclass(frozen=True)
class Budget:
    """The groups of weights and their average number of bits per element.

    Attributes:
        wanted: the requested bits per element.
        bits: the bits per element used, including scales.
        tokens: the number of tokens on which the costs were measured.
        costs: the groups, in descending order of loss.
    """

    wanted: float
    bits: float
    tokens: int
    costs: tuple[Cost, ...]

    @property
    def left_dense(self) -> tuple[str, ...]:
        """The names of the weights that stay dense."""
        return tuple(name for cost in self.costs if cost.dense for name in cost.weights)


def spend(
    model: nn.Module, batch: Mapping[str, Any], bits: float, config: NVFP4WeightOnlyConfig, filter_fn: Filter,
    group_of: Callable[[str], str], *, progress: bool = True,
) -> Budget:  # fmt: skip
    """Measure the cost of each group of weights, and choose which groups stay dense within ``bits`` on average.

    Args:
        model: a language model, called with ``**batch``; it is not changed.
        batch: keyword arguments of the model, including ``input_ids``.
        bits: the budget, in bits per element.
        config: how weights are quantized.
        filter_fn: selects the modules to quantize, by (module, name).
        group_of: maps the name of a weight to the name of its group. All weights of a group are dense or quantized.
        progress: show a progress bar.

    Raises:
        ValueError: the filter selects no linear, or ``bits`` is below the size of the quantized weights.
    """
    found = sensitivity(model, [batch], config, filter_fn=filter_fn, group_of=group_of, progress=progress)
    if not found.parts:
        raise ValueError("no linear is quantized, so there is no budget to distribute: check exclude and include")
    dense = set(found.dense_within(bits))
    costs = [Cost(part.weights, part.loss, part.elements, part.weights[0] in dense) for part in found.parts]
    used = [(part.dense_bits if part.weights[0] in dense else part.bits) * part.elements for part in found.parts]
    average = sum(used) / sum(part.elements for part in found.parts)
    return Budget(bits, average, batch["input_ids"].numel(), tuple(sorted(costs, key=lambda cost: -cost.loss)))
