"""The name of the cache in a model's forward: ``cache`` in transformers 5.24 and later, before ``past_key_values``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

NAMES = ("cache", "past_key_values")
"""Both names. Models of transformers 5.24 and later take either."""
CACHE = NAMES["cache" not in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}]
"""The name that the installed transformers uses, in arguments of ``generate`` and in outputs."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, under either name, or None."""
    first, second = (arguments.get(name) for name in NAMES)
    return second if first is None else first


def cache_argument(model: Any) -> str:
    """Return the name of the cache in the model's forward, which may be remote code with the older name."""
    return _name_in(type(model).forward)


@functools.lru_cache
def _name_in(forward: Callable[..., Any]) -> str:
    return NAMES["cache" not in inspect.signature(forward).parameters]
