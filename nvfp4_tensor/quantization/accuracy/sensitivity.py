"""Measure how much each weight's quantization costs, and choose which weights stay dense within a budget of bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from tqdm import tqdm

from nvfp4_tensor.quantization.accuracy.gptq.run import find_targets
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, in_eval_mode, layers_of, list_of, logits_of
from nvfp4_tensor.quantization.callers import Filter
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.weights import WeightRef


@dataclasses.dataclass(frozen=True)
class Part:
    """Weights that are quantized together, and the cost of quantizing only them.

    Attributes:
        name: the name of the weight, layer or group.
        weights: the names of the weights.
        loss: the Kullback-Leibler divergence of the model's output from the dense model's, in nats per token.
        elements: the number of elements of the weights.
        dense_bits, bits: bits per element, dense and in NVFP4.
        called: whether a batch reached any of the weights. If not, the loss is zero because nothing was measured.
        dense: whether a budget leaves the weights dense.
    """

    name: str
    weights: tuple[str, ...]
    loss: float
    elements: int
    dense_bits: float
    bits: float
    called: bool = True
    dense: bool = False


@dataclasses.dataclass(frozen=True)
class Budget:
    """What stays dense within a number of bits per element.

    Attributes:
        wanted: the requested bits per element.
        bits: the bits per element used, including scales.
        tokens: the number of tokens on which the costs were measured.
        costs: the parts, in descending order of loss.
    """

    wanted: float
    bits: float
    tokens: int
    costs: tuple[Part, ...]

    @property
    def left_dense(self) -> tuple[str, ...]:
        """The names of the weights that stay dense."""
        return tuple(name for cost in self.costs if cost.dense for name in cost.weights)


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """The result of :func:`sensitivity`. Its ``str`` is a table in descending order of loss.

    Attributes:
        parts: the weights that were quantized together, with their costs.
        tokens: the number of tokens on which the costs were measured.
    """

    parts: tuple[Part, ...]
    tokens: int = 0

    def within(self, bits: float) -> Budget:
        """Return the parts, those of :meth:`dense_within` marked as dense.

        Raises:
            ValueError: ``bits`` is below the average with every weight in NVFP4.
        """
        dense = set(self.dense_within(bits))
        costs = [dataclasses.replace(part, dense=part.weights[0] in dense) for part in self._by_loss]
        used = sum((part.dense_bits if part.dense else part.bits) * part.elements for part in costs)
        return Budget(bits, used / sum(part.elements for part in costs), self.tokens, tuple(costs))

    @property
    def _by_loss(self) -> list[Part]:
        return sorted(self.parts, key=lambda part: part.loss, reverse=True)

    def dense_within(self, bits: float) -> list[str]:
        """Return the weights to leave dense so that the model uses at most ``bits`` per element on average.

        Weights are chosen greedily by loss per additional bit, assuming that losses add up.

        Raises:
            ValueError: ``bits`` is below the average with every weight in NVFP4.
        """
        elements = sum(part.elements for part in self.parts)
        left = bits * elements - sum(part.bits * part.elements for part in self.parts)
        if left < -1e-9 * bits * elements:  # a budget equal to the average of all weights may be rounded
            least = bits - left / elements
            raise ValueError(f"a budget of {bits} bits is below the {least:.3f} bits of every weight in NVFP4")
        chosen: list[str] = []
        for part in sorted(self.parts, key=lambda part: part.loss / self._extra(part), reverse=True):
            if self._extra(part) <= left:
                left -= self._extra(part)
                chosen += part.weights
        return chosen

    def filter_for_bit_budget(self, bits: float, filter_fn: Filter | None = None) -> Filter:
        """Return a filter for ``quantize_``, :func:`calibrate` or :func:`gptq` that excludes :meth:`dense_within`.

        filter_fn: the filter that was passed to :func:`sensitivity`; modules that it excludes stay excluded.
        """
        dense = set(self.dense_within(bits))
        known = {name for part in self.parts for name in part.weights}

        def is_selected(module: nn.Module, name: str) -> bool:
            if filter_fn is not None and not filter_fn(module, name):
                return False
            own = {f"{name}.{parameter}".lstrip(".") for parameter in module._parameters} & known
            return bool(own) and not own & dense

        return is_selected

    def __str__(self) -> str:
        width = max([len(part.name) for part in self.parts], default=0)
        losses = {part.name: f"{part.loss:.3e} nats" if part.called else "    not called" for part in self.parts}
        return "\n".join(
            f"{part.name:<{width}}  {losses[part.name]}  {part.elements:>12,} elements" for part in self._by_loss
        )

    @staticmethod
    def _extra(part: Part) -> float:
        return max((part.dense_bits - part.bits) * part.elements, 1e-9)


@torch.no_grad()
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    config: NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Filter | None = None,
    by_layer: bool = False,
    group_of: Callable[[str], str] | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Measure the cost of quantizing each weight while all others stay dense. The model is not changed.

    The model runs once per weight and batch. A few hundred tokens are a good start, because divergences from the
    model's own output need far fewer tokens than a perplexity. The logits of all batches are kept in memory.

    Args:
        model: returns logits (..., classes), or an object with ``.logits``. It runs in eval mode.
        batches: the inputs of the model, as in :func:`calibrate`.
        config: how weights, or weights and activations, are quantized; NVFP4WeightOnlyConfig() by default.
        filter_fn: selects modules by (module, name); by default all linears and experts, also those that
            :func:`quantize_model` leaves dense.
        by_layer: quantize all weights of a layer (of the longest nn.ModuleList) together, which needs fewer runs.
        group_of: maps the name of a weight to the name of its group; weights of one group are quantized together.
        progress: show a progress bar.

    Raises:
        ValueError: no batches, or batches without tokens; a config that needs a calibration; both by_layer and
            group_of; nothing to quantize; outputs that are NaN.
        TypeError: one batch in place of several; the model returns a tuple, or another object without logits.

    Example::

        found = sensitivity(model, batches, filter_fn=linears)
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=found.filter_for_bit_budget(5.0, linears))
    """
    config = NVFP4WeightOnlyConfig() if config is None else config
    config._check_calibrated()
    if config.step is not None:
        raise ValueError("sensitivity needs a config without step, because it does not use a calibration")
    batches = list_of(batches, "sensitivity compares outputs")
    if by_layer and group_of is not None:
        raise ValueError("by_layer and group_of both choose what is quantized together: give only one of them")
    with restored(model, only_on_error=False), in_eval_mode(model):
        groups = _groups(model, find_targets(model, filter_fn), by_layer, group_of)
        to_dense(model)
        called: set[nn.Module] = set()
        with ExitStack() as hooks:
            for module in model.modules():
                hooks.enter_context(module.register_forward_pre_hook(lambda module, args: called.add(module)))
            exact = [_log_probabilities(model, batch) for batch in batches]
        if not any(own.numel() for own in exact):
            raise ValueError("the batches have no tokens, on which sensitivity compares outputs")
        bar = tqdm(groups.items(), desc="sensitivity", unit="part", disable=not progress)
        parts = [_part(model, name, targets, config, batches, exact) for name, targets in bar]
    if nan := [part.name for part in parts if math.isnan(part.loss)]:
        raise ValueError(f"the losses of {some(nan)} are NaN: look for NaN in the batches and the dense model")
    reached = {name for name, targets in groups.items() if any(target.module in called for target in targets)}
    tokens = sum(own.shape[:-1].numel() for own in exact)
    return Sensitivity(tuple(dataclasses.replace(p, called=p.name in reached or p.loss != 0) for p in parts), tokens)


def _groups(
    model: nn.Module, targets: Sequence[WeightRef], by_layer: bool, group_of: Callable[[str], str] | None
) -> dict[str, list[WeightRef]]:
    layers = layers_of(model, [target.module for target in targets]) if by_layer else []
    layer_of = {module: name for name, layer in layers for module in layer.modules()}
    groups: dict[str, list[WeightRef]] = {}
    for target in targets:
        name = layer_of.get(target.module, target.name) if group_of is None else group_of(target.name)
        groups.setdefault(name, []).append(target)
    return groups


def _part(
    model: nn.Module,
    name: str,
    targets: Sequence[WeightRef],
    config: NVFP4WeightOnlyConfig,
    batches: Sequence[Any],
    exact: Sequence[Tensor],
) -> Part:
    bits = 0
    try:
        for target in targets:
            weight = target.quantized(config)
            bits += 8 * weight.stored_bytes
            target.set(weight)
        pairs = [(_log_probabilities(model, batch), own) for batch, own in zip(batches, exact, strict=True)]
    finally:
        for target in targets:
            target.restore()
    loss = sum(kl_div(found, own, reduction="sum", log_target=True).item() for found, own in pairs)
    elements = sum(target.dense.numel() for target in targets)
    dense_bits = 8 * sum(target.dense.nbytes for target in targets) / elements
    tokens = sum(own.shape[:-1].numel() for own in exact)
    names = tuple(target.name for target in targets)
    return Part(name, names, loss / tokens, elements, dense_bits, bits / elements)


def _log_probabilities(model: nn.Module, batch: Any) -> Tensor:
    return logits_of(call_model(model, batch), model, "sensitivity").float().log_softmax(dim=-1)
