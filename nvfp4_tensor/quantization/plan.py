"""Plan one call of torchao's quantize_: check all modules before the first one changes, and find tied weights.

torchao passes a handler one module at a time, without the model. Checking all modules and finding tied weights needs
the model and the filter, so they are read from the frame of ``quantize_``. If a handler is called without
``quantize_``, its module is treated as the model.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

from nvfp4_tensor.quantization.callers import warn_of_adapters, warn_of_merge

Filter = Callable[[nn.Module, str], bool]
Modules: TypeAlias = "weakref.WeakSet[nn.Module]"


@dataclasses.dataclass
class Plan:
    """One call of quantize_, from its first module to its last.

    Attributes:
        config: the config of the call.
        left: the number of calls of the handler still expected; a module with two paths is counted twice.
        chosen: all modules of the call.
        tied: all modules that share a module's weight, including itself. Modules with their own weight are absent.
        dense: modules that stay dense because something that is not quantized shares their weight.
        groups: the modules with which a module shares its per-tensor scale, including itself, where a plan of the
            whole model has them (whole_model.py).
        done: modules that are quantized. Modules that share a weight are quantized together.
        amax: the amax of each group, by module, from before its first module changed.
    """

    config: AOBaseConfig
    left: int
    chosen: Modules
    tied: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]]
    dense: Modules
    groups: Mapping[nn.Module, tuple[nn.Module, ...]]
    done: Modules = dataclasses.field(default_factory=weakref.WeakSet)
    amax: weakref.WeakKeyDictionary[nn.Module, Tensor] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)


_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan_of(
    module: nn.Module,
    config: AOBaseConfig,
    check: Callable[[nn.Module], bool],
    before: Callable[[nn.Module, list[nn.Module] | None], None] | None = None,
) -> Plan:
    """Return the plan of the current call of quantize_, which is created for the first module of the call.

    ``check`` returns whether a module will be quantized, or raises an error; no module has changed at that point.
    ``before`` is called once, after all checks, with the model and the chosen modules (None if only this one is known).
    """
    model, call_config, filter_fn = current_call(module, config)
    plan = _plans.get(model)
    if plan is None or plan.config is not call_config or module not in plan.chosen:
        is_first = plan is None or plan.config is not call_config
        chosen = [module] if filter_fn is None else list(selected(model, filter_fn))
        to_quantize = [each for each in chosen if check(each)]
        groups = getattr(filter_fn, "groups", {})
        plan = Plan(call_config, len(chosen), weakref.WeakSet(chosen), *_ties(model, to_quantize), groups)
        if filter_fn is not None:
            _warn_of_dense_attention(model, filter_fn)
            warn_of_adapters(model, to_quantize)
        warn_of_merge()
        if is_first and before is not None:
            before(model, None if filter_fn is None else chosen)
        _plans[model] = plan  # not if ``before`` refused the call, so that another one asks it again
    plan.left -= 1
    if not plan.left:
        del _plans[model]
    return plan


def current_call(module: nn.Module, config: AOBaseConfig) -> tuple[nn.Module, AOBaseConfig, Filter | None]:
    """Return (model, config, filter_fn) of the current quantize_ call; no filter if only this module has the config."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not quantize_.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    arguments: dict[str, Any] = {} if frame is None else frame.f_locals
    if not isinstance(arguments.get("model"), nn.Module):
        return module, config, None
    if arguments.get("config") is not config:  # one of several configs, chosen by module names
        return arguments["model"], config, None
    return arguments["model"], config, arguments["filter_fn"]


def selected(module: nn.Module, filter_fn: Filter, name: str = "") -> Iterator[nn.Module]:
    """Yield the modules that quantize_ passes to a handler, in order. It does not descend into selected modules."""
    if filter_fn(module, name):
        yield module
        return
    for child_name, child in module.named_children():
        yield from selected(child, filter_fn, f"{name}.{child_name}" if name else child_name)


def _warn_of_dense_attention(model: nn.Module, filter_fn: Filter) -> None:
    """Warn of nn.MultiheadAttention that stays dense, if the filter would select an nn.Linear in place of out_proj.

    Its forward passes the weights to one function and calls no linear; torchao's default filter excludes out_proj.
    """
    found = {
        name: module.out_proj for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    dense: list[str] = []
    for name, last in found.items():
        path, plain = f"{name}.out_proj".lstrip("."), nn.Linear(last.in_features, last.out_features, device="meta")
        if type(last.weight.data) is Tensor and filter_fn(plain, path) and not filter_fn(last, path):
            dense.append(name or type(model).__name__)
    if dense:
        warnings.warn(
            f"left dense, because nn.MultiheadAttention calls no nn.Linear: all weights of {', '.join(dense)}. To "
            "quantize them, write attention with one nn.Linear per projection; a filter_fn that excludes their names "
            "silences this warning",
            stacklevel=2,
        )


def _ties(
    model: nn.Module, linears: list[nn.Module]
) -> tuple[weakref.WeakKeyDictionary[nn.Module, list[nn.Module]], Modules]:
    """Return (Plan.tied, Plan.dense), and warn of the latter."""
    holders: dict[int, list[tuple[str, nn.Module, str]]] = {id(linear.weight): [] for linear in linears}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in holders:
                holders[id(parameter)].append((path, module, name))
    quantized: Modules = weakref.WeakSet(linears)
    tied: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]] = weakref.WeakKeyDictionary()
    dense: Modules = weakref.WeakSet()
    left: list[str] = []
    for shared in holders.values():
        modules = [module for _, module, _ in shared]
        if len(shared) < 2:
            continue
        if all(name == "weight" and module in quantized for _, module, name in shared):
            tied.update(dict.fromkeys(modules, modules))
        else:
            dense.update(module for module in modules if module in quantized)
            left.append(" = ".join(f"{path}.{name}".lstrip(".") for path, _, name in shared))
    if left:
        warnings.warn(
            f"left dense, because something that is not quantized shares these weights: {', '.join(left)}. To quantize "
            "only the linear, give it a weight of its own first: linear.weight = "
            "nn.Parameter(linear.weight.detach().clone())",
            stacklevel=2,
        )
    return tied, dense
