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
"""6 * 448: an activation's amax over its input scale, by the rule that every reader applies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearParts:
    """A quantized weight (*leading, N, K) in plain tensors, nothing swizzled. Value = code x scale x per_tensor_scale.

    Attributes:
        qdata: uint8 (*leading, N, K / 2, K rounded up to 16), two codes a byte, the even element low.
        scale: float8_e4m3fn (*leading, N, K / 16, rounded up), in the order of the weight.
        per_tensor_scale: float32 in the direction of decoding (it multiplies, amax / 2688): 0-d, or (E, 1), one for
            each matrix of (E, N, K), or (rows,), one a row.
        columns: K, without padding.
        quantizes_activations: whether products quantize what they multiply the weight by (W4A4).
        input_scale: None, or the static scale of that operand, float32 0-d, in the direction of decoding (its
            amax / 2688).
        divisor, input_divisor: None, or the inverse of per_tensor_scale and of input_scale as a file had it, float32 of
            the same shape: 1/x taken twice is another number. They are kept so that a checkpoint that goes there and
            back is the same, byte for byte.
        input_amax: None, or the amax that input_scale was made of, float32 0-d, for the same reason: a tensor keeps it.
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
        """The logical shape, (*leading, N, K)."""
        return (*self.qdata.shape[:-1], self.columns)

    @property
    def bits(self) -> float:
        """Stored bits per element: codes, block scales and per-tensor scales."""
        stored = self.qdata.nbytes + self.scale.nbytes + self.per_tensor_scale.nbytes
        return 8 * stored / max(math.prod(self.shape), 1)

    def replace(self, **changes: Any) -> LinearParts:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def weight_divisor(self) -> Tensor:
        """What a writer of divisors writes: the one that a file had, else 1 / per_tensor_scale."""
        return self.per_tensor_scale.reciprocal() if self.divisor is None else self.divisor

    def activation_divisor(self) -> Tensor | None:
        """The same of input_scale; None where there is none."""
        if self.input_scale is None or self.input_divisor is not None:
            return self.input_divisor
        return self.input_scale.reciprocal()

    def activation_amax(self) -> Tensor | None:
        """The amax that products quantize by: the one that input_scale was made of, else input_scale * 2688."""
        if self.input_scale is None or not self.quantizes_activations:
            return None
        if self.input_amax is not None and torch.equal(self.input_amax / LARGEST, self.input_scale):
            return self.input_amax
        return self.input_scale * LARGEST


def parts_of(
    weight: NVFP4Tensor,
    *,
    input_scale: Tensor | None = None,
    divisor: Tensor | None = None,
    input_divisor: Tensor | None = None,
) -> LinearParts:
    """The plain tensors of an NVFP4Tensor: byte for byte, and :func:`tensor_of` makes the same tensor of them.

    Args:
        input_scale, divisor, input_divisor: as a file had them, float32. Each is used where it still says what the
            tensor says, and left out where the tensor has changed since.

    Raises:
        ValueError: the tensor is transposed, or holds Hadamard-transformed values: no layout can say so.
    """
    if weight.transposed:
        raise ValueError("a transposed NVFP4Tensor has no layout in checkpoints: save the one it is the transpose of")
    if weight.spec.hadamard_sign is not None:
        raise ValueError(
            f"a weight quantized with hadamard_sign {weight.spec.hadamard_sign:#06x} holds transformed values, which "
            "no checkpoint's layout can say: quantize without the transform, or save it with torch.save"
        )
    if divisor is not None and not torch.equal(divisor.reciprocal(), weight.per_tensor_scale):
        divisor = None
    amax = weight.activation_amax
    if amax is None:
        input_scale = None
    elif input_scale is None or not torch.equal(input_scale * LARGEST, amax):
        input_scale = amax / LARGEST
    if input_scale is None or (input_divisor is not None and not torch.equal(input_divisor.reciprocal(), input_scale)):
        input_divisor = None
    return LinearParts(
        qdata=weight.qdata,
        scale=weight.unswizzled_scale(),
        per_tensor_scale=weight.per_tensor_scale,
        columns=weight.columns,
        quantizes_activations=weight.activation_spec is not None,
        input_scale=input_scale,
        divisor=divisor,
        input_divisor=input_divisor,
        input_amax=amax,
    )


def tensor_of(
    parts: LinearParts,
    dtype: torch.dtype = torch.bfloat16,
    *,
    spec: QuantizeSpec | None = None,
    activation_spec: QuantizeSpec | None = None,
) -> NVFP4Tensor:
    """The NVFP4Tensor of plain tensors, which it shares its codes with.

    Args:
        dtype: what it decodes to: bfloat16, float16 or float32.
        spec: how ``copy_`` from a dense tensor quantizes; the plain spec by default, for files do not say.
        activation_spec: how products quantize what they meet, where the parts say that they do (the plain spec by
            default).

    Raises:
        TypeError, ValueError: the parts do not fit together.
    """
    rows = math.prod(parts.qdata.shape[:-1])
    blocks = ceil_to(parts.columns, BLOCK) // BLOCK
    if tuple(parts.scale.shape) != (*parts.qdata.shape[:-1], blocks):
        raise ValueError(
            f"block scales are {(*parts.qdata.shape[:-1], blocks)} for codes {tuple(parts.qdata.shape)}, not "
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


def nan_blocks(parts: LinearParts) -> int:
    """How many block scales are NaN (bytes 0x7F and above): vLLM takes them for scales that were never loaded."""
    data = parts.scale.view(torch.uint8)
    return int((data >= layout.E4M3_NAN).sum()) if data.numel() and data.max() >= layout.E4M3_NAN else 0


def check_scales(parts: LinearParts) -> LinearParts:
    """The parts, if their scales can be those of some tensor.

    A per-tensor scale of 0 is right where all that it multiplies is zero: ModelOpt and torchao write it for a weight of
    zeros. NaN block scales are right too, they mean NaN. Block scales on the meta device are not looked at.

    Raises:
        ValueError: a per-tensor scale that is negative, infinite, NaN, or 0 beside codes that are not zero; a negative
            block scale; an input scale that is not above zero, or infinite.
    """
    factor, static = parts.per_tensor_scale, parts.input_scale
    if (wrong := ~(factor.isfinite() & (factor >= 0))).any():
        raise ValueError(f"expected a per-tensor scale that is finite and not negative, found {factor[wrong][0]}")
    if static is not None and not ((static * LARGEST).isfinite() & (static > 0)):
        raise ValueError(f"expected an input scale that is finite and above zero, found {static}")
    if parts.scale.is_meta:
        return parts
    rows = factor.view(parts.qdata.shape[:-1]) if factor.dim() == 1 else factor
    if not factor.all() and ((rows == 0) & (parts.qdata & 0x77).any(-1)).any():
        raise ValueError("expected a per-tensor scale above zero, found 0 for codes that are not all zero")
    data = parts.scale.view(torch.uint8)
    if data.numel() and data.max() > layout.E4M3_NAN and (negative := (data > layout.E4M3_NAN) & (data != 0xFF)).any():
        raise ValueError(f"expected block scales that are not negative, found {int(negative.sum())} that are")
    return parts
