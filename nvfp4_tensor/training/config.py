"""NVFP4TrainingConfig for quantize_, and functions that change the recipe of a model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.quantization.callers import once_per_call
from nvfp4_tensor.quantization.conv1d import as_linear, is_conv1d
from nvfp4_tensor.quantization.linear import quantizable
from nvfp4_tensor.quantization.names import refused_by_name
from nvfp4_tensor.quantization.shards import refuse_absent
from nvfp4_tensor.training.linear.cache import WeightCodes
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe, resolve


@functools.partial(pin, loadable=False)
@dataclasses.dataclass
class NVFP4TrainingConfig(AOBaseConfig):
    """Train nn.Linear of any size in NVFP4: ``quantize_(model, NVFP4TrainingConfig(...))``.

    Weights stay the same parameters, so the optimizer can be created before or after the conversion, and the state_dict
    is that of the dense model. ``torch.manual_seed`` seeds stochastic rounding. A compiled model draws the same bits;
    with a dropout in it, only under ``torch._inductor.config.fallback_random = True``.
    GPT-2's Conv1D becomes an nn.Linear with such a state_dict.

    Args:
        recipe: a :class:`Recipe`, or the name of one: nvidia, nvidia_4over6, unbiased, accurate, accurate_eden,
            forward_only, weight_only.

    Raises:
        TypeError, ValueError: if the recipe is unknown.
    """

    recipe: Recipe | str = "nvidia"

    def __post_init__(self) -> None:
        self.recipe = resolve(self.recipe)


@register_quantize_module_handler(NVFP4TrainingConfig)
def _train_linear(module: nn.Module, config: NVFP4TrainingConfig) -> nn.Module:
    assert isinstance(config.recipe, Recipe)
    return converted(module, config, config.recipe)


def converted(module: nn.Module, config: AOBaseConfig, recipe: Recipe) -> nn.Module:
    """Let a linear train by a recipe, in a call of quantize_ with this config that may pass it by several paths."""
    once_per_call(module, config, check_trainable)
    if isinstance(module, NVFP4TrainingLinear):
        return module
    return NVFP4TrainingLinear.convert(as_linear(trainable(module)), recipe)


def check_trainable(model: nn.Module, chosen: list[nn.Module], is_all: bool) -> None:
    """Raise the errors of all modules of a call before the first one changes."""
    refuse_absent(model, chosen)
    among = set(chosen)
    for name, module in model.named_modules():
        if module in among:
            with refused_by_name(name):
                trainable(module)


def trainable(module: nn.Module) -> nn.Linear:
    """Return a plain nn.Linear with a trainable weight; raise a TypeError or ValueError for any other module."""
    if isinstance(module, NVFP4TrainingLinear):
        raise ValueError(f"{module} trains in NVFP4 already: change its recipe with training.set_recipe")
    linear = quantizable(module)
    if type(linear) is not nn.Linear and not is_conv1d(linear):
        raise TypeError(
            f"{module} is a {type(linear).__name__}, whose own code NVFP4TrainingConfig would replace: leave it out "
            "with filter_fn"
        )
    if not linear.weight.requires_grad:
        raise ValueError(
            f"the weight of {module} is frozen, and NVFP4TrainingConfig is for trainable weights: leave it out with "
            "filter_fn, store it in NVFP4 with NVFP4WeightOnlyConfig, or call weight.requires_grad_() first"
        )
    return linear


# --- a converted model -----------------------------------------------------------------------------------------------


def training_linears(model: nn.Module) -> dict[str, NVFP4TrainingLinear]:
    """Return a model's NVFP4 training linears, by name.

    Raises:
        ValueError: if it has none.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, NVFP4TrainingLinear)}
    if not linears:
        raise ValueError(
            f"{type(model).__name__} has no linear that trains in NVFP4: quantize_(model, NVFP4TrainingConfig()) first"
        )
    return linears


def set_recipe(
    model: nn.Module,
    recipe: Recipe | str | None = None,
    *,
    forward: str | None = None,
    backward: str | None = None,
) -> None:
    """Change the recipe of a model's NVFP4 training linears between two training steps.

    Args:
        model: a model that :class:`NVFP4TrainingConfig` was applied to, or a submodule of one.
        recipe: a :class:`Recipe` or the name of one; None keeps each linear's recipe.
        forward, backward: "bf16" for a dense forward or backward, "nvfp4" for the recipe's; None keeps the present one.
            NVIDIA recovers most of the loss in accuracy by a dense forward at the end of a run (arXiv 2509.25149).

    Raises:
        ValueError: if the model has no such linear, or an argument has an unknown value.
        TypeError: if recipe is neither a Recipe nor a name.

    >>> set_recipe(model, forward="bf16")    # from now on
    >>> set_recipe(model, forward="nvfp4")   # and back
    """
    for name, half in (("forward", forward), ("backward", backward)):
        if half not in (None, "bf16", "nvfp4"):
            raise ValueError(f"{name} is 'bf16', 'nvfp4' or None (unchanged), got {half!r}")
    new = None if recipe is None else resolve(recipe)
    for linear in training_linears(model).values():
        linear.set_recipe(
            linear.recipe if new is None else new,
            linear.bf16_forward if forward is None else forward == "bf16",
            linear.bf16_backward if backward is None else backward == "bf16",
        )


@contextlib.contextmanager
def reuse_weight_codes(model: nn.Module) -> Iterator[None]:
    """Quantize each weight only once within this context, in which weights must not change.

    Use it around several micro-batches of one optimizer step, around the forward and backward with activation
    checkpointing, and for evaluation with few tokens per call. Otherwise every eager forward quantizes the weights.

    In-place operators, a new tensor and optimizer steps are detected, and the weight is quantized again. A write
    through ``weight.data``, ``weight.numpy()`` or another view of the storage is not detected.

    Args:
        model: a model with NVFP4 training linears. Compiled graphs, and recipes with ``keep_w=False`` or a stochastic
            spec for w, are not affected.

    Raises:
        ValueError: if the model has no such linear.

    >>> with training.reuse_weight_codes(model):
    ...     for x in micro_batches:
    ...         model(x).square().mean().backward()
    >>> optimizer.step()
    """
    linears = [linear for linear in training_linears(model).values() if linear._weight_codes is None]
    for linear in linears:
        linear._weight_codes = WeightCodes()
    try:
        yield
    finally:
        for linear in linears:
            linear._weight_codes = None
