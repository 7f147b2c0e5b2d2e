"""Which linears to leave dense for a budget of bits: ``nvfp4 quantize --bits``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor, nn

from nvfp4_tensor.checkpoints.names import joined_with, some
from nvfp4_tensor.cli.results import number
from nvfp4_tensor.quantization import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter
from nvfp4_tensor.quantization.accuracy.sensitivity import Sensitivity, sensitivity


@dataclasses.dataclass(frozen=True)
class Cost:
    """What quantizing some weights alone costs, those that servers join together.

    Attributes:
        loss: how far the model's next-token distributions move, in nats a token (Kullback-Leibler).
        dense: whether they were left dense.
    """

    weights: tuple[str, ...]
    loss: float
    elements: int
    dense: bool


@dataclasses.dataclass(frozen=True)
class Budget:
    """What was left dense. ``bits`` are an average over all linears that could be quantized, scales among them."""

    wanted: float
    bits: float
    tokens: int
    costs: tuple[Cost, ...]

    @property
    def left_dense(self) -> tuple[str, ...]:
        """The names of the weights."""
        return tuple(name for cost in self.costs if cost.dense for name in cost.weights)

    def __str__(self) -> str:
        dense = [f"{some(cost.weights)} ({number(cost.loss, 2)} nats)" for cost in self.costs if cost.dense]
        return f"{self.bits:.2f} bits over all linears; left dense: {some(dense) or 'none'}"


def spend(
    model: nn.Module, batches: Sequence[Tensor], bits: float, config: NVFP4WeightOnlyConfig, filter_fn: Filter,
    progress: bool,
) -> Budget:  # fmt: skip
    """Which weights of the linears of ``filter_fn`` are best left dense, so that all take ``bits`` on average.

    Each group of linears that servers join is quantized alone, and the model runs over the first batch.

    Raises:
        ValueError: no linear is chosen, or fewer bits than NVFP4 takes.
    """
    names = {f"{name}.weight" for name, module in model.named_modules() if filter_fn(module, name)}
    found = sensitivity(
        model,
        [{"input_ids": batches[0], "use_cache": False}],
        config,
        filter_fn=filter_fn,
        group_of=lambda name: joined_with(name, names)[0],
        progress=progress,
    )
    return _budget(found, bits, batches[0].numel())


def _budget(found: Sensitivity, wanted: float, tokens: int) -> Budget:
    if not found.parts:
        raise ValueError("no linear is quantized, so no budget of bits can be spent: check --exclude and --include")
    dense = set(found.dense_within(wanted))
    costs = [Cost(part.weights, part.loss, part.elements, part.weights[0] in dense) for part in found.parts]
    taken = [(part.dense_bits if part.weights[0] in dense else part.bits) * part.elements for part in found.parts]
    bits = sum(taken) / sum(part.elements for part in found.parts)
    return Budget(wanted, bits, tokens, tuple(sorted(costs, key=lambda cost: -cost.loss)))
