"""LinearPlan: what calls of a linear have in common, and the products of a call and of its backward.

    y_MN  = x_MK    @ w_NK^T   fprop
    dx_MK = dy_MN   @ w_NK     dgrad
    dw_NK = dy_MN^T @ x_MK     wgrad

A small linear takes as long as the Python around its kernels. So a call is checked once, and later calls that
:meth:`LinearPlan.fits` only compare what may have changed. :meth:`LinearPlan.forward` and :meth:`LinearPlan.backward`
are one op each if the recipe, the device and the sharding allow it. Otherwise they call an op for each operand and each
product. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from nvfp4_tensor.matmul.backends import multiplies_codes, reads_transposed
from nvfp4_tensor.matmul.product import Left, decode_values, multiply
from nvfp4_tensor.numerics.codes import Codes, Decoded
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.training import (
    DY_STREAM,
    DY_T_STREAM,
    W_FOR_DX_STREAM,
    W_STREAM,
    X_STREAM,
    X_T_STREAM,
)
from nvfp4_tensor.sharding.layout import UNSHARDED_LINEAR, LinearSharding, compare_token_counts
from nvfp4_tensor.sharding.sequence import GatheredShape, gather_operands, gather_shape_only, gather_tokens
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.cache import Pair, is_tracing
from nvfp4_tensor.training.linear.operands import Quantized, quantize_left_operands, quantize_operand, rotate_back
from nvfp4_tensor.training.recipe import Recipe, WeightForDx, any_stochastic

_is_grad_enabled = torch.is_grad_enabled
_is_autocast_enabled, _autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_transforming = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack

_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}
"""The numbers of dtypes (c10::ScalarType). An op asks a dtype for its ``__torch_function__``, and the AttributeError
takes longer than reading any other argument."""

Saved: TypeAlias = "tuple[Any, ...]"
"""What a backward reads: rng_state; the codes of x^T, or x; w and its codes, of which one is None."""


class Call(NamedTuple):
    """The arguments of one call that autograd does not differentiate, in one tuple, because each costs host time."""

    plan: LinearPlan
    rng_state: Tensor | None
    x: Pair | None = None
    """The operands made of x; None if the op of the whole forward is to quantize it, and to add them to ``made``."""
    w: Codes | None = None
    """The codes of the weight; None to quantize it."""
    made: list[Pair] | None = None


class LinearPlan:
    """What calls of a linear have in common that agree in recipe, sharding, dtypes, device and needed gradients.

    Args:
        recipe: the recipe of the products, not dense throughout.
        x: (..., K), the input.
        weight: (N, K), or (E, N, K) of experts.
        needs: whether the gradients of x and of the weight are needed.
        sharding: this rank's shards of the linear.
        autocast: the dtype that autocast casts x to, if it is enabled.
    """

    def __init__(
        self,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        needs: tuple[bool, bool],
        sharding: LinearSharding | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        # Not the default of the argument, which torch 2.11 does not compile.
        self.given_sharding = UNSHARDED_LINEAR if sharding is None else sharding
        self.recipe, self.autocast = recipe, autocast
        self.x_type, self.weight_type = type(x), type(weight)
        self.device, self.device_type = x.device, x.device.type
        self.columns, self.weight_shape = x.shape[-1:], weight.shape
        self.dtype, self.weight_dtype = _dtype_of(x, autocast), weight.dtype
        self.needs_dx, self.needs_dw = needs
        self.spec, self.spec_t = recipe.x, recipe.x_t if self.needs_dw else None
        self.draws = recipe.is_stochastic_forward or recipe.is_stochastic_backward
        self.x_draws = any_stochastic(self.spec, self.spec_t)
        self.no_state = torch.empty((0,), dtype=torch.int64, device=x.device)
        self.keeps_codes = recipe.dgrad_reads_codes and (recipe.keep_w or isinstance(weight, NVFP4Tensor))
        self._set_shards(x)
        self.passing = is_tracing() or _is_transforming() or x.is_meta
        self.shares = self.needs_dx and type(x) is Tensor and not (self.x_draws or self.passing)
        one_op = recipe.is_coded and not multiplies_codes(x.device)
        self.backward_is_one_op = one_op and self.shape is None and self.needs_dx and self.needs_dw
        plain = type(x) in PLAIN and type(weight) in PLAIN
        self.forward_is_one_op = self.backward_is_one_op and plain and not self.passing
        dtypes: tuple[Any, Any] = self.dtype, self.weight_dtype
        if not self.passing:
            dtypes = _SCALAR_TYPES[self.dtype], _SCALAR_TYPES[self.weight_dtype]
        transposes_w = recipe.w_for_dx == WeightForDx.CODES and reads_transposed(x.device)
        of_x, self.packed_w, of_dy, of_dy_t, of_x_t, _ = recipe.packed
        self.forward_arguments = of_x, of_x_t, self.packed_w, dtypes[0]
        self.backward_arguments = of_dy, of_dy_t, self.packed_w, transposes_w, *dtypes

    @classmethod
    def of_call(
        cls,
        recipe: Recipe,
        x: Tensor,
        weight: Tensor,
        sharding: LinearSharding | None = None,
        name: object = "linear",
    ) -> LinearPlan:
        """Return the plan of a call, and raise the errors that :func:`linear` documents, in the name of ``name``."""
        autocast, grad = autocast_dtype(x.device), torch.is_grad_enabled()
        dtype = _dtype_of(x, autocast)
        for kind, each in (("an input", dtype), ("a weight", weight.dtype)):
            if each not in HIGH_PRECISION_DTYPES:
                raise TypeError(f"{name} takes bfloat16, float16 or float32, not {kind} of {each}: cast it first")
        if not torch.compiler.is_compiling() and (_is_transformed(x) or _is_transformed(weight)):
            raise RuntimeError(
                f"{name} does not support transforms of torch.func (vmap, grad, jvp, ...): call it with plain tensors, "
                'or use set_recipe(model, forward="bf16", backward="bf16")'
            )
        if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
            raise ValueError(f"{name} takes an input (..., {weight.shape[-1]}), got {tuple(x.shape)}")
        if dtype != weight.dtype and autocast is None:
            raise TypeError(
                f"the input of {name} is {dtype} and its weight {weight.dtype}: cast one of them, or use torch.autocast"
            )
        return cls(recipe, x, weight, (grad and x.requires_grad, grad and weight.requires_grad), sharding, autocast)

    def _set_shards(self, x: Tensor) -> None:
        """Find the shards of an input of this shape, and how to gather a sequence shard.

        It is gathered as codes if the recipe's products read only codes of x, and dense otherwise.
        """
        sharding = self.sharding = self.x_sharding = self.given_sharding
        self.gathered: GatheredShape | None = None
        self.gathers_codes, self.shape = False, None
        if sharding is not UNSHARDED_LINEAR:
            leading: Sequence[int] = x.shape[:-1]
            self.shape = x.shape
            sequence = sharding.sequence_of(x)
            if sequence is not None:
                self.gathered = GatheredShape.of(x, sequence)
                leading = self.gathered.leading
            self.sharding = sharding.for_input(leading)
            self.x_sharding = self.sharding if sequence is None else sharding.for_input(x.shape[:-1], local=True)
            self.gathers_codes = sequence is not None and self._reads_only_codes(flatten_tokens(x))
        self.x_is_codes = self.recipe.w is None or self.gathers_codes
        self.input_key = self.dtype, self.spec, self.spec_t, self.x_is_codes, self.x_sharding.x, self.gathered

    def _reads_only_codes(self, x_MK: Tensor) -> bool:
        spec, spec_t, sharding = self.spec, self.spec_t, self.x_sharding.x
        if spec is None or (self.needs_dw and spec_t is None):
            return False
        return sharding.fits(x_MK, spec) and (spec_t is None or sharding.t.fits(x_MK.t(), spec_t))

    # --- a call like the one that was checked ---

    def needs(self, bias: Tensor | None) -> bool:
        """Whether any gradient of a call with this bias is needed."""
        of_bias = bias is not None and bias.requires_grad and _is_grad_enabled()
        return self.needs_dx or self.needs_dw or of_bias

    def fits(self, recipe: Recipe, x: Tensor, weight: Tensor, sharding: LinearSharding) -> bool:
        """Whether a call is like the one that this plan was made for."""
        autocast, grad = self.autocast, _is_grad_enabled()
        return (
            recipe is self.recipe
            and sharding is self.given_sharding
            and (x.dtype is self.dtype or (autocast is not None and x.is_floating_point()))
            and weight.dtype is self.weight_dtype
            and type(x) is self.x_type
            and type(weight) is self.weight_type
            and (grad and x.requires_grad) is self.needs_dx
            and (grad and weight.requires_grad) is self.needs_dw
            and x.device == self.device
            and x.shape[-1:] == self.columns
            and weight.shape == self.weight_shape
            and (self.shape is None or x.shape == self.shape)
            and _is_autocast_enabled(self.device_type) is (autocast is not None)
            and (autocast is None or _autocast_dtype(self.device_type) is autocast)
            and not (_is_wrapped(x) or _is_wrapped(weight) or _is_transforming())
            and forward_ad._current_level < 0
            and not (_dispatch_modes() and is_tracing())
        )

    # --- forward ---

    def gather(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x as autograd sees it, gathered if it is a sequence shard, and what to quantize of it (M, K)."""
        if self.gathered is None:
            return x, flatten_tokens(x.detach())
        x_MK, specs = flatten_tokens(x.detach()), (self.spec, self.spec_t)
        if self.gathers_codes:
            if any([spec is not None and spec.row_scaled for spec in specs]):
                compare_token_counts(self.x_sharding.x, x_MK, *specs)  # other specs compare with their amaxes
            return gather_shape_only(x, self.gathered.sharding), x_MK
        compare_token_counts(self.x_sharding.x, x_MK, *specs)
        x = gather_tokens(x, self.gathered.sharding)
        return x, flatten_tokens(x.detach())

    def quantize_input(self, x_MK: Tensor, rng_state: Tensor | None) -> Pair:
        """Quantize x (M, K) for fprop and, if dw is needed, x^T (K, M) for wgrad, in one pass over x.

        The ops get rng_state only if they use random bits, so that a compiled graph merges equal quantizations of x.
        """
        sharding = self.x_sharding if self.gathers_codes else self.sharding
        x, x_t = quantize_left_operands(
            x_MK, self.spec, self.spec_t, rng_state if self.x_draws else None, (X_STREAM, X_T_STREAM), sharding.x,
            name="x", codes_t=True, codes=self.x_is_codes,
        )  # fmt: skip
        assert not isinstance(x_t, Decoded)
        if self.gathers_codes:
            assert isinstance(x, Codes) and self.gathered is not None
            return gather_operands(x, x_t, self.gathered)
        return x, x_t

    def quantize_weight(self, w_NK: Tensor, rng_state: Tensor | None) -> Codes | None:
        """Quantize the weight for fprop and for dgrad.

        The op always gets rng_state, even if it uses no random bits. Otherwise a compiled graph could sample rng_state
        in the backward, where layers run in reverse order and would get other random bits than in eager mode.
        """
        if self.recipe.w is None:
            return None
        return quantize_operand(w_NK, self.recipe.w, rng_state, W_STREAM, self.sharding.w, name="w")

    def forward(self, x: Tensor, w_NK: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor, Saved]:
        """Return y (..., N) = x (..., K) @ w^T + bias, which is not a view, and what :meth:`backward` reads."""
        state, w = call.rng_state, call.w
        if call.x is None:
            y, drawn, values, factor, *codes = torch.ops.nvfp4.train_linear_forward.default(
                x, w_NK, bias, state, *self.forward_arguments
            )
            if call.made is not None:
                call.made.append((Decoded(values, factor), Codes(*codes[:3])))
            # A checkpoint compares what its two runs save, of which one may find x quantized.
            return y, self.to_save(drawn if self.draws else None, x, codes[:3], w_NK, codes[3:])
        x_operand, x_t = call.x
        if w is None and self._quantizes_in_product(x_operand):
            values, factor = (x, None) if x_operand is None else x_operand[:2]
            if x_operand is not None and x.dim() != 2:
                values = values.view(*x.shape[:-1], values.shape[1])
            y, *w = torch.ops.nvfp4.train_linear.default(values, factor, w_NK, bias, state, self.packed_w, self.dtype)
            return y, self.to_save(state, x, x_t, w_NK, w)
        w = self.quantize_weight(w_NK, state) if w is None else w
        y = multiply(x_operand or flatten_tokens(x), w or w_NK, self.dtype, bias)
        if w is None and state is not None:
            y = _depend_on_rng_state(y, state)
        if x.dim() != 2:
            y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))
        return y, self.to_save(state, x, x_t, w_NK, w)

    def _quantizes_in_product(self, x: Quantized | None) -> bool:
        """Whether one op quantizes an unsharded weight and multiplies: without FP4 tensor cores, if x is not codes."""
        if self.recipe.w is None or self.recipe.w.row_scaled or self.shape is not None:
            return False
        return isinstance(x, Decoded) or (x is None and not multiplies_codes(self.device))

    def to_save(
        self,
        rng_state: Tensor | None,
        x: Tensor,
        x_t: Sequence[Tensor] | None,
        w_NK: Tensor,
        w: Sequence[Tensor] | None,
    ) -> Saved:
        """Select codes for products that read codes in the backward, and dense tensors for the others."""
        of_x = (None, None, None) if not self.needs_dw else (x, None, None) if x_t is None else x_t
        if self.keeps_codes and self.needs_dx and w is not None:
            return rng_state, *of_x, None, *w
        return rng_state, *of_x, w_NK if self.needs_dx else None, None, None, None

    # --- backward ---

    def backward(self, dy_MN: Tensor, *saved: Any) -> tuple[Tensor | None, Tensor | None]:
        """Compute dx (M, K) and dw (N, K), each if it is needed and in its dtype, from dy (M, N)."""
        if self.backward_is_one_op:
            return torch.ops.nvfp4.train_linear_backward.default(dy_MN, *saved, *self.backward_arguments)
        state, x, x_scale, x_factor, w, *codes = saved
        recipe = self.recipe
        w_or_x_is_dense = (recipe.w_for_dx == WeightForDx.DENSE and not recipe.rotates_dy_back) or recipe.x_t is None
        dy, dy_t = quantize_left_operands(
            dy_MN, recipe.dy if self.needs_dx else None, recipe.dy_t if self.needs_dw else None, state,
            (DY_STREAM, DY_T_STREAM), self.sharding.dy, name="dy", codes=w_or_x_is_dense,
        )  # fmt: skip
        dx = dw = None
        if self.needs_dx:
            of_w = Codes(*codes) if w is None else w
            if w is not None and recipe.dgrad_reads_codes:
                of_w = self.quantize_weight(w, _depend_on_dy(state, dy_MN))
            dx = self._dgrad(dy_MN if dy is None else dy, of_w, state)
        if self.needs_dw:
            x_KM = flatten_tokens(x).t() if x_scale is None else Codes(x, x_scale, x_factor)
            dw = multiply(dy_MN.t() if dy_t is None else dy_t, x_KM, self.weight_dtype)
        return dx, dw

    def _dgrad(self, dy: Left, w: Codes | Tensor, rng_state: Tensor | None) -> Tensor:
        """Compute dx (M, K) = dy (M, N) @ w (N, K); ``recipe.w_for_dx`` decides how w is read."""
        recipe, (K,), dtype = self.recipe, self.columns, self.dtype
        N = w.shape[0] if isinstance(w, Tensor) else w.qdata.shape[0]
        if isinstance(recipe.w_for_dx, QuantizeSpec):  # w^T in blocks along N
            assert isinstance(w, Tensor)
            w_KN, sharding = w.t().contiguous(), self.sharding.w.t
            w_t = quantize_operand(w_KN, recipe.w_for_dx, rng_state, W_FOR_DX_STREAM, sharding, name="w")
            return multiply(dy, w_t, dtype)
        if recipe.rotates_dy_back:
            assert not isinstance(dy, Tensor)
            dense_dtype = w.dtype if isinstance(w, Tensor) else None
            dy = rotate_back(dy, N, rng_state, dense_dtype, self.sharding.outputs.rank * N)
        if isinstance(w, Tensor):
            return multiply(dy, w.t(), dtype)
        if recipe.w_for_dx == WeightForDx.CODES and not isinstance(dy, Tensor) and reads_transposed(self.device):
            qdata, scale = torch.ops.nvfp4.transpose_codes(w.qdata, w.scale)
            return multiply(dy, Codes(qdata, scale, w.per_tensor_scale), dtype)[:, :K]
        values, factor = (dy, None) if isinstance(dy, Tensor) else decode_values(dy, N)
        return torch.ops.nvfp4.matmul.default(values, factor, *w, None, K, True, dtype)


PLAIN = Tensor, nn.Parameter
"""Classes without behavior of their own."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype if it is enabled for a device, or None."""
    return _autocast_dtype(device.type) if device.type != "meta" and _is_autocast_enabled(device.type) else None


def _dtype_of(x: Tensor, autocast: torch.dtype | None) -> torch.dtype:
    return autocast if autocast is not None and x.is_floating_point() else x.dtype


def apply_autocast(x: Tensor) -> Tensor:
    """Cast x to autocast's dtype if autocast is enabled for its device."""
    return x.to(_dtype_of(x, autocast_dtype(x.device)))


def flatten_tokens(x: Tensor) -> Tensor:
    """Return x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _is_transformed(t: Tensor) -> bool:
    """Whether a transform of torch.func is applied to t, or t has a tangent, which ops without autograd would drop."""
    return _is_wrapped(t) or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None)


def _depend_on_rng_state(y: Tensor, rng_state: Tensor) -> Tensor:
    """Make y depend on rng_state in a compiled graph.

    If only the backward read rng_state, the graph would sample it there, where layers run in reverse order (see
    :meth:`LinearPlan.quantize_weight`).
    """
    return torch.where(rng_state[0] == rng_state[0], y, y) if torch.compiler.is_compiling() else y


def _depend_on_dy(rng_state: Tensor | None, dy: Tensor) -> Tensor | None:
    """Make rng_state, or zeros if it is None, depend on dy in a compiled graph.

    This keeps the second quantization of a weight in the backward: otherwise the compiler would merge it with the
    forward's, and save its codes after all.
    """
    if not torch.compiler.is_compiling():
        return rng_state
    state = torch.zeros((2,), dtype=torch.int64, device=dy.device) if rng_state is None else rng_state
    return torch.where(dy.reshape(-1)[:1].sum() == 0, state, state)
