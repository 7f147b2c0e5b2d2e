"""The operands of a training step, and their product: the one place that multiplies them.

On FP4 tensor cores two quantized operands go to ``scaled_mm`` as codes. Everywhere else the left one is decoded to
``code x block scale``, exact in bfloat16, and the op ``nvfp4.matmul`` multiplies it by the codes of the right one: the
same sum, up to its order, with both per-tensor scales applied in float32 before the one rounding.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.matmul.backends import capability, has_fp4_tensor_cores
from nvfp4_tensor.matmul.scaled_mm import scaled_mm_product
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.definitions import own_amax


class Operand(NamedTuple):
    """A matrix (R, C) in NVFP4, C padded to 16; the plain tensors that an NVFP4Tensor holds, for autograd to save."""

    qdata: Tensor  # uint8 (R, C/2)
    scale: Tensor  # e4m3, swizzled
    per_tensor_scale: Tensor  # float32 0-d, or (R,) where the spec is row-scaled

    @property
    def columns(self) -> int:
        """C, padded to 16: a Hadamard transform fills the padding, and the product sums it."""
        return self.qdata.shape[-1] * 2

    def values(self, columns: int | None = None) -> Tensor:
        """code x block scale, bfloat16 (R, C), or its first columns: exact."""
        columns = self.columns if columns is None else columns
        return torch.ops.nvfp4.dequantize(self.qdata, self.scale, None, columns, torch.bfloat16)


class Values(NamedTuple):
    """A matrix (R, C) in NVFP4 as a dense product reads it, never saved: C is padded where it was transformed."""

    values: Tensor  # bfloat16: code x block scale
    per_tensor_scale: Tensor  # float32 0-d


Left: TypeAlias = "Operand | Values | Tensor"
"""What stands on the left of a product: in NVFP4, or dense."""


# --- quantize --------------------------------------------------------------------------------------------------------


def quantized(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None = None, stream: int = 0) -> Operand:
    """x (R, C) by its own amax, or each row by that row's."""
    if spec.row_scaled:
        return Operand(*torch.ops.nvfp4.quantize_rows(x, None, rng_state, spec.pack(), 0, 0, 0, stream))
    amax = own_amax(x, spec, rng_state)
    return Operand(*torch.ops.nvfp4.quantize(x, amax, rng_state, spec.pack(), 0, 0, 0, stream))


def quantized_pair(
    x: Tensor,
    spec: QuantizeSpec | None,
    spec_t: QuantizeSpec | None,
    rng_state: Tensor | None = None,
    stream_t: int = 1,
) -> tuple[Operand | None, Operand | None]:
    """x (R, C) and x^T (C, R), each by its spec and its own amax, in one pass over x; None for a spec of None."""
    if spec is None or spec_t is None or spec.row_scaled or spec_t.row_scaled:
        of_x = None if spec is None else quantized(x, spec, rng_state)
        return of_x, None if spec_t is None else quantized(x.t().contiguous(), spec_t, rng_state, stream_t)
    amax, amax_t = _amax_pair(x, spec, spec_t, rng_state)
    parts = torch.ops.nvfp4.quantize_pair(x, amax, amax_t, rng_state, spec.pack(), spec_t.pack(), 0, 0, 0, 0, stream_t)
    return Operand(*parts[:3]), Operand(*parts[3:])


def _amax_pair(x: Tensor, spec: QuantizeSpec, spec_t: QuantizeSpec, rng_state: Tensor | None) -> tuple[Tensor, Tensor]:
    if spec.rotation is None and not spec_t.is_eden:
        return torch.ops.nvfp4.amax_pair(x, -1 if spec_t.hadamard_sign is None else spec_t.hadamard_sign)
    return own_amax(x, spec, rng_state), own_amax(x.t().contiguous(), spec_t, rng_state)


def multipliable(
    x: Tensor,
    spec: QuantizeSpec | None,
    spec_t: QuantizeSpec | None,
    rng_state: Tensor | None,
    stream_t: int,
    *,
    codes_t: bool = False,
    codes: bool = False,
) -> tuple[Operand | Values | None, Operand | Values | None]:
    """:func:`quantized_pair` in the form that a product on x's device takes on the left.

    codes_t: x^T as codes even so, to be saved. codes: both, for products with a dense right operand.
    """
    if codes or runs_on_codes(x.device) or any(each is not None and each.row_scaled for each in (spec, spec_t)):
        return quantized_pair(x, spec, spec_t, rng_state, stream_t)
    if spec is not None and spec_t is not None:
        amax, amax_t = _amax_pair(x, spec, spec_t, rng_state)
        packed = spec.pack(), spec_t.pack()
        values, factor, *of_t = torch.ops.nvfp4.quantize_pair_values(
            x, amax, amax_t, rng_state, *packed, codes_t, 0, 0, 0, 0, stream_t
        )
        t, scale_t, factor_t = of_t
        return Values(values, factor), Operand(t, scale_t, factor_t) if codes_t else Values(t, factor_t)
    if spec is not None:
        return Values(*torch.ops.nvfp4.quantize_activation(x, rng_state, spec.pack(), torch.bfloat16)), None
    return quantized_pair(x, spec, spec_t, rng_state, stream_t)


def transposed(w: Operand) -> Operand:
    """The codes of w (R, C) in 16x16 blocks as those of w^T (C, R), R padded to 16: the same codes, moved."""
    qdata, scale = torch.ops.nvfp4.transpose_codes(w.qdata, w.scale)
    return Operand(qdata, scale, w.per_tensor_scale)


# --- multiply --------------------------------------------------------------------------------------------------------


def product(a: Left, b: Operand | Tensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (N, K)^T + bias (N,), rounded once: (M, N). A dense operand stays as it is."""
    if isinstance(a, Operand) and isinstance(b, Operand) and _on_codes(a, b):
        return scaled_mm_product(a, b, bias, 1, out_dtype)
    if isinstance(b, Operand):
        dense, factor = decoded(a)
        return _matmul(dense, factor, b, bias, out_dtype)
    assert not isinstance(a, Values)
    if isinstance(a, Operand):  # (b a^T)^T: codes stand on the right
        y = _matmul(b, None, a, None if bias is None else bias.unsqueeze(-1), out_dtype)
        return y.t().contiguous()
    y = torch.mm(a, b.t().to(a.dtype)) if bias is None else torch.addmm(bias.to(a.dtype), a, b.t().to(a.dtype))
    # Under torch 2.11's compiler a cast that changes nothing, as an autograd.Function's output, cuts the gradient.
    return y if y.dtype == out_dtype else y.to(out_dtype)


def decoded(a: Left, columns: int | None = None) -> tuple[Tensor, Tensor | None]:
    """The values of a, or their first columns, and the factor left out of them; a dense one as it is."""
    if isinstance(a, Operand):
        return a.values(columns), a.per_tensor_scale
    if isinstance(a, Values):
        return a.values if columns is None else a.values[:, :columns], a.per_tensor_scale
    return a, None


def product_across(a: Tensor, factor: Tensor | None, b: Operand, columns: int, out_dtype: torch.dtype) -> Tensor:
    """factor * a (M, N) @ b (N, K), a sum across the blocks of b, in its decoded values: (M, columns) of K padded."""
    return torch.ops.nvfp4.matmul(a, factor, *b, None, columns, True, out_dtype)


def rotated_back(
    a: Operand | Values, columns: int, rng_state: Tensor | None, dtype: torch.dtype | None = None, col0: int = 0
) -> Values | Tensor:
    """The values of what EDEN rotated in the basis that it had before: bfloat16 (R, columns), or dense in ``dtype``.

    col0: its first column in the whole that it is a piece of.
    """
    values, factor = decoded(a)
    assert factor is not None
    values = torch.ops.nvfp4.rotate(values.float(), rng_state, True, col0)[:, :columns]
    return Values(values.bfloat16(), factor) if dtype is None else (values * factor).to(dtype)


@torch.compiler.assume_constant_result
def runs_on_codes(device: torch.device) -> bool:
    """Whether two quantized operands are multiplied as codes there."""
    return has_fp4_tensor_cores(device)


@torch.compiler.assume_constant_result
def reads_transposed(device: torch.device) -> bool:
    """Whether dgrad is a product of the codes of w^T there, not one across the blocks of w, which are decoded first.

    FP4 tensor cores take nothing else, and Hopper's kernels decode as they multiply: moved codes are 9/16 bytes an
    element to write, decoded ones 2.
    """
    return has_fp4_tensor_cores(device) or capability(device) == (9, 0)


def _on_codes(a: Operand, b: Operand) -> bool:
    one_scale = a.per_tensor_scale.dim() == b.per_tensor_scale.dim() == 0
    return runs_on_codes(a.qdata.device) and one_scale and a.qdata.numel() > 0 and b.qdata.numel() > 0


def _matmul(x: Tensor, factor: Tensor | None, w: Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    return torch.ops.nvfp4.matmul(x, factor, *w, bias, x.shape[-1], False, out_dtype)
