"""Refuse weights that are sharded already: a shard has another amax than its weight, and FSDP2 keeps its own shards."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn


def refuse_shards(model: nn.Module, chosen: Collection[nn.Module]) -> None:
    """Raise a TypeError if a weight of the chosen modules is a DTensor, or belongs to FSDP.

    Between two calls of a model, FSDP2 can leave plain parameters in modules, which it replaces later.
    """
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
        refuse_shards(module, [module])


def _is(value: object, *names: str) -> bool:
    """Return whether a value is of a class of torch.distributed, without the slow import of it."""
    return any(each.__name__ in names for each in type(value).__mro__)
