"""Filters that select which linears train in NVFP4, for ``quantize_``'s filter_fn. ``&`` combines filters."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable

from torch import nn

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.quantization.conv1d import is_linear


class Filter:
    """A function of (module, name), as quantize_ calls it, that selects linears. ``a & b`` selects what both select.

    names: those that :func:`keep_dense` was given, of which the model should have modules.
    """

    def __init__(self, selects: Callable[[nn.Module, str], bool], names: tuple[str, ...] = ()) -> None:
        self._selects, self._names = selects, names

    def __call__(self, module: nn.Module, name: str) -> bool:
        if not name:  # quantize_ asks about the whole model first
            self._warn_of_missing(module)
        return is_linear(module) and self._selects(module, name)

    def _warn_of_missing(self, model: nn.Module) -> None:
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self._names:
            if names and not any(_matches(name, pattern) for name in names):
                warn_user(
                    f"keep_dense({pattern!r}) keeps nothing dense: no module of the {type(model).__name__} has that "
                    "name"
                )

    def __and__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
        names = self._names + (other._names if isinstance(other, Filter) else ())
        return Filter(lambda module, name: self._selects(module, name) and other(module, name), names)

    __rand__ = __and__


def keep_dense(*which: str | Callable[[nn.Module, str], bool]) -> Filter:
    """Select all linears except these: names with ``*`` and ``?``, or functions of (module, name) that return True.

    A name stands for the module with that name and all modules inside it, at any depth: "lm_head", "layers.0",
    "*.router". A name that no module of the model has is warned of.

    Raises:
        TypeError: if an argument is neither a string nor a function.

    >>> quantize_(model, NVFP4TrainingConfig(), filter_fn=keep_dense("lm_head"))
    """
    for one in which:
        if not isinstance(one, str) and not callable(one):
            raise TypeError(f"keep_dense takes names and functions of (module, name), not {one!r}")

    def is_dense(module: nn.Module, name: str) -> bool:
        return any(_matches(name, one) if isinstance(one, str) else one(module, name) for one in which)

    names = tuple(one for one in which if isinstance(one, str))
    return Filter(lambda module, name: not is_dense(module, name), names)


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern matches the name of the module or of a parent, or the end of it that follows a dot."""
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def keep_last_blocks_dense(model: nn.Module, share: float) -> Filter:
    """Select all linears except those in the last ``ceil(share * blocks)`` blocks of a decoder.

    The blocks are the entries of the ModuleList whose linears have the most parameters.

    Raises:
        ValueError: if share is not from 0 to 1, or the model has no ModuleList with linears inside.

    >>> quantize_(model, NVFP4TrainingConfig(), filter_fn=keep_last_blocks_dense(model, 0.15) & keep_dense("lm_head"))
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is a fraction of the blocks, from 0 to 1, got {share!r}")
    sizes = {
        name: sum(linear.weight.numel() for linear in module.modules() if is_linear(linear))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    name = max(sizes, key=lambda name: sizes[name], default="")  # of equal ones, the outermost
    if not sizes.get(name):
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks with linears inside: use keep_dense with the names of "
            "linears instead"
        )
    blocks = len(model.get_submodule(name))  # type: ignore[arg-type]
    last = math.ceil(share * blocks - 1e-9)
    return keep_dense(*(f"{name}.{i}" if name else str(i) for i in range(blocks - last, blocks)))
