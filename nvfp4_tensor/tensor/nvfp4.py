"""NVFP4Tensor: a tensor whose values are NVFP4, and the functions that make one."""

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
    """What writing into a tensor would mean for the one that a view op took it from."""

    WHOLE = 0
    """Its own storage, or all of another's: writing is fine."""
    PART = 1
    """It shares storage with a larger tensor, whose per-tensor scale is not its own to change."""
    COPY = 2
    """The layout did not allow a view: writing would be lost, so it is refused, or carried to the original."""


NOT_IN_SAFETENSORS = (
    "a safetensors file holds plain tensors alone: nvfp4_tensor.checkpoints.save(model, folder) writes what servers "
    "read, nvfp4_tensor.integrations.transformers.attach_quantizer(model) lets save_pretrained do the same, and "
    "torch.save(model.state_dict(), path) keeps all there is, for model.load_state_dict(torch.load(path), assign=True)"
)

with quietly():
    from torchao.utils import TorchAOBaseTensor


def _no_operators(cls: type, func: Op, types: Types, args: Args, kwargs: Kwargs | None) -> Any:
    raise RuntimeError(f"{func} needs the operators of NVFP4Tensor: import nvfp4_tensor.dispatch first")


_operators: Callable[..., Any] = _no_operators


def register_operators(operators: Callable[..., Any]) -> None:
    """Let ``__torch_dispatch__`` call this function; :mod:`nvfp4_tensor.dispatch` does so when it is imported."""
    global _operators
    _operators = operators


@pin
class NVFP4Tensor(TorchAOBaseTensor):
    """A tensor of any shape (not 0-d) stored as NVFP4: 4.5 bits an element, behaving as one of dtype ``orig_dtype``.

    Make one with :meth:`to_nvfp4` or :func:`quantize`. Value = code x block scale x per-tensor scale.

    An operator that writes (``t *= 2``, ``out=t``, ``torch.nn.init``) computes on the decoded values, and its result is
    quantized by ``spec``, as :meth:`copy_` from a dense tensor is. It raises a RuntimeError instead, and changes
    nothing, where t is a view whose layout or shared per-tensor scale does not let the write through.

    Attributes:
        qdata: uint8 (*leading, columns rounded up to 16, halved), two codes a byte, the even element low.
        scale: float8_e4m3fn (row tiles, column tiles, 32, 16), swizzled as cuBLASLt takes it; rows are the leading
            dimensions flattened. :meth:`unswizzled_scale` gives the plain matrix.
        per_tensor_scale: float32, 0-d; or (E, 1), one for each matrix of (E, N, K); or one per row (rows joined from
            tensors of different scales have one each). :meth:`row_scale` gives the last in place of the second.
        columns: size of the stored last dimension, without padding.
        orig_dtype: bfloat16, float16 or float32: what it decodes to by default.
        spec: how the codes were made, and how ``copy_`` from a dense tensor makes new ones.
        activation_spec: None, or how a product quantizes the dense operand it meets (W4A4).
        activation_amax: None, or the calibrated amax of that operand, float32 0-d; else each call takes its own.
        transposed: whether the logical tensor has the stored one's last two dimensions swapped.
        product_backend: what multiplies it by quantized operands.
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
    place: Any = None
    """Where a slice lies in what it was cut from: see :mod:`nvfp4_tensor.dispatch.parts`."""

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
        if isinstance(qdata, NVFP4Tensor):  # as accelerate makes a parameter of the class of another
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
        """Of parts that fit, which are not checked again: every operator makes a tensor so."""
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
            storage_size=qdata.numel() + scale.numel() + 4 * per_tensor_scale.numel(),  # nbytes has no symbols
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
        """Quantize x: any shape but 0-d; bfloat16, float16 or float32; contiguous or not.

        Args:
            round_mode: a RoundingMode or its name; replaces that of ``spec``. To nearest even by default.
            spec, amax, rng_state, generator: as :func:`quantize` takes them.
        """
        spec = checked_spec(spec)
        if round_mode is not None:
            spec = spec.replace(round_mode=round_mode)
        return quantize(x, spec, amax=amax, rng_state=rng_state, generator=generator)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a dense tensor of ``dtype`` (``orig_dtype`` by default), rounded once.

        Of a Hadamard-transformed tensor, these are the transformed values.

        Raises:
            TypeError: dtype is not bfloat16, float16 or float32.
        """
        dtype = self.orig_dtype if dtype is None else dtype
        if dtype not in HIGH_PRECISION_DTYPES:
            raise TypeError(f"dequantize gives bfloat16, float16 or float32, not {dtype}: cast its result instead")
        values = self._decode(dtype, self.row_scale())
        return values.transpose(-2, -1) if self.transposed else values

    def _decode(self, dtype: torch.dtype, per_tensor_scale: Tensor | None, columns: int | None = None) -> Tensor:
        """The stored, never transposed, tensor decoded; without per_tensor_scale exact in bfloat16."""
        columns = self.columns if columns is None else columns
        return torch.ops.nvfp4.dequantize(
            self.qdata.contiguous(), self.scale.contiguous(), per_tensor_scale, columns, dtype
        )

    def row_scale(self) -> Tensor:
        """The per-tensor scale if there is one, else one per row: float32 0-d or (rows,), as the ops take it."""
        if self.per_tensor_scale.dim() < 2:
            return self.per_tensor_scale
        return self.per_tensor_scale.expand(self.qdata.shape[:-1]).reshape(-1)

    def unswizzled_scale(self) -> Tensor:
        """Block scales in the order of the stored tensor: e4m3 (*leading, columns / 16, rounded up)."""
        *leading, half = self.qdata.shape
        scale = layout.unswizzle(self.scale, math.prod(leading), half * 2 // BLOCK)
        return scale.view(*leading, half * 2 // BLOCK)

    @property
    def stored_bytes(self) -> int:
        """Bytes of the codes, the block scales (padding included) and the per-tensor scale."""
        return sum(t.numel() * t.element_size() for t in (self.qdata, self.scale, self.per_tensor_scale))

    @property
    def bits_per_element(self) -> float:
        """:attr:`stored_bytes` in bits, over the elements without padding."""
        return 8 * self.stored_bytes / max(self.numel(), 1)

    @property
    def nbytes(self) -> int:  # type: ignore[override]  # torch's is a property too, of C
        """:attr:`stored_bytes`."""
        return self.stored_bytes

    def element_size(self) -> float:  # type: ignore[override]
        """Bytes of an element, a fraction: so that libraries that multiply it by the elements find what is stored."""
        return self.stored_bytes / max(self.numel(), 1)

    def storage(self) -> NoReturn:  # type: ignore[override]
        """Raises a TypeError: the parts have a storage each. safetensors asks for it, and transformers by it."""
        raise TypeError(NOT_IN_SAFETENSORS)

    @property
    def optional_tensor_attribute_names(self) -> NoReturn:
        """Raises a TypeError: torchao's writer of safetensors asks for it, and takes this class for its own by name."""
        raise TypeError(NOT_IN_SAFETENSORS)

    def _replace(self, **changes: Any) -> NVFP4Tensor:
        """A tensor of the same fields but those given."""
        return _made_of(**{**self._fields(), **changes})

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> NVFP4Tensor:
        names = self.__tensor_flatten__()[0]
        return self._replace(**{name: fn(getattr(self, name)) for name in names})

    def _fields(self) -> dict:
        names = self.tensor_data_names + self.tensor_attribute_names + self.optional_tensor_data_names
        return {name: getattr(self, name) for name in names}

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
        # Each part as an object of its own, or pickle alone would let two tensors share some of their parts; it lets
        # two views of a dense one share nothing. Scales travel as bytes: it cannot load a float8 storage.
        parts = {name: getattr(self, name).detach() for name in self.__tensor_flatten__()[0]}
        fields = {**self._fields(), **parts, "scale": self.scale.view(torch.uint8)}
        mark = (int(self.aliasing),) if self.aliasing else ()  # 0.1.0 reads what has none
        return _rebuild, (fields, self.requires_grad, getattr(self, "_is_param", False), *mark)

    @classmethod
    def _from_pickle(cls, fields: dict, requires_grad: bool, is_parameter: bool, aliasing: int = 0) -> NVFP4Tensor:
        scale = fields.get("scale")
        if not isinstance(scale, Tensor) or scale.dtype != torch.uint8 or scale.dim() == 0:
            raise TypeError(f"a pickled NVFP4Tensor holds its scale as bytes, in uint8, not as {scale!r}")
        t = cls(**{**fields, "scale": scale.view(torch.float8_e4m3fn)})._marked(Aliasing(aliasing))
        if is_parameter:
            return torch.nn.Parameter(t, requires_grad)  # type: ignore[return-value]  # still an NVFP4Tensor
        return t.requires_grad_(requires_grad)

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        # Compiled code calls this two or three times a call for each weight, so it asks nobody for the names.
        names = ["qdata", "scale", "per_tensor_scale"]
        if self.activation_amax is not None:
            names.append("activation_amax")
        return names, {
            "columns": self.columns,
            "orig_dtype": self.orig_dtype,
            "spec": self.spec,
            "activation_spec": self.activation_spec,
            "transposed": self.transposed,
            "product_backend": self.product_backend,
            "aliasing": self.aliasing,
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
        if outer_size is not None:  # the size may be symbolic where the attribute is a trace's constant
            attributes["columns"] = outer_size[-2 if attributes["transposed"] else -1]
        return cls._of_parts(**tensor_data_dict, **attributes)._marked(aliasing)

    def _stable_hash_for_caching(self) -> str:
        """What a compiled graph may depend on, for torch's cache of graphs on disk."""
        names, fields = self.__tensor_flatten__()
        inner = [(name, t.shape, t.stride(), t.dtype, t.device) for name in names for t in (getattr(self, name),)]
        what = self.shape, self.requires_grad, inner, fields, _source_digest()
        return hashlib.blake2b(repr(what).encode()).hexdigest()

    def describe(self) -> str:
        """The spec in words, that of the activation if a product quantizes it, and the bits per element."""
        static = ", static" if self.activation_amax is not None else ""
        backend = f", by {self.product_backend.name.lower()}" if self.product_backend != ProductBackend.AUTO else ""
        activation = (
            f", activation ({self.activation_spec}{static}{backend})" if self.activation_spec is not None else ""
        )
        return f"{self.spec}{activation}, {self._bits()} bits/element"

    def _bits(self) -> str:
        if not isinstance(self.numel(), int):
            return "?"  # a compiler's sizes are symbols
        return f"{self.bits_per_element:.2f}"

    def __repr__(self, *, tensor_contents: object = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"NVFP4Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"spec=({self.spec}){', transposed' if self.transposed else ''}"
            + (f", activation_spec=({self.activation_spec})" if self.activation_spec is not None else "")
            + f", {self._bits()} bits/element{grad})"
        )


def _made_of(*parts: Any, **fields: Any) -> NVFP4Tensor:
    """The tensor of parts that fit; where torch.compile reads along, by a call of the class, all that it follows."""
    make = NVFP4Tensor if torch.compiler.is_dynamo_compiling() else NVFP4Tensor._of_parts
    return make(*parts, **fields)


@functools.cache
def _source_digest() -> str:
    """Of this package's code: what one version traced must not serve another, and torch's key knows only its own."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.blake2b(b"".join(source.read_bytes() for source in sources)).hexdigest()


if torch.__version__ < "2.13":  # whose cache does not ask tensors for a hash: into the tag of all of its keys
    torch.compiler.config.cache_key_tag += f"nvfp4_tensor {_source_digest()}"


def check_dense(x: object) -> None:
    """Raises a TypeError for an NVFP4Tensor, which is not quantized again."""
    if isinstance(x, NVFP4Tensor):
        raise TypeError("x is an NVFP4Tensor already: dequantize() first to quantize it anew")


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
        spec: how; the plain spec (to nearest even, 1x16) by default.
        amax: the largest magnitude to allow for, a float or a floating-point tensor of one element; that of x by
            default. Larger elements saturate. One below zero is refused, but not on CUDA, where the value of a tensor
            is not looked at and its sign left out. With ``row_scaled`` a tensor of one magnitude a row.
        rng_state: int64 (seed, offset) on the device of x, the source of all random bits; drawn from ``generator``,
            or from torch's generator of the device, where a stochastic spec comes without one.
        origin, full_width: where x lies in the logical tensor it is a shard of: its first row (a multiple of
            block_rows) and column (a multiple of 16), and that tensor's columns. It then gets the bits that the
            whole would have had there.

    Raises:
        TypeError: x is not a tensor of those dtypes.
        ValueError: 0-d x; an amax, rng_state, origin or full_width that does not fit; rng_state and generator both; a
            spec of EDEN, which :func:`fake_quantize` and the ops take.
    """
    check_dense(x)
    spec = stored_spec(spec)
    amax, rng_state, place = resolve_arguments(x, spec, amax, rng_state, generator, origin, full_width)
    op = torch.ops.nvfp4.quantize_rows if spec.row_scaled else torch.ops.nvfp4.quantize
    qdata, scale, per_tensor_scale = op(x.detach(), amax, rng_state, spec.pack(), *place)
    return _made_of(qdata, scale, per_tensor_scale, x.shape[-1], x.dtype, spec)


def quantize_experts(
    x: Tensor,
    spec: QuantizeSpec | None = None,
    *,
    rng_state: Tensor | None = None,
    generator: torch.Generator | None = None,
    activation_spec: QuantizeSpec | None = None,
) -> NVFP4Tensor:
    """Quantize experts (E, N, K), each with a per-tensor scale of its own.

    spec, rng_state, generator: as :func:`quantize` takes them; one rng_state serves all, whose bits differ by place.
    activation_spec: how products quantize what they multiply the experts by (W4A4); by default it stays as it is.

    Raises:
        ValueError: x is not (E, N, K) with at least one expert, the two specs have different Hadamard transforms, or as
            :func:`quantize` does.
    """
    if not isinstance(x, Tensor) or x.dim() != 3 or len(x) == 0:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"experts are a tensor (E, N, K) of at least one, got {got}")
    spec = checked_spec(spec)
    if activation_spec is not None and stored_spec(activation_spec).hadamard_sign != spec.hadamard_sign:
        raise ValueError("spec and activation_spec need the same hadamard_sign: the transform only cancels in pairs")
    rng_state = resolve_rng_state(x, spec, rng_state, generator)
    rows = ceil_to(x.shape[1], spec.block_rows)
    parts = tuple(quantize(w, spec, rng_state=rng_state, origin=(e * rows, 0)) for e, w in enumerate(x))
    experts = torch.stack(parts)
    assert isinstance(experts, NVFP4Tensor)
    # One each, which a stack joins to one where all happen to be equal.
    scales = torch.stack([part.per_tensor_scale for part in parts]).reshape(len(parts), -1)
    return experts._replace(per_tensor_scale=scales, activation_spec=activation_spec)
