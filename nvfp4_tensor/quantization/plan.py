"""What one call of torchao's quantize_ is about to do: checked before the first module changes, tied weights known.

torchao hands a config one module at a time and says nothing of the model, which a check of all modules needs, and a
weight that two of them share. Both stand in the frame of ``quantize_``, so they are read there. A module that comes
another way, from a caller of the handler itself, is taken for the whole model.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor, nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_

Filter = Callable[[nn.Module, str], bool]
Modules: TypeAlias = "weakref.WeakSet[nn.Module]"


@dataclasses.dataclass
class Plan:
    """One call of quantize_, from its first module to its last.

    Attributes:
        config: the call's.
        left: how many modules are still to come, one that stands at two places counted twice.
        chosen: all modules of the call.
        tied: for a module, all that share its weight, itself among them; not there where it shares none.
        dense: modules left dense, since what shares their weight is not to be quantized.
        done: modules quantized, each when the first of those that share its weight came.
    """

    config: AOBaseConfig
    left: int
    chosen: Modules
    tied: weakref.WeakKeyDictionary[nn.Module, list[nn.Module]]
    dense: Modules
    done: Modules = dataclasses.field(default_factory=weakref.WeakSet)


_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()


def plan_of(
    module: nn.Module,
    config: AOBaseConfig,
    check: Callable[[nn.Module], bool],
    before: Callable[[nn.Module], None] | None = None,
) -> Plan:
    """The plan of the call that hands over ``module``, made when its first one comes.

    ``check`` says whether a module will be quantized, or raises what is wrong with it: then nothing has changed yet.
    ``before`` is called once with the model, after all checks.
    """
    model, whole, filter_fn = _call(module, config)
    plan = _plans.get(model)
    if plan is None or plan.config is not whole or module not in plan.chosen:
        is_first = plan is None or plan.config is not whole
        chosen = [module] if filter_fn is None else list(_selected(model, filter_fn))
        to_quantize = [each for each in chosen if check(each)]
        plan = Plan(whole, len(chosen), weakref.WeakSet(chosen), *_ties(model, to_quantize))
        _plans[model] = plan
        if filter_fn is not None:
            _name_attention(model, filter_fn)
        if is_first and before is not None:
            before(model)
    plan.left -= 1
    if not plan.left:
        del _plans[model]
    return plan


def _call(module: nn.Module, config: AOBaseConfig) -> tuple[nn.Module, AOBaseConfig, Filter | None]:
    """(model, config, filter_fn) of the call under way; no filter where the config gets this module alone."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not quantize_.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    given: dict[str, Any] = {} if frame is None else frame.f_locals
    if not isinstance(given.get("model"), nn.Module):
        return module, config, None
    if given.get("config") is not config:  # it is one of several, by modules' names
        return given["model"], config, None
    return given["model"], config, given["filter_fn"]


def _selected(module: nn.Module, filter_fn: Filter, name: str = "") -> Iterator[nn.Module]:
    """What quantize_ hands over, in its order: below a module that the filter takes, it does not look."""
    if filter_fn(module, name):
        yield module
        return
    for child_name, child in module.named_children():
        yield from _selected(child, filter_fn, f"{name}.{child_name}" if name else child_name)


def _name_attention(model: nn.Module, filter_fn: Filter) -> None:
    """Warns of attention that stays dense, where the filter would take a plain linear in place of its last one.

    It hands its weights to one function, and calls no linear; torchao's own filter leaves that linear out.
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
            f"left dense, for nn.MultiheadAttention calls no nn.Linear: all weights of {', '.join(dense)}. To quantize "
            "them write attention with an nn.Linear for each projection; a filter_fn that leaves them out by name "
            "silences this",
            stacklevel=2,
        )


def _ties(
    model: nn.Module, linears: list[nn.Module]
) -> tuple[weakref.WeakKeyDictionary[nn.Module, list[nn.Module]], Modules]:
    """(Plan.tied, Plan.dense); warns of the latter."""
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
            f"left dense, for what shares these weights is not quantized: {', '.join(left)}. To quantize the linear "
            "alone, give it a weight of its own first: linear.weight = nn.Parameter(linear.weight.detach().clone())",
            stacklevel=2,
        )
    return tied, dense
