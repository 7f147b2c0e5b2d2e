"""What makes up a model, to compare before and after a call."""

from torch import nn


def state_of(model: nn.Module) -> tuple[object, ...]:
    """Return the classes, attributes and hooks of all modules, and the identity of all parameters and buffers."""
    modules = [
        (name, type(module), sorted(module.__dict__), len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    implementation = getattr(getattr(model, "config", None), "_experts_implementation", None)
    return modules, {name: (id(each), type(each.data), each.shape) for name, each in tensors}, implementation
