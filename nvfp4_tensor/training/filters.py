"""Which linears train in NVFP4: what ``quantize_`` takes as filter_fn. Filters combine by ``&``."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable

from torch import nn


class Filter:
    """Selects linears: a function of (module, name), as quantize_ calls it. ``a & b`` selects what both do."""

    def __init__(self, selects: Callable[[nn.Module, str], bool]) -> None:
        self._selects = selects

    def __call__(self, module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and self._selects(module, name)

    def __and__(self, other: Callable[[nn.Module, str], bool]) -> Filter:
        return Filter(lambda module, name: self(module, name) and other(module, name))

    __rand__ = __and__


def keep_dense(*which: str | Callable[[nn.Module, str], bool]) -> Filter:
    """All linears but these: names with ``*`` and ``?``, or functions of (module, name) that say True of one.

    A name stands for the module of that name and all inside it, at any depth: "lm_head", "layers.0", "*.router".

    Raises:
        TypeError: neither a string nor a function.

    >>> quantize_(model, NVFP4TrainingConfig(), filter_fn=keep_dense("lm_head"))
    """
    for one in which:
        if not isinstance(one, str) and not callable(one):
            raise TypeError(f"keep_dense takes names and functions of (module, name), not {one!r}")

    def stays(module: nn.Module, name: str) -> bool:
        return any(_matches(name, one) if isinstance(one, str) else one(module, name) for one in which)

    return Filter(lambda module, name: not stays(module, name))


def _matches(name: str, pattern: str) -> bool:
    """Whether the pattern names the module or one that holds it, whole or behind a dot."""
    parts = name.split(".")
    holders = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatch.fnmatchcase(h, pattern) or fnmatch.fnmatchcase(h, f"*.{pattern}") for h in holders)


def keep_last_blocks_dense(model: nn.Module, share: float) -> Filter:
    """All linears but those of the last blocks of a decoder, ``ceil(share * blocks)`` of them.

    The blocks are the entries of the model's largest ModuleList.

    Raises:
        ValueError: share is not from 0 to 1, or the model has no ModuleList with linears inside.

    >>> quantize_(model, NVFP4TrainingConfig(), filter_fn=keep_last_blocks_dense(model, 0.15) & keep_dense("lm_head"))
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is a part of the blocks, from 0 to 1, got {share!r}")
    name, blocks = find_blocks(model)
    last = math.ceil(share * len(blocks) - 1e-9)
    return keep_dense(*(f"{name}.{i}" if name else str(i) for i in range(len(blocks) - last, len(blocks))))


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The ModuleList that holds most parameters of linears, and its name; of equals, the outermost."""
    sizes = {
        name: sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is None or sizes[largest] == 0:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList of blocks with linears inside: name those that stay dense with "
            "keep_dense instead"
        )
    blocks = model.get_submodule(largest)
    assert isinstance(blocks, nn.ModuleList)
    return largest, blocks
