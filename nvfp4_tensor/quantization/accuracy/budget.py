"""Choose which linears stay dense, so that all of them together take a given number of bits per element."""

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
    """What it costs to quantize one group of weights alone.

    Attributes:
        loss: Kullback-Leibler divergence of the next-token distributions from the dense model's, in nats per token.
        dense: whether the group stays dense.
    """

    weights: tuple[str, ...]
    loss: float
    elements: int
    dense: bool


@dataclasses.dataclass(frozen=True)
class Budget:
    """The groups of weights, the most costly first, and the bits per element that they take together.

    Attributes:
        wanted: the bits that were asked for; bits: those that are used, scales included.
        tokens: how many tokens the costs were measured on.
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
    """Quantize each group of weights alone, and choose which stay dense so that all take ``bits`` on average.

    Args:
        model: a language model, called with ``**batch``; it stays as it is.
        batch: arguments of the model, ``input_ids`` among them.
        group_of: the name of the group that a weight belongs to. A group is dense or quantized as a whole.

    Raises:
        ValueError: the filter chooses no linear, or ``bits`` are fewer than NVFP4 takes.
    """
    found = sensitivity(model, [batch], config, filter_fn=filter_fn, group_of=group_of, progress=progress)
    if not found.parts:
        raise ValueError("no linear is quantized, so there are no bits to distribute: check exclude and include")
    dense = set(found.dense_within(bits))
    costs = [Cost(part.weights, part.loss, part.elements, part.weights[0] in dense) for part in found.parts]
    used = [(part.dense_bits if part.weights[0] in dense else part.bits) * part.elements for part in found.parts]
    average = sum(used) / sum(part.elements for part in found.parts)
    return Budget(bits, average, batch["input_ids"].numel(), tuple(sorted(costs, key=lambda cost: -cost.loss)))
