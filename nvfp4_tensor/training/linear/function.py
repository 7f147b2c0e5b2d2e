"""Forward and backward of one linear that trains in NVFP4: three products, each operand quantized by a recipe.

    y_MN  = x_MK    @ w_NK^T   fprop
    dx_MK = dy_MN   @ w_NK     dgrad
    dw_NK = dy_MN^T @ x_MK     wgrad

The steps of one call, in order, of :func:`linear` or of a module:

1. :func:`input_operands` quantizes x for fprop and x^T for wgrad, outside of autograd.
2. :func:`multiply_operands` quantizes w and computes y in the autograd function :class:`_Products`, which saves codes
   for the backward.
3. In the backward, :func:`gradients` quantizes dy for dgrad and dy^T for wgrad and computes dx and dw.

``fused.py`` does each step by one op if the recipe, the device and the sharding allow it. Otherwise, steps 2 and 3 call
an op for each operand and each product. The bits are the same.

Autograd and torch.compile see plain tensors. ``operands.py`` calls the kernels that quantize, on one rank or several;
``matmul/product.py`` calls those that multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nvfp4_tensor.matmul.backends import multiplies_codes, reads_transposed
from nvfp4_tensor.matmul.product import Left, decode_values, multiply, multiply_across_blocks
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
from nvfp4_tensor.tensor.fake_quantize import fake_quantize
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear import fused
from nvfp4_tensor.training.linear.cache import is_tracing
from nvfp4_tensor.training.linear.fused import raise_on_double_backward
from nvfp4_tensor.training.linear.operands import (
    Quantized,
    quantize_left_operands,
    quantize_operand,
    rotate_back,
    transpose,
)
from nvfp4_tensor.training.recipe import Recipe, WeightForDx, any_stochastic, resolve


class Needs(NamedTuple):
    """Which gradients the backward has to compute."""

    dx: bool
    dw: bool
    db: bool


class Operands(NamedTuple):
    """The quantized operands of a forward; None if the recipe leaves an operand dense, or no product reads it.

    w is None too if the product quantizes it: see :func:`quantizes_in_product`.
    """

    x: Quantized | None
    x_t: Codes | None
    w: Codes | None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: Recipe | str = "nvidia",
    *,
    rng_state: Tensor | None = None,
) -> Tensor:
    """``x @ weight^T + bias``, with the three products of training quantized by a recipe.

    Args:
        x: (..., K).
        weight: (N, K), in the dtype of x (under autocast, bfloat16, float16 or float32); its gradient has its dtype.
        bias: (N,), or None.
        recipe: a :class:`Recipe`, or the name of one.
        rng_state: int64 (seed, offset) on the device of x, the source of the random bits. By default, torch's generator
            provides one if the recipe uses random bits.

    Returns:
        (..., N) in the dtype of x, or of autocast if it is enabled.

    Raises:
        ValueError: if the recipe is unknown or the shapes do not fit.
        TypeError: if the dtypes differ or NVFP4 does not support them.

    >>> w = torch.randn(32, 64, requires_grad=True)
    >>> linear(torch.randn(8, 64), w).sum().backward()
    """
    recipe = resolve(recipe)
    x = apply_autocast(x)
    check_operands(x, weight, "linear")
    needs = needed_gradients(x, weight, bias)
    rng_state = call_rng_state(recipe, any_requires_grad(x, weight, bias), x, rng_state)
    x_operand, x_t = input_operands(InputShard(flatten_tokens(x.detach()), UNSHARDED_LINEAR), recipe, needs, rng_state)
    w = None if quantizes_in_product(recipe, x_operand, x) else weight_operand(weight, recipe, rng_state)
    return multiply_operands(x, weight, bias, recipe, Operands(x_operand, x_t, w), needs, rng_state)


def ste(w: Tensor, spec: QuantizeSpec | None = None, *, rng_state: Tensor | None = None) -> Tensor:
    """Round w (..., K) to values that NVFP4 can represent, with a straight-through gradient.

    Use it for trainable parameters that are not the weight of a linear. It is :func:`nvfp4_tensor.fake_quantize` under
    the name that quantization-aware training uses. The result has the dtype of w: bfloat16, float16 or float32.

    Args:
        w: any shape except 0-d.
        spec: how w is quantized. By default, to nearest even in 1x16 blocks.
        rng_state: int64 (seed, offset) for a stochastic spec. By default, it is sampled from torch's generator.

    Raises:
        TypeError, ValueError: see :func:`nvfp4_tensor.quantize`.

    >>> w = torch.randn(32, 64, requires_grad=True)
    >>> ste(w).square().sum().backward()
    """
    return fake_quantize(w, spec, rng_state=rng_state)


# --- arguments -------------------------------------------------------------------------------------------------------


def apply_autocast(x: Tensor) -> Tensor:
    """Cast x to autocast's dtype if autocast is enabled for its device."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if x.is_floating_point() and _autocasts(x.device) else x


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def check_operands(x: Tensor, weight: Tensor, name: object) -> None:
    """Raise the errors that :func:`linear` documents, in the name of a function or module."""
    dtype = x.dtype
    if dtype not in HIGH_PRECISION_DTYPES or weight.dtype not in HIGH_PRECISION_DTYPES:
        kind, dtype = ("a weight", weight.dtype) if dtype in HIGH_PRECISION_DTYPES else ("an input", dtype)
        raise TypeError(f"{name} takes bfloat16, float16 or float32, not {kind} of {dtype}: cast it first")
    if not torch.compiler.is_compiling() and (_is_transformed(x) or _is_transformed(weight)):
        raise RuntimeError(
            f"{name} does not support transforms of torch.func (vmap, grad, jvp, ...): call it with plain tensors, or "
            'use set_recipe(model, forward="bf16", backward="bf16")'
        )
    if x.dim() == 0 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"{name} takes an input (..., {weight.shape[-1]}), got {tuple(x.shape)}")
    if dtype != weight.dtype and not _autocasts(x.device):
        raise TypeError(
            f"the input of {name} is {dtype} and its weight {weight.dtype}: cast one of them, or use torch.autocast"
        )


def _is_transformed(t: Tensor) -> bool:
    """Whether a transform of torch.func is applied to t, or t has a tangent, which ops without autograd would drop."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
    return wrapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None)


def needed_gradients(x: Tensor, weight: Tensor, bias: Tensor | None) -> Needs:
    """Return which gradients the backward has to compute: none under no_grad."""
    grad = torch.is_grad_enabled()
    db = bias is not None and bias.requires_grad
    return Needs(grad and x.requires_grad, grad and weight.requires_grad, grad and db)


def any_requires_grad(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call has to sample the random bits of a backward, even under no_grad.

    The first run of a reentrant checkpoint is under no_grad and has to advance the generator as its second run does:
    otherwise a dropout after it would have different masks in the two runs.
    """
    return any(t is not None and t.requires_grad for t in (x, weight, bias))


def flatten_tokens(x: Tensor) -> Tensor:
    """Return x (..., K) as (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def call_rng_state(recipe: Recipe, backward: bool, like: Tensor, given: Tensor | None = None) -> Tensor | None:
    """Return the (seed, offset) of one call: the given one, or one from torch's generator; None if nothing uses it.

    The forward passes it to its backward, so that a forward recomputed by a checkpoint has the same random bits.
    """
    if not (recipe.is_stochastic_forward or (backward and recipe.is_stochastic_backward)):
        return None
    if given is not None:
        return given.clone()  # its owner counts steps in place
    if is_tracing():  # each call passes a new tensor: no compiler pass merges two ops with different arguments
        like = torch.empty((2,), dtype=torch.int64, device=like.device)
    return torch.ops.nvfp4.draw_rng_state.default(like.detach())


# --- quantize --------------------------------------------------------------------------------------------------------


class InputShard(NamedTuple):
    """The dense input that a call quantizes, detached, and its sharding."""

    x_MK: Tensor
    sharding: LinearSharding = UNSHARDED_LINEAR
    gathered: GatheredShape | None = None
    """If x is a sequence shard, the shape that its codes are gathered to."""


def prepare_input(x: Tensor, recipe: Recipe, needs: Needs, sharding: LinearSharding) -> tuple[Tensor, InputShard]:
    """Return x as autograd and dense products see it, and the shard of it to quantize, which is detached.

    A sequence shard is gathered as codes if the recipe's products read only codes of x, and dense otherwise.
    """
    if sharding is UNSHARDED_LINEAR:
        return x, InputShard(flatten_tokens(x.detach()), sharding)  # torch 2.11 does not compile the default
    sequence = sharding.sequence_of(x)
    if sequence is not None:
        local, x_MK = sharding.for_input(x.shape[:-1], local=True), flatten_tokens(x.detach())
        specs = _input_specs(recipe, needs)
        if _is_read_as_codes(x_MK, local, needs, *specs):
            return gather_shape_only(x, sequence), InputShard(x_MK, local, GatheredShape.of(x, sequence))
        compare_token_counts(local.x, x_MK, *specs)
        x = gather_tokens(x, sequence)
    return x, InputShard(flatten_tokens(x.detach()), sharding.for_input(x.shape[:-1]))


def _input_specs(recipe: Recipe, needs: Needs) -> tuple[QuantizeSpec | None, QuantizeSpec | None]:
    """Return the specs of x and of x^T; that of x^T is None if no gradient of w is needed."""
    return recipe.x, recipe.x_t if needs.dw else None


def _is_read_as_codes(
    x_MK: Tensor, sharding: LinearSharding, needs: Needs, spec: QuantizeSpec | None, spec_t: QuantizeSpec | None
) -> bool:
    if spec is None or (needs.dw and spec_t is None):
        return False
    return sharding.x.fits(x_MK, spec) and (spec_t is None or sharding.x.t.fits(x_MK.t(), spec_t))


def input_operands(
    shard: InputShard, recipe: Recipe, needs: Needs, rng_state: Tensor | None
) -> tuple[Quantized | None, Codes | None]:
    """Quantize x (M, K) for fprop and, if dw is needed, x^T (K, M) for wgrad, in one pass over x.

    The ops get rng_state only if they use random bits, so that a compiled graph merges equal quantizations of one x.
    """
    x_MK, sharding, gathered = shard
    spec, spec_t = _input_specs(recipe, needs)
    rng_state = rng_state if recipe.is_stochastic_forward and any_stochastic(spec, spec_t) else None
    if needs.dw and sharding is UNSHARDED_LINEAR and fused.quantizes_input(recipe, x_MK.device):
        return fused.quantize_input(x_MK, recipe, rng_state)
    if gathered is not None and any([each is not None and each.row_scaled for each in (spec, spec_t)]):
        compare_token_counts(sharding.x, x_MK, spec, spec_t)  # other specs compare with their amaxes
    x_operand, x_t = quantize_left_operands(
        x_MK, spec, spec_t, rng_state, (X_STREAM, X_T_STREAM), sharding.x, name="x", codes_t=True,
        codes=recipe.w is None or gathered is not None,
    )  # fmt: skip
    assert not isinstance(x_t, Decoded)
    if gathered is not None:
        assert isinstance(x_operand, Codes)
        return gather_operands(x_operand, x_t, gathered)
    return x_operand, x_t


def weight_operand(
    w_NK: Tensor, recipe: Recipe, rng_state: Tensor | None, sharding: LinearSharding = UNSHARDED_LINEAR
) -> Codes | None:
    """Quantize the weight for fprop and for dgrad.

    The op always gets rng_state, even if it uses no random bits. Otherwise a compiled graph could sample rng_state in
    the backward, where layers run in reverse order and would get other random bits than in eager mode.
    """
    if recipe.w is None:
        return None
    return quantize_operand(w_NK.detach(), recipe.w, rng_state, W_STREAM, sharding.w, name="w")


def quantizes_in_product(recipe: Recipe, x_operand: Quantized | None, x: Tensor) -> bool:
    """Whether one op quantizes an unsharded weight and multiplies: without FP4 tensor cores, and if x is not codes."""
    if recipe.w is None or recipe.w.row_scaled:
        return False
    return isinstance(x_operand, Decoded) or (x_operand is None and not multiplies_codes(x.device))


# --- multiply --------------------------------------------------------------------------------------------------------


def multiply_operands(
    x: Tensor,
    w_NK: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    operands: Operands,
    needs: Needs,
    rng_state: Tensor | None,
    sharding: LinearSharding = UNSHARDED_LINEAR,
) -> Tensor:
    """Compute y (..., N) = x (..., K) @ w^T + bias in the dtype of x, with the recipe's backward."""
    if needs.dx and needs.dw and sharding is UNSHARDED_LINEAR and fused.fits(recipe, operands.x, operands.x_t):
        x_operand, x_t, w = operands
        assert isinstance(x_operand, Decoded) and x_t is not None
        return fused.multiply_operands(x, w_NK, bias, recipe, x_operand, x_t, w, rng_state, needs.db)
    x_MK = flatten_tokens(x)
    if any(needs):
        flattened = [t for operand in operands for t in _flatten(operand)]
        y_MN = _Products.apply(x_MK, w_NK, bias, recipe, needs, rng_state, sharding, *flattened)
    else:
        y_MN, _ = quantize_and_multiply(x_MK, w_NK, bias, recipe, operands, rng_state)
    return y_MN if x.dim() == 2 else y_MN.view(*x.shape[:-1], w_NK.shape[0])


def fprop(x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, operands: Operands) -> Tensor:
    """Compute y (M, N) = x @ w^T + bias from the quantized operands, or from the dense x or w if there is none."""
    return multiply(operands.x or x_MK, operands.w or w_NK, x_MK.dtype, bias)


def quantize_and_multiply(
    x_MK: Tensor, w_NK: Tensor, bias: Tensor | None, recipe: Recipe, operands: Operands, rng_state: Tensor | None
) -> tuple[Tensor, Operands]:
    """Run :func:`fprop`; quantize the weight if it is to be, and return it among the operands.

    The op always gets rng_state, as in :func:`weight_operand`.
    """
    if operands.w is not None or recipe.w is None:
        return fprop(x_MK, w_NK, bias, operands), operands
    assert not isinstance(operands.x, Codes)  # quantizes_in_product
    x, factor = (x_MK, None) if operands.x is None else operands.x
    y_MN, *w = torch.ops.nvfp4.train_linear.default(x, factor, w_NK, bias, rng_state, recipe.packed.w, x_MK.dtype)
    return y_MN, Operands(operands.x, operands.x_t, Codes(*w))


class _Products(torch.autograd.Function):
    """fprop, whose derivatives are the recipe's dgrad and wgrad.

    torch.func's transforms are not supported: they need ``setup_context``, which torch.compile rejects (2.13).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        needs: Needs,
        rng_state: Tensor | None,
        sharding: LinearSharding,
        *flattened: Tensor | None,
    ) -> Tensor:
        x_t, w = _unflatten(flattened[3:6]), _unflatten(flattened[6:])
        assert not isinstance(x_t, Decoded) and not isinstance(w, Decoded)
        operands = Operands(_unflatten(flattened[:3]), x_t, w)
        y_MN, operands = quantize_and_multiply(x_MK, w_NK, bias, recipe, operands, rng_state)
        saved = tensors_to_save(x_MK, w_NK, recipe, operands, needs)
        ctx.save_for_backward(rng_state, saved.x, saved.weight, *_flatten(saved.x_t), *_flatten(saved.w))
        ctx.recipe, ctx.needs, ctx.sharding = recipe, needs, sharding
        ctx.shape, ctx.dtypes = w_NK.shape, (x_MK.dtype, w_NK.dtype, None if bias is None else bias.dtype)
        return y_MN if operands.w is not None or rng_state is None else _depend_on_rng_state(y_MN, rng_state)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        raise_on_double_backward()
        rng_state, x, weight, *flattened = ctx.saved_tensors
        x_t, w = _unflatten(flattened[:3]), _unflatten(flattened[3:])
        assert not isinstance(x_t, Decoded) and not isinstance(w, Decoded)
        saved = Saved(x, weight, x_t, w)
        dx, dw = gradients(dy_MN, saved, ctx.recipe, ctx.needs, rng_state, ctx.shape, ctx.dtypes[:2], ctx.sharding)
        db = dy_MN.sum(0, dtype=ctx.dtypes[2]) if ctx.needs.db else None
        return dx, dw, db, None, None, None, None, *[None] * 9


def _depend_on_rng_state(y: Tensor, rng_state: Tensor) -> Tensor:
    """Make y depend on rng_state in a compiled graph.

    If only the backward read rng_state, the graph would sample it there, where layers run in reverse order (see
    :func:`weight_operand`).
    """
    return torch.where(rng_state[0] == rng_state[0], y, y) if torch.compiler.is_compiling() else y


class Saved(NamedTuple):
    """The tensors of the forward that the backward reads; None for those that it does not read."""

    x: Tensor | None
    weight: Tensor | None
    x_t: Codes | None
    w: Codes | None


def tensors_to_save(x_MK: Tensor, w_NK: Tensor, recipe: Recipe, operands: Operands, needs: Needs) -> Saved:
    """Select codes for products that read codes in the backward, and dense tensors for the others."""
    quantizes_again = operands.w is not None and not recipe.keep_w and not isinstance(w_NK, NVFP4Tensor)
    saves_dense_w = needs.dx and (quantizes_again or not recipe.dgrad_reads_codes)
    return Saved(
        x=x_MK if needs.dw and operands.x_t is None else None,
        weight=w_NK if saves_dense_w else None,
        x_t=operands.x_t,
        w=operands.w if needs.dx and not saves_dense_w else None,
    )


def _flatten(operand: Quantized | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if operand is None:
        return None, None, None
    return (operand.values, None, operand.per_tensor_scale) if isinstance(operand, Decoded) else operand


def _unflatten(tensors: Sequence[Tensor | None]) -> Quantized | None:
    data, scale, per_tensor_scale = tensors
    if data is None or per_tensor_scale is None:
        return None
    return Decoded(data, per_tensor_scale) if scale is None else Codes(data, scale, per_tensor_scale)


# --- backward --------------------------------------------------------------------------------------------------------


def gradients(
    dy_MN: Tensor,
    saved: Saved,
    recipe: Recipe,
    needs: Needs,
    rng_state: Tensor | None,
    shape: torch.Size,
    dtypes: tuple[torch.dtype, torch.dtype],
    sharding: LinearSharding = UNSHARDED_LINEAR,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dx (M, K) and dw (N, K), each in its dtype, from dy (M, N); ``shape`` is (N, K)."""
    spec, spec_t = recipe.dy if needs.dx else None, recipe.dy_t if needs.dw else None
    w_or_x_is_dense = (recipe.w_for_dx == WeightForDx.DENSE and not recipe.rotates_dy_back) or recipe.x_t is None
    dy, dy_t = quantize_left_operands(
        dy_MN, spec, spec_t, rng_state, (DY_STREAM, DY_T_STREAM), sharding.dy, name="dy", codes=w_or_x_is_dense
    )
    dx = dw = None
    if needs.dx:
        w = _weight_for_dx(saved, recipe, rng_state, sharding, dy_MN)
        dx = _dgrad(dy_MN if dy is None else dy, w, recipe, rng_state, sharding, shape, dtypes[0])
    if needs.dw:
        x_KM = saved.x.t() if saved.x is not None else saved.x_t
        assert x_KM is not None
        dw = multiply(dy_MN.t() if dy_t is None else dy_t, x_KM, dtypes[1])
    return dx, dw


def _weight_for_dx(
    saved: Saved, recipe: Recipe, rng_state: Tensor | None, sharding: LinearSharding, dy_MN: Tensor
) -> Codes | Tensor:
    """Return the weight for dgrad: the saved codes, the dense weight, or the dense weight quantized again."""
    if saved.weight is None:
        assert saved.w is not None
        return saved.w
    if not recipe.dgrad_reads_codes:
        return saved.weight
    w = weight_operand(saved.weight, recipe, _depend_on_dy(rng_state, dy_MN), sharding)
    assert w is not None
    return w


def _depend_on_dy(rng_state: Tensor | None, dy: Tensor) -> Tensor | None:
    """Make rng_state, or zeros if it is None, depend on dy in a compiled graph.

    This keeps the second quantization of a weight in the backward: otherwise the compiler would merge it with the
    forward's, and save its codes after all.
    """
    if not torch.compiler.is_compiling():
        return rng_state
    state = torch.zeros((2,), dtype=torch.int64, device=dy.device) if rng_state is None else rng_state
    return torch.where(dy.reshape(-1)[:1].sum() == 0, state, state)


def _dgrad(
    dy: Left,
    w: Codes | Tensor,
    recipe: Recipe,
    rng_state: Tensor | None,
    sharding: LinearSharding,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Compute dx (M, K) = dy (M, N) @ w (N, K); ``recipe.w_for_dx`` decides how w is read, and ``shape`` is (N, K)."""
    N, K = shape
    if isinstance(recipe.w_for_dx, QuantizeSpec):  # w^T in blocks along N
        assert isinstance(w, Tensor)
        w_KN = w.t().contiguous()
        w_t = quantize_operand(w_KN, recipe.w_for_dx, rng_state, W_FOR_DX_STREAM, sharding.w.t, name="w")
        return multiply(dy, w_t, dtype)
    if recipe.rotates_dy_back:
        assert not isinstance(dy, Tensor)
        dy = rotate_back(dy, N, rng_state, w.dtype if isinstance(w, Tensor) else None, sharding.outputs.rank * N)
    if isinstance(w, Tensor):
        return multiply(dy, w.t(), dtype)
    if recipe.w_for_dx == WeightForDx.CODES and not isinstance(dy, Tensor) and reads_transposed(w.qdata.device):
        return multiply(dy, transpose(w), dtype)[:, :K]
    values, scale = (dy, None) if isinstance(dy, Tensor) else decode_values(dy, N)
    return multiply_across_blocks(values, scale, w, K, dtype)
