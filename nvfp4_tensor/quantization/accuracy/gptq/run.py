"""gptq(model, batches, config): a whole model, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter, Place, Watch, places_of
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

REST = "rest"
"""The file of what lies outside of layers."""


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
    """Quantize a model in place by GPTQ (arXiv:2210.17323), one layer after the other.

    Beside the model, memory holds the hidden states of all batches (twice with ``to_dense``), what is summed up of one
    layer, and with ``to_dense`` the dense inputs of one layer. The dense weights are kept until all is done: after any
    exception, an interrupt too, the model is as it was.

    Args:
        model: linears, and experts' parameters (E, N, K), are replaced in place; it runs in eval mode meanwhile.
        batches: what the model is called with: a tensor, a tuple of arguments or a mapping of keyword arguments each. A
            few thousand tokens at least, of the kind that the model will see.
        config: a :class:`GPTQConfig`; an NVFP4WeightOnlyConfig or NVFP4Config stands for one with that base_config.
        filter_fn: which modules, by (module, name): linears, and modules with experts' parameters. All by default. A
            weight that something else shares stays dense, with a warning.
        layers: the layers that follow one another; by default those of the longest nn.ModuleList that hold most of
            what is quantized. ``[]``: the model as a whole, whose inputs are all taken before its first weight changes.
        folder: where finished layers are kept, so that a run that was interrupted goes on behind them.
        progress: show a progress bar over the weights.

    Returns:
        The model.

    Raises:
        TypeError: config or a selected module is of another kind.
        ValueError: no batches; layers that are no chain; inputs that are not finite; a folder of another run.
        RuntimeError: no batch reached a weight.

    Example::

        batches = [tokenizer(text, return_tensors="pt") for text in texts]
        gptq(model, batches, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head")
    """
    config = _checked(config)
    batches = list(batches)
    if not batches:
        raise ValueError("GPTQ learns from what weights are fed: give at least one batch")
    places = places_of(model, filter_fn)
    chain = _chain(model, places, layers)
    finished = None if folder is None else Finished(folder, config, model, places, batches)
    bar = tqdm(total=len(places), desc="GPTQ", unit="weight", disable=not progress)
    with torch.no_grad(), in_eval_mode(model), _all_or_nothing(places), bar:
        run = _Run(config, finished, bar.update)
        rest = run.chain(model, chain, places, batches) if chain else places
        run.whole(model, rest, batches)
    return model


def _checked(config: GPTQConfig | NVFP4WeightOnlyConfig | None) -> GPTQConfig:
    if config is None:
        return GPTQConfig()
    return config if isinstance(config, GPTQConfig) else GPTQConfig(base_config=config)


def _chain(
    model: nn.Module, places: Sequence[Place], layers: Sequence[nn.Module] | None
) -> list[tuple[str, nn.Module]]:
    if layers is None:
        return layers_of(model, [place.module for place in places])
    names = {module: name for name, module in model.named_modules()}
    if len(set(layers)) < len(layers):
        raise ValueError("one of the layers is given twice: give layers=[] to take the model as a whole")
    if strangers := [layer for layer in layers if layer not in names]:
        raise ValueError(f"layers are modules of the model, and {type(strangers[0]).__name__} is none of it")
    return [(names[layer], layer) for layer in layers]


@contextmanager
def _all_or_nothing(places: Sequence[Place]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for place in places:
            place.restore()
        raise


@dataclasses.dataclass
class _Run:
    """What one call of gptq goes by."""

    config: GPTQConfig
    finished: Finished | None
    tick: Callable[[], object]

    def chain(
        self,
        model: nn.Module,
        layers: Sequence[tuple[str, nn.Module]],
        places: Sequence[Place],
        batches: Sequence[Any],
    ) -> list[Place]:
        """The layers in turn; the places outside of them are left."""
        hidden, calls = record(model, layers, batches)
        streams = Streams(hidden, list(hidden) if self.config.to_dense else None)
        left = list(places)
        for i, (name, layer) in enumerate(layers):
            modules = set(layer.modules())
            own = [place for place in left if place.module in modules]
            self._layer(name, layer, own, [batch[i] for batch in calls], streams)
            left = [place for place in left if place not in own]
        return left

    def whole(self, model: nn.Module, places: Sequence[Place], batches: Sequence[Any]) -> None:
        """Places outside of layers, in one pass over the model."""
        if not places or self._load(REST, places):
            return
        collected = self._collected(places)
        for batch in batches:
            with Watch(places) as watch:
                call_model(model, batch)
            collected.add(watch)
        self._quantize(collected)
        self._save(REST, places)

    def _layer(self, name: str, layer: nn.Module, places: list[Place], calls: Sequence[Call], streams: Streams) -> None:
        dense = streams.advance_dense(layer, calls, places)
        fed: Sequence[Watch | None] = dense or [None] * len(calls)
        if not self._load(name, places):
            for group in self._groups(layer, calls, places, streams, dense):
                collected = self._collected(group)
                for call, states, z in zip(calls, streams.met, fed, strict=True):
                    with Watch(group) as watch:
                        call.run(layer, states)
                    collected.add(watch, z, rows=states.shape[:-1].numel())
                self._quantize(collected)
            self._save(name, places)
        streams.advance(layer, calls)

    def _collected(self, places: Sequence[Place]) -> Collected:
        return Collected(places, self.config.base_config.activation, self.config.to_dense)

    def _groups(
        self,
        layer: nn.Module,
        calls: Sequence[Call],
        places: Sequence[Place],
        streams: Streams,
        dense: list[Watch] | None,
    ) -> list[list[Place]]:
        """What is summed up in one pass over the batches: what shares an input, or the whole layer."""
        if not self.config.one_by_one:
            return [list(places)] if places else []
        groups: list[list[Place]] = []
        left = list(places)
        for i, (call, states) in enumerate(zip(calls, streams.met, strict=True)):
            if not left:
                break
            if dense is not None:
                watch = dense[i]
            else:
                with Watch(left) as watch:
                    call.run(layer, states)
            groups += [new for group in watch.groups() if (new := [place for place in group if place in left])]
            left = [place for place in left if not any(place in group for group in groups)]
        return [*groups, left] if left else groups

    def _quantize(self, collected: Collected) -> None:
        made: dict[Place, list[NVFP4Tensor]] = {}
        for each in collected.statistics():
            with torch.autocast(each.hessian.device.type, enabled=False):  # the model's own, which would round products
                weights = self._rounded(each)
            for (place, _), weight in zip(each.fed, weights, strict=True):
                made.setdefault(place, []).append(weight)
        for place, rounded in made.items():
            place.put(_joined(rounded) if place.dense.dim() == 3 else rounded[0])
            self.tick()

    def _rounded(self, each: Statistics) -> list[NVFP4Tensor]:
        config = self.config
        names = ", ".join(place.name for place, _ in each.fed)
        try:
            factor = Factor.of(each.hessian, config.damping, by_activation=config.by_activation)
        except ValueError as error:
            raise ValueError(f"{names}: {error}") from None
        weights = [place.matrix(expert).float() for place, expert in each.fed]
        if bad := [place.name for (place, _), w in zip(each.fed, weights, strict=True) if not w.isfinite().all()]:
            raise ValueError(f"{', '.join(bad)} holds NaN or Inf, whose error nothing makes up for: mend it first")
        if each.cross is not None:
            weights = [moved_to_inputs(weight, each.cross, each.hessian, factor) for weight in weights]
        amax: Sequence[Tensor] = [
            reference.row_amax(weight) if config.weight.row_scaled else torch.ops.nvfp4.amax(weight)
            for weight in weights
        ]
        if config.share_scales:
            amax = torch.stack(tuple(amax)).amax().expand(len(weights)).unbind()
        rounded = [round_weight(w, factor, config.weight, own) for w, own in zip(weights, amax, strict=True)]
        fields = {"orig_dtype": each.fed[0][0].dense.dtype, **config.fields}
        return [weight._replace(**fields) for weight in rounded]

    def _load(self, name: str, places: Sequence[Place]) -> bool:
        weights = None if self.finished is None else self.finished.load(name, places)
        if weights is None:
            return False
        for place in places:
            place.put(weights[place.name])
            self.tick()
        return True

    def _save(self, name: str, places: Sequence[Place]) -> None:
        if self.finished is not None:
            self.finished.save(name, {place.name: getattr(place.module, place.attribute).data for place in places})


def _joined(experts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """Experts (E, N, K), each with its own per-tensor scale."""
    stacked = torch.stack(tuple(experts))
    assert isinstance(stacked, NVFP4Tensor)
    scales = torch.stack([expert.per_tensor_scale for expert in experts]).reshape(len(experts), -1)
    return stacked._replace(per_tensor_scale=scales)
