"""Methods of torch.Tensor that access the storage. An NVFP4Tensor or FP8Tensor has one storage per inner tensor.

These methods do not reach ``__torch_dispatch__``: torch would dereference a null pointer, or silently do nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.utils.dlpack
from torch import Tensor

from nvfp4_tensor._compat.frames import caller_frame_locals
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, view_of


def _implements(*functions: Any) -> Callable[[Callable], Callable]:
    """Register an implementation of torch functions on both tensors."""

    def register(implementation: Callable) -> Callable:
        for cls in (NVFP4Tensor, FP8Tensor):
            cls.implements_torch_function(functions)(implementation)
        return implementation

    return register


@_implements(Tensor.share_memory_)
def _share_memory_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    for part in args[0]._parts():
        part.share_memory_()
    return args[0]


@_implements(Tensor.is_shared)
def _is_shared(func: Op, types: Types, args: Args, kwargs: Kwargs) -> bool:
    return all(part.is_shared() for part in args[0]._parts())


@_implements(Tensor.data_ptr)
def _data_ptr(func: Op, types: Types, args: Args, kwargs: Kwargs) -> int:
    """Return the address of the codes, because accelerate and others tell tensors apart by it.

    Return 0 when dcp.async_save stages tensors: it then copies the inner tensors instead of a missing storage.
    """
    if caller_frame_locals("_offload_tensor", "_state_dict_stager.py") is not None:
        return 0
    return args[0].qdata.data_ptr()


@_implements(Tensor.data.__set__)  # type: ignore[attr-defined]  # a property of C
def _set_data(func: Op, types: Types, args: Args, kwargs: Kwargs) -> None:
    """Replace the fields of t by those of another tensor of its class, of any shape, dtype and device."""
    t, new = args
    if type(new) is not type(t):
        name, into = type(t).__name__, "use t.copy_(x) to quantize x into t, or " * isinstance(t, NVFP4Tensor)
        raise RuntimeError(
            f"t.data = x of an {name} needs an {name}, got {type(new).__name__}: {into}"
            "module.weight = torch.nn.Parameter(x) to replace t"
        )
    with torch._C.DisableTorchFunctionSubclass():
        func(t, new)  # shape, strides, dtype and device
    kept = {name: value for name, value in t.__dict__.items() if name == "_is_param"}
    t.__dict__.clear()
    t.__dict__.update(new.__dict__ | kept)


@NVFP4Tensor.implements_torch_function(Tensor.__deepcopy__)
def _deepcopy(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Copy a view's whole tensor, once for all views in ``memo``; as a parameter, only what it shows."""
    t, memo = args
    with torch._C.DisableTorchFunctionSubclass():
        if id(t) in memo or not t.is_leaf:
            return func(t, memo)
        grad = t.grad
        if t.window is None:  # an alias without the gradient, which torch does not copy if it has a graph
            alias = t.detach().requires_grad_(t.requires_grad)
            alias.__dict__.update(t.__dict__)
            copied = func(alias, memo)
            del memo[id(alias)]
        elif getattr(t, "_is_param", False):
            copied = torch.nn.Parameter(t.detach().clone(), t.requires_grad)
        else:
            stored = copy.deepcopy(t._stored(), memo)
            copied = view_of(stored, t._geometry(), t.transposed, t.__dict__).requires_grad_(t.requires_grad)
        copied.grad = None if grad is None else grad.detach().clone()
        memo[id(t)] = copied
        return copied


@_implements(Tensor.tolist)
def _tolist(func: Op, types: Types, args: Args, kwargs: Kwargs) -> list:
    return args[0].dequantize().tolist()


@_implements(torch.dequantize)
def _dequantize(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return args[0].dequantize()


OFFLOAD = "accelerate's disk_offload cannot store an NVFP4Tensor: use cpu_offload"


@_implements(Tensor.apply_, Tensor.map_, Tensor.map2_, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
def _raise_no_storage(func: Op, types: Types, args: Args, kwargs: Kwargs) -> NoReturn:
    name, into = func.__name__, ", or t.copy_(x) to quantize x into t" * (NVFP4Tensor in types)
    raise RuntimeError(
        f"Tensor.{name} needs one storage of plain elements, which an {types[0].__name__} does not have: "
        f"use t.dequantize().{name}(...) for a dense copy{into}" + (f". {OFFLOAD}" if name == "numpy" else "")
    )


_to_dlpack: Any = torch.utils.dlpack.to_dlpack


@functools.wraps(_to_dlpack)
def _checked_to_dlpack(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if isinstance(tensor, NVFP4Tensor | FP8Tensor):  # torch asks no subclass, and would read a null pointer
        _raise_no_storage(Tensor.__dlpack__, (type(tensor),), (), {})
    return _to_dlpack(tensor, *args, **kwargs)


torch.to_dlpack = torch.utils.dlpack.to_dlpack = _checked_to_dlpack  # type: ignore[assignment]
