"""Run a model as a chain of layers, one at a time, each on the output of the previous one.

The other arguments of a layer (masks, positions) do not depend on weights. One pass over the model, in which each layer
returns its input, therefore records the arguments of all layers. Afterwards, only hidden states are kept for each
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
    """The arguments of a module's call, except the hidden states.

    Attributes:
        hidden: the keyword of the hidden states; None if they are the first positional argument.
    """

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    hidden: str | None

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """Return the output hidden states of ``module``. The input is copied, because the module may write to it."""
        hidden = hidden.clone()
        if self.hidden is None:
            return _hidden_of(module(hidden, *self.arguments, **self.keywords))
        return _hidden_of(module(*self.arguments, **{**self.keywords, self.hidden: hidden}))


class _Recorded(Exception):
    """Raised at the last layer, to stop the model's forward."""


def layers_of(model: nn.Module, chosen: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the (name, module) of each layer: the items of the nn.ModuleList that contains most of ``chosen``.

    Return an empty list if no nn.ModuleList contains at least half of them. Lists with a repeated item are ignored.
    """
    wanted = set(chosen)
    best: list[tuple[str, nn.Module]] = []
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 2 or len(set(module)) < len(module):
            continue
        inside = sum(each in wanted for each in module.modules())
        if inside > most:
            most, best = inside, [(f"{name}.{i}", layer) for i, layer in enumerate(module)]
    return best if 2 * most >= len(wanted) else []


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode, and restore the mode of each afterwards."""
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
    """Return (hidden states before the first layer, calls of all layers), both as one item per batch.

    Raises:
        ValueError: the layers do not form a chain in which the input of each is the output of the previous one.
    """
    recorded = [_recorded(model, layers, batch) for batch in batches]
    return [hidden for hidden, _ in recorded], [calls for _, calls in recorded]


def check_batches(batches: object) -> None:
    """Raise a TypeError for one batch in place of several."""
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(f"batches must be an iterable of batches, not one {type(batches).__name__}: pass [batch]")


def list_of(batches: Iterable[Any], why: str) -> list[Any]:
    """Return the batches, at least one; raise a ValueError that begins with ``why`` if there is none."""
    check_batches(batches)
    if not (found := list(batches)):
        raise ValueError(f"{why}: give at least one batch")
    return found


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple of arguments or a mapping of keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def logits_of(output: Any, model: nn.Module, caller: str) -> Tensor:
    """Return the logits (..., classes) that a model's output is or has; raise a TypeError in the name of ``caller``."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.dim() == 0:
        raise TypeError(
            f"{caller} compares logits (..., classes) or an output with .logits, and {type(model).__name__} returned "
            f"{type(logits).__name__}: pass a module whose forward returns only logits"
        )
    return logits


def _recorded(model: nn.Module, layers: Sequence[tuple[str, nn.Module]], batch: Any) -> tuple[Tensor, list[Call]]:
    """Call the model with each layer's forward replaced: it returns its input, in the output format of the first."""
    calls: list[Call] = []
    first = latest = form = None

    def replaced(target: int, forward: Any) -> Any:
        def identity(*arguments: Any, **keywords: Any) -> Any:
            nonlocal first, latest, form
            call, hidden = _split(arguments, keywords)
            if target != len(calls) or (target and hidden is not latest):
                raise ValueError(
                    f"the input of {layers[target][0]} is not the output of the previous layer, so layers cannot be "
                    "run one at a time: give layers=[] to treat the model as one layer"
                )
            calls.append(call)
            if target == 0:
                first = hidden.clone()  # the layer may write to it
                form = forward(*arguments, **keywords)
            if target == len(layers) - 1:
                raise _Recorded
            latest = hidden
            return hidden if isinstance(form, Tensor) else (hidden, *form[1:])

        return identity

    own = [(layer, layer.__dict__.get("forward")) for _, layer in layers]  # set by accelerate's hooks, for instance
    try:
        for i, (layer, _) in enumerate(own):
            layer.forward = replaced(i, layer.forward)  # type: ignore[method-assign]
        call_model(model, batch)
    except _Recorded:
        pass
    finally:
        for layer, forward in own:
            del layer.forward
            if forward is not None:
                layer.forward = forward  # type: ignore[method-assign]
    if first is None or len(calls) != len(layers):
        raise ValueError(
            f"a batch reached {len(calls)} of the {len(layers)} layers from {layers[0][0]} on: "
            "give layers=[] to treat the model as one layer"
        )
    return first, calls


def _split(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Call, Tensor]:
    arguments = tuple(_without_cache(value) for value in arguments)
    keywords = {name: False if name == "use_cache" else _without_cache(value) for name, value in keywords.items()}
    if arguments and isinstance(arguments[0], Tensor):
        return Call(arguments[1:], keywords, None), arguments[0]
    for name in ("hidden_states", *keywords):
        if isinstance(keywords.get(name), Tensor):
            hidden = keywords.pop(name)
            return Call(arguments, keywords, name), hidden
    raise ValueError("a layer is called without a tensor: give layers=[] to treat the model as one layer")


def _without_cache(value: Any) -> Any:
    """Return None for a transformers cache, which would carry state from one run to the next."""
    return None if hasattr(value, "get_seq_length") else value


def _hidden_of(output: Any) -> Tensor:
    hidden = output if isinstance(output, Tensor) else output[0]
    assert isinstance(hidden, Tensor)
    return hidden
