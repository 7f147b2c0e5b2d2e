"""The present call of torchao's quantize_, which passes a handler one module at a time, without the model.

To check all modules before the first one changes, to find tied weights and to reach experts, a handler needs the model
and the filter, which are read from the frame of ``quantize_``. ``quantize_model`` and ``calibrate`` need no frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from nvfp4_tensor._compat.frames import caller_frame_locals, warn_user

Filter = Callable[[nn.Module, str], bool]
T = TypeVar("T")
_STARTED = "nvfp4 modules, and what they started"


def once_per_call(module: nn.Module, config: AOBaseConfig, start: Callable[[nn.Module, list[nn.Module], bool], T]) -> T:
    """Return what ``start`` returned at the first module of the current call of quantize_, before any has changed.

    start: called with the model, the modules of the call in order, and whether these are all that the call has. If not,
        there is only one: the handler was called alone (the module is the model), or by one of several configs.
    """
    code = quantize_.__code__
    call: Any = caller_frame_locals(code.co_name, code.co_filename, depth=None) or {}
    model: nn.Module = call.get("model", module)
    filter_fn: Filter | None = call.get("filter_fn")
    if filter_fn is None or call["config"] is not config:  # but one of several configs, chosen by module names
        return start(model, [module], False)
    if _STARTED not in call or module not in call[_STARTED][0]:
        chosen = list(dict.fromkeys((*selected(model, filter_fn), module)))
        warn_of_dense_attention(model, filter_fn)
        call[_STARTED] = set(chosen), start(model, chosen, True)  # in the frame, which ends with the call
    return call[_STARTED][1]  # type: ignore[no-any-return]


def selected(module: nn.Module, filter_fn: Filter, name: str = "") -> Iterator[nn.Module]:
    """Yield the modules that quantize_ passes to a handler, in order. It does not descend into selected modules."""
    if filter_fn(module, name):
        yield module
        return
    for child_name, child in module.named_children():
        yield from selected(child, filter_fn, f"{name}.{child_name}" if name else child_name)


def warn_of_dense_attention(model: nn.Module, filter_fn: Filter) -> None:
    """Warn of nn.MultiheadAttention that stays dense, if the filter would select an nn.Linear in place of out_proj.

    Its forward passes the weights to one function and calls no linear; torchao's default filter excludes out_proj.
    """
    dense: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        last, path = module.out_proj, f"{name}.out_proj".lstrip(".")
        plain = nn.Linear(last.in_features, last.out_features, device="meta")
        if type(last.weight.data) is Tensor and filter_fn(plain, path) and not filter_fn(last, path):
            dense.append(name or type(model).__name__)
    if dense:
        warn_user(
            f"left dense, because nn.MultiheadAttention calls no nn.Linear: all weights of {', '.join(dense)}. To "
            "quantize them, write attention with one nn.Linear per projection; a filter_fn that excludes their names "
            "silences this warning"
        )
