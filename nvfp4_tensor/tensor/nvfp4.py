"""NVFP4Tensor: a tensor stored in NVFP4, and the functions that create one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
from torch import Tensor

from nvfp4_tensor._compat.pickles import _rebuild, pin
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import ProductBackend, RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.tensor.arguments import checked_spec, resolve_arguments, resolve_rng_state, stored_spec
from nvfp4_tensor.tensor.checks import check_fields
from nvfp4_tensor.tensor.description import NOT_IN_SAFETENSORS, Args, CodedTensor, Kwargs, Op, Types
from nvfp4_tensor.tensor.windows import OFFSET, STORED, Geometry, OfWindow, Stored, Unreadable, Window, find_window


@pin
class NVFP4Tensor(CodedTensor):
    """A tensor of at least one dimension stored in NVFP4, 4.5 bits per element. Its dtype is ``orig_dtype``.

    Create one with :meth:`to_nvfp4` or :func:`quantize`. Value = code x block scale x per-tensor scale.

    An operator that writes (``t *= 2``, ``out=t``, ``torch.nn.init``) computes on the decoded values, and its result is
    quantized with ``spec``, as in :meth:`copy_` from a dense tensor. If t is a view and shares its per-tensor scale
    with elements outside of it, it raises a RuntimeError and changes nothing.

    A view has the strides of a view of a dense tensor, and reads and writes the codes of its tensor. If it is not all
    of that tensor, ``scale`` and ``per_tensor_scale`` are gathered at each access (see :mod:`.windows`).

    Attributes:
        qdata: uint8 (*leading, columns rounded up to 16, halved), two codes per byte, the even element in the low bits.
        scale: float8_e4m3fn (row tiles, column tiles, 32, 16), swizzled as cuBLASLt requires; rows are the flattened
            leading dimensions. :meth:`unswizzled_scale` returns the plain matrix.
        per_tensor_scale: float32, 0-d; or (E, 1), one per matrix of (E, N, K); or one per row, if rows of tensors with
            different scales were joined. :meth:`row_scale` returns the last form instead of the second.
        columns: size of the stored last dimension, without padding.
        orig_dtype: bfloat16, float16 or float32; the default dtype of :meth:`dequantize`.
        spec: how values that are written are quantized. The codes may have come from a tensor with another spec.
        activation_spec: how a product quantizes its dense operand (W4A4), or None to keep that operand dense.
        activation_amax: the calibrated amax of that operand, float32 0-d, or None to compute it in each call.
        transposed: whether the logical tensor is the stored one with its last two dimensions swapped.
        product_backend: the backend of products with quantized operands; FP8 if activation_spec is None, and products
            round many rows of their dense operand to e4m3.
    """

    tensor_data_names: ClassVar[list[str]] = ["qdata", "scale", "per_tensor_scale"]
    optional_tensor_data_names: ClassVar[list[str]] = ["activation_amax"]
    tensor_attribute_names: ClassVar[list[str]] = [
        "columns", "orig_dtype", "spec", "activation_spec", "transposed", "product_backend",
    ]  # fmt: skip

    qdata: Tensor = OfWindow()  # type: ignore[assignment]
    scale: Tensor = OfWindow()  # type: ignore[assignment]
    per_tensor_scale: Tensor = OfWindow()  # type: ignore[assignment]
    stored_qdata, stored_scale, stored_per_tensor_scale, stored_offset = (OfWindow() for _ in range(4))
    columns: int
    orig_dtype: torch.dtype
    spec: QuantizeSpec
    activation_spec: QuantizeSpec | None
    activation_amax: Tensor | None
    transposed: bool
    product_backend: ProductBackend
    window: Window | Unreadable | None = None
    """The region of another tensor's codes that this view shows; None for a tensor that has codes, or shares all."""

    def __new__(
        cls,
        qdata: Tensor,
        scale: Tensor | None = None,
        per_tensor_scale: Tensor | None = None,
        columns: int | None = None,
        orig_dtype: torch.dtype | None = None,
        spec: QuantizeSpec | None = None,
        activation_spec: QuantizeSpec | None = None,
        transposed: bool = False,
        product_backend: ProductBackend = ProductBackend.AUTO,
        activation_amax: Tensor | None = None,
        *,
        requires_grad: bool = False,
    ) -> NVFP4Tensor:
        if isinstance(qdata, NVFP4Tensor):  # accelerate creates a parameter by calling the class of another one
            return torch.nn.Parameter(qdata, requires_grad)  # type: ignore[return-value]  # still an NVFP4Tensor
        fields: dict[str, Any] = {
            "qdata": qdata,
            "scale": scale,
            "per_tensor_scale": per_tensor_scale,
            "columns": columns,
            "orig_dtype": orig_dtype,
            "spec": spec,
            "activation_spec": activation_spec,
            "transposed": transposed,
            "product_backend": product_backend,
            "activation_amax": activation_amax,
        }
        check_fields(fields)
        fields.update({name: fields[name].contiguous() for name in cls.tensor_data_names})  # views count their bytes
        return cls._of_parts(**fields).requires_grad_(requires_grad)

    @classmethod
    def _of_parts(
        cls,
        qdata: Tensor,
        scale: Tensor,
        per_tensor_scale: Tensor,
        columns: int,
        orig_dtype: torch.dtype,
        spec: QuantizeSpec,
        activation_spec: QuantizeSpec | None = None,
        transposed: bool = False,
        product_backend: ProductBackend = ProductBackend.AUTO,
        activation_amax: Tensor | None = None,
    ) -> NVFP4Tensor:
        """Create a tensor from fields that are known to be valid, without checks."""
        shape = [*qdata.shape[:-1], columns]
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
        if transposed:
            shape[-2:] = shape[:-3:-1]
            strides[-2:] = strides[:-3:-1]
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            dtype=orig_dtype,
            device=qdata.device,
            requires_grad=False,
            storage_size=_bytes_of(qdata, scale, per_tensor_scale),
        )
        self.qdata = qdata
        self.scale = scale
        self.per_tensor_scale = per_tensor_scale
        self.columns = columns
        self.orig_dtype = orig_dtype
        self.spec = spec
        self.activation_spec = activation_spec
        self.activation_amax = activation_amax
        self.transposed = transposed
        self.product_backend = product_backend
        return self

    @classmethod
    def _of_window(
        cls, window: Window | Unreadable, geometry: Geometry, transposed: bool, attributes: dict[str, Any]
    ) -> NVFP4Tensor:
        """Create the view that shows a window of stored codes with dense sizes, strides and offset."""
        size, stride, offset = geometry
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=attributes["orig_dtype"],
            device=window.stored.qdata.device,
            requires_grad=False,
            storage_size=_bytes_of(*window.stored[:3]),
        )
        self.window = window
        self.columns = window.columns
        self.transposed = transposed
        for name in _OF_VIEWS:
            setattr(self, name, attributes[name])
        if type(window.stored.qdata) is not Tensor:  # in a trace, where it needs the modes of this call
            self.__dict__[OFFSET] = attributes.get(OFFSET, window.stored.qdata.new_empty((offset, 0)))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Raise a RuntimeError; importing :mod:`nvfp4_tensor.dispatch` replaces this method."""
        raise RuntimeError(f"{func} needs the operators of NVFP4Tensor: import nvfp4_tensor.dispatch first")

    @classmethod
    def to_nvfp4(
        cls,
        x: Tensor,
        *,
        round_mode: RoundingMode | str | None = None,
        spec: QuantizeSpec | None = None,
        amax: Tensor | float | None = None,
        rng_state: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> NVFP4Tensor:
        """Quantize x, a bfloat16, float16 or float32 tensor of at least one dimension, contiguous or not.

        Args:
            round_mode: a RoundingMode or its name; replaces the mode of ``spec``. Default: round to nearest even.
            spec, amax, rng_state, generator: see :func:`quantize`.
        """
        spec = checked_spec(spec)
        if round_mode is not None:
            spec = spec.replace(round_mode=round_mode)
        return quantize(x, spec, amax=amax, rng_state=rng_state, generator=generator)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the values as a dense tensor of ``dtype`` (``orig_dtype`` by default), rounded once.

        A Hadamard-transformed tensor returns the transformed values. The gradient of the values is that of the tensor.
        torch.func hides the class of what it differentiates: there, ``w.to_dense()`` decodes w.

        Raises:
            TypeError: dtype is not bfloat16, float16 or float32.
        """
        dtype = self.orig_dtype if dtype is None else dtype
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}: cast the result instead")
        if torch.is_grad_enabled() and self.requires_grad:
            return torch.ops.aten._to_dense.default(self, dtype)  # calls _dense
        return self._dense(dtype)

    def _dense(self, dtype: torch.dtype) -> Tensor:
        values = self._decode(dtype, self.row_scale())
        return values.transpose(-2, -1) if self.transposed else values

    def _decode(self, dtype: torch.dtype, per_tensor_scale: Tensor | None, columns: int | None = None) -> Tensor:
        """Decode the stored tensor, not transposed; without per_tensor_scale the result is exact in bfloat16."""
        columns = self.columns if columns is None else columns
        return torch.ops.nvfp4.dequantize(
            self.qdata.contiguous(), self.scale.contiguous(), per_tensor_scale, columns, dtype
        )

    def row_scale(self) -> Tensor:
        """Return the per-tensor scale as the ops require it: float32 0-d, or (rows,) if there is more than one."""
        if self.per_tensor_scale.dim() < 2:
            return self.per_tensor_scale
        return self.per_tensor_scale.expand(self.qdata.shape[:-1]).reshape(-1)

    def unswizzled_scale(self) -> Tensor:
        """Return the block scales in the order of the stored tensor: e4m3 (*leading, columns / 16, rounded up)."""
        if isinstance(self.window, Window):
            return self.window.unswizzled_scale()
        *leading, half = self.qdata.shape
        scale = layout.unswizzle(self.scale, math.prod(leading), half * 2 // BLOCK)
        return scale.view(*leading, half * 2 // BLOCK)

    def _replace(self, **changes: Any) -> NVFP4Tensor:
        """Return a tensor with some fields changed, which shares the others."""
        if self.window is not None and changes.keys() <= _OF_VIEWS:
            return self._of_window(self.window, self._geometry(), self.transposed, {**self.__dict__, **changes})
        return _from_valid_fields(**self._fields(without=changes), **changes)

    def _geometry(self) -> Geometry:
        return self.size(), self.stride(), self.storage_offset()

    def _stored(self) -> Stored:
        """Return the codes that this tensor and its views share."""
        if self.window is not None:
            return self.window.stored
        assert self.qdata.is_contiguous()
        return Stored(self.qdata, self.scale, self.per_tensor_scale, self.columns)

    def _parts(self) -> list[Tensor]:
        """Return the plain tensors that hold the data of this tensor, of a view those of its whole tensor."""
        amax = self.activation_amax
        return [*self._stored()[:3], *([] if amax is None else [amax])]

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> NVFP4Tensor:
        data = {name: fn(getattr(self, name)) for name in self.tensor_data_names}
        amax = self.activation_amax
        return self._replace(**data, activation_amax=None if amax is None else fn(amax))

    def describe(self) -> str:
        """Return a description of the spec, the activation's spec (W4A4) and the bits per element."""
        static = ", static" if self.activation_amax is not None else ""
        backend = f", by {self.product_backend.name.lower()}" if self.product_backend != ProductBackend.AUTO else ""
        activation = "" if self.activation_spec is None else f", activation ({self.activation_spec}{static}{backend})"
        if self.product_backend == ProductBackend.FP8:
            activation = ", activation (fp8)"
        return f"{self.spec}{activation}, {self._bits()} bits/element"

    def _bits(self) -> str:
        if not isinstance(self.numel(), int) or isinstance(self.window, Unreadable):
            return "?"
        return f"{self.bits_per_element:.2f}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        activation = "" if self.activation_spec is None else f", activation_spec=({self.activation_spec})"
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"spec=({self.spec}){', transposed' if self.transposed else ''}{activation}"
            f", {self._bits()} bits/element{', requires_grad=True' if self.requires_grad else ''})"
        )

    @property
    def optional_tensor_attribute_names(self) -> NoReturn:
        """Raise a TypeError: torchao's safetensors writer reads it and mistakes this class for its own of that name."""
        raise TypeError(NOT_IN_SAFETENSORS)

    fsdp_pre_all_gather = fsdp_transport.pre_all_gather
    fsdp_post_all_gather = fsdp_transport.post_all_gather

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable, tuple]:
        # Detach each inner tensor: otherwise pickle would let two tensors share inner tensors as objects, which it does
        # not do for two views of a dense tensor. Scales are stored as bytes: pickle cannot load a float8 storage.
        stored, amax = self._stored(), self.activation_amax
        fields = {name: getattr(self, name) for name in self.tensor_attribute_names}
        fields |= {name: part.detach() for name, part in zip(self.tensor_data_names, stored[:3], strict=True)}
        fields |= {"scale": stored.scale.detach().view(torch.uint8), "columns": stored.columns}
        fields["activation_amax"] = None if amax is None else amax.detach()
        view = None
        if self.window is not None:
            fields["transposed"], (size, stride, offset) = False, self._geometry()
            view = tuple(size), tuple(stride), offset, self.transposed
        return _rebuild, (fields, self.requires_grad, getattr(self, "_is_param", False), view)

    @classmethod
    def _from_pickle(
        cls, fields: dict, requires_grad: bool, is_parameter: bool, view: tuple | None = None
    ) -> NVFP4Tensor:
        scale = fields.get("scale")
        if not isinstance(scale, Tensor) or scale.dtype != torch.uint8 or scale.dim() == 0:
            raise TypeError(f"the scale of a pickled NVFP4Tensor must be a uint8 tensor, got {scale!r}")
        t = cls(**{**fields, "scale": scale.view(torch.float8_e4m3fn)})
        if view is not None:
            *geometry, transposed = view
            t = view_of(t._stored(), (geometry[0], geometry[1], geometry[2]), transposed, t.__dict__)
        if is_parameter:
            return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]  # still an NVFP4Tensor
        return t.requires_grad_(requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        # Guards of compiled code call this twice per call and weight, so it reads the fields without attribute lookups.
        fields = self.__dict__
        window = fields.get("window")
        names = ["qdata", "scale", "per_tensor_scale"] if window is None else [*STORED, OFFSET]
        if fields["activation_amax"] is not None:
            names.append("activation_amax")
        attributes = {
            "columns": fields["columns"],
            "orig_dtype": fields["orig_dtype"],
            "spec": fields["spec"],
            "activation_spec": fields["activation_spec"],
            "transposed": fields["transposed"],
            "product_backend": fields["product_backend"],
        }
        if window is not None:
            attributes["columns"] = window.stored.columns
        return names, attributes

    @classmethod
    def __tensor_unflatten__(
        cls,
        tensor_data_dict: dict[str, Any],
        tensor_attributes: dict[str, Any],
        outer_size: Sequence[int] | None,
        outer_stride: Sequence[int] | None,
    ) -> NVFP4Tensor:
        attributes = dict(tensor_attributes)
        if OFFSET in tensor_data_dict:
            qdata, scale, factor = (tensor_data_dict[name] for name in STORED)
            stored = Stored(qdata, scale, factor, attributes["columns"])
            attributes |= {"activation_amax": tensor_data_dict.get("activation_amax")}
            attributes[OFFSET] = tensor_data_dict[OFFSET]
            assert outer_size is not None and outer_stride is not None
            geometry = outer_size, outer_stride, tensor_data_dict[OFFSET].shape[0]
            return view_of(stored, geometry, attributes["transposed"], attributes)
        if outer_size is not None:  # the size may be symbolic, while the attribute is a constant of the trace
            attributes["columns"] = outer_size[-2 if attributes["transposed"] else -1]
        return cls._of_parts(**tensor_data_dict, **attributes)


_OF_VIEWS = {"orig_dtype", "spec", "activation_spec", "product_backend", "activation_amax"}
"""Fields that a view has of its own; it shares the others with its tensor."""


def view_of(stored: Stored, geometry: Geometry, transposed: bool, attributes: dict[str, Any]) -> NVFP4Tensor:
    """Return the view of stored codes with dense sizes, strides and offset.

    Args:
        transposed: which of the last two dimensions to try first as that of the blocks.
        attributes: the other fields.

    Raises:
        SplitsABlock: a block would be split.
    """
    own = {name: attributes[name] for name in _OF_VIEWS}
    found, transposed = find_window(stored, geometry, transposed)
    if isinstance(found, Stored):
        return _from_valid_fields(**found._asdict(), **own, transposed=transposed)
    return NVFP4Tensor._of_window(found, geometry, transposed, attributes)


def _bytes_of(qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor) -> int:
    return qdata.numel() + scale.numel() + 4 * per_tensor_scale.numel()  # nbytes is not symbolic


def _from_valid_fields(*args: Any, **fields: Any) -> NVFP4Tensor:
    """Create a tensor from valid fields. Under Dynamo this calls the class, because Dynamo traces nothing else."""
    create = NVFP4Tensor if torch.compiler.is_dynamo_compiling() else NVFP4Tensor._of_parts
    return create(*args, **fields)


def check_dense(x: object) -> None:
    """Raise a TypeError if x is already an NVFP4Tensor."""
    if isinstance(x, NVFP4Tensor):
        raise TypeError("x is already an NVFP4Tensor: use x.dequantize() first to quantize it again")


def quantize(
    x: Tensor,
    spec: QuantizeSpec | None = None,
    *,
    amax: Tensor | float | None = None,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
    origin: tuple[int, int] = (0, 0),
    full_width: int | None = None,
) -> NVFP4Tensor:
    """Quantize x to NVFP4 (numerics contract, sections 2 to 5). Not differentiable: see :func:`fake_quantize`.

    Args:
        x: (..., K), at least 1-D; bfloat16, float16 or float32.
        spec: how to quantize. Default: round to nearest even, 1x16 blocks.
        amax: the largest magnitude that must be representable, as a float or a floating-point tensor of one element;
            larger elements saturate. Default: the amax of x. A negative value raises a ValueError, except in a CUDA
            tensor, whose sign is ignored. If ``spec.row_scaled``, a tensor with one magnitude per row.
        rng_state: int64 (seed, offset) on the device of x, the source of all random bits. By default, a stochastic spec
            samples it from ``generator``, or from torch's default generator of the device.
        generator: see ``rng_state``.
        origin, full_width: the offset (row, column) of the shard x in the full tensor, and the number of columns of the
            full tensor. The row is a multiple of block_rows, the column of 16. The shard then gets the same bits as
            these elements of the full tensor.

    Raises:
        TypeError: x is not a tensor of these dtypes.
        ValueError: x is 0-d; amax, rng_state, origin or full_width is invalid; both rng_state and generator are given;
            or the spec is EDEN, which only :func:`fake_quantize` and the ops support.
    """
    check_dense(x)
    spec = stored_spec(spec)
    amax, rng_state, offsets = resolve_arguments(x, spec, amax, rng_state, generator, origin, full_width)
    op = torch.ops.nvfp4.quantize_rows if spec.row_scaled else torch.ops.nvfp4.quantize
    qdata, scale, per_tensor_scale = op(x.detach(), amax, rng_state, spec.pack(), *offsets)
    return _from_valid_fields(qdata, scale, per_tensor_scale, x.shape[-1], x.dtype, spec)


def quantize_experts(
    x: Tensor,
    spec: QuantizeSpec | None = None,
    *,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
    activation_spec: QuantizeSpec | None = None,
) -> NVFP4Tensor:
    """Quantize experts (E, N, K), each with its own per-tensor scale.

    Args:
        x: (E, N, K), at least one expert; bfloat16, float16 or float32.
        spec, rng_state, generator: see :func:`quantize`. All experts use one rng_state at different offsets.
        activation_spec: how products quantize the dense operand (W4A4). Default: the operand stays dense.

    Raises:
        ValueError: x is not (E, N, K) with at least one expert, the two specs have different Hadamard transforms, or
            for the reasons of :func:`quantize`.
    """
    if not isinstance(x, Tensor) or x.dim() != 3 or len(x) == 0:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"experts must be a tensor (E, N, K) with at least one expert, got {got}")
    spec = checked_spec(spec)
    if activation_spec is not None and stored_spec(activation_spec).hadamard_sign != spec.hadamard_sign:
        raise ValueError("spec and activation_spec must have the same hadamard_sign: only equal transforms cancel")
    rng_state = resolve_rng_state(x, spec, rng_state, generator)
    rows = ceil_to(x.shape[1], spec.block_rows)
    parts = tuple(quantize(w, spec, rng_state=rng_state, origin=(e * rows, 0)) for e, w in enumerate(x))
    experts = torch.stack(parts)
    assert isinstance(experts, NVFP4Tensor)
    # torch.stack merges equal per-tensor scales into one.
    scales = torch.stack([part.per_tensor_scale for part in parts]).reshape(len(parts), -1)
    return experts._replace(per_tensor_scale=scales, activation_spec=activation_spec)
