"""Calls of a module that train in eager mode, with what does not change from call to call checked once.

A small linear takes as long as the Python around its kernels. The first call of a module is checked in full and run by
``function.py``. If ``fused.py`` computes all of it, the module keeps a :class:`Prepared`, and later calls that
:meth:`Prepared.fits` run by it: one comparison of what may have changed, then one autograd function of one op, or of
two if another linear has quantized the same input. The bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nvfp4_tensor.sharding.layout import UNSHARDED_LINEAR
from nvfp4_tensor.training.linear import fused
from nvfp4_tensor.training.linear.cache import is_tracing, share_input, shared_input
from nvfp4_tensor.training.linear.fused import settings_of
from nvfp4_tensor.training.recipe import Recipe, any_stochastic

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_transforming = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack

SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""The numbers of dtypes (c10::ScalarType). An op asks a dtype for its ``__torch_function__``, and the AttributeError
takes longer than reading any other argument."""


class Prepared:
    """What the calls of an unsharded module have in common: its recipe, and the dtypes and device of its operands."""

    def __init__(self, recipe: Recipe, x: Tensor, weight: Tensor) -> None:
        self.recipe, self.columns = recipe, x.shape[-1:]
        self.dtype, self.weight_dtype = x.dtype, weight.dtype
        self.device, self.device_type = x.device, x.device.type
        self.autocast = _autocast_dtype(self.device_type) if _is_autocast_enabled(self.device_type) else None
        self.draws = recipe.is_stochastic_forward or recipe.is_stochastic_backward
        self.x_draws = recipe.is_stochastic_forward and any_stochastic(recipe.x, recipe.x_t)
        self.key = input_key(x, recipe, recipe.x_t, UNSHARDED_LINEAR, None)
        numbers = SCALAR_TYPES[x.dtype], SCALAR_TYPES[weight.dtype]
        self.settings = settings_of(recipe, x.device, *numbers, saves_codes=recipe.keep_w)
        self.no_state = torch.empty((0,), dtype=torch.int64, device=x.device)

    @staticmethod
    def serves(recipe: Recipe, x: Tensor, weight: Tensor) -> bool:
        """Whether calls like this unsharded one can be prepared, given that the gradients of x and w are needed."""
        plain = type(x) in _PLAIN and type(weight) in _PLAIN and not x.is_meta
        return plain and fused.quantizes_input(recipe, x.device) and not is_tracing()

    def fits(self, recipe: Recipe, x: Tensor, weight: Tensor) -> bool:
        """Whether a call is like the one that was checked; x is its input, before autocast."""
        autocast = self.autocast
        return (
            recipe is self.recipe
            and (x.dtype is self.dtype or (autocast is not None and x.is_floating_point()))
            and weight.dtype is self.weight_dtype
            and type(x) in _PLAIN
            and type(weight) in _PLAIN
            and x.requires_grad
            and weight.requires_grad
            and _is_grad_enabled()
            and x.device == self.device
            and x.shape[-1:] == self.columns
            and weight.shape[1:] == self.columns
            and _is_autocast_enabled(self.device_type) is (autocast is not None)
            and (autocast is None or _autocast_dtype(self.device_type) is autocast)
            and not (_is_wrapped(x) or _is_wrapped(weight) or _is_transforming())
            and forward_ad._current_level < 0
            and not (_dispatch_modes() and is_tracing())
        )

    def run(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, rounding_state: Tensor | None, user: object
    ) -> Tensor:
        """Return y (..., N) for the input (..., K); ``user`` is the module."""
        x = input if input.dtype is self.dtype else input.to(self.dtype)
        needs_db = bias is not None and bias.requires_grad
        shares = not (self.x_draws or input.is_leaf)
        shared = shared_input(input, self.key, user) if shares else None
        if shared is None:
            given = rounding_state if self.draws else self.no_state
            made: list[Any] = []
            y = fused.apply_linear(x, weight, bias, (self.settings, needs_db, self.draws, given, made))
            if shares:
                x_operand, x_t = made
                share_input(input, self.key, user, (x_operand, x_t))
            return y
        state = None
        if self.draws:
            draw = torch.ops.nvfp4.draw_rng_state.default
            state = draw(self.no_state) if rounding_state is None else rounding_state.clone()
        return fused.apply_products(x, weight, bias, (self.settings, needs_db, state, *shared, None))


_PLAIN = Tensor, nn.Parameter
"""Classes without behavior of their own."""

_MISSING = object()


def parameter(module: nn.Module, name: str) -> Any:
    """Return the parameter ``module.name``, as nn.Module does after an AttributeError, four times as fast."""
    own = module.__dict__
    if name in own:  # pruned weights, and codes that FSDP2 has gathered
        return own[name]
    found = own["_parameters"].get(name, _MISSING)
    return getattr(module, name) if found is _MISSING else found  # parametrized weights


def input_key(x: Tensor, recipe: Recipe, x_t: Any, sharding: Any, gathered: Any) -> tuple:
    """Return what x is quantized by, and to which dtype it was cast: linears that agree share its operands."""
    return x.dtype, recipe.x, x_t, recipe.w is None, sharding.x, gathered
