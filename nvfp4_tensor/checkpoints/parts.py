"""The plain tensors of a quantized weight, as checkpoints store it, and their conversion from and to NVFP4Tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

LARGEST = 2688.0
"""6 * 448. All formats define an input scale as the activation's amax over this number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearParts:
    """Unswizzled tensors of a quantized weight (*leading, N, K): value = code * scale * per_tensor_scale.

    Attributes:
        qdata: uint8 (*leading, N, K / 2), with K rounded up to a multiple of 16; two codes per byte, the even element
            in the low nibble.
        scale: float8_e4m3fn (*leading, N, K / 16), with K rounded up, in the order of the weight.
        per_tensor_scale: float32, amax / 2688, a factor: 0-d, or (E, 1) with one per matrix of (E, N, K), or (rows,)
            with one per row.
        columns: K, without padding.
        quantizes_activations: whether products quantize the activations (W4A4).
        input_scale: None, or the static scale of the activations, float32 0-d, amax / 2688.
        divisor, input_divisor: None, or the inverse of per_tensor_scale and of input_scale as read from a file, float32
            of the same shape. They are kept because 1 / (1 / x) can differ from x, so that a checkpoint that is
            converted and converted back is byte-identical.
        input_amax: None, or the amax that input_scale was computed from, float32 0-d, kept for the same reason.
    """

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor
    columns: int
    quantizes_activations: bool = False
    input_scale: Tensor | None = None
    divisor: Tensor | None = None
    input_divisor: Tensor | None = None
    input_amax: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the logical shape, (*leading, N, K)."""
        return (*self.qdata.shape[:-1], self.columns)

    @property
    def bits(self) -> float:
        """Return the stored bits per element: codes, block scales and per-tensor scales."""
        stored = self.qdata.nbytes + self.scale.nbytes + self.per_tensor_scale.nbytes
        return 8 * stored / max(math.prod(self.shape), 1)

    @property
    def factors(self) -> Tensor:
        """Return the per-tensor scale of each row, (*leading, N)."""
        factors, rows = self.per_tensor_scale, self.qdata.shape[:-1]
        return factors.view(rows) if factors.dim() == 1 else factors.expand(rows)

    def rows(self, index: slice | tuple[int, slice], name: str) -> LinearParts:
        """Return the weight ``name`` that has some rows of this one.

        Raises:
            ValueError: their per-tensor scales differ.
        """
        factors = self.factors[index]
        if not (factors == factors[0]).all():
            raise ValueError(f"{name}: its rows have different per-tensor scales, which no format supports")
        return self.replace(
            qdata=self.qdata[index].contiguous(),
            scale=self.scale[index].contiguous(),
            per_tensor_scale=factors[0].clone(),
            divisor=None,
        )

    def replace(self, **changes: Any) -> LinearParts:
        """Return a copy with the given fields changed."""
        return dataclasses.replace(self, **changes)

    def weight_only(self) -> LinearParts:
        """Return a copy without the quantization of activations (W4A16)."""
        return self.replace(quantizes_activations=False, input_scale=None, input_divisor=None, input_amax=None)

    def weight_divisor(self) -> Tensor:
        """Return the divisor for formats that store one: ``divisor`` if there is one, else 1 / per_tensor_scale."""
        return self.per_tensor_scale.reciprocal() if self.divisor is None else self.divisor

    def activation_divisor(self) -> Tensor | None:
        """Return the divisor of the activations, or None if there is no input scale."""
        if self.input_scale is None or self.input_divisor is not None:
            return self.input_divisor
        return self.input_scale.reciprocal()

    def activation_amax(self) -> Tensor | None:
        """Return the static amax of the activations: ``input_amax`` if it matches input_scale, else input_scale *
        2688."""
        if self.input_scale is None or not self.quantizes_activations:
            return None
        if self.input_amax is not None and torch.equal(_input_scale(self.input_amax), self.input_scale):
            return self.input_amax
        return self.input_scale * LARGEST


def _input_scale(amax: Tensor) -> Tensor:
    return amax / amax.new_full((), LARGEST)  # by a number of the host, a GPU would multiply by its inverse


def parts_of(weight: NVFP4Tensor) -> LinearParts:
    """Return the plain tensors of an NVFP4Tensor. :func:`tensor_of` is the exact inverse.

    Raises:
        ValueError: the tensor is transposed, or has Hadamard-transformed values, which no format supports.
    """
    if weight.transposed:
        raise ValueError("a transposed NVFP4Tensor cannot be stored in a checkpoint: save its transpose")
    if weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"a weight quantized with hadamard_sign {weight.spec.hadamard_sign:#06x} holds transformed values, which "
            "no checkpoint format supports: quantize without the transform, or save it with torch.save"
        )
    amax = weight.activation_amax
    return LinearParts(
        qdata=weight.qdata,
        scale=weight.unswizzled_scale(),
        per_tensor_scale=weight.per_tensor_scale,
        columns=weight.columns,
        quantizes_activations=weight.activation_spec is not None,
        input_scale=None if amax is None else _input_scale(amax),
        input_amax=amax,
    )


def tensor_of(
    parts: LinearParts,
    dtype: torch.dtype = torch.bfloat16,
    *,
    spec: QuantizeSpec | None = None,
    activation_spec: QuantizeSpec | None = None,
) -> NVFP4Tensor:
    """Return an NVFP4Tensor of plain tensors. It shares their codes.

    Args:
        dtype: the dtype that it decodes to: bfloat16, float16 or float32.
        spec: how ``copy_`` from a dense tensor quantizes. The default is the plain spec, because files do not store it.
        activation_spec: how products quantize activations if ``parts.quantizes_activations``. The default is the plain
            spec.

    Raises:
        TypeError, ValueError: dtypes or shapes do not match.
    """
    rows = math.prod(parts.qdata.shape[:-1])
    blocks = ceil_to(parts.columns, BLOCK) // BLOCK
    if tuple(parts.scale.shape) != (*parts.qdata.shape[:-1], blocks):
        raise ValueError(
            f"expected block scales {(*parts.qdata.shape[:-1], blocks)} for codes {tuple(parts.qdata.shape)}, found "
            f"{tuple(parts.scale.shape)}"
        )
    if parts.quantizes_activations and activation_spec is None:
        activation_spec = QuantizeSpec()
    return NVFP4Tensor(
        parts.qdata.contiguous(),
        layout.swizzle(parts.scale.reshape(rows, blocks)),
        parts.per_tensor_scale,
        parts.columns,
        dtype,
        QuantizeSpec() if spec is None else spec,
        activation_spec if parts.quantizes_activations else None,
        activation_amax=parts.activation_amax(),
    )


def with_scale(parts: LinearParts, factor: Tensor) -> LinearParts | None:
    """Return a weight with another per-tensor scale (0-d), the same codes and the same values; None if none is.

    A weight of zeros has one; so has one whose block scales times the ratio of the two scales are e4m3 numbers.
    """
    if torch.equal(parts.per_tensor_scale, factor):
        return parts
    scale = parts.scale
    if parts.qdata.bitwise_and(0x77).any():
        product = scale.double() * parts.factors.double().unsqueeze(-1)  # exact: 4 bits times 24
        scale = (product / factor.double()).float().to(scale.dtype)
        if not ((scale.double() * factor.double() == product) | product.isnan()).all():
            return None
    return parts.replace(scale=scale, per_tensor_scale=factor, divisor=None)


def nan_blocks(parts: LinearParts) -> int:
    """Return the number of NaN block scales (bytes 0x7F and above), which vLLM treats as scales that were not
    loaded."""
    data = parts.scale.view(torch.uint8)
    return int((data >= layout.E4M3_NAN).sum()) if data.numel() and data.max() >= layout.E4M3_NAN else 0


def check_scales(parts: LinearParts) -> LinearParts:
    """Return ``parts`` unchanged if their scales are valid.

    A per-tensor scale of 0 is valid if all of its codes are zero: ModelOpt and torchao write it for a weight of zeros.
    NaN block scales are valid and mean NaN. Block scales on the meta device are not checked.

    Raises:
        ValueError: a per-tensor scale is negative, infinite, NaN, or 0 with nonzero codes; a block scale is negative;
            or an input scale is infinite or not above zero.
    """
    factor, static = parts.per_tensor_scale, parts.input_scale
    is_plain = factor.numel() == 1 and 0.0 < factor.item() < math.inf  # nearly all are: without operators
    if not is_plain and (wrong := ~(factor.isfinite() & (factor >= 0))).any():
        raise ValueError(f"expected a per-tensor scale that is finite and not negative, found {factor[wrong][0]}")
    if static is not None and not ((static * LARGEST).isfinite() & (static > 0)):
        raise ValueError(f"expected an input scale that is finite and above zero, found {static}")
    if parts.scale.is_meta:
        return parts
    if not is_plain and not factor.all() and ((parts.factors == 0) & (parts.qdata & 0x77).any(-1)).any():
        raise ValueError("expected a per-tensor scale above zero, found 0 for codes that are not all zero")
    data = parts.scale.view(torch.uint8)
    if data.numel() and data.max() > layout.E4M3_NAN and (negative := (data > layout.E4M3_NAN) & (data != 0xFF)).any():
        raise ValueError(f"expected block scales that are not negative, found {int(negative.sum())} negative ones")
    return parts
