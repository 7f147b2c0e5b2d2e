"""Derivatives of products that quantize their dense operand (W4A4, FP8): those of the product that does not.

Torch's own formulas multiply tangents, and gradients of gradients, by the same tensor, which would quantize them like
activations, or clip them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.hadamard import inverse_hadamard
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.tensor.description import Args, Kwargs
from nvfp4_tensor.tensor.fake_quantize import with_derivative_of
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_GROUPED = (torch._grouped_mm, torch.nn.functional.grouped_mm)


def quantizes(w: Any) -> bool:
    """Return whether products of w quantize their dense operand."""
    return isinstance(w, NVFP4Tensor) and (w.activation_spec is not None or w.product_backend == ProductBackend.FP8)


def transformed(product: Callable[..., Tensor], args: Args, kwargs: Kwargs) -> Tensor:
    """Return a product with the derivatives of the dense one, which it computes too; under any transform."""
    if not any(map(quantizes, (*args, *kwargs.values()))):
        return product(*args, **kwargs)
    values = product(*tree_map(_constant, args), **tree_map(_constant, kwargs))
    return with_derivative_of(values, product(*tree_map(_multiplied, args), **tree_map(_multiplied, kwargs)))


@torch.compiler.assume_constant_result  # Dynamo of torch 2.11 cannot trace it
def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


def autocasts(x: Tensor) -> bool:
    if (x.is_cpu or x.is_cuda) and not torch.compiler.is_dynamo_compiling():  # faster
        return torch._C._is_any_autocast_enabled()
    device = x.device.type
    return _has_autocast(device) and torch.is_autocast_enabled(device)


def has_gradient(*tensors: Any) -> bool:
    """Return whether eager mode records these tensors. A compiled graph has no gradients of gradients."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any([isinstance(t, Tensor) and t.requires_grad for t in tensors])


def recorded(product: Callable[..., Tensor], args: Args, kwargs: Kwargs) -> Tensor:
    """Return a product that autograd records, by :func:`multiply` if that has its form, else as :func:`transformed`."""
    if not any(map(quantizes, (*args, *kwargs.values()))):
        return product(*args, **kwargs)
    y: Tensor | None = None
    if product in _GROUPED:
        given = {name: value for name, value in kwargs.items() if value is not None}
        if len(args) == 2 and given.keys() == {"offs"} and quantizes(args[1]):
            y = _Product.apply(*args, None, given["offs"])
    elif not kwargs and product is not Tensor.__rmatmul__ and all([isinstance(each, Tensor) for each in args]):
        y = _multiplied_as(*args)
    return transformed(product, args, kwargs) if y is None else y


def _multiplied_as(*args: Tensor) -> Tensor | None:
    """Return the product of the last two, plus the first of three, or None if that is no product of matrices."""
    *bias, a, b = args
    if isinstance(a, NVFP4Tensor) == isinstance(b, NVFP4Tensor):
        return None
    if bias:
        return multiply(a, b, *bias) if quantizes(b) and a.dim() == b.dim() == 2 else None
    if quantizes(a):
        return multiply(b.mT, a.mT).mT.contiguous() if a.dim() == b.dim() == 2 else None
    if b.dim() == 2 and a.dim() > 1:
        return multiply(a.flatten(0, -2), b).view(*a.shape[:-1], b.shape[1])
    return multiply(a, b) if b.dim() == a.dim() == 3 and len(a) == len(b) else None


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a (..., M, K) @ b (..., K, N) + bias, for matrices or equal batches, b in NVFP4, by which a is rounded."""
    if autocasts(a) and torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = a.to(dtype), b.to(dtype)
    y: Tensor = _Product.apply(a, b, bias, None)
    return y


class _Product(torch.autograd.Function):
    """A product by b as torch computes it, with derivatives of all orders that round nothing.

    With ``offs`` it is a grouped product, of rows a by experts b.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: NVFP4Tensor, bias: Tensor | None, offs: Tensor | None) -> Tensor:
        needs_a, needs_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None, offs)
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        if bias is not None:
            return torch.addmm(bias, a, b)
        return _matmul(a, b, offs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (a, b, offs), needs = ctx.saved_tensors, ctx.needs_input_grad
        da = db = dbias = None
        if needs[0]:  # only a sum along the blocks of b rounds
            da = _Product.apply(dy, b.mT, None, offs) if b.transposed else _matmul(dy, _multiplied(b.mT), offs)
        if needs[1]:
            db = _matmul(a.mT, dy, offs)
        if needs[2]:
            shape, dtype = ctx.bias
            dbias = dy.sum_to_size(shape).to(dtype)
        return da, db, dbias, None


def _matmul(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    return a @ b if offs is None else torch._grouped_mm(a, b, offs=offs)


def _constant(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _multiplied(w: Any) -> Any:
    """Return the dense matrix by which w multiplies dense operands; any other value as it is."""
    if not quantizes(w):
        return w
    sign = w.spec.hadamard_sign
    if sign is None:
        return w.dequantize()
    decoded = w._decode(torch.float32, w.row_scale(), ceil_to(w.columns, BLOCK))
    dense = inverse_hadamard(decoded, sign)[..., : w.columns].to(w.dtype)
    dense = dense.mT if w.transposed else dense
    return with_derivative_of(dense, w.dequantize()) if has_gradient(w) else dense
