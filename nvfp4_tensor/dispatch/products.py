"""Matrix products: mm, addmm, bmm, baddbmm, mv, linear and grouped products."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.utils import fill_defaults

from nvfp4_tensor._compat.exports import check_not_traced
from nvfp4_tensor.dispatch.nested import is_nested, over_nested
from nvfp4_tensor.dispatch.straight_through import autocasts, has_gradient, multiply, quantizes, recorded, transformed
from nvfp4_tensor.dispatch.table import UnsupportedError, aten, dense, implements, unsupported
from nvfp4_tensor.matmul.product import grouped_product, linear_product, product
from nvfp4_tensor.tensor.fake_quantize import is_transformed
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types


@implements([aten.mm.default, aten.bmm.default])
def _mm(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return product(*args)


@implements([aten.addmm.default, aten.baddbmm.default])
def _addmm(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    bias, a, b = args
    if not isinstance(a, NVFP4Tensor) and not isinstance(b, NVFP4Tensor):
        return func(dense(bias), a, b, **kwargs)
    return product(a, b, bias=dense(bias), **kwargs)


@implements(aten._grouped_mm.default)
def _grouped_mm(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    x, w, *rest = args
    offs, bias, out_dtype = fill_defaults(rest, 3, [kwargs.get("offs"), kwargs.get("bias"), kwargs.get("out_dtype")])
    if offs is None:
        return product(x, w)
    if bias is not None or out_dtype not in (None, x.dtype):
        raise unsupported(func, "a grouped product supports no bias, and out_dtype must be the dtype of its input")
    return grouped_product(x, w, offs)


@implements(aten.mv.default)
def _mv(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return product(args[0], args[1].unsqueeze(-1)).squeeze(-1)


@implements(aten.linear.default)
def _linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return linear(*args)


@NVFP4Tensor.implements_torch_function(torch.nn.functional.linear)
def _functional_linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    check_not_traced()
    # Skips two dispatches, and __torch_function__ for each attribute of the weight: CPU time falls from 23 us to 9,
    # and with W4A4 from 31 to 15 (1 x 576 times 192 x 576 on a CPU).
    with torch._C.DisableTorchFunctionSubclass():
        if is_transformed():
            return transformed(linear, args, kwargs)
        return linear(*args, **kwargs)


@NVFP4Tensor.implements_torch_function([
    torch.mm, torch.bmm, torch.matmul, Tensor.mm, Tensor.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
    torch.mv, torch.addmm, torch.baddbmm, Tensor.mv, Tensor.addmm, Tensor.baddbmm,
    torch._grouped_mm, torch.nn.functional.grouped_mm,
])  # fmt: skip
def _product(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if is_transformed():
            return transformed(func, args, kwargs)
        if has_gradient(*args, *kwargs.values()):
            return recorded(func, args, kwargs)
        return func(*args, **kwargs)


@NVFP4Tensor.implements_torch_function([
    torch.t, torch.transpose, Tensor.t, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
])  # fmt: skip
def _transpose(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if not is_transformed():
            return func(*args, **kwargs)
        with torch._C._DisableFuncTorch():  # which would wrap it, so that a product would not come to _product
            return func(*args, **kwargs)


@NVFP4Tensor.implements_torch_function(torch.functional.einsum)
def _einsum(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    try:
        return _product(func, types, args, kwargs)
    except UnsupportedError as error:
        raise unsupported("torch.einsum", repr(args[0]), "use x @ w.mT, or dequantize() first") from error


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute input @ weight^T + bias, rounded once (aten's linear adds some biases after rounding)."""
    if is_nested(input):
        return over_nested(lambda rows: linear(rows, weight, bias), input)
    dims, weight_dims = input.dim(), weight.dim()
    if dims == 0 or weight_dims not in (1, 2):
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(f"linear needs an input (..., K) and a weight (N, K) or (K,), got {shapes}")
    if weight_dims == 1:
        return linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    rows = input if dims == 2 else input.unsqueeze(0) if dims == 1 else input.flatten(0, -2)
    if bias is not None and bias.dim() > 1 and dims > 2:  # it broadcasts to the result before flattening
        bias = bias.expand(*input.shape[:-1], weight.shape[0]).flatten(0, -2)
    if isinstance(weight, NVFP4Tensor) and _is_plain_inference(input, weight, bias):
        y = linear_product(rows, weight, dense(bias))
    elif quantizes(weight) and has_gradient(rows, weight, bias):
        y = multiply(rows, weight.t(), bias)
    else:
        y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return y if dims == 2 else y.view(*input.shape[:-1], weight.shape[0])


def _is_plain_inference(input: Tensor, weight: NVFP4Tensor, bias: Tensor | None) -> bool:
    """Return whether there is no gradient, trace, torch.func transform or autocast, so dispatch can be skipped."""
    if torch.compiler.is_dynamo_compiling() or is_transformed() or autocasts(input):
        return False
    bias_requires_grad = bias is not None and bias.requires_grad
    return not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad or bias_requires_grad))
