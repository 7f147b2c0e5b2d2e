"""The class of a module, where others call the forward that it had: accelerate's hooks, of every ``device_map``."""

from __future__ import annotations

from torch import nn


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Change the class of a module in place, for a hook of accelerate too, which keeps the forward that it replaced."""
    if _is_hooked(module):
        module._old_forward = kind.forward.__get__(module)
    module.__class__ = kind  # type: ignore[assignment]


def check_forward(module: nn.Module) -> None:
    """Raise a TypeError if a module has a forward of its own, which would be called in place of another class's."""
    if "forward" in vars(module) and not _is_hooked(module):
        raise TypeError(
            f"{module} has a forward of its own, which would go on multiplying as it does: `del module.forward` first, "
            "and set it again afterwards"
        )


def _is_hooked(module: nn.Module) -> bool:
    replaced = vars(module).get("_old_forward")
    is_own = getattr(replaced, "__self__", None) is module
    return is_own and getattr(replaced, "__func__", None) is type(module).forward
