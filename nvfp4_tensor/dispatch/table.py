"""The table of aten operators on an NVFP4Tensor, and operators that decode it to read its values.

The other modules of this package fill the table. A writing operator that is not in the table decodes its inputs and
quantizes its outputs. Any other operator raises a RuntimeError with its name. It is not a TypeError, because torch
turns that into NotImplemented for ``t *= 2`` and ``x @ t``, and Python would lose the write or the message.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.dispatch.traces import check_write
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import requantize
from nvfp4_tensor.tensor.windows import Unreadable

aten = torch.ops.aten
implements = NVFP4Tensor.implements


class UnsupportedError(RuntimeError):
    """The operator is not supported on an NVFP4Tensor, or not with these arguments."""


def unsupported(func: Op, why: str = "", instead: str = "dequantize() first") -> UnsupportedError:
    """Return the error with the operator, the reason and the fix."""
    return UnsupportedError(f"{func} is not supported on an NVFP4Tensor{': ' + why if why else ''}; {instead}")


HARDLY_MOVES = (
    "an average that is rounded to 4 bits at each update (torch.optim.swa_utils.AveragedModel) hardly moves, since "
    "small changes round to nothing: average decoded weights, weight.dequantize(torch.float32)"
)

IN_DDP = ", or DistributedDataParallel(nvfp4_tensor.distributed.prepare_ddp(model))"
"""The fix where DistributedDataParallel flattens, joins and broadcasts parameters."""


def _dispatch(cls: type[NVFP4Tensor], func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
    kwargs = kwargs or {}
    implementation = cls._ATEN_OP_TABLE[cls].get(func)
    if func._schema.is_mutable:
        check_write(func, written_by(func, args, kwargs))
        try:
            return (implementation or _write)(func, types, args, kwargs)
        except TypeError as error:  # ``t *= 2`` would become ``t = t * 2``
            raise RuntimeError(str(error)) from error
    if implementation is not None:
        if func.is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view of an ordinary tensor must be an ordinary tensor
                return implementation(func, types, args, kwargs)
        return implementation(func, types, args, kwargs)
    if _reads_values(func):
        return func(*tree_map(dense, args), **tree_map(dense, kwargs))
    # Inference mode does not decompose composite operators; the table has their components.
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise unsupported(func)
    return result


NVFP4Tensor.__torch_dispatch__ = classmethod(_dispatch)  # type: ignore[assignment,method-assign]


# --- reads by decoding -----------------------------------------------------------------------------------------------

_READS = {
    aten.allclose.default, aten.isclose.default, aten.max.default, aten.min.default, aten.std.correction,
    aten.var.correction, aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.dot.default,
    aten.any.default, aten.all.default, aten.amax.default, aten.amin.default, aten.aminmax.default,
    aten.argmax.default, aten.argmin.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default,
    aten.mean.dim, aten.max.dim, aten.min.dim, aten._local_scalar_dense.default, aten.histc.default,
    aten.count_nonzero.default, aten.nansum.default, aten.isinf.default, aten.isnan.default,
    aten.floor_divide.default, aten.floor_divide.Scalar,
}  # fmt: skip


def _reads_values(func: Op) -> bool:
    """Return whether the operator is a functional reduction or elementwise: its result is dense, so it may decode."""
    return func in _READS or torch.Tag.pointwise in func.tags or func._schema.name.startswith("aten::_foreach_")


def dense(value: Any) -> Any:
    """Decode an NVFP4Tensor; return anything else unchanged."""
    return value.dequantize() if isinstance(value, NVFP4Tensor) else value


def contiguous_clone(data: Tensor) -> Tensor:
    """Return a copy of a plain tensor, contiguous."""
    return data.clone(memory_format=torch.contiguous_format)


@implements(aten.equal.default)
def _equal(func: Op, types: Types, args: Args, kwargs: Kwargs) -> bool:
    """Compare in the dtype of the dense operand, to which the other is decoded; in float32 if both are NVFP4."""
    a, b = args
    if a.shape != b.shape:
        return False
    dtype = next((t.dtype for t in (a, b) if not isinstance(t, NVFP4Tensor)), torch.float32)
    dtype = dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32
    a, b = (t.dequantize(dtype) if isinstance(t, NVFP4Tensor) else t for t in (a, b))
    dtype = torch.promote_types(a.dtype, b.dtype)
    return torch.equal(a.to(dtype), b.to(dtype))


# --- writes ----------------------------------------------------------------------------------------------------------


def check_writable(func: Op, t: NVFP4Tensor, new_scale: bool) -> None:
    """Raise an error if t cannot be written, or a new per-tensor scale would change other values."""
    window = t.window
    if window is None:
        return
    if isinstance(window, Unreadable):
        raise unsupported(func, window.reason)
    if window.overlaps():
        raise unsupported(func, "more than one element of this view is one element of its tensor", "clone() it")
    if window.splits:
        raise unsupported(func, f"this view ends within a block of {BLOCK}, which shares its scale", "clone() it")
    if new_scale and not window.has_own_scales():
        raise unsupported(
            func,
            "this slice shares its per-tensor scale with the rest of its tensor",
            "write an NVFP4Tensor of no smaller scale (t[3:4] = NVFP4Tensor.to_nvfp4(row[None], amax=...)), clone() "
            "it, or write to t.dequantize() and t.copy_() that",
        )


def written_by(func: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """Return the leaves of the arguments that ``func`` writes."""
    arguments = {argument.name: argument for argument in func._schema.arguments}
    given = dict(zip(arguments, args, strict=False)) | kwargs
    return tree_leaves([v for name, v in given.items() if (a := arguments[name].alias_info) is not None and a.is_write])


def _write(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Run a writing operator on decoded tensors, as if all had been dense.

    A result that belongs in an NVFP4Tensor is then quantized with that tensor's spec, in the blocks that it has.
    """
    if torch.Tag.inplace_view in func.tags or func in (aten._resize_output_.default, aten.retain_grad.default):
        raise unsupported(func, "it would change a shape or a storage in place")
    written: dict[int, tuple[NVFP4Tensor, Tensor]] = {}

    def decoded(value: Any) -> Any:
        if not isinstance(value, NVFP4Tensor):
            return value
        if id(value) not in written:
            check_writable(func, value, new_scale=True)
            if value.spec.hadamard_sign is not None:
                raise unsupported(func, "its values are Hadamard-transformed; quantizing would transform them again")
            written[id(value)] = value, value.dequantize()
        return written[id(value)][1]

    arguments = {argument.name: argument for argument in func._schema.arguments}

    def prepared(name: str, value: Any) -> Any:  # what is read has values of its own, also of a tensor that is written
        alias = arguments[name].alias_info
        return tree_map(decoded if alias is not None and alias.is_write else dense, value)

    result = func(*map(prepared, arguments, args), **{name: prepared(name, value) for name, value in kwargs.items()})
    if "lerp" in func._schema.name and not all(t.spec.is_stochastic for t, _ in written.values()):
        warn_user(HARDLY_MOVES)
    for t, values in written.values():
        if values.shape != t.shape:
            raise unsupported(func, f"its shape {tuple(t.shape)} cannot be resized to {tuple(values.shape)}")
    originals = {id(values): t.copy_(requantize(t, values, t.spec)) for t, values in written.values()}
    return tree_map(lambda value: originals.get(id(value), value), result)
