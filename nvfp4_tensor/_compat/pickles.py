"""The names that files hold: public ones in what is written now, those of earlier layouts in what is still read.

A pickle names a class by its module, so a module that moves breaks files. Everything that a file of ours can hold says
that its module is ``nvfp4_tensor``; :func:`pin` writes that down, and lets ``torch.load(weights_only=True)`` take it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

PACKAGE = "nvfp4_tensor"

_EARLIER = {
    "format": ("RoundingMode", "ScaleRounding", "FourOverSix", "ProductBackend"),
    "spec": ("QuantizeSpec",),
    "config": ("NVFP4Config", "NVFP4WeightOnlyConfig", "NVFP4Linear"),
    "observer": ("ObservedLinear",),
    "tensor": ("_rebuild",),
}
"""Modules of 0.1.0, and what files of that version name in them."""

T = TypeVar("T", bound="type | Callable")


def pin(public: T, *, loadable: bool = True) -> T:
    """Give a class or function the package as its module; ``loadable`` by torch.load(weights_only=True) too."""
    public.__module__ = PACKAGE
    if loadable:
        names = [PACKAGE, *(f"{PACKAGE}.{module}" for module, held in _EARLIER.items() if public.__name__ in held)]
        torch.serialization.add_safe_globals([(public, f"{name}.{public.__name__}") for name in names])
    return public


def keep_earlier_names() -> None:
    """Let pickles of 0.1.0 find their modules: each alias asks the package for the names that it had."""
    for module, names in _EARLIER.items():
        if f"{PACKAGE}.{module}" not in sys.modules and module != "tensor":
            sys.modules[f"{PACKAGE}.{module}"] = _Alias(module, names)


class _Alias(types.ModuleType):
    def __init__(self, module: str, names: tuple[str, ...]) -> None:
        super().__init__(f"{PACKAGE}.{module}", "Names of an earlier layout, kept for the files that hold them.")
        self._names = names

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: see {PACKAGE}")
        return getattr(importlib.import_module(PACKAGE), name)


@pin
def _rebuild(fields: dict, requires_grad: bool, is_parameter: bool, aliasing: int = 0) -> Any:
    """What a pickled NVFP4Tensor calls. A part or a copy of another stays one: torch.load shares its storage again."""
    tensor = importlib.import_module(PACKAGE).NVFP4Tensor
    return tensor._from_pickle(fields, requires_grad, is_parameter, aliasing)
