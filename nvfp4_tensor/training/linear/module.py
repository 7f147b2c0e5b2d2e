"""NVFP4TrainingLinear: an nn.Linear whose products are quantized while it trains."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.exports import check_not_traced, refuse_export
from nvfp4_tensor._compat.modules import change_class, check_forward
from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.linears import is_nested, over_nested
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.random_state import rng_state_of_call
from nvfp4_tensor.quantization.observer import keep_called, release
from nvfp4_tensor.sharding.layout import UNSHARDED_LINEAR, LinearSharding, local_shard
from nvfp4_tensor.sharding.sequence import gather_if_sharded
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.cache import WeightCodes, is_cacheable
from nvfp4_tensor.training.linear.function import run
from nvfp4_tensor.training.linear.plan import LinearPlan
from nvfp4_tensor.training.recipe import Recipe

_NOT_SAVED = "_weight_codes", "_plans", "weight", "_writes_before"
"""Instance attributes of which a copy has none. The last two exist while FSDP2's gathered codes are in use."""


@functools.partial(pin, loadable=False)
class NVFP4TrainingLinear(nn.Linear):
    """An nn.Linear that trains according to a recipe. Its weight and its state_dict stay those of nn.Linear.

    ``quantize_(model, NVFP4TrainingConfig(...))`` creates it, and :func:`set_recipe` changes its recipe.

    Attributes:
        recipe: the :class:`Recipe` that the config or :func:`set_recipe` set.
        bf16_forward, bf16_backward: whether the forward, or the backward, is dense at present.
        active_recipe: the recipe in use, which follows from these three.
    """

    use_of_nvfp4: ClassVar[str] = "trains in NVFP4"
    recipe: Recipe
    active_recipe: Recipe
    bf16_forward: bool
    bf16_backward: bool
    sharding: LinearSharding = UNSHARDED_LINEAR
    """This rank's shards of the tokens, outputs and inputs: see :mod:`nvfp4_tensor.distributed`."""
    rounding_state: Tensor | None
    """int64 (seed, step), the source of random bits instead of torch's generator; a buffer that is not saved."""
    calls: int = 0
    """The number of calls that train since the step was set, each of which derives its own (seed, step)."""
    _calls_repeat: bool = False
    """Whether a step has called this module several times."""
    _weight_codes: WeightCodes | None = None
    """The cache of the weight's codes within :func:`training.reuse_weight_codes`."""
    _plans: tuple[LinearPlan, ...] = ()
    """Of the latest calls, for calls like them: two, because a reentrant checkpoint and evaluation alternate."""
    _writes_before: int
    """The number of writes to the shard when its codes were gathered."""

    @classmethod
    def convert(cls, linear: nn.Linear, recipe: Recipe) -> NVFP4TrainingLinear:
        """Convert a linear in place to train according to a recipe."""
        check_forward(linear)
        change_class(linear, cls)
        assert isinstance(linear, NVFP4TrainingLinear)
        keep_called(linear)
        linear.register_buffer("rounding_state", None, persistent=False)
        linear.set_recipe(recipe, False, False)
        return linear

    __prepare_scriptable__ = refuse_export

    def to_dense(self) -> nn.Linear:
        """Convert this module in place to a plain nn.Linear."""
        del self.rounding_state
        own = "recipe", "active_recipe", "bf16_forward", "bf16_backward", "sharding", "calls", "_calls_repeat"
        for name in (*own, *_NOT_SAVED):
            self.__dict__.pop(name, None)
        release(self)
        change_class(self, nn.Linear)
        return self

    def set_recipe(self, recipe: Recipe, bf16_forward: bool, bf16_backward: bool) -> None:
        """Set the recipe and its dense halves; see :func:`training.set_recipe`."""
        active = recipe.dense_forward() if bf16_forward else recipe
        active = active.dense_backward() if bf16_backward else active
        self.recipe, self.active_recipe = recipe, active
        self.bf16_forward, self.bf16_backward = bf16_forward, bf16_backward

    def forward(self, input: Tensor) -> Tensor:
        if is_nested(input):
            return over_nested(self.forward, input)
        recipe, sharding, plans = self.active_recipe, self.sharding, self._plans
        if torch.compiler.is_compiling():
            plans = ()
        else:
            check_not_traced()
            self._check_gathered()
        weight, bias = self._own_parameters(sharding)
        if isinstance(weight, NVFP4Tensor) and "weight" not in self.__dict__:  # not gathered, which the recipe's w made
            recipe = recipe.for_any_blocks
        for plan in plans:
            if plan.fits(recipe, input, weight, sharding):
                break
        else:
            if recipe.is_dense:
                return nn.functional.linear(gather_if_sharded(input, sharding), weight, bias)
            plan = LinearPlan.of_call(recipe, input, weight, sharding, self)
            if not plan.passing:
                self._plans = plan, *plans[:1]
        # The first run of a reentrant checkpoint has no gradients and must sample as the second does.
        trains = self.training or plan.needs(bias)
        state = self._call_state() if trains else self.rounding_state
        codes = None
        if self._weight_codes is not None or plan.weight_type is NVFP4Tensor:
            codes = self._known_codes(plan, weight)
        return run(plan, input, weight, bias, state, trains, self, codes)

    def _own_parameters(self, sharding: LinearSharding) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight and bias. If inputs are sharded, the bias is None: the sum over ranks adds it.

        Each is read once: a parametrization computes it, and may draw random bits or count calls.
        """
        if sharding is not UNSHARDED_LINEAR:
            bias = self.bias if sharding.inputs.ranks == 1 else None
            return local_shard(self.weight), None if bias is None else local_shard(bias)
        if torch.compiler.is_compiling():
            return self.weight, self.bias
        return _parameter(self, "weight"), _parameter(self, "bias")

    def _call_state(self) -> Tensor | None:
        """Return the (seed, step) of a call that trains, or None to draw it."""
        state, call = self._buffers["rounding_state"], self.calls
        if state is None:
            return None
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            if self._calls_repeat:  # and which of them a checkpoint runs again is not known
                raise RuntimeError(
                    f"{self} ran several times since its step was set, so activation checkpointing cannot repeat its "
                    "random bits: call distributed.set_step before each step, or, for a layer that one step calls "
                    "several times, leave out distributed.seed_rounding or the checkpoint"
                )
            return state
        self.calls = call + 1
        if call:
            self._calls_repeat = True
        return rng_state_of_call(state, call)

    def _known_codes(self, plan: LinearPlan, weight: Tensor) -> Codes | None:
        """Return the weight's codes if they are known: gathered, or cached by :func:`training.reuse_weight_codes`."""
        if isinstance(weight, NVFP4Tensor):
            return None if plan.recipe.w is None else Codes(weight.qdata, weight.scale, weight.per_tensor_scale)
        kept, spec = self._weight_codes, plan.recipe.w
        if kept is None or spec is None or spec.is_stochastic or not plan.recipe.keep_w or not is_cacheable(weight):
            return None
        return kept.get(weight, spec, lambda: plan.quantize_weight(weight.detach(), None))

    def __setattr__(self, name: str, value: Any) -> None:
        """Store gathered codes, which FSDP2 sets as the weight, as an instance attribute and keep the parameter.

        ``parameters()`` still yields the shard, so that averages of parameters never read rounded values.
        """
        if name == "weight" and isinstance(getattr(value, "_local_tensor", value), NVFP4Tensor):
            shard = getattr(self._parameters.get("weight"), "_local_tensor", None)
            if shard is not None and not isinstance(shard, NVFP4Tensor):
                self.__dict__.update(weight=value, _writes_before=self._writes())
                return
        super().__setattr__(name, value)

    def _writes(self) -> int:
        """Return how often the shard was written to whose codes FSDP2 gathers."""
        return getattr(getattr(self._parameters["weight"], "_local_tensor", None), "_writes", 0)

    def _check_gathered(self) -> None:
        own = self.__dict__  # pruning makes the weight an attribute too
        if "weight" in own and "_writes_before" in own and self._writes() != self._writes_before:
            raise RuntimeError(
                f"the weight of {self} was written to after FSDP2 had gathered its codes, which FSDP2 keeps with "
                "reshard_after_forward=False: call reshard() of its FSDP module before the next forward"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_SAVED}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.active_recipe.name}"


_MISSING = object()


def _parameter(module: nn.Module, name: str) -> Any:
    """Return the parameter ``module.name``, as nn.Module does after an AttributeError, four times as fast."""
    own = module.__dict__
    if name in own:  # pruned weights, and codes that FSDP2 has gathered
        return own[name]
    found = own["_parameters"].get(name, _MISSING)
    return getattr(module, name) if found is _MISSING else found  # parametrized weights
