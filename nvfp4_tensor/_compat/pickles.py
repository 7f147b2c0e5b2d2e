"""Names in pickles: public names in new files, and module names of version 0.1.0 in old ones.

A pickle contains the module of a class, so moving a module would break files. :func:`pin` therefore sets the module of
everything that can be pickled to ``nvfp4_tensor``, and lets ``torch.load(weights_only=True)`` accept it.
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
"""Modules of 0.1.0, and the names in them that files of that version contain."""

T = TypeVar("T", bound="type | Callable")


def pin(public: T, *, loadable: bool = True) -> T:
    """Set the module of a class or function to the package; ``loadable`` allows torch.load(weights_only=True)."""
    public.__module__ = PACKAGE
    if loadable:
        earlier = (f"{PACKAGE}.{module}" for module, names in _EARLIER.items() if public.__name__ in names)
        torch.serialization.add_safe_globals(
            [(public, f"{module}.{public.__name__}") for module in (PACKAGE, *earlier)]
        )
    return public


def keep_earlier_names() -> None:
    """Create modules with the names of 0.1.0, so that its pickles load; they look up names in the package."""
    for module, names in _EARLIER.items():
        if f"{PACKAGE}.{module}" not in sys.modules and module != "tensor":
            sys.modules[f"{PACKAGE}.{module}"] = _Alias(module, names)


class _Alias(types.ModuleType):
    def __init__(self, module: str, names: tuple[str, ...]) -> None:
        super().__init__(f"{PACKAGE}.{module}", "Names of version 0.1.0, for pickles that contain them.")
        self._names = names

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name not in self._names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}: use {PACKAGE}")
        return getattr(importlib.import_module(PACKAGE), name)


@pin
def _rebuild(
    fields: dict, requires_grad: bool, is_parameter: bool, aliasing: int = 0, view: tuple | None = None
) -> Any:
    """Unpickle an NVFP4Tensor, or a view of one; torch.load restores shared storages.

    ``aliasing`` marks slices of earlier versions. A view has (size, stride, offset, transposed).
    """
    tensor = importlib.import_module(PACKAGE).NVFP4Tensor
    return tensor._from_pickle(fields, requires_grad, is_parameter, aliasing, view)
