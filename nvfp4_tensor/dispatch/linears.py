"""A linear with an NVFP4 weight, as its module calls it: the product of ``products.py`` with less time on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvfp4_tensor.dispatch.traces import reads_parts
from nvfp4_tensor.matmul import backends
from nvfp4_tensor.matmul.product import linear_product
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.tensor.fake_quantize import is_transformed
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_matmul = torch.ops.nvfp4.matmul.default
_tracing_state = torch._C._get_tracing_state
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_torch_function_mode_enabled = torch._C._is_torch_function_mode_enabled


def linear_of_module(module: nn.Linear, input: Tensor) -> Tensor:
    """Compute ``torch.nn.functional.linear(input, module.weight, module.bias)`` for a weight of any class.

    In inference, torch.compile gets the parts of an NVFP4 weight as inputs (see :mod:`nvfp4_tensor.dispatch.traces`),
    and eager mode calls the op at once.
    """
    if torch.compiler.is_dynamo_compiling():
        return _traced_linear(input, module.weight, module.bias)
    parameters = module._parameters  # module.weight takes 0.6 us
    w = parameters.get("weight")  # None if it is parametrized, pruned or sharded
    if type(w) is NVFP4Tensor and "bias" in parameters and _is_inference(input, w, bias := parameters["bias"]):
        if _keeps_activations(input, w):
            qdata, scale = w.qdata.contiguous(), w.scale.contiguous()
            return _matmul(input, None, qdata, scale, w.per_tensor_scale, bias, w.columns, False, input.dtype)
        with torch._C.DisableTorchFunctionSubclass():
            return _linear_by_product(input, w, bias)
    return torch.nn.functional.linear(input, module.weight, module.bias)


def _keeps_activations(x: Tensor, w: NVFP4Tensor) -> bool:
    """Return whether the product of x (..., K) and w rounds only the result."""
    if w.activation_spec is not None:
        return False
    return w.product_backend != ProductBackend.FP8 or x.shape[:-1].numel() < backends.FP8_ROWS


# --- eager mode ------------------------------------------------------------------------------------------------------


def _is_inference(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> bool:
    """Return whether this is a product of a plain dense x (..., K) and a matrix w (N, K), and nothing else.

    This reads only fields of w, because attributes of torch call ``__torch_function__``, 2 us each.
    """
    if w.window is not None:
        return False
    qdata = w.qdata
    return (
        type(x) is Tensor
        and type(qdata) is Tensor
        and not torch.is_grad_enabled()
        and _tracing_state() is None
        and not w.transposed
        and qdata.dim() == 2
        and not x.is_nested
        and x.dim() > 1
        and x.shape[-1] == w.columns
        and x.dtype is w.orig_dtype
        and x.device == qdata.device
        and (x.is_cuda or x.is_cpu)
        and (bias is None or _is_plain_bias(bias, x))
        and not _is_any_autocast_enabled()
        and not _is_torch_function_mode_enabled()
        and not is_transformed()
        and not backends.PRINTS_PLANS
    )


def _is_plain_bias(bias: Tensor, x: Tensor) -> bool:
    plain = type(bias) in (Tensor, nn.Parameter) and bias.dim() == 1
    return plain and bias.dtype is x.dtype and bias.device == x.device


# --- torch.compile ---------------------------------------------------------------------------------------------------


def _traced_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(weight, NVFP4Tensor) and _traces_inference(input, weight, bias) and reads_parts(weight):
        return _linear_of_parts(input, weight, bias)
    return torch.nn.functional.linear(input, weight, bias)


def _traces_inference(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> bool:
    """Return whether Dynamo traces a product of plain tensors without a gradient, autocast or torch.func transform."""
    if not isinstance(w, nn.Parameter) or type(x) is not Tensor or x.is_nested:
        return False
    if x.dim() < 2 or x.shape[-1] != w.shape[-1] or x.dtype != w.dtype or x.device != w.device:
        return False
    if bias is not None and (bias.dim() != 1 or bias.dtype != x.dtype or bias.device != x.device):
        return False
    if is_transformed() or torch.is_autocast_enabled(x.device.type):
        return False
    bias_requires_grad = bias is not None and bias.requires_grad
    return not (torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or bias_requires_grad))


def _linear_of_parts(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> Tensor:
    if _keeps_activations(x, w):  # each field that is read adds a guard
        return _matmul(x, None, w.qdata, w.scale, w.per_tensor_scale, bias, x.shape[-1], False, x.dtype)
    return _linear_by_product(x, w, bias)


def _linear_by_product(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> Tensor:
    y = linear_product(x.flatten(0, -2), w, bias)
    return y.view(*x.shape[:-1], y.shape[1])
