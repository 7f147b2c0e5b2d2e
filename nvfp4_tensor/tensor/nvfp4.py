"""NVFP4Tensor: a tensor stored in NVFP4, and the functions that create one."""

from __future__ import annotations

import enum
import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, SupportsIndex

import torch
import torch.compiler.config
from torch import Tensor

from nvfp4_tensor._compat.pickles import _rebuild, pin
from nvfp4_tensor._compat.torchao_import import quietly
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.choices import ProductBackend, RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.sharding import fsdp_transport
from nvfp4_tensor.tensor.arguments import checked_spec, resolve_arguments, resolve_rng_state, stored_spec
from nvfp4_tensor.tensor.checks import check_fields
from nvfp4_tensor.tensor.protocol import Args, Kwargs, Op, Types


class Aliasing(enum.IntEnum):
    """How a tensor shares storage with the tensor that a view operator created it from."""

    WHOLE = 0
    """It owns its storage, or shares all of another tensor's: writes are allowed."""
    PART = 1
    """It shares storage with a larger tensor, so a write must not change the per-tensor scale that both use."""
    COPY = 2
    """The layout did not allow a view. A write raises an error, or also writes to the original, so it is never lost."""


NOT_IN_SAFETENSORS = (
    "a safetensors file stores only plain tensors: use nvfp4_tensor.checkpoints.save(model, folder) for a checkpoint "
    "that servers load, nvfp4_tensor.integrations.transformers.attach_quantizer(model) before save_pretrained, "
    "accelerator.save_state(folder, safe_serialization=False) with accelerate, or "
    "torch.save(model.state_dict(), path) and model.load_state_dict(torch.load(path), assign=True)"
)

with quietly():
    from torchao.utils import TorchAOBaseTensor


def _no_operators(cls: type, func: Op, types: Types, args: Args, kwargs: Kwargs | None) -> Any:
    raise RuntimeError(f"{func} needs the operators of NVFP4Tensor: import nvfp4_tensor.dispatch first")


_operators: Callable[..., Any] = _no_operators


def register_operators(operators: Callable[..., Any]) -> None:
    """Set the function that ``__torch_dispatch__`` calls; importing :mod:`nvfp4_tensor.dispatch` does this."""
    global _operators
    _operators = operators


_refresh: Callable[[NVFP4Tensor], None] = lambda t: None  # noqa: E731


def register_refresh(refresh: Callable[[NVFP4Tensor], None]) -> None:
    """Set what reads a copy again if its tensor was written to: see :mod:`nvfp4_tensor.dispatch.stale`."""
    global _refresh
    _refresh = refresh


@pin
class NVFP4Tensor(TorchAOBaseTensor):
    """A tensor of at least one dimension stored in NVFP4, 4.5 bits per element. Its dtype is ``orig_dtype``.

    Create one with :meth:`to_nvfp4` or :func:`quantize`. Value = code x block scale x per-tensor scale.

    An operator that writes (``t *= 2``, ``out=t``, ``torch.nn.init``) computes on the decoded values, and its result is
    quantized with ``spec``, as in :meth:`copy_` from a dense tensor. If t is a view whose layout or shared per-tensor
    scale does not allow the write, it raises a RuntimeError and changes nothing.

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

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    columns: int
    orig_dtype: torch.dtype
    spec: QuantizeSpec
    activation_spec: QuantizeSpec | None
    activation_amax: Tensor | None
    transposed: bool
    product_backend: ProductBackend
    aliasing: Aliasing
    slice_origin: Any = None
    """The SliceOrigin of a slice, or None: see :mod:`nvfp4_tensor.dispatch.slice_writes`."""
    read_from: Any = None
    """The Origin of a copy that stands in for a view, or None: see :mod:`nvfp4_tensor.dispatch.stale`."""

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
        check_fields(**fields)
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
            storage_size=qdata.numel() + scale.numel() + 4 * per_tensor_scale.numel(),  # nbytes is not symbolic
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
        self.aliasing = Aliasing.WHOLE
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Op, types: Types, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return _operators(cls, func, types, args, kwargs)

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
        self._refresh()
        if self.per_tensor_scale.dim() < 2:
            return self.per_tensor_scale
        return self.per_tensor_scale.expand(self.qdata.shape[:-1]).reshape(-1)

    def unswizzled_scale(self) -> Tensor:
        """Return the block scales in the order of the stored tensor: e4m3 (*leading, columns / 16, rounded up)."""
        self._refresh()
        *leading, half = self.qdata.shape
        scale = layout.unswizzle(self.scale, math.prod(leading), half * 2 // BLOCK)
        return scale.view(*leading, half * 2 // BLOCK)

    @property
    def stored_bytes(self) -> int:
        """Number of bytes of the codes, block scales (including padding) and per-tensor scale."""
        return sum(t.numel() * t.element_size() for t in (self.qdata, self.scale, self.per_tensor_scale))

    @property
    def bits_per_element(self) -> float:
        """Number of stored bits per element, padding not counted as elements."""
        return 8 * self.stored_bytes / max(self.numel(), 1)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's is a property too, of C
        """The same as :attr:`stored_bytes`."""
        return self.stored_bytes

    def element_size(self) -> float:  # type: ignore[override]
        """Return bytes per element as a fraction, so that ``element_size() * numel()`` is :attr:`stored_bytes`."""
        return self.stored_bytes / max(self.numel(), 1)

    def storage(self) -> NoReturn:  # type: ignore[override]
        """Raise a TypeError, because each inner tensor has its own storage. safetensors and transformers call it."""
        raise TypeError(NOT_IN_SAFETENSORS)

    @property
    def optional_tensor_attribute_names(self) -> NoReturn:
        """Raise a TypeError: torchao's safetensors writer reads it and mistakes this class for its own of that name."""
        raise TypeError(NOT_IN_SAFETENSORS)

    def _replace(self, **changes: Any) -> NVFP4Tensor:
        """Return a tensor with some fields changed."""
        return _from_valid_fields(**{**self._fields(), **changes})

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> NVFP4Tensor:
        names = self.__tensor_flatten__()[0]
        return self._replace(**{name: fn(getattr(self, name)) for name in names})

    def _fields(self) -> dict:
        names = self.tensor_data_names + self.tensor_attribute_names + self.optional_tensor_data_names
        return {name: getattr(self, name) for name in names}

    def _refresh(self) -> None:
        if self.read_from is not None:
            _refresh(self)

    def _marked(self, aliasing: Aliasing) -> NVFP4Tensor:
        self.aliasing = aliasing
        return self

    def fsdp_pre_all_gather(
        self,
        mesh: fsdp_transport.Mesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor, ...], fsdp_transport.GatherMetadata]:
        """FSDP2's hook: see :mod:`nvfp4_tensor.sharding.fsdp_transport`."""
        return fsdp_transport.pre_all_gather(self, mesh, outer_size, module)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: fsdp_transport.GatherMetadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook: see :mod:`nvfp4_tensor.sharding.fsdp_transport`."""
        return fsdp_transport.post_all_gather(self, all_gather_outputs, metadata, param_dtype, out)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable, tuple]:
        # Detach each inner tensor: otherwise pickle would let two tensors share inner tensors as objects, which it does
        # not do for two views of a dense tensor. Scales are stored as bytes: pickle cannot load a float8 storage.
        parts = {name: getattr(self, name).detach() for name in self.__tensor_flatten__()[0]}
        fields = {**self._fields(), **parts, "scale": self.scale.view(torch.uint8)}
        mark = (int(self.aliasing),) if self.aliasing else ()  # 0.1.0 can read tensors without it
        return _rebuild, (fields, self.requires_grad, getattr(self, "_is_param", False), *mark)

    @classmethod
    def _from_pickle(cls, fields: dict, requires_grad: bool, is_parameter: bool, aliasing: int = 0) -> NVFP4Tensor:
        scale = fields.get("scale")
        if not isinstance(scale, Tensor) or scale.dtype != torch.uint8 or scale.dim() == 0:
            raise TypeError(f"the scale of a pickled NVFP4Tensor must be a uint8 tensor, got {scale!r}")
        t = cls(**{**fields, "scale": scale.view(torch.float8_e4m3fn)})._marked(Aliasing(aliasing))
        if is_parameter:
            return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]  # still an NVFP4Tensor
        return t.requires_grad_(requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        # Guards of compiled code call this twice per call and weight, so it reads the fields without attribute lookups.
        fields = self.__dict__
        if fields.get("read_from") is not None:
            self._refresh()
        names = ["qdata", "scale", "per_tensor_scale"]
        if fields["activation_amax"] is not None:
            names.append("activation_amax")
        return names, {
            "columns": fields["columns"],
            "orig_dtype": fields["orig_dtype"],
            "spec": fields["spec"],
            "activation_spec": fields["activation_spec"],
            "transposed": fields["transposed"],
            "product_backend": fields["product_backend"],
            "aliasing": fields["aliasing"],
        }

    @classmethod
    def __tensor_unflatten__(
        cls,
        tensor_data_dict: dict[str, Any],
        tensor_attributes: dict[str, Any],
        outer_size: Sequence[int] | None,
        outer_stride: Sequence[int] | None,
    ) -> NVFP4Tensor:
        attributes = dict(tensor_attributes)
        aliasing = attributes.pop("aliasing", Aliasing.WHOLE)
        if outer_size is not None:  # the size may be symbolic, while the attribute is a constant of the trace
            attributes["columns"] = outer_size[-2 if attributes["transposed"] else -1]
        return cls._of_parts(**tensor_data_dict, **attributes)._marked(aliasing)

    def _stable_hash_for_caching(self) -> str:
        """Return a hash of everything that a compiled graph may depend on, for torch's graph cache on disk."""
        names, fields = self.__tensor_flatten__()
        inner = [(name, t.shape, t.stride(), t.dtype, t.device) for name in names for t in (getattr(self, name),)]
        what = self.shape, self.requires_grad, inner, fields, _source_digest()
        return hashlib.blake2b(repr(what).encode()).hexdigest()

    def describe(self) -> str:
        """Return a description of the spec, the activation's spec (W4A4) and the bits per element."""
        static = ", static" if self.activation_amax is not None else ""
        backend = f", by {self.product_backend.name.lower()}" if self.product_backend != ProductBackend.AUTO else ""
        activation = (
            f", activation ({self.activation_spec}{static}{backend})" if self.activation_spec is not None else ""
        )
        if self.product_backend == ProductBackend.FP8:
            activation = ", activation (fp8)"
        return f"{self.spec}{activation}, {self._bits()} bits/element"

    def _bits(self) -> str:
        if not isinstance(self.numel(), int):
            return "?"  # symbolic sizes
        return f"{self.bits_per_element:.2f}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"spec=({self.spec}){', transposed' if self.transposed else ''}"
            + (f", activation_spec=({self.activation_spec})" if self.activation_spec is not None else "")
            + f", {self._bits()} bits/element{grad})"
        )


def _from_valid_fields(*args: Any, **fields: Any) -> NVFP4Tensor:
    """Create a tensor from valid fields. Under Dynamo this calls the class, because Dynamo traces nothing else."""
    create = NVFP4Tensor if torch.compiler.is_dynamo_compiling() else NVFP4Tensor._of_parts
    return create(*args, **fields)


@functools.cache
def _source_digest() -> str:
    """Return a digest of this package's code, on which a traced graph depends; torch's cache key lacks it."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources)).hexdigest()


if torch.__version__ < "2.13":  # its cache does not call _stable_hash_for_caching, so the digest goes into all keys
    torch.compiler.config.cache_key_tag += f"nvfp4_tensor {_source_digest()}"


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
