"""Whether a model is still what a plan was made from: modules, hooks, parameters and constants, compared per token."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from copy import copy
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nvfp4_tensor.quantization import NVFP4Linear

_CAPTURING = "install_output_capuring_hook"
"""Transformers leaves such hooks in a model after hidden states were requested. They have no effect by themselves."""
_EXPERTS = "_experts_implementation_internal"
_DTYPE = attrgetter("dtype")
CHANGING = ("dynamic", "longrope")
"""Types of rotary embeddings that depend on the length of the text."""
_NOT_CALLED = ("__init__", "extra_repr", "reset_parameters")
_NVFP4_FORWARD = NVFP4Linear.forward
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NOT_READ = frozenset({"forward", "generation_config", "warnings_issued"})
"""Attributes of models that no forward reads, some of which ``generate`` sets."""


class ModelState:
    """What the result of some modules depends on, in a few lists.

    The weights of a token drive a model's objects out of a processor's caches, so a comparison waits for memory: it
    touches each object once, in loops without bytecode, and of a module's own dict only what is not torch's.
    ``gc.get_referents`` lists the values of many dicts so.

    Parameters and buffers are compared by identity; dense ones also by what they show of which memory, and others by
    their parts, since Module.to() replaces the tensor inside a parameter, which stays the same object.

    Args:
        modules: the modules by name, whose forwards a step replaces. Rotary embeddings that change themselves
            ("dynamic", "longrope") are compared by their type only.
        hooked: the modules among them whose ``forward`` is ours.
        config: the config of the model. Those of modules, which may be others, are compared too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], hooked: Iterable[nn.Module], config: Any) -> None:
        every, ours = list(modules.values()), {id(each) for each in hooked}
        still = [each for each in every if not changes_itself(each)]
        whole = [each for each in still if not isinstance(each, nn.Linear | PreTrainedModel)]
        self._modules, self._types = every, list(map(type, every))
        functions = [(cls, name, each) for cls in set(self._types) for name, each in _functions_of(cls)]
        self._classes, self._names, self._functions = (list(each) for each in zip(*functions, strict=True))
        self._hooks = [h for each in every for h in (each._forward_hooks, each._forward_pre_hooks)]
        self._next_id = RemovableHandle.next_id
        self._hook_ids = list(chain.from_iterable(self._hooks))
        seen = set(map(id, whole))
        # A dict that lacks none of its values and has no more of them has no "forward" either.
        self._dicts = [vars(each) for each in whole]
        self._sizes = list(map(len, self._dicts))
        self._others = [vars(each) for each in every if id(each) not in seen and id(each) not in ours]
        owners: list[dict[str, Any]] = [*(each._parameters for each in every), *(each._buffers for each in still)]
        self._holders = [each for each in (*owners, *(each._modules for each in every)) if each]
        tensors = [each for owner in owners for each in owner.values() if each is not None]
        self._dense = [each for each in tensors if type(each.data) is Tensor]
        self._parted: list[Any] = [each for each in tensors if type(each.data) is not Tensor]
        self._parted_types = list(map(type, self._parted))
        # What a graph reads stays alive, even if the model has replaced it.
        self._kept = [each.detach() for each in self._dense]
        self._dtypes = list(map(_DTYPE, self._dense))
        named = [(each, name) for each in whole for name in vars(each) if name not in _OF_MODULES]
        named += [(each, name) for each in still if isinstance(each, PreTrainedModel) for name in _attributes(each)]
        self._attribute_dicts, self._attribute_names = [vars(each) for each, _ in named], [name for _, name in named]
        self._held = self._current_values()
        # Tensors of one element, whose == compares values. A graph reads the one that it was captured with.
        self._singles = [i for i, t in enumerate(self._held) if isinstance(t, Tensor) and t.numel() == 1]
        self._single = [self._held[i] for i in self._singles]
        own = (vars(each)[name] for each, name in named)
        self._containers = [each for each in own if isinstance(each, list | dict)]  # they may be changed in place
        self._contents = list(map(copy, self._containers))
        self._config = config
        configs = [config, *(vars(each).get("config", config) for each in every)]
        # Their own access to attributes takes microseconds each.
        self._configs = [
            object.__getattribute__(each, "__dict__") for each in {id(each): each for each in configs}.values()
        ]
        self._values = [
            {name: copy(value) if isinstance(value, list | dict) else value for name, value in each.items()}
            for each in self._configs
        ]

    def _current_values(self) -> list[Any]:
        """Return children, parameters, buffers, the parts of weights and constants, of which none was added."""
        values = gc.get_referents(*self._holders, *map(vars, self._parted))
        values += map(dict.get, self._attribute_dicts, self._attribute_names)
        return values

    def _hold_hooks(self) -> bool:
        """Return whether no hook was added. A new hook increments a global id; without that, none is compared."""
        if RemovableHandle.next_id != self._next_id:
            if list(chain.from_iterable(self._hooks)) != self._hook_ids:
                return False
            self._next_id = RemovableHandle.next_id
        return True

    def _hold_configs(self) -> bool:
        """How experts are multiplied does not count: ``generate`` changes it for the time of a text."""
        for found, held in zip(self._configs, self._values, strict=True):
            if _EXPERTS in found:
                held[_EXPERTS] = found[_EXPERTS]
        return self._configs == self._values

    def holds(self, config: Any) -> bool:
        """Return whether nothing has changed: tensors and modules are identical, constants equal."""
        try:
            found = self._current_values()
            return (
                found == self._held
                and all(map(is_, map(found.__getitem__, self._singles), self._single))
                and list(map(type, self._modules)) == self._types
                and list(map(type, self._parted)) == self._parted_types
                and list(map(len, self._dicts)) == self._sizes
                and not any(map(contains, self._others, repeat("forward")))
                and self._hold_hooks()
                and all(map(Tensor.is_set_to, self._dense, self._kept))
                and list(map(_DTYPE, self._dense)) == self._dtypes
                and self._containers == self._contents
                and list(map(getattr, self._classes, self._names, repeat(None))) == self._functions
                and config is self._config
                and self._hold_configs()
                and unsupported_process() is None
            )
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # other tensors: == is elementwise
            return False


def changes_itself(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding whose frequencies depend on the length of the text."""
    kinds: Any = getattr(module, "rope_type", None)
    return any(kind in CHANGING for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def _attributes(model: PreTrainedModel) -> Iterable[str]:
    """Return the names of the constants of a model that its forward may read."""
    return [name for name in vars(model) if not (name in _OF_MODULES | _NOT_READ or name.startswith("_"))]


def unsupported_reason(config: Any) -> str | None:
    """Return why native steps do not support the configuration or the state of the process; None if they do."""
    if config._attn_implementation not in ("sdpa", "eager"):
        name = config._attn_implementation
        return f"the attention implementation is {name!r}, and decode_natively supports 'sdpa' and 'eager'"
    if getattr(config, "is_causal", None) is False:
        return "config.is_causal is False"
    return unsupported_process()


def unsupported_process() -> str | None:
    """Return why native steps do not support the state of the process; None if they do."""
    if ALL_ATTENTION_FUNCTIONS.get("sdpa") is not sdpa_attention_forward or "eager" in ALL_ATTENTION_FUNCTIONS:
        return "an attention implementation of transformers was replaced"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are global forward hooks, which decode_natively would not call"
    return None


def check_modules(modules: Mapping[str, nn.Module], hooked: Iterable[nn.Module], patched: bool = False) -> None:
    """Raise a ValueError for a module whose call does more than its class's forward.

    ``patched`` accepts classes whose forward was replaced.
    """
    ours = {id(each) for each in hooked}
    for name, module in modules.items():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(getattr(hook, "__qualname__", "").startswith(_CAPTURING) for hook in hooks):
            raise ValueError(f"{name} has hooks, which decode_natively would not call: remove them first")
        names = ["forward"] if patched else [each for each, _ in _functions_of(type(module))]
        replaced = [each for each in names if each in vars(module)]
        if replaced and id(module) not in ours:
            raise ValueError(
                f"{name} is a {type(module).__name__} with a {replaced[0]} that decode_natively would not call"
            )
        if not patched:
            check_class(type(module))


def _functions_of(cls: type) -> Iterable[tuple[str, Any]]:
    """Yield forward, and the functions that it may call: those of the class and its bases, up to ``nn.Module``."""
    names = {"forward": None}
    for holder in cls.__mro__:
        if holder in (nn.Module, PreTrainedModel):
            break
        names |= {name: None for name, each in vars(holder).items() if isinstance(each, FunctionType)}
    return [(name, getattr(cls, name, None)) for name in names if name not in _NOT_CALLED]


def check_class(cls: type) -> None:
    """Raise a ValueError for a class with a function that is not the one in its source."""
    for name, _ in _functions_of(cls):
        holder = next(each for each in cls.__mro__ if name in vars(each))
        function = vars(holder)[name]
        if holder is nn.Module or (holder is NVFP4Linear and function is _NVFP4_FORWARD):
            continue
        source = getattr(function, "__module__", "")
        is_own = source == holder.__module__ and function.__qualname__ == f"{holder.__qualname__}.{name}"
        is_added = name != "forward" and source.startswith(("transformers.", "nvfp4_tensor."))  # by decorators, or ours
        if not (is_own or is_added):
            raise ValueError(f"the {name} of {cls.__name__} was patched, and decode_natively would not call it")
