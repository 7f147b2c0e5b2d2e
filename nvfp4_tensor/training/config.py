"""NVFP4TrainingConfig, what quantize_ does by it, and how to change a live model's recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.quantization.linear import quantizable
from nvfp4_tensor.quantization.plan import plan_of
from nvfp4_tensor.training.linear.cache import WeightCodes
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import Recipe, resolve


@functools.partial(pin, loadable=False)
@dataclasses.dataclass
class NVFP4TrainingConfig(AOBaseConfig):
    """Train nn.Linear of any size in NVFP4, by ``quantize_(model, NVFP4TrainingConfig(...))``.

    Weights stay the parameters that they are, so an optimizer made before or after serves alike, and a state_dict is
    that of the dense model. ``torch.manual_seed`` governs stochastic rounding.

    Args:
        recipe: a :class:`Recipe`, or the name of one: nvidia, nvidia_4over6, unbiased, accurate, accurate_eden,
            forward_only, weight_only.
        hadamard_sign: "shared", the mask of the recipe; or "per layer": each linear gets a mask of its own, by its
            place among those that this config has converted. Linears of one input then quantize its transpose apart.

    Raises:
        TypeError, ValueError: an unknown recipe or hadamard_sign.
    """

    recipe: Recipe | str = "nvidia"
    hadamard_sign: str = "shared"
    _converted: int = dataclasses.field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.recipe = resolve(self.recipe)
        if self.hadamard_sign not in ("shared", "per layer"):
            raise ValueError(f"hadamard_sign is 'shared' or 'per layer', got {self.hadamard_sign!r}")

    def next_sign(self) -> int | None:
        """The mask of the next linear converted; None where it is the recipe's own."""
        if self.hadamard_sign == "shared":
            return None
        self._converted += 1
        return int.from_bytes(hashlib.blake2b(f"linear {self._converted}".encode(), digest_size=2).digest(), "little")


@register_quantize_module_handler(NVFP4TrainingConfig)
def _train_linear(module: nn.Module, config: NVFP4TrainingConfig) -> nn.Module:
    plan_of(module, config, _is_trainable)  # all of the call are checked before the first changes
    linear = trainable(module)
    assert isinstance(config.recipe, Recipe)
    return NVFP4TrainingLinear.convert(linear, config.recipe, config.next_sign())


def _is_trainable(module: nn.Module) -> bool:
    """Raises what :func:`trainable` does; False because tied weights, which stay as they are, need no plan."""
    trainable(module)
    return False


def trainable(module: nn.Module) -> nn.Linear:
    """The module, if it is a plain nn.Linear with a weight that trains; else a TypeError or ValueError with the fix."""
    if isinstance(module, NVFP4TrainingLinear):
        raise ValueError(f"{module} trains in NVFP4 already: change its recipe with training.set_recipe")
    linear = quantizable(module)
    if type(linear) is not nn.Linear:
        raise TypeError(
            f"{module} is a {type(linear).__name__}, whose own code NVFP4TrainingConfig would put aside: leave it out "
            "with filter_fn"
        )
    if not linear.weight.requires_grad:
        raise ValueError(
            f"the weight of {module} is frozen, and a recipe is for what trains: leave it out with filter_fn, store it "
            "in NVFP4 with NVFP4WeightOnlyConfig, or call weight.requires_grad_() first"
        )
    return linear


# --- a live model ----------------------------------------------------------------------------------------------------


def training_linears(model: nn.Module) -> dict[str, NVFP4TrainingLinear]:
    """Those of a model, by name.

    Raises:
        ValueError: it has none.
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
    """Change what a model's NVFP4 linears do, between two steps of training.

    Args:
        model: a model that :class:`NVFP4TrainingConfig` was applied to, or a part of one.
        recipe: a :class:`Recipe` or the name of one; None keeps each linear's own.
        forward, backward: "bf16" for a dense half, "nvfp4" for the recipe's; None keeps it as it is. A dense forward
            for the last part of a run is NVIDIA's cure for most of what a forward in NVFP4 costs (arXiv 2509.25149).

    Raises:
        ValueError: the model has no such linear, an unknown recipe, a half that is neither.
        TypeError: recipe is neither a Recipe nor a name.

    >>> set_recipe(model, forward="bf16")    # from now on
    >>> set_recipe(model, forward="nvfp4")   # and back
    """
    for name, half in (("forward", forward), ("backward", backward)):
        if half not in (None, "bf16", "nvfp4"):
            raise ValueError(f"{name} is 'bf16', 'nvfp4' or None (as it is), got {half!r}")
    new = None if recipe is None else resolve(recipe)
    for linear in training_linears(model).values():
        linear.set_recipe(
            linear.recipe if new is None else new,
            linear.bf16_forward if forward is None else forward == "bf16",
            linear.bf16_backward if backward is None else backward == "bf16",
        )


def to_dense(model: nn.Module) -> nn.Module:
    """The same model with its NVFP4 training linears plain nn.Linear again, weights untouched."""
    for linear in [module for module in model.modules() if isinstance(module, NVFP4TrainingLinear)]:
        linear.to_dense()
    return model


@contextlib.contextmanager
def reuse_weight_codes(model: nn.Module) -> Iterator[None]:
    """Within it, each weight is quantized once, for the caller says that no weight changes there.

    For several micro-batches of one optimizer step, for activation checkpointing (around the forward and the backward),
    and for evaluation with few tokens a call. Elsewhere every eager forward quantizes the weights as they are.

    In-place operators, a new tensor and the steps of optimizers are noticed even so; a write through ``weight.data``,
    ``weight.numpy()`` or another view of the storage is not.

    Args:
        model: with NVFP4 training linears. Compiled graphs, and recipes with ``keep_w=False`` or random bits in w, go
            on as they do.

    Raises:
        ValueError: the model has no such linear.

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
