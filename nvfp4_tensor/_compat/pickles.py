"""Names in pickles.

A pickle contains the module of a class, so moving a module would break files. :func:`pin` therefore sets the module of
everything that can be pickled to ``nvfp4_tensor``, and lets ``torch.load(weights_only=True)`` accept it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

PACKAGE = "nvfp4_tensor"

T = TypeVar("T", bound="type | Callable")


def pin(public: T, *, loadable: bool = True) -> T:
    """Set the module of a class or function to the package; ``loadable`` allows torch.load(weights_only=True)."""
    public.__module__ = PACKAGE
    if loadable:
        torch.serialization.add_safe_globals([(public, f"{PACKAGE}.{public.__name__}")])
    return public


@pin
def _rebuild(fields: dict, requires_grad: bool, is_parameter: bool, view: tuple | None = None) -> Any:
    """Unpickle an NVFP4Tensor, or a view of one, (size, stride, offset, transposed); torch.load restores storages."""
    tensor = importlib.import_module(PACKAGE).NVFP4Tensor
    return tensor._from_pickle(fields, requires_grad, is_parameter, view)


@pin
def _rebuild_fp8(fields: tuple, is_parameter: bool) -> Any:
    """Unpickle an FP8Tensor, whose first field is the codes in bytes."""
    codes, *others = fields
    tensor = importlib.import_module(PACKAGE).FP8Tensor(codes.view(torch.float8_e4m3fn), *others)
    return torch.nn.Parameter(tensor, False) if is_parameter else tensor
