"""What aten operators mean on an NVFP4Tensor: storage, copies, reads by decoding, and products.

Views and joins are in ``views.py``. Anything not registered raises a TypeError that names the operator.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map
from torchao.utils import fill_defaults

from nvfp4_tensor.format import HIGH_PRECISION_DTYPES
from nvfp4_tensor.matmul import grouped_product, linear_product, product
from nvfp4_tensor.tensor import Aliasing, NVFP4Tensor, is_transformed, quantize

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
        return func(*tree_map(_dense, args), **tree_map(_dense, kwargs))
    # Under inference mode composite operators arrive whole; their parts are what is registered here.
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise unsupported(func)
    return result


NVFP4Tensor.__torch_dispatch__ = classmethod(_dispatch)


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


def _dense(value):
    return value.dequantize() if isinstance(value, NVFP4Tensor) else value


@implements(aten.equal.default)
def _equal(func, types, args, kwargs):
    a, b = args
    if a.shape != b.shape:
        return False
    return torch.equal(*(t.dequantize(torch.float32) if isinstance(t, NVFP4Tensor) else t.float() for t in (a, b)))


@implements(aten.embedding.default)
def _embedding(func, types, args, kwargs):
    weight, indices = args[:2]
    if not isinstance(weight, NVFP4Tensor) or weight.transposed or weight.dim() != 2:
        raise unsupported(func, "the weight has to be a matrix, not transposed")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices of an embedding are int32 or int64, not {indices.dtype}")
    rows = aten.index_select.default(weight, 0, indices.flatten()).dequantize()
    return rows.view(*indices.shape, weight.shape[1])


# --- copies and casts ------------------------------------------------------------------------------------------------


@implements([aten.detach.default, aten.alias.default])
def _alias(func, types, args, kwargs):
    t = args[0]
    return return_and_correct_aliasing(func, args, kwargs, t._apply_fn_to_data(func)._marked(t.aliasing))


@implements([aten.clone.default, aten.contiguous.default])
def _clone(func, types, args, kwargs):
    return args[0]._apply_fn_to_data(lambda t: t.clone(memory_format=torch.contiguous_format))


@NVFP4Tensor.implements_torch_function(torch.Tensor.contiguous)
def _contiguous(func, types, args, kwargs):
    t = args[0]
    return t.clone() if t.aliasing == Aliasing.PART or t.transposed else t


@implements(aten._to_copy.default)
def _to_copy(func, types, args, kwargs):
    t = args[0]
    dtype = kwargs.get("dtype") or t.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        raise unsupported(func, f"it decodes to bfloat16, float16 or float32, and {dtype} was asked for")
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    moved = t._apply_fn_to_data(lambda data: data.to(device, non_blocking=non_blocking, copy=True))
    return moved._replace(orig_dtype=dtype)


@implements(aten._pin_memory.default)
def _pin_memory(func, types, args, kwargs):
    return args[0]._apply_fn_to_data(lambda data: data.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func, types, args, kwargs):
    t = args[0]
    return all(getattr(t, name).is_pinned() for name in t.tensor_data_names)


def _check_writable(func, t: NVFP4Tensor, new_scale: bool) -> None:
    if t.aliasing == Aliasing.COPY:
        raise unsupported(func, "this is a copy, its layout allowed no view, and the write would be lost (clone() it)")
    if t.aliasing == Aliasing.PART and new_scale and t.per_tensor_scale.dim() == 0:
        raise unsupported(func, "this is part of a tensor whose other parts share its per-tensor scale (clone() it)")


@implements(aten.copy_.default)
def _copy_(func, types, args, kwargs):
    """From NVFP4: the codes as they are. From a dense tensor: quantized by the spec of the destination.

    Whether activations are quantized stays the destination's choice; their amax, if they are, goes with the codes.
    """
    t, source = args[:2]
    if not isinstance(t, NVFP4Tensor):
        return t.copy_(source.dequantize(t.dtype if t.dtype in HIGH_PRECISION_DTYPES else None))
    if not isinstance(source, NVFP4Tensor):
        if t.transposed:
            source = source.expand(t.shape).mT
        stored_shape = (*t.qdata.shape[:-1], t.columns)
        source = quantize(source.expand(stored_shape).to(t.device, t.dtype), t.spec)
        source = source.mT if t.transposed else source
    elif source.spec.hadamard_sign != t.spec.hadamard_sign:
        raise unsupported(func, "the Hadamard transforms of source and destination differ")
    if source.shape != t.shape or source.transposed != t.transposed:
        raise unsupported(func, f"source {_layout(source)} and destination {_layout(t)} are stored differently")
    if source.per_tensor_scale.dim() > t.per_tensor_scale.dim() == 0 or (
        source.per_tensor_scale.dim() == 1 and t.per_tensor_scale.dim() == 2
    ):
        raise unsupported(
            func,
            "the source has more per-tensor scales (one a row, or one a matrix) than the destination",
            "load_state_dict(..., assign=True) takes it as it is, else dequantize() it first",
        )
    if source.per_tensor_scale.dim() > t.per_tensor_scale.dim():
        source = source._replace(per_tensor_scale=source.row_scale())
    _check_writable(func, t, new_scale=source.per_tensor_scale is not t.per_tensor_scale)
    for name in t.tensor_data_names:
        getattr(t, name).copy_(getattr(source, name))
    if t.activation_spec is not None and source.activation_spec is not None:
        amax = source.activation_amax  # none where the source takes each call's own: another's would clip
        t.activation_amax = None if amax is None else amax.to(t.device, copy=True)
    return t


def _layout(t: NVFP4Tensor) -> str:
    return f"{tuple(t.shape)}{' (transposed)' if t.transposed else ''}"


@implements([aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor])
def _fill_(func, types, args, kwargs):
    t = args[0]
    value = 0 if func is aten.zero_.default else args[1]
    if isinstance(value, Tensor) and t.aliasing != Aliasing.WHOLE:
        value = value.item()  # what ``t[a:b] = 0`` passes; only zero fits under any per-tensor scale
    if not isinstance(value, Tensor) and value == 0:
        _check_writable(func, t, new_scale=False)
        t.qdata.zero_()
        t.scale.view(torch.uint8).zero_()
        return t
    return t.copy_(torch.full((), value, dtype=t.dtype, device=t.device) if not isinstance(value, Tensor) else value)


# --- new tensors -----------------------------------------------------------------------------------------------------


def _new(like: NVFP4Tensor, shape, kwargs, fill) -> Tensor:
    """A tensor of that shape, NVFP4 by the spec of ``like`` unless another kind of dtype is asked for."""
    dtype = kwargs.get("dtype") or like.dtype
    device = kwargs.get("device") or like.device
    if dtype not in HIGH_PRECISION_DTYPES or len(shape) == 0:
        return torch.full(shape, fill, dtype=dtype, device=device)
    if fill == 0:
        amax = torch.zeros((), device=device)
    else:
        amax = torch.full((), abs(fill), dtype=torch.float32, device=device)
    spec = like.spec.replace(round_mode="rne", hardware_rounding=False) if like.spec.is_stochastic else like.spec
    dense = torch.full((), fill, dtype=dtype, device=device).expand(shape)
    return quantize(dense, spec, amax=None if spec.hadamard_sign is not None else amax)._replace(
        spec=like.spec, activation_spec=like.activation_spec, product_backend=like.product_backend
    )


@implements([aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default])
def _new_of_shape(func, types, args, kwargs):
    fill = args[2] if func is aten.new_full.default else 1 if func is aten.new_ones.default else 0
    return _new(args[0], args[1], kwargs, fill)


@implements([aten.zeros_like.default, aten.ones_like.default, aten.full_like.default])
def _like(func, types, args, kwargs):
    fill = args[1] if func is aten.full_like.default else 1 if func is aten.ones_like.default else 0
    t = args[0]
    shape = (*t.qdata.shape[:-1], t.columns)
    new = _new(t, shape, kwargs, fill)
    return new.mT if t.transposed else new


@implements(aten.empty_like.default)
def _empty_like(func, types, args, kwargs):
    t, dtype = args[0], kwargs.get("dtype")
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        return torch.empty(t.shape, dtype=dtype, device=kwargs.get("device") or t.device)
    new = t._apply_fn_to_data(
        lambda data: torch.empty_like(
            data,
            device=kwargs.get("device"),
            pin_memory=kwargs.get("pin_memory"),
            memory_format=torch.contiguous_format,
        )
    )
    return new._replace(orig_dtype=dtype or t.dtype)


# --- products --------------------------------------------------------------------------------------------------------


@implements([aten.mm.default, aten.bmm.default])
def _mm(func, types, args, kwargs):
    return product(*args)


@implements([aten.addmm.default, aten.baddbmm.default])
def _addmm(func, types, args, kwargs):
    bias, a, b = args
    return product(a, b, bias=_dense(bias), **kwargs)


@implements(aten._grouped_mm.default)
def _grouped_mm(func, types, args, kwargs):
    x, w, *rest = args
    offs, bias, out_dtype = fill_defaults(rest, 3, [kwargs.get("offs"), kwargs.get("bias"), kwargs.get("out_dtype")])
    if offs is None:
        return product(x, w)
    if bias is not None or out_dtype not in (None, x.dtype):
        raise unsupported(func, "a grouped product has no bias, and the dtype of its input")
    return grouped_product(x, w, offs)


@implements(aten.mv.default)
def _mv(func, types, args, kwargs):
    return product(args[0], args[1].unsqueeze(-1)).squeeze(-1)


@implements(aten.linear.default)
def _linear(func, types, args, kwargs):
    return linear(*args)


@NVFP4Tensor.implements_torch_function(torch.nn.functional.linear)
def _functional_linear(func, types, args, kwargs):
    # Past two dispatches, and __torch_function__ on each attribute of the weight: of the host's time, 23 us become 9,
    # and 31 become 15 with W4A4 (1 x 576 times 192 x 576 on a CPU).
    with torch._C.DisableTorchFunctionSubclass():
        return linear(*args, **kwargs)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input @ weight^T + bias as one product, rounded once (aten's own linear adds some biases after rounding)."""
    dims, weight_dims = input.dim(), weight.dim()
    if dims == 0 or weight_dims not in (1, 2):
        shapes = f"{tuple(input.shape)} and {tuple(weight.shape)}"
        raise RuntimeError(f"linear takes an input (..., K) and a weight (N, K) or (K,), got {shapes}")
    if weight_dims == 1:
        return linear(input, weight.unsqueeze(0), bias).squeeze(-1)
    rows = input if dims == 2 else input.unsqueeze(0) if dims == 1 else input.flatten(0, -2)
    if bias is not None and bias.dim() > 1 and dims > 2:  # it broadcasts to the result, not to its rows
        bias = bias.expand(*input.shape[:-1], weight.shape[0]).flatten(0, -2)
    if isinstance(weight, NVFP4Tensor) and _needs_only_the_product(input, weight, bias):
        y = linear_product(rows, weight, _dense(bias))
    else:
        y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return y if dims == 2 else y.view(*input.shape[:-1], weight.shape[0])


def _autocasts(x: Tensor) -> bool:
    if x.is_cpu or x.is_cuda:  # the shorter question, which leaves some devices out, MPS for one
        return torch._C._is_any_autocast_enabled()
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _needs_only_the_product(input: Tensor, weight: NVFP4Tensor, bias: Tensor | None) -> bool:
    """Whether nothing between here and the product has a say: no gradient, no trace, no transform, no autocast."""
    if torch.compiler.is_dynamo_compiling() or is_transformed() or _autocasts(input):
        return False
    bias_requires_grad = bias is not None and bias.requires_grad
    return not (torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad or bias_requires_grad))
