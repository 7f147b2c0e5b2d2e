"""NVFP4TrainingLinear: an nn.Linear whose products are quantized while it trains."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.exports import check_not_traced, refuse_export
from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.nested import is_nested, over_nested
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.random_state import rng_state_of_call
from nvfp4_tensor.quantization.fast_path import keep_called, release
from nvfp4_tensor.sharding.layout import UNSHARDED_LINEAR, LinearSharding, local_shard
from nvfp4_tensor.sharding.sequence import gather_if_sharded
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.cache import Pair, WeightCodes, is_cacheable, is_shareable, share_input, shared_input
from nvfp4_tensor.training.linear.function import (
    InputShard,
    Needs,
    Operands,
    apply_autocast,
    call_rng_state,
    check_operands,
    input_operands,
    multiply_operands,
    needed_gradients,
    prepare_input,
    quantizes_in_product,
    weight_operand,
)
from nvfp4_tensor.training.linear.operands import Quantized
from nvfp4_tensor.training.linear.prepared import Prepared, input_key, parameter
from nvfp4_tensor.training.recipe import Recipe, any_stochastic

_GATHERED_ATTRIBUTES = "weight", "_writes_before"
"""The instance attributes that exist while the gathered codes of the weight are in use (FSDP2)."""


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
    hadamard_sign: int | None
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
    _prepared: Prepared | None = None
    """What was checked at an earlier call, so that calls like it need not check again."""
    _writes_before: int
    """The number of writes to the shard when its codes were gathered."""

    @classmethod
    def convert(cls, linear: nn.Linear, recipe: Recipe, hadamard_sign: int | None = None) -> NVFP4TrainingLinear:
        """Convert a linear in place to train according to a recipe, optionally with its own Hadamard sign."""
        linear.__class__ = cls
        assert isinstance(linear, NVFP4TrainingLinear)
        linear.hadamard_sign = hadamard_sign
        keep_called(linear)
        linear.register_buffer("rounding_state", None, persistent=False)
        linear.set_recipe(recipe, False, False)
        return linear

    __prepare_scriptable__ = refuse_export

    def to_dense(self) -> nn.Linear:
        """Convert this module in place to a plain nn.Linear."""
        for name in ("recipe", "active_recipe", "bf16_forward", "bf16_backward", "hadamard_sign"):
            delattr(self, name)
        del self.rounding_state
        self.__dict__.pop("_prepared", None)
        for name in ("sharding", "_weight_codes", "calls", "_calls_repeat", *_GATHERED_ATTRIBUTES):
            self.__dict__.pop(name, None)
        release(self)
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def set_recipe(self, recipe: Recipe, bf16_forward: bool, bf16_backward: bool) -> None:
        """Set the recipe and its dense halves; see :func:`training.set_recipe`."""
        active = recipe if self.hadamard_sign is None else recipe.with_hadamard_sign(self.hadamard_sign)
        active = active.dense_forward() if bf16_forward else active
        active = active.dense_backward() if bf16_backward else active
        self.recipe, self.active_recipe = recipe, active
        self.bf16_forward, self.bf16_backward = bf16_forward, bf16_backward

    def forward(self, input: Tensor) -> Tensor:
        if is_nested(input):
            return over_nested(self.forward, input)
        recipe, sharding = self.active_recipe, self.sharding
        given: Any = None  # read once: a parametrization computes the weight, and may draw random bits or count calls
        if not torch.compiler.is_compiling():
            check_not_traced()
            self._check_gathered()
            ready = self._prepared
            if ready is not None and sharding is UNSHARDED_LINEAR and self._weight_codes is None:
                given = parameter(self, "weight")
                if ready.fits(recipe, input, given):
                    return ready.run(input, given, parameter(self, "bias"), self._call_state(), self)
        if sharding is not UNSHARDED_LINEAR:
            weight, bias = self._local_parameters(sharding)
        else:
            weight, bias = self.weight if given is None else given, self.bias
        if isinstance(weight, NVFP4Tensor) and "weight" not in self.__dict__:  # not gathered, which the recipe's w made
            recipe = recipe.for_any_blocks
        if recipe.is_dense:
            return nn.functional.linear(gather_if_sharded(input, sharding), weight, bias)
        x = apply_autocast(input)
        check_operands(x, weight, self)
        needs = needed_gradients(x, weight, bias)
        # The first run of a reentrant checkpoint has no gradients and must sample as the second does.
        trains = self.training or any(needs)
        rng_state = call_rng_state(recipe, trains, x, self._call_state() if trains else self.rounding_state)
        x, shard = prepare_input(x, recipe, needs, sharding)
        x_operand, x_t = self._input_operands(input, shard, recipe, needs, rng_state)
        operands = Operands(x_operand, x_t, self._weight_operand(weight, recipe, rng_state, x_operand, x))
        if sharding is not UNSHARDED_LINEAR:
            sharding = sharding.for_input(x.shape[:-1])
        elif not torch.compiler.is_compiling() and needs.dx and needs.dw:
            self._prepared = Prepared(recipe, x, weight) if Prepared.serves(recipe, x, weight) else None
        return multiply_operands(x, weight, bias, recipe, operands, needs, rng_state, sharding)

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

    def _local_parameters(self, sharding: LinearSharding) -> tuple[Tensor, Tensor | None]:
        """Return this rank's weight and bias. If inputs are sharded, the bias is None: the sum over ranks adds it."""
        bias = self.bias if sharding.inputs.ranks == 1 else None
        return local_shard(self.weight), None if bias is None else local_shard(bias)

    def _input_operands(
        self, input: Tensor, shard: InputShard, recipe: Recipe, needs: Needs, rng_state: Tensor | None
    ) -> Pair:
        """Return the operands that another linear made from the same input, or quantize it.

        Stochastic operands are never shared. Each linear has its own random bits in a compiled graph and on other
        numbers of ranks, where linears do not share operands.
        """
        x_t = recipe.x_t if needs.dw else None
        if (recipe.is_stochastic_forward and any_stochastic(recipe.x, x_t)) or not is_shareable(input):
            return input_operands(shard, recipe, needs, rng_state)
        key = input_key(shard.x_MK, recipe, x_t, shard.sharding, shard.gathered)
        operands = shared_input(input, key, self)
        if operands is None:
            operands = input_operands(shard, recipe, needs, rng_state)
            share_input(input, key, self, operands)
        return operands

    def _weight_operand(
        self, weight: Tensor, recipe: Recipe, rng_state: Tensor | None, x_operand: Quantized | None, x: Tensor
    ) -> Codes | None:
        """Return the weight's codes: cached ones within :func:`training.reuse_weight_codes`, else quantized now.

        Return None if the product quantizes the weight.
        """
        kept = self._weight_codes
        if recipe.w is None:
            return None
        if isinstance(weight, NVFP4Tensor):  # gathered as codes
            return Codes(weight.qdata, weight.scale, weight.per_tensor_scale)
        if kept is None or recipe.w.is_stochastic or not recipe.keep_w or not is_cacheable(weight):
            if self.sharding is UNSHARDED_LINEAR and quantizes_in_product(recipe, x_operand, x):
                return None
            return weight_operand(weight, recipe, rng_state, self.sharding)
        operand = kept.get(weight, recipe.w)
        if operand is None:
            with torch.inference_mode(False):  # so that a forward that trains can use them too
                operand = weight_operand(weight, recipe, rng_state, self.sharding)
            assert operand is not None
            kept.put(weight, recipe.w, operand)
        return operand

    def __setattr__(self, name: str, value: Any) -> None:
        """Store gathered codes, which FSDP2 sets as the weight, as an instance attribute and keep the parameter.

        ``parameters()`` still yields the shard, so that averages of parameters never read rounded values.
        """
        if name == "weight" and self._is_gathered(value):
            self.__dict__.update(weight=value, _writes_before=self._writes())
        else:
            super().__setattr__(name, value)

    def _is_gathered(self, weight: Any) -> bool:
        shard = getattr(self._parameters.get("weight"), "_local_tensor", None)
        gathered = isinstance(getattr(weight, "_local_tensor", weight), NVFP4Tensor)
        return gathered and shard is not None and not isinstance(shard, NVFP4Tensor)

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
        not_saved = ("_weight_codes", "_prepared", *_GATHERED_ATTRIBUTES)
        return {name: value for name, value in self.__dict__.items() if name not in not_saved}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.active_recipe.name}"
