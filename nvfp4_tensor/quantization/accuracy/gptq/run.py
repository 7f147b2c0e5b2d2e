"""gptq(model, batches, config): quantize a model by GPTQ, one layer at a time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.quantization.accuracy.gptq.config import GPTQConfig
from nvfp4_tensor.quantization.accuracy.gptq.folder import Finished
from nvfp4_tensor.quantization.accuracy.gptq.rounding import Factor, moved_to_inputs, round_weight
from nvfp4_tensor.quantization.accuracy.gptq.stages import Call, call_model, in_eval_mode, layers_of, record
from nvfp4_tensor.quantization.accuracy.gptq.statistics import Collected, Statistics, Streams
from nvfp4_tensor.quantization.accuracy.gptq.targets import Fed, Filter, Watch, WeightRef, find_targets
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.model_plan import plan_matrices
from nvfp4_tensor.quantization.observed_experts import ROUTED, routed_tokens, summary_of
from nvfp4_tensor.quantization.trained import restored, to_dense
from nvfp4_tensor.quantization.whole_model import PlannedFilter, matrices_of, plan_model
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

REST = "rest"
"""The file with the weights outside of layers."""


def gptq(
    model: nn.Module,
    batches: Iterable[Any],
    config: GPTQConfig | NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Filter | None = None,
    layers: Sequence[nn.Module] | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize a model in place by GPTQ (arXiv:2210.17323), one layer at a time.

    A model that trained is taken as :func:`training.to_dense` would leave it. Every expert of a transformers model gets
    statistics of all tokens of its layer, in which those that the router sent elsewhere count little: see
    :func:`calibrate`. Linears that servers join (q, k and v; gate and up) share the largest of their per-tensor scales,
    as with ``quantize_model``.

    The model, the hidden states of all batches (two copies with ``dense_target_weight``), the statistics of one layer
    and, with ``dense_target_weight``, the dense inputs of one layer are kept in memory. The dense weights are kept
    until the run is complete: after an exception or an interrupt, the model is restored.

    Args:
        model: the model whose linears and experts' parameters (E, N, K) are replaced in place. It runs in eval mode.
        batches: the inputs of the model. Each is a tensor, a tuple of arguments or a mapping of keyword arguments. Use
            at least a few thousand tokens, similar to those that the model will process.
        config: a :class:`GPTQConfig`. An NVFP4WeightOnlyConfig or NVFP4Config is used as its base_config.
        filter_fn: selects modules by (module, name): linears, and modules with experts' parameters; by default those of
            ``quantize_model``. A shared weight stays dense, with a warning.
        layers: the sequential layers of the model. By default, those of the longest nn.ModuleList that contain most of
            the selected modules. ``[]`` treats the model as one layer: all inputs are recorded before its first weight
            changes.
        folder: a folder for finished layers, from which an interrupted run resumes.
        progress: show a progress bar over the weights.

    Returns:
        The model.

    Raises:
        TypeError: config or a selected module has another type, or a weight is sharded.
        ValueError: no batches, layers that do not form a chain, inputs that are not finite, or a folder of another run.
        RuntimeError: no batch reached a weight.

    Example::

        batches = [tokenizer(text, return_tensors="pt") for text in texts]
        gptq(model, batches, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    """
    config = _checked(config)
    batches = list(batches)
    if not batches:
        raise ValueError("GPTQ needs the inputs of weights: give at least one batch")
    with torch.no_grad(), restored(model, only_on_error=True):
        targets = find_targets(model, PlannedFilter(model, plan_model(model)) if filter_fn is None else filter_fn)
        chain = _chain(model, targets, layers)
        finished = None if folder is None else Finished(folder, config, model, targets, batches)
        to_dense(model)
        with in_eval_mode(model), tqdm(total=len(targets), desc="GPTQ", unit="weight", disable=not progress) as bar:
            run = _Run(config, _joined(model, targets), finished, bar.update)
            rest = run.quantize_layers(model, chain, targets, batches) if chain else targets
            run.quantize_rest(model, rest, batches)
        for module, tokens in run.routed.items():
            setattr(module, ROUTED, tokens.tolist())
    if progress and run.routed:
        tqdm.write(summary_of(routed_tokens(model)), file=sys.stderr)
    return model


def _checked(config: GPTQConfig | NVFP4WeightOnlyConfig | None) -> GPTQConfig:
    if config is None:
        return GPTQConfig()
    return config if isinstance(config, GPTQConfig) else GPTQConfig(base_config=config)


def _chain(
    model: nn.Module, targets: Sequence[WeightRef], layers: Sequence[nn.Module] | None
) -> list[tuple[str, nn.Module]]:
    if layers is None:
        return layers_of(model, [target.module for target in targets])
    names = {module: name for name, module in model.named_modules()}
    if len(set(layers)) < len(layers):
        raise ValueError("one of the layers is given twice: give layers=[] to treat the model as one layer")
    if foreign := [layer for layer in layers if layer not in names]:
        raise ValueError(f"layers must be modules of the model, and {type(foreign[0]).__name__} is not one of them")
    return [(names[layer], layer) for layer in layers]


def _joined(model: nn.Module, targets: Sequence[WeightRef]) -> dict[WeightRef, list[WeightRef]]:
    """Return the weights with which each linear that servers join shares a per-tensor scale, including itself."""
    linears = {target.module: target for target in targets if target.experts == 1}
    names = {target.name for target in linears.values()}
    groups = PlannedFilter(model, plan_matrices(matrices_of(model), selected=names.__contains__)).groups
    return {linears[module]: [linears[each] for each in group] for module, group in groups.items()}


@dataclasses.dataclass
class _Run:
    """The state of one call of gptq."""

    config: GPTQConfig
    joined: Mapping[WeightRef, Sequence[WeightRef]]
    finished: Finished | None
    tick: Callable[[], object]
    routed: dict[nn.Module, Tensor] = dataclasses.field(default_factory=dict)
    """The tokens that the router sent to each expert, by experts' module."""

    def quantize_layers(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        targets: Sequence[WeightRef],
        batches: Sequence[Any],
    ) -> list[WeightRef]:
        """Quantize the layers in sequence. Return the weights outside of them."""
        hidden, calls = record(model, layers, batches)
        streams = Streams(hidden, list(hidden) if self.config.dense_target_weight else None)
        left = list(targets)
        for i, (name, layer) in enumerate(layers):
            modules = set(layer.modules())
            own = [target for target in left if target.module in modules]
            self._layer(name, layer, own, [batch[i] for batch in calls], streams)
            left = [target for target in left if target not in own]
        return left

    def quantize_rest(self, model: nn.Module, targets: Sequence[WeightRef], batches: Sequence[Any]) -> None:
        """Quantize weights outside of layers, in one pass over the model."""
        if not targets or self._load(REST, targets):
            return
        collected = self._collected(targets)
        for batch in batches:
            with Watch(targets) as watch:
                call_model(model, batch)
            collected.add(watch)
        self._quantize(collected)
        self._save(REST, targets)

    def _layer(
        self, name: str, layer: nn.Module, targets: list[WeightRef], calls: Sequence[Call], streams: Streams
    ) -> None:
        dense = streams.advance_dense(layer, calls, targets)
        fed: Sequence[Watch | None] = dense or [None] * len(calls)
        if not self._load(name, targets):
            for group in self._groups(layer, calls, targets, streams, dense):
                collected = self._collected(group)
                for call, states, z in zip(calls, streams.quantized, fed, strict=True):
                    with Watch(group) as watch:
                        call.run(layer, states)
                    collected.add(watch, z, rows=states.shape[:-1].numel())
                self._quantize(collected)
            self._save(name, targets)
        streams.advance(layer, calls)

    def _collected(self, targets: Sequence[WeightRef]) -> Collected:
        return Collected(targets, self.config.base_config.activation, self.config.dense_target_weight)

    def _groups(
        self,
        layer: nn.Module,
        calls: Sequence[Call],
        targets: Sequence[WeightRef],
        streams: Streams,
        dense: list[Watch] | None,
    ) -> list[list[WeightRef]]:
        """Return the weights per pass over the batches: those that share an input or a scale, or all of the layer."""
        if not self.config.sequential_within_layer:
            return [list(targets)] if targets else []
        groups: list[list[WeightRef]] = []
        left = list(targets)
        for i, (call, states) in enumerate(zip(calls, streams.quantized, strict=True)):
            if not left:
                break
            if dense is not None:
                watch = dense[i]
            else:
                with Watch(left) as watch:
                    call.run(layer, states)
            for group in watch.groups():
                reached = [other for target, _ in group for other in self.joined.get(target, [target])]
                if new := [target for target in dict.fromkeys(reached) if target in left]:
                    groups.append(new)
                    left = [target for target in left if target not in new]
        return [*groups, left] if left else groups

    def _quantize(self, collected: Collected) -> None:
        made: dict[WeightRef, dict[int, NVFP4Tensor]] = {}
        shared: dict[WeightRef, Tensor] = {}
        for each in collected.statistics():
            with torch.autocast(each.hessian.device.type, enabled=False):  # autocast would round the products
                for (target, expert), weight in zip(each.fed, self._rounded(each, collected, shared), strict=True):
                    made.setdefault(target, {})[expert] = weight
        for target, rounded in made.items():
            target.put([rounded[expert] for expert in range(target.experts)])
            self.tick()
        for module, tokens in collected.routed.items():
            self.routed.setdefault(module, tokens)  # a layer may run several times

    def _rounded(
        self, each: Statistics, collected: Collected, shared: dict[WeightRef, Tensor]
    ) -> Iterator[NVFP4Tensor]:
        """Yield the rounded weights of the statistics. Experts, which may be large, are rounded one at a time.

        shared: the amax of each linear that servers join with others. Those of the group are added here.
        """
        factor = self._factor(each)
        for fed in each.fed:
            target = fed[0]
            if target in self.joined and target not in shared and not self.config.weight.row_scaled:
                shared |= self._joined_amax(target, each, factor, collected)
            weight = self._aimed_at(each, fed, factor)
            amax = shared[target].to(weight.device) if target in shared else self._amax(weight)
            rounded = round_weight(weight, factor, self.config.weight, amax)
            yield rounded._replace(orig_dtype=target.dense.dtype, **self.config.fields)

    def _joined_amax(
        self, target: WeightRef, each: Statistics, factor: Factor, collected: Collected
    ) -> dict[WeightRef, Tensor]:
        """Return the largest amax of the linears that servers join with this one, by linear. ``each`` is of its input,
        which the others may not have."""
        every = {}
        for other in self.joined[target]:
            if own := collected.of.get((other, 0)):
                weight = self._aimed_at(own, (other, 0), factor if own is each else self._factor(own))
                every[other] = self._amax(weight).to(each.hessian.device)
        return dict.fromkeys(every, torch.stack([*every.values()]).amax())

    def _factor(self, each: Statistics) -> Factor:
        try:
            return Factor.of(each.hessian, self.config.damping, act_order=self.config.act_order)
        except ValueError as error:
            names = ", ".join(dict.fromkeys(target.name for target, _ in each.fed))
            raise ValueError(f"{names}: {error}") from None

    def _amax(self, weight: Tensor) -> Tensor:
        row_scaled = self.config.weight.row_scaled
        return reference.row_amax(weight) if row_scaled else torch.ops.nvfp4.amax(weight)

    def _aimed_at(self, each: Statistics, fed: Fed, factor: Factor) -> Tensor:
        """Return the float32 weight (N, K) to round: the dense one, or its best fit to the actual inputs."""
        target, expert = fed
        weight = target.matrix(expert).float()
        if not weight.isfinite().all():
            raise ValueError(f"{target.name} has NaN or Inf: replace these values, or exclude it with filter_fn")
        return weight if each.cross is None else moved_to_inputs(weight, each.cross, each.hessian, factor)

    def _load(self, name: str, targets: Sequence[WeightRef]) -> bool:
        weights = None if self.finished is None else self.finished.load(name, targets)
        if weights is None:
            return False
        for target in targets:
            target.set(weights[target.name])
            self.tick()
        return True

    def _save(self, name: str, targets: Sequence[WeightRef]) -> None:
        if self.finished is not None:
            self.finished.save(name, {target.name: getattr(target.module, target.attribute).data for target in targets})
