"""Refuse weights that are not in their modules: sharded ones, and those that hooks of accelerate keep.

A shard has another amax than its weight, and FSDP2 keeps its own shards; accelerate keeps the values that it offloads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn


def refuse_absent(model: nn.Module, chosen: Collection[nn.Module]) -> None:
    """Raise an error if weights of the chosen modules are not in them.

    Raises:
        TypeError: a weight is a DTensor, or belongs to FSDP, which can leave plain parameters in modules between two
            calls of a model, and replaces them later.
        ValueError: accelerate has offloaded a weight.
    """
    _refuse_shards(model, chosen)
    offloaded = {
        each for hooked in model.modules() for each in _offloaded_by(hooked, getattr(hooked, "_hf_hook", None))
    }
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items() if module in chosen and module in offloaded else ():
            if parameter is not None and parameter.is_meta:
                raise ValueError(
                    f"{path}.{name}".lstrip(".") + " is offloaded by accelerate, and its values are not in the model: "
                    "quantize first, then offload. accelerate.hooks.remove_hook_from_submodules(model) brings them back"
                )


def _offloaded_by(module: nn.Module, hook: object) -> Iterator[nn.Module]:
    """Yield the modules whose weights a hook of accelerate keeps."""
    for each in getattr(hook, "hooks", ()):
        yield from _offloaded_by(module, each)
    if getattr(hook, "offload", False):
        yield from module.modules() if getattr(hook, "place_submodules", False) else (module,)


def _refuse_shards(model: nn.Module, chosen: Collection[nn.Module]) -> None:
    of_fsdp = {
        inner
        for each in model.modules()
        if _is(each, "FSDPModule", "FullyShardedDataParallel")
        for inner in each.modules()
    }
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items() if module in chosen else ():
            if parameter is not None and (module in of_fsdp or _is(parameter, "DTensor")):
                whose = f"{path}.{name}" if path else f"the {name} of {type(module).__name__}"
                raise TypeError(
                    f"{whose} is sharded, and only whole weights can be quantized: quantize the "
                    "model first, then call fully_shard or parallelize_module, which shard its codes"
                )


def refuse_dtensors(module: nn.Module) -> None:
    """Raise a TypeError if a prepared module was sharded before it is called: its statistics would be of a shard."""
    if any(_is(parameter, "DTensor") for parameter in module._parameters.values()):
        _refuse_shards(module, [module])


def _is(value: object, *names: str) -> bool:
    """Return whether a value is of a class of torch.distributed, without the slow import of it."""
    return any(each.__name__ in names for each in type(value).__mro__)
