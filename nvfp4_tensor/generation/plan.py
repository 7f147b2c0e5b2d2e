"""The arguments of the CPU's decoding op for a model, and a check that the model has not changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from nvfp4_tensor.generation.cpu_arguments import flatten
from nvfp4_tensor.generation.families import describe
from nvfp4_tensor.generation.model_state import ModelState, check_class, check_known, check_modules, unsupported_reason


class Plan:
    """What ``nvfp4::decode_step`` reads of a model, and the state of the model that it depends on.

    Attributes:
        description: the model.
        constants: the arguments of the op between x and the caches.

    Raises:
        ValueError: the op does not compute this model's forward. The message has the reason.
    """

    def __init__(self, inner: Any) -> None:
        check_model(inner)
        self.description = describe(inner)
        modules = dict(modules_of(inner))
        check_known(modules, type(inner).__module__)
        check_modules(modules, ())
        check_class(type(inner))
        self.constants = flatten(self.description).constants
        self._state = ModelState({"model": inner, **modules}, (inner,), inner.config)  # its children may be replaced

    def holds(self, config: Any) -> bool:
        """Return whether the model has not changed."""
        return self._state.holds(config)


def check_model(inner: Any) -> None:
    """Raise a ValueError for a configuration, or a state of the process or layers, that native steps do not support."""
    if reason := unsupported_reason(inner.config):
        raise ValueError(reason)
    layers = len(inner.layers)
    if inner.config.num_hidden_layers != layers:
        raise ValueError(
            f"config.num_hidden_layers is {inner.config.num_hidden_layers}, and the model has {layers} layers"
        )
    for i, layer in enumerate(inner.layers):
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"model.layers.{i} uses gradient checkpointing, which disables the cache: call model.eval() first"
            )


def modules_of(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each module whose forward the op replaces."""
    yield "model.layers", inner.layers
    for path, module in inner.layers.named_modules(remove_duplicate=False):
        if path:
            yield f"model.layers.{path}", module
    yield "model.norm", inner.norm
    yield "model.rotary_emb", inner.rotary_emb
