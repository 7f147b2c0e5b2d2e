"""Copies, casts, writes and creation of NVFP4Tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torchao.utils import fill_defaults

from nvfp4_tensor._compat.frames import caller_frame_locals, warn_user
from nvfp4_tensor.dispatch.table import HARDLY_MOVES, aten, check_writable, contiguous_clone, implements, unsupported
from nvfp4_tensor.dispatch.writes import write_codes, write_zeros
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.description import Args, Kwargs, Op, Types
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize
from nvfp4_tensor.tensor.tiles import quantized_like

_CODE_OF_ONE = 2

# --- copies and casts ------------------------------------------------------------------------------------------------


@implements([aten.detach.default, aten.alias.default])
def _alias(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    # The same parts, so that a write counts as one to both; a trace records what happens to the parts.
    plain = t.window is not None or type(t.qdata) is Tensor
    alias = t._replace() if plain else t._apply_fn_to_data(func)
    return return_and_correct_aliasing(func, args, kwargs, alias)


@implements(aten.clone.default)
def _clone(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    if kwargs.get("memory_format") == torch.contiguous_format:
        return args[0]._apply_fn_to_data(contiguous_clone)
    return _copied(args[0], contiguous_clone)


def _copied(t: NVFP4Tensor, function: Callable[[Tensor], Tensor]) -> NVFP4Tensor:
    """Return t with ``function``, which copies, applied to its parts; dimensions keep the order of their strides."""
    order = sorted(range(t.dim()), key=lambda dim: -t.stride(dim)) if t.window is not None and t.dim() > 2 else []
    if order in ([], sorted(order)) or 0 in t.stride():
        return t._apply_fn_to_data(function)
    copied = aten.permute.default(t, order)._apply_fn_to_data(function)
    return aten.permute.default(copied, [order.index(dim) for dim in range(t.dim())])


@implements(aten.contiguous.default)
def _contiguous(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Return t, or a copy of what is no complete range of rows; the copy of a transposed tensor is transposed."""
    return args[0] if args[0].is_contiguous() else args[0].clone(memory_format=torch.contiguous_format)


@NVFP4Tensor.implements_torch_function(torch.Tensor.contiguous)
def _method_contiguous(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # torchao's implementation copies no views
        return func(*args, **kwargs)


@implements(aten._to_copy.default)
def _to_copy(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    dtype = kwargs.get("dtype") or t.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        raise unsupported(func, f"it decodes to bfloat16, float16 or float32, not to {dtype}")
    device, non_blocking = kwargs.get("device"), kwargs.get("non_blocking", False)
    moved = _copied(t, lambda data: data.to(device, non_blocking=non_blocking, copy=True))
    return moved._replace(orig_dtype=dtype)


@implements([aten._to_dense.default, aten.dequantize.self])
def _to_dense(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t, dtype = fill_defaults(args[:2], 2, [None])
    return t._dense(t.orig_dtype if dtype is None else dtype)


@implements(aten._pin_memory.default)
def _pin_memory(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    return _copied(args[0], lambda data: data.pin_memory())


@implements(aten.record_stream.default)
def _record_stream(func: Op, types: Types, args: Args, kwargs: Kwargs) -> None:
    t, stream = args
    for part in t._parts():
        part.record_stream(stream)


@implements(aten.is_pinned.default)
def _is_pinned(func: Op, types: Types, args: Args, kwargs: Kwargs) -> bool:
    return all(part.is_pinned() for part in args[0]._stored()[:3])


@implements(aten.copy_.default)
def _copy_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Copy the codes of an NVFP4Tensor, or quantize a dense tensor with the spec of the destination.

    The destination keeps its activation_spec; if both have one, the activation_amax is copied too. That of a slice is
    its whole tensor's, which becomes the larger of both.
    """
    t, source = args[:2]
    if isinstance(source, FP8Tensor):
        return t.copy_(source.values(t.dtype))
    is_dense = not isinstance(source, NVFP4Tensor)
    if not isinstance(t, NVFP4Tensor):
        if isinstance(t, torch.nn.Parameter):
            warn_user(
                f"NVFP4 weights are decoded to {t.dtype}, because those of the model are dense: to keep them in NVFP4, "
                "pass assign=True to load_state_dict, or quantize the model in the same way first",
            )
        return t.copy_(source.dequantize(t.dtype if t.dtype in HIGH_PRECISION_DTYPES else None))
    if is_dense:
        check_writable(func, t, new_scale=True)
        # AveragedModel computes averages of a CPU in dense tensors, which it copies.
        if not t.spec.is_stochastic and caller_frame_locals("update_parameters", "swa_utils.py") is not None:
            warn_user(HARDLY_MOVES)
        source = quantized_like(t, source.expand(t.shape).to(t.device, t.dtype), t.spec)
    elif source.spec.hadamard_sign != t.spec.hadamard_sign:
        raise unsupported(func, "source and destination have different Hadamard transforms")
    if source.shape != t.shape or source.transposed != t.transposed:
        raise unsupported(func, f"source {_layout(source)} and destination {_layout(t)} have different layouts")
    old, new = t.activation_amax, source.activation_amax
    copies_amax = t.activation_spec is not None and source.activation_spec is not None
    if copies_amax and t.window is not None and old is not None and new is None:
        raise unsupported(
            func,
            "the source computes its activation amax in each call, and the tensor of this slice has a fixed one",
            "copy_ the full tensor, or set activation_amax = None on that first",
        )
    write_codes(func, t, source)
    if copies_amax and old is not None and new is not None:  # in place, so that aliases and whole tensors have it too
        new = new.to(old.device)
        old.copy_(new if t.window is None else old.maximum(new))
    elif copies_amax and t.window is None:  # None if the source computes it in each call: a fixed one could clip
        t.activation_amax = None if new is None else new.to(t.device, copy=True)
    return t


def _layout(t: NVFP4Tensor) -> str:
    return f"{tuple(t.shape)}{' (transposed)' if t.transposed else ''}"


@implements([aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor])
def _fill_(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    t = args[0]
    value = 0 if func is aten.zero_.default else args[1]
    if isinstance(value, Tensor) and t.window is not None:
        value = value.item()  # ``t[a:b] = 0`` passes a tensor; only zero fits any per-tensor scale
    if not isinstance(value, Tensor) and value == 0:
        check_writable(func, t, new_scale=False)
        write_zeros(t)
        return t
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=t.dtype, device=t.device)
    check_writable(func, t, new_scale=True)
    constant = _constant(t.spec, (*t.qdata.shape[:-1], t.columns), value.to(t.device, t.dtype))
    return t.copy_(constant.mT if t.transposed else constant)


# --- new tensors -----------------------------------------------------------------------------------------------------


def _constant(spec: QuantizeSpec, shape: Sequence[int], value: Tensor) -> NVFP4Tensor:
    """Return a tensor filled with a 0-d ``value``, exactly: codes and block scales are 1, the per-tensor scale |value|.

    NaN and infinity fill it with NaN, as they fill their blocks in ``quantize``. With a Hadamard transform the values
    are quantized like any others.
    """
    if spec.hadamard_sign is not None:
        rounded = spec.replace(round_mode="rne", hardware_rounding=False) if spec.is_stochastic else spec
        return quantize(value.expand(shape), rounded)._replace(spec=spec)
    *leading, columns = shape
    is_zero = value == 0
    code = torch.where(is_zero, 0, _CODE_OF_ONE).to(torch.uint8) | value.signbit().to(torch.uint8) << 3
    codes = torch.nn.functional.pad(code.expand(shape), (0, ceil_to(columns, BLOCK) - columns))
    scale = value.new_ones((math.prod(leading), codes.shape[-1] // BLOCK), dtype=torch.float32)
    return NVFP4Tensor._of_parts(
        qdata=layout.pack(codes),
        scale=layout.swizzle(scale.to(torch.float8_e4m3fn)),
        per_tensor_scale=torch.where(is_zero, 1, torch.where(value.isfinite(), value.abs(), torch.nan)).float(),
        columns=columns,
        orig_dtype=value.dtype,
        spec=spec,
    )


def _new(like: NVFP4Tensor, shape: Sequence[int], kwargs: Kwargs, fill: float) -> Tensor:
    """Return a filled tensor, in NVFP4 with the spec of ``like`` unless another kind of dtype is requested."""
    dtype = kwargs.get("dtype") or like.dtype
    device = kwargs.get("device") or like.device
    if dtype not in HIGH_PRECISION_DTYPES or len(shape) == 0:
        return torch.full(shape, fill, dtype=dtype, device=device)
    new, amax = _constant(like.spec, shape, torch.full((), fill, dtype=dtype, device=device)), like.activation_amax
    return new._replace(
        per_tensor_scale=_scales_like(like, new),
        activation_spec=like.activation_spec,
        activation_amax=None if amax is None else amax.to(device, copy=True),
        product_backend=like.product_backend,
    )


def _scales_like(like: NVFP4Tensor, new: NVFP4Tensor) -> Tensor:
    """Return the per-tensor scales of ``new``, one per matrix or per row if ``like`` has them."""
    scale = new.per_tensor_scale
    if like.per_tensor_scale.dim() == 1 or (like.per_tensor_scale.dim() == 2 and new.dim() != 3):
        return scale.repeat(math.prod(new.qdata.shape[:-1]))
    return scale.repeat(new.shape[0], 1) if like.per_tensor_scale.dim() == 2 else scale


@implements([aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default])
def _new_of_shape(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    fill = args[2] if func is aten.new_full.default else 1 if func is aten.new_ones.default else 0
    return _new(args[0], args[1], kwargs, fill)


@implements([aten.zeros_like.default, aten.ones_like.default, aten.full_like.default])
def _like(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Return a dense tensor, because optimizers store their state in ``zeros_like(parameter)``.

    ``empty_like`` and ``new_zeros``, with which modules and FSDP2 allocate parameters, return NVFP4.
    """
    fill = args[1] if func is aten.full_like.default else 1 if func is aten.ones_like.default else 0
    t = args[0]
    given = {name: value for name, value in kwargs.items() if value is not None and name != "memory_format"}
    return torch.full(t.shape, fill, **{"dtype": t.dtype, "device": t.device, **given})


@implements(aten.empty_like.default)
def _empty_like(func: Op, types: Types, args: Args, kwargs: Kwargs) -> Tensor:
    """Return zeros, so that a checkpoint can be loaded slice by slice with any per-tensor scale.

    Uninitialized memory could contain codes of earlier tensors, whose per-tensor scale slices would have to keep.
    """
    t, dtype = args[0], kwargs.get("dtype")
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        return torch.empty(t.shape, dtype=dtype, device=kwargs.get("device") or t.device)
    new = t._apply_fn_to_data(
        lambda data: torch.zeros_like(
            data,
            device=kwargs.get("device"),
            pin_memory=kwargs.get("pin_memory"),
            memory_format=torch.contiguous_format,
        )
    )
    new.per_tensor_scale.fill_(1)
    return new._replace(orig_dtype=dtype or t.dtype)
