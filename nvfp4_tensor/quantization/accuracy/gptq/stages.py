"""A model as a chain of layers that can be run one at a time, each on what the one before it gave.

What a layer gets beside the hidden states (masks, positions) does not depend on weights, so one pass over the model in
which layers hand on what they are given records it all; hidden states are then the only thing that is kept for each
batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass
class Call:
    """What a module is called with; the hidden states apart, which differ from stream to stream."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    hidden: str | None
    """The keyword of the hidden states; None where they are the first argument."""

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """The hidden states that ``module`` makes of these, which it may write to: they are copied."""
        hidden = hidden.clone()
        if self.hidden is None:
            return _hidden_of(module(hidden, *self.arguments, **self.keywords))
        return _hidden_of(module(*self.arguments, **{**self.keywords, self.hidden: hidden}))


class _Recorded(Exception):
    """Raised behind the last layer: nothing after it is of interest."""


def layers_of(model: nn.Module, chosen: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The names and modules of the model's layers: of the longest nn.ModuleList whose items hold most of ``chosen``.

    Empty where there is none, or where one stands in it twice: such a model is taken as a whole.
    """
    wanted = set(chosen)
    best: list[tuple[str, nn.Module]] = []
    held = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len(set(module)) < len(module):
            continue
        inside = sum(each in wanted for each in module.modules())
        if inside > held:
            held, best = inside, [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
    return best if 2 * held >= len(wanted) else []


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode; afterwards each as it was."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was


@torch.no_grad()
def record(
    model: nn.Module, layers: Sequence[tuple[str, nn.Module]], batches: Iterable[Any]
) -> tuple[list[Tensor], list[list[Call]]]:
    """(hidden states before the first layer, the calls of all layers), both for each batch.

    Raises:
        ValueError: the layers do not form a chain, each fed what the one before it gives.
    """
    hidden: list[Tensor] = []
    calls: list[list[Call]] = []
    for batch in batches:
        recorder = _Recorder(layers)
        try:
            recorder.watch()
            call_model(model, batch)
        except _Recorded:
            pass
        finally:
            recorder.stop()
        recorder.check()
        assert recorder.first is not None
        hidden.append(recorder.first)
        calls.append(recorder.calls)
    return hidden, calls


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model called with a batch: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


class _Recorder:
    """Stands in for the layers' forward: each hands on the hidden states it is given, in the form of the first."""

    def __init__(self, layers: Sequence[tuple[str, nn.Module]]) -> None:
        self.layers = layers
        self.first: Tensor | None = None
        self.given: Tensor | None = None
        self.calls: list[Call] = []
        self.own: list[tuple[nn.Module, Any]] = []

    def watch(self) -> None:
        for i, (_, layer) in enumerate(self.layers):
            self.own.append((layer, layer.__dict__.get("forward")))  # of accelerate's hooks, for instance
            layer.forward = self._forward(i, layer.forward)  # type: ignore[method-assign]

    def stop(self) -> None:
        for layer, forward in self.own:
            del layer.forward
            if forward is not None:
                layer.forward = forward

    def check(self) -> None:
        if len(self.calls) != len(self.layers):
            raise ValueError(
                f"a batch reached {len(self.calls)} of the {len(self.layers)} layers from {self.layers[0][0]} on: "
                "give layers=[] to take the model as a whole"
            )

    def _forward(self, target: int, forward: Any) -> Any:
        def handed_on(*arguments: Any, **keywords: Any) -> Any:
            call, hidden = _split(arguments, keywords)
            if target != len(self.calls) or (target and hidden is not self.given):
                raise ValueError(
                    f"{self.layers[target][0]} is not fed what the layer before it gives, so layers cannot be run one "
                    "at a time: give layers=[] to take the model as a whole"
                )
            self.calls.append(call)
            if target == 0:
                self.first = hidden.clone()  # the layer may write to it
                self.form = forward(*arguments, **keywords)
            if target == len(self.layers) - 1:
                raise _Recorded
            self.given = hidden
            return hidden if isinstance(self.form, Tensor) else (hidden, *self.form[1:])

        return handed_on


def _split(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Call, Tensor]:
    arguments = tuple(_forgetful(value) for value in arguments)
    keywords = {name: False if name == "use_cache" else _forgetful(value) for name, value in keywords.items()}
    if arguments and isinstance(arguments[0], Tensor):
        return Call(arguments[1:], keywords, None), arguments[0]
    for name in ("hidden_states", *keywords):
        if isinstance(keywords.get(name), Tensor):
            hidden = keywords.pop(name)
            return Call(arguments, keywords, name), hidden
    raise ValueError("a layer is called with no tensor: give layers=[] to take the model as a whole")


def _forgetful(value: Any) -> Any:
    """None for a cache of transformers, by which a layer would remember one run in the next, whatever its name."""
    return None if hasattr(value, "get_seq_length") else value


def _hidden_of(output: Any) -> Tensor:
    hidden = output if isinstance(output, Tensor) else output[0]
    assert isinstance(hidden, Tensor)
    return hidden
