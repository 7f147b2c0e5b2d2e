"""Products with quantized operands: on FP4 tensor cores (``scaled_mm.py``), or by the op ``nvfp4.matmul`` elsewhere.

:func:`product` implements mm, addmm, bmm, baddbmm, linear and matmul on an :class:`NVFP4Tensor`; :func:`multiply`
implements the products of training, whose operands are :class:`Codes`. Both call the same backends. The result is
``round_once(alpha * sum + bias)`` with a float32 sum (numerics contract, section 6) on every backend.

FP4 tensor cores multiply two quantized operands as codes. Elsewhere the left one is decoded to ``code x block scale``,
exact in bfloat16, and the op multiplies it by the codes of the right one: the same sum, up to the order of summation,
with both per-tensor scales applied in float32 before the one rounding.

With an ``activation_spec`` on the NVFP4 operand (W4A4), the dense operand is quantized first, but only if the sum runs
along the blocks of the NVFP4 operand, as in the forward product. Its gradient sums across the blocks and stays dense.

With ``ProductBackend.FP8``, both operands of the forward product are rounded to e4m3 if x has many rows (``fp8.py``).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.matmul import fp8, scaled_mm
from nvfp4_tensor.matmul.backends import Backend, choose, choose_grouped, multiplies
from nvfp4_tensor.numerics.codes import Codes, Decoded
from nvfp4_tensor.numerics.hadamard import inverse_hadamard
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.tensor.arguments import resolve_amax, resolve_rng_state
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize

Left: TypeAlias = "Codes | Decoded | Tensor"
"""The left operand of a product: quantized, or dense."""

_matmul = torch.ops.nvfp4.matmul.default


# --- products of plain operands --------------------------------------------------------------------------------------


def multiply(a: Left, b: Codes | Tensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a (M, K) @ b (N, K)^T + bias (N,), rounded once: (M, N). A dense operand is not quantized."""
    if isinstance(a, Codes) and isinstance(b, Codes) and multiplies(a, b):
        return scaled_mm.scaled_mm_product(a, b, bias, 1, out_dtype)
    if isinstance(b, Codes):
        x, factor = (a, None) if isinstance(a, Tensor) else decode_values(a)
        return _matmul(x, factor, *b, bias, x.shape[-1], False, out_dtype)
    assert not isinstance(a, Decoded)
    if isinstance(a, Codes):  # (b a^T)^T: the op reads codes on the right
        y = _matmul(b, None, *a, None if bias is None else bias.unsqueeze(-1), b.shape[-1], False, out_dtype)
        return y.t().contiguous()
    y = torch.mm(a, b.t().to(a.dtype)) if bias is None else torch.addmm(bias.to(a.dtype), a, b.t().to(a.dtype))
    # In torch 2.11's compiler, a cast to the same dtype as the output of an autograd.Function loses the gradient.
    return y if y.dtype == out_dtype else y.to(out_dtype)


def decode_values(a: Codes | Decoded, columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Return code x block scale, exact in bfloat16, (R, C) or the first ``columns``; and the per-tensor scale."""
    if isinstance(a, Decoded):
        return a.values if columns is None else a.values[:, :columns], a.per_tensor_scale
    width = a.columns if columns is None else columns
    return torch.ops.nvfp4.dequantize(a.qdata, a.scale, None, width, torch.bfloat16), a.per_tensor_scale


# --- products of tensors ---------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, *, bias: Tensor | None = None, alpha: float = 1, beta: float = 1) -> Tensor:
    """Return ``alpha * a @ b + beta * bias`` of two matrices or two equal batches, at least one an NVFP4Tensor.

    bias broadcasts to the result. The result has the common dtype of the operands. As in BLAS, beta = 0 ignores the
    bias and alpha = 0 the product, including their NaNs.
    """
    _check_operands(a, b)
    if beta == 0:
        bias = None
    if alpha == 0:
        y = a.new_zeros((), dtype=torch.float32) if bias is None else bias.float() * beta
        return y.to(a.dtype).expand(*a.shape[:-1], b.shape[-1]).contiguous()
    elif bias is not None and beta != 1:
        bias = bias.float() * beta
    if isinstance(b, NVFP4Tensor):
        return _times_nvfp4(a, b, b.transposed, bias, alpha)
    # (a @ b)^T = b^T @ a^T has the NVFP4 operand on the right
    if bias is not None:
        bias = bias.expand(*a.shape[:-1], b.shape[-1]).mT
    assert isinstance(a, NVFP4Tensor)
    return _times_nvfp4(b.mT, a, not a.transposed, bias, alpha).mT.contiguous()


def linear_product(x: Tensor, w: NVFP4Tensor, bias: Tensor | None) -> Tensor:
    """Return x (M, K) @ w^T + bias for a matrix w (N, K), as :func:`product` with w.t() but without that view."""
    if x.size(1) != w.size(1) or x.dtype != w.dtype or x.device != w.device:
        _check_operands(x, w.t())
    return _times_nvfp4(x, w, not w.transposed, bias, 1)


def grouped_product(x: Tensor, w: NVFP4Tensor, offs: Tensor) -> Tensor:
    """Return rows offs[e-1]..offs[e] of x (M, K) times experts w[e] of w (E, K, N), for mixtures of experts."""
    if isinstance(x, NVFP4Tensor) or not isinstance(w, NVFP4Tensor) or x.dim() != 2 or w.dim() != 3:
        raise TypeError("a grouped product needs dense rows (M, K) and NVFP4 experts (E, K, N)")
    if x.shape[1] != w.shape[1] or x.dtype != w.dtype or offs.shape != w.shape[:1]:
        raise RuntimeError(
            f"rows {tuple(x.shape)} {x.dtype}, offsets {tuple(offs.shape)} and experts {tuple(w.shape)} {w.dtype} "
            "do not match: they must be (M, K), (E,) and (E, K, N) of one dtype"
        )
    if not x.device == w.device == offs.device:
        raise RuntimeError(
            f"rows on {x.device}, experts on {w.device}, offsets on {offs.device}: move them to one device"
        )
    x_scale, out_dtype = None, x.dtype
    if w.transposed and w.activation_spec is not None:
        if w.activation_amax is None:  # rows after the last group must not affect the amax
            x = torch.where(torch.arange(len(x), device=x.device)[:, None] < offs[-1:], x, 0)
        if choose_grouped(x, w) == Backend.GROUPED_FP4:
            return scaled_mm.scaled_grouped_product(quantize(x, w.activation_spec, amax=w.activation_amax), w, offs)
        x, x_scale = _quantized_values(x, w)
    weight = w.qdata.contiguous(), w.scale.contiguous(), w.per_tensor_scale
    if w.transposed and x.dtype != torch.float32:
        return torch.ops.nvfp4.grouped_linear(x, x_scale, *weight, offs, out_dtype)
    if (sign := _sign_to_undo(w, w.transposed)) is not None:
        columns = ceil_to(w.columns, BLOCK)
        y = torch.ops.nvfp4.grouped_matmul(x, x_scale, *weight, offs, columns, True, torch.float32)
        return inverse_hadamard(y, sign)[..., : w.columns].to(out_dtype)
    columns = x.shape[-1] if w.transposed else w.columns
    return torch.ops.nvfp4.grouped_matmul(x, x_scale, *weight, offs, columns, not w.transposed, out_dtype)


def _check_operands(a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} cannot be multiplied")
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"both operands of a product must have the same dtype, got {a.dtype} and {b.dtype}: cast one, for example "
            f"with x.to({b.dtype}) (casting an NVFP4Tensor only changes the dtype that it decodes to)"
        )
    if a.device != b.device:
        raise RuntimeError(f"both operands of a product must be on one device, got {a.device} and {b.device}")


def _check_bias(bias: Tensor, x: Tensor) -> None:
    """Check dtype and device. A bias on the meta device would make the ops infer a shape and compute nothing."""
    if bias.device != x.device or not bias.is_floating_point():
        raise RuntimeError(
            f"bias must be floating point on the device of x, {x.device}, got {bias.dtype} on {bias.device}: move it, "
            "or initialize it if it is on the meta device"
        )


def _times_nvfp4(x: Tensor, w: NVFP4Tensor, along_blocks: bool, bias: Tensor | None, alpha: float) -> Tensor:
    """Return x (M, K) or (E, M, K) times the stored w, transposed if the sum runs along its blocks."""
    if bias is not None:
        _check_bias(bias, x)
    out_dtype, backend = x.dtype, choose(x, w, along_blocks)
    if backend.on_codes:
        a = x if isinstance(x, NVFP4Tensor) else quantize(x, w.activation_spec, amax=w.activation_amax)
        multiply_codes = scaled_mm.fbgemm_product if backend == Backend.FBGEMM else scaled_mm.scaled_mm_product
        return multiply_codes(codes_of(a), codes_of(w), bias, alpha, out_dtype)
    if backend in (Backend.FP8_SCALED_MM, Backend.FP8_VALUES):
        return fp8.product(x, codes_of(w), bias, alpha, out_dtype, backend == Backend.FP8_SCALED_MM)
    sign = None if isinstance(x, NVFP4Tensor) else _sign_to_undo(w, along_blocks)
    factor: Tensor | None = None
    if backend == Backend.QUANTIZED_VALUES:
        x, factor = _quantized_values(x, w)
    elif isinstance(x, NVFP4Tensor):
        x, factor = _decoded(x, w, along_blocks)
    if alpha != 1:
        factor = torch.full((), alpha, dtype=torch.float32, device=x.device) if factor is None else factor * alpha
    if sign is None:
        columns = x.shape[-1] if along_blocks else w.columns
        return _matmul(x, factor, *codes_of(w), bias, columns, not along_blocks, out_dtype)
    y = _matmul(x, factor, *codes_of(w), None, ceil_to(w.columns, BLOCK), True, torch.float32)
    y = inverse_hadamard(y, sign)[..., : w.columns]
    return (y if bias is None else y + bias).to(out_dtype)


def _sign_to_undo(w: NVFP4Tensor, along_blocks: bool) -> int | None:
    """Return the sign of the Hadamard transform of w that a sum across its blocks must invert, or None.

    If activations are transformed before the product, their gradient must be that of the untransformed activations.
    """
    return None if along_blocks or w.activation_spec is None else w.activation_spec.hadamard_sign


def codes_of(w: NVFP4Tensor) -> Codes:
    """Return the parts of a matrix as products read them."""
    # In a graph of torch.compile, a call of a method would read w itself, not its parts.
    scale = w.per_tensor_scale if w.per_tensor_scale.dim() < 2 else w.row_scale()
    return Codes(w.qdata.contiguous(), w.scale.contiguous(), scale)


def _quantized_values(x: Tensor, w: NVFP4Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x; return code x block scale, exact in bfloat16, and the per-tensor scale."""
    spec = w.activation_spec
    assert spec is not None
    rng_state = resolve_rng_state(x, spec, None, None)
    if w.activation_amax is None:
        values, factor = torch.ops.nvfp4.quantize_activation(x, rng_state, spec.pack(), torch.bfloat16)
    else:
        amax = resolve_amax(x, spec, w.activation_amax)
        values, factor = torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec.pack(), torch.bfloat16, False)
    # A transform fills the padding, which a product with a weight that is transformed too sums over.
    return values if w.spec.hadamard_sign is not None else values[..., : w.columns], factor


def _decoded(x: NVFP4Tensor, w: NVFP4Tensor, along_blocks: bool) -> tuple[Tensor, Tensor | None]:
    """Return (values, factor) of an NVFP4 left operand, with exact bfloat16 values if the factor can be left out."""
    if x.transposed:  # the sum runs over the rows, which may have different factors
        if x.per_tensor_scale.dim():
            return x._decode(torch.float32, x.row_scale()).mT, None
        return x._decode(torch.bfloat16, None).mT, x.per_tensor_scale
    both_transformed = x.spec.hadamard_sign is not None and x.spec.hadamard_sign == w.spec.hadamard_sign
    columns = ceil_to(x.columns, BLOCK) if both_transformed and along_blocks else x.columns
    return x._decode(torch.bfloat16, None, columns), x.row_scale()
