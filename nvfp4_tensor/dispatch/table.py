"""The table of aten operators on an NVFP4Tensor, and those that read its values by decoding it.

The other files of this room fill the table. Anything not in it raises a TypeError that names the operator.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

aten = torch.ops.aten
implements = NVFP4Tensor.implements


def unsupported(func, why: str = "", instead: str = "dequantize() first") -> TypeError:
    """The error for an operator that has no meaning on the format, or not on these arguments."""
    return TypeError(f"{func} is not supported on an NVFP4Tensor{': ' + why if why else ''}; {instead}")


def _dispatch(cls, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    implementation = cls._ATEN_OP_TABLE[cls].get(func)
    if implementation is not None:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor has to be an ordinary tensor
                return implementation(func, types, args, kwargs)
        return implementation(func, types, args, kwargs)
    if _reads_values(func):
        return func(*tree_map(dense, args), **tree_map(dense, kwargs))
    # Under inference mode composite operators arrive whole; their parts are what is registered here.
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise unsupported(func)
    return result


def install() -> None:
    """Let NVFP4Tensor ask this table."""
    NVFP4Tensor.__torch_dispatch__ = classmethod(_dispatch)  # type: ignore[method-assign, assignment]


# --- reads by decoding -----------------------------------------------------------------------------------------------

_READS = {
    aten.allclose.default, aten.isclose.default, aten.max.default, aten.min.default, aten.std.correction,
    aten.var.correction, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.dot.default,
    aten.any.default, aten.all.default, aten.amax.default, aten.amin.default, aten.aminmax.default,
    aten.argmax.default, aten.argmin.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.max.dim, aten.min.dim, aten._local_scalar_dense.default, aten.histc.default,
    aten.count_nonzero.default, aten.nansum.default, aten.isinf.default, aten.isnan.default,
}  # fmt: skip


def _reads_values(func) -> bool:
    """Functional reductions and elementwise operators: what they give is dense, so decoding changes no meaning."""
    return func in _READS or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


def dense(value):
    """An NVFP4Tensor decoded, anything else as it is."""
    return value.dequantize() if isinstance(value, NVFP4Tensor) else value


@implements(aten.equal.default)
def _equal(func, types, args, kwargs):
    a, b = args
    if a.shape != b.shape:
        return False
    return torch.equal(*(t.dequantize(torch.float32) if isinstance(t, NVFP4Tensor) else t.float() for t in (a, b)))
