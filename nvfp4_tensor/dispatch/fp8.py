"""Torch's operators on an FP8Tensor: linears, views that share its codes, and values for everything else that reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from nvfp4_tensor._compat.exports import check_not_traced
from nvfp4_tensor.matmul import backends
from nvfp4_tensor.matmul.fp8 import scaled_mm
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.fake_quantize import is_transformed
from nvfp4_tensor.tensor.fp8 import E4M3, FP8Spec, FP8Tensor

__all__ = ["FP8Spec", "FP8Tensor"]

aten = torch.ops.aten
LARGEST = 448.0
"""The largest e4m3 number."""


@FP8Tensor.implements_torch_function(torch.nn.functional.linear)
def _functional_linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    check_not_traced()
    return linear(*args, **kwargs)


@FP8Tensor.implements_torch_function([torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__])
def _matmul(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return torch.matmul(*map(_decoded, args))  # it would expand and view the weight


@FP8Tensor.implements(aten.linear.default)
def _linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return linear(*args, **kwargs)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return input @ weight^T + bias. Gradients are those of the product without rounded activations."""
    if not isinstance(weight, FP8Tensor) or isinstance(input, FP8Tensor):
        return torch.nn.functional.linear(*map(_decoded, (input, weight, bias)))
    if is_transformed() and weight.spec.activations is None:  # by torch.func, which differentiates its operators
        return _product(input, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (input, weight, bias)):
        product: Tensor = _Linear.apply(input, weight, bias)
        return product
    return _product(input, weight, bias)


def _product(x: Tensor, w: FP8Tensor, bias: Tensor | None = None) -> Tensor:
    if w.spec.activations is None or w.transposed:
        return torch.nn.functional.linear(x, w.values(x.dtype), bias)
    codes, scale = quantize_activations(x, w)
    if backends.has_fp8_tensor_cores(x.device) and _fits_scaled_mm(codes, w):
        factors = (scale.reshape(-1, 1).contiguous().view(-1), w.scale.view(-1).expand(len(w)).contiguous())
        y = scaled_mm(codes.reshape(-1, w.shape[1]), factors[0], w.qdata, factors[1], bias, x.dtype)
        return y.view(*x.shape[:-1], len(w))
    values = (codes.float() * scale.unsqueeze(-1)).to(x.dtype).flatten(-2)[..., : x.shape[-1]]
    return torch.nn.functional.linear(values, w.values(x.dtype), bias)


def _fits_scaled_mm(codes: Tensor, w: FP8Tensor) -> bool:
    by_row = w.dim() == 2 and w.spec.block in ((0, 0), (1, 0)) and codes.shape[-2] == 1
    return by_row and w.shape[1] % 16 == 0 and codes.numel() > 0 and w.numel() > 0


def quantize_activations(x: Tensor, w: FP8Tensor) -> tuple[Tensor, Tensor]:
    """Round x (..., K) to e4m3 as ``w.spec.activations`` says.

    Returns:
        codes, e4m3 (..., blocks, columns of a block), padded with zeros; and their scales, float32 (..., blocks).
    """
    kind, columns = w.spec.activations, x.shape[-1]
    step = w.spec.block[1] if kind == FP8Activations.GROUP else columns
    values = torch.nn.functional.pad(x.float(), (0, -columns % step)).unflatten(-1, (-1, step))
    if kind != FP8Activations.TENSOR:
        scale = _scale_of(values.abs().amax(-1))
    else:
        largest = values.abs().amax() if x.numel() else w.scale.new_zeros(())
        scale = _scale_of(largest) if w.input_scale is None else w.input_scale
        scale = scale.expand(*x.shape[:-1], 1)
    return (values / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(E4M3), scale


def _scale_of(amax: Tensor) -> Tensor:
    return torch.where(amax == 0, 1.0, amax / LARGEST)


class _Linear(torch.autograd.Function):
    """x @ w^T + bias, which saves the codes instead of decoded values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: FP8Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(w, x if w.requires_grad else None)
        return _product(x, w, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        w, x = ctx.saved_tensors
        rows, needs = dy.reshape(-1, dy.shape[-1]), ctx.needs_input_grad
        dw = (rows.t() @ x.reshape(-1, x.shape[-1])).to(w.dtype) if needs[1] else None
        return dy @ w.values(dy.dtype) if needs[0] else None, dw, rows.sum(0) if needs[2] else None


class _Values(torch.autograd.Function):
    """The values of a weight that has a gradient."""

    @staticmethod
    def forward(ctx: Any, w: FP8Tensor) -> Tensor:
        return w.values()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


def _decoded(value: Any) -> Any:
    needs_grad = isinstance(value, FP8Tensor) and value.requires_grad and torch.is_grad_enabled()
    return _Values.apply(value) if needs_grad else _dense(value)


@FP8Tensor.implements([aten.t.default, aten.transpose.int, aten.permute.default])
def _transpose(func: Op, types: Types, args: Args, kwargs: Kwargs) -> FP8Tensor:
    w = args[0]
    order = list(range(w.dim()))
    if func is aten.permute.default:
        order = [dim % w.dim() for dim in args[1]]
    else:
        first, second = args[1:] or (0, 1)
        order[first], order[second] = order[second], order[first]
    if order != [*range(w.dim() - 2), w.dim() - 1, w.dim() - 2]:
        raise _unsupported(func)
    return return_and_correct_aliasing(func, args, kwargs, w.replace(transposed=not w.transposed))


@FP8Tensor.implements(aten.select.int)
def _select(func: Op, types: Types, args: Args, kwargs: Kwargs) -> FP8Tensor:
    w, dim, index = args
    if w.dim() < 3 or dim % w.dim():
        raise _unsupported(func)
    return return_and_correct_aliasing(func, args, kwargs, w.replace(qdata=w.qdata[index], scale=w.scale[index]))


@FP8Tensor.implements(aten._to_copy.default)
def _to_copy(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Copy to a device. Another dtype is what the weight decodes to; its codes stay."""
    w, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        return func(w.values(), **kwargs)
    others = {key: kwargs[key] for key in ("device", "non_blocking") if kwargs.get(key) is not None}
    moved = w._apply_fn_to_data(lambda part: func(part, **others))
    return return_and_correct_aliasing(func, args, kwargs, moved.replace(orig_dtype=dtype))


@FP8Tensor.implements(aten.copy_.default)
def _copy_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Copy codes and scales from a tensor of the same form; a tensor of another class takes the values."""
    w, source = args[:2]
    if not isinstance(w, FP8Tensor):
        return w.copy_(source.values(w.dtype if w.dtype in HIGH_PRECISION_DTYPES else None))  # type: ignore[no-any-return]
    if not isinstance(source, FP8Tensor) or _form(w) != _form(source):
        raise _unsupported(func, "which takes codes of its own form only: load_state_dict(..., assign=True), or")
    for own, new in zip(w._parts(), source._parts(), strict=True):
        own.copy_(new)
    return w


@FP8Tensor.implements(aten.empty_like.default)
def _empty_like(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Return zeros in FP8: ``to_empty`` of a module keeps the class of its weights."""
    w, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        return func(w.values(), **kwargs)
    new = w._apply_fn_to_data(lambda part: torch.zeros_like(part, device=kwargs.get("device")))
    return new.replace(orig_dtype=dtype)  # type: ignore[no-any-return]


def _operators(cls: type[FP8Tensor], func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    kwargs = kwargs or {}
    own = cls._ATEN_OP_TABLE[cls].get(func)
    if own is not None:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor must be an ordinary tensor
                return own(func, types, args, kwargs)
        return own(func, types, args, kwargs)
    if func._schema.is_mutable or func.is_view:
        result = func.decompose(*args, **kwargs)  # which inference mode has not done
        if result is NotImplemented:
            raise _unsupported(func)
        return result
    return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))


def _dense(value: Any) -> Any:
    return value.values() if isinstance(value, FP8Tensor) else value


def _form(w: FP8Tensor) -> tuple[object, ...]:
    return tuple(w.shape), w.spec, w.transposed, w.input_scale is not None


def _unsupported(func: Op, why: str = "whose codes are read-only:") -> RuntimeError:
    return RuntimeError(f"{func} is not supported on an FP8Tensor, {why} dequantize() first")


FP8Tensor.__torch_dispatch__ = classmethod(_operators)  # type: ignore[assignment,method-assign]
