"""Linears: torch.nn.functional.linear, and what a module calls, with less time on the host."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.exports import check_not_traced
from nvfp4_tensor.dispatch.straight_through import autocasts, has_gradient, multiply, quantizes, transformed
from nvfp4_tensor.dispatch.table import aten, implements
from nvfp4_tensor.dispatch.traces import reads_parts
from nvfp4_tensor.matmul import backends
from nvfp4_tensor.matmul.product import linear_product
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.fake_quantize import is_transformed
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_matmul = torch.ops.nvfp4.matmul.default
_tracing_state = torch._C._get_tracing_state
_is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled


def linear_of_module(module: nn.Linear, input: Tensor) -> Tensor:
    """Compute ``torch.nn.functional.linear(input, module.weight, module.bias)`` for a weight of any class.

    In inference, torch.compile gets the parts of an NVFP4 weight as inputs (see :mod:`nvfp4_tensor.dispatch.traces`),
    and eager mode calls the op at once.
    """
    if torch.compiler.is_dynamo_compiling():
        weight: Tensor = module.weight
        is_plain = type(input) is Tensor and isinstance(module.weight, nn.Parameter)
        if (
            is_plain
            and isinstance(weight, NVFP4Tensor)
            and _is_inference(input, weight, module.bias)
            and reads_parts(weight)
        ):
            return _inference(input, weight, module.bias)
        return torch.nn.functional.linear(input, weight, module.bias)
    parameters = module._parameters  # module.weight takes 0.6 us
    w = parameters.get("weight")  # None if it is parametrized, pruned or sharded
    if type(w) is NVFP4Tensor and type(input) is Tensor and "bias" in parameters and not torch.is_grad_enabled():
        bias, is_hooked = parameters["bias"], _tracing_state() is not None or _is_torch_function_mode_enabled()
        if not is_hooked and _is_inference(input, w, bias):
            return _inference(input, w, bias)
    return torch.nn.functional.linear(input, module.weight, module.bias)


@NVFP4Tensor.implements_torch_function(torch.nn.functional.linear)
def _functional_linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    check_not_traced()
    # Skips two dispatches, and __torch_function__ for each attribute of the weight: CPU time falls from 23 us to 9,
    # and with W4A4 from 31 to 15 (1 x 576 times 192 x 576 on a CPU).
    with torch._C.DisableTorchFunctionSubclass():
        if is_transformed():
            return transformed(linear, args, kwargs)
        return linear(*args, **kwargs)


@implements(aten.linear.default)
def _linear(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return linear(*args)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute input @ weight^T + bias, rounded once (aten's linear adds some biases after rounding)."""
    is_eager = not torch.compiler.is_dynamo_compiling()
    if isinstance(weight, NVFP4Tensor) and is_eager and _is_inference(input, weight, bias):
        return _inference(input, weight, bias)
    if is_nested(input):
        return over_nested(lambda rows: linear(rows, weight, bias), input)
    dims, weight_dims = input.dim(), weight.dim()
    if dims == 0 or weight_dims not in (1, 2):
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(f"linear needs an input (..., K) and a weight (N, K) or (K,), got {shapes}")
    if weight_dims == 1:
        return linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    if dims == 1:
        return linear(input.unsqueeze(0), weight, bias).squeeze(0)
    rows = input if dims == 2 else input.flatten(0, -2)
    if bias is not None and bias.dim() > 1 and dims > 2:  # it broadcasts to the result before flattening
        bias = bias.expand(*input.shape[:-1], weight.shape[0]).flatten(0, -2)
    if quantizes(weight) and has_gradient(rows, weight, bias):
        y = multiply(rows, weight.t(), bias)
    else:
        y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return y if dims == 2 else y.view(*input.shape[:-1], weight.shape[0])


# --- inference -------------------------------------------------------------------------------------------------------


def _is_inference(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> bool:
    """Return whether this is a product of a dense x (..., K) and a matrix w (N, K), and nothing else.

    It reads fields of w where there are some, because its attributes call ``__torch_function__``, 2 us each.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad) or w.requires_grad):
        return False
    if type(x) is NVFP4Tensor or x.is_nested or x.dim() < 2 or w.transposed or w.window is not None:
        return False
    if x.shape[-1] != w.columns or x.dtype is not w.orig_dtype or not (x.is_cpu or x.is_cuda):
        return False
    is_plain = bias is None or (type(bias) is not NVFP4Tensor and bias.dim() == 1 and bias.dtype is x.dtype)
    if not is_plain or is_transformed() or autocasts(x):
        return False
    return w.qdata.dim() == 2 and w.qdata.device == x.device and (bias is None or bias.device == x.device)


def _inference(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> Tensor:
    if _keeps_activations(x, w) and not backends.PRINTS_PLANS:
        qdata, scale = w.qdata.contiguous(), w.scale.contiguous()
        return _matmul(x, None, qdata, scale, w.per_tensor_scale, bias, x.shape[-1], False, x.dtype)
    with torch._C.DisableTorchFunctionSubclass():
        y = linear_product(x.flatten(0, -2), w, bias)
    return y.view(*x.shape[:-1], y.shape[1])


def _keeps_activations(x: Tensor, w: NVFP4Tensor) -> bool:
    """Return whether the product of x (..., K) and w rounds only the result."""
    if w.activation_spec is not None:
        return False
    return w.product_backend != ProductBackend.FP8 or math.prod(x.shape[:-1]) < backends.FP8_ROWS


# --- strided nested tensors, which nn.TransformerEncoder creates from a padded batch; they have no sizes -------------


def is_nested(x: Tensor) -> bool:
    """Return whether x is a strided nested tensor; jagged ones are a separate class."""
    return x.is_nested and x.layout == torch.strided


def over_nested(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear over (tokens, features) to all rows of a nested tensor (batch, tokens, features)."""
    sequences = x.unbind()
    y = linear(torch.cat(sequences))
    return torch.nested.as_nested_tensor(list(y.split([len(rows) for rows in sequences])), layout=torch.strided)
