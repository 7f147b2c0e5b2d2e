"""Matrix products: mm, addmm, bmm, baddbmm, mv and grouped products; linears are in ``linears.py``."""

from __future__ import annotations

import torch
from torch import Tensor
from torchao.utils import fill_defaults

from nvfp4_tensor.dispatch.straight_through import has_gradient, recorded, transformed
from nvfp4_tensor.dispatch.table import UnsupportedError, aten, dense, implements, unsupported
from nvfp4_tensor.matmul.product import grouped_product, product
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.fake_quantize import is_transformed
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


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
