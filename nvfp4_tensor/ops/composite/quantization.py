"""Plain-torch implementations of the ops that quantize and decode, for devices without a native kernel.

All ops are functional and get their randomness from a tensor (``rng_state``), so that torch.compile, CUDA graphs,
activation checkpointing and export need nothing special. ``spec`` is :meth:`QuantizeSpec.pack`'s integer.

No op has a gradient. They run below autograd: NVFP4Tensor's aten operators, which torch differentiates, and
:func:`tensor.fake_quantize`, which has a straight-through gradient, call them. If an op is called on a tensor that
requires a gradient, backward warns and returns none. With torch's stable ABI, an autograd kernel can only be registered
from Python, and would cost compiled graphs 5 us of CPU time per call, even under no_grad.

If x is a shard of a larger tensor, ``row0`` and ``col0`` are the offsets of its first element, and ``full_width`` (and
``full_rows``) is the size of the full tensor, 0 for the size of x. Only the random bits depend on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import eden, fp8, layout, reference
from nvfp4_tensor.numerics.layout import BLOCK, ROTATION, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.schemas import SymInt, op

# --- randomness ------------------------------------------------------------------------------------------------------


@op(tags=(torch.Tag.nondeterministic_seeded,))
def draw_rng_state(like: Tensor) -> Tensor:
    """Sample (seed, offset), int64 (2,), from torch's default generator of the device of ``like``.

    This is a separate op, because Inductor would sample other bits for torch.randint than eager mode, and would merge
    two calls with equal arguments of an op that it does not know to be random.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


# --- amax and Hadamard -----------------------------------------------------------------------------------------------


@op()
def amax(x: Tensor, hadamard_sign: int = -1) -> Tensor:
    """Return the largest finite magnitude of x, or of its Hadamard transform along the last dimension: float32 0-d."""
    return reference.amax(x if hadamard_sign == -1 else reference.hadamard(x, hadamard_sign))


@op(returns="amax, amax_t")
def amax_pair(
    x: Tensor, rng_state: Tensor | None, spec: int, spec_t: int, row0: SymInt = 0, col0: SymInt = 0
) -> tuple[Tensor, Tensor]:
    """Return amax of x (2-D) after the transform of ``spec``, and of its transpose after that of ``spec_t``.

    These are the amaxes that :func:`quantize_pair` needs: float32 0-d each. Only EDEN, whose rotation depends on them,
    reads rng_state and the offsets of x in the full tensor.
    """
    return (
        own_amax(x, QuantizeSpec.unpack(spec), rng_state, col0),
        own_amax(x.t(), QuantizeSpec.unpack(spec_t), rng_state, row0),
    )


@op()
def hadamard(x: Tensor, sign: int) -> Tensor:
    """Apply the random Hadamard transform to each 16 elements of the last dimension, padded to 16: bfloat16."""
    return reference.hadamard(x, sign)


# --- rotation (EDEN; contract, section 9) ----------------------------------------------------------------------------


@op()
def rotate(x: Tensor, rng_state: Tensor, inverse: bool = False, col0: SymInt = 0) -> Tensor:
    """Apply EDEN's rotation to each 128 columns (contract, section 9), or its inverse: float32 (..., K padded to 128).

    x: (..., K); for the inverse, K is a multiple of 128. col0: the first column of the shard x in the full tensor.
    """
    _check_rotation(x, col0)
    if inverse and x.shape[-1] % ROTATION:
        raise ValueError(f"a rotated tensor has a multiple of {ROTATION} columns, not {x.shape[-1]}")
    return eden.rotate(x, rng_state, inverse, col0)


@op()
def rotate_back(x: Tensor, rng_state: Tensor, columns: SymInt, col0: SymInt = 0) -> Tensor:
    """Invert EDEN's rotation of x (..., K), K a multiple of 128, and round to bfloat16: (..., columns).

    dgrad calls it for values of dy that were rotated, if w is not. col0: the first column of the shard x in the full
    tensor.
    """
    if not 0 <= columns <= x.shape[-1]:
        raise ValueError(f"columns is at most the {x.shape[-1]} of x, not {columns}")
    return rotate(x, rng_state, True, col0)[..., :columns].bfloat16().contiguous()


def _check_rotation(x: Tensor, col0: int) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension: x.reshape(1) has")
    if col0 < 0 or col0 % ROTATION:
        raise ValueError(f"col0 must be a multiple of {ROTATION}, where a rotation begins, not {col0}")


@op()
def amax_rotated(x: Tensor, rng_state: Tensor, col0: SymInt = 0) -> Tensor:
    """Return the largest magnitude of ``rotate(x)``, ignoring rotations with a NaN or an Inf: float32 0-d."""
    _check_rotation(x, col0)
    return eden.amax(x, rng_state, col0)


# --- quantize --------------------------------------------------------------------------------------------------------
# The messages of these checks are those of csrc/arguments.h.


@op(returns="qdata, scale, per_tensor_scale")
def quantize(
    x: Tensor,
    amax: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_width: SymInt = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x (..., K), by default with its own amax; see :func:`reference.quantize`."""
    how = QuantizeSpec.unpack(spec)
    if how.row_scaled:
        raise ValueError(
            "the op quantize does not support row_scaled=True: use quantize_rows, which returns one scale per row"
        )
    check_origin(math.prod(x.shape[:-1]), x.shape[-1], row0, col0, full_width, how.column_multiple)
    if amax is None:
        amax = own_amax(x, how, rng_state, col0)
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


def check_origin(rows: int, columns: int, row0: int, col0: int, full_width: int, multiple: int) -> None:
    """Raise a ValueError for offsets that block_numbers in csrc/arguments.h does not accept."""
    if min(row0, col0, full_width) < 0:
        raise ValueError(
            "row0, col0 and full_width, where x lies in a larger tensor, must not be negative, not "
            f"{row0}, {col0} and {full_width}"
        )
    if col0 % multiple:
        unit = "a block" if multiple == BLOCK else "a rotation"
        raise ValueError(f"col0 must be a multiple of {multiple}, where {unit} begins, not {col0}")
    width = full_width or columns
    last = (row0 + rows) * (ceil_to(width, multiple) // multiple) + (col0 + ceil_to(columns, multiple)) // multiple
    if last >= 1 << 63:
        raise ValueError(f"blocks are numbered in 63 bits: row0 {row0} of a tensor of {width} columns lies beyond them")


def own_amax(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, col0: int = 0) -> Tensor:
    """Return the amax of x after the spec's Hadamard transform or rotation (EDEN), if any: float32 0-d."""
    if not spec.is_eden:
        return torch.ops.nvfp4.amax(x, -1 if spec.hadamard_sign is None else spec.hadamard_sign)
    if rng_state is None:
        raise ValueError("EDEN needs rng_state, an int64 tensor (seed, offset)")
    return torch.ops.nvfp4.amax_rotated(x, rng_state, col0)


@op(returns="qdata, scale, per_tensor_scale")
def quantize_rows(
    x: Tensor,
    amax: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_width: SymInt = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each row of x (..., K) with its own amax, to (qdata, scale, per_tensor_scale (rows,)).

    rows is the product of the leading dimensions. amax is (rows,) if given. ``spec`` must have ``row_scaled`` set.
    """
    how = QuantizeSpec.unpack(spec)
    rows = math.prod(x.shape[:-1])
    if not how.row_scaled:
        raise ValueError("quantize_rows needs a spec with row_scaled=True")
    if amax is not None and (amax.shape != (rows,) or amax.dtype != torch.float32):
        raise ValueError(f"amax must be float32 ({rows},), one per row, got {amax.dtype} {tuple(amax.shape)}")
    check_origin(rows, x.shape[-1], row0, col0, full_width, how.column_multiple)
    amax = reference.row_amax(x, how.hadamard_sign) if amax is None else amax
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


@op(returns="qdata, scale, per_tensor_scale, qdata_t, scale_t, per_tensor_scale_t")
def quantize_pair(
    x: Tensor,
    amax: Tensor | None,
    amax_t: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_rows: SymInt = 0,
    full_width: SymInt = 0,
    stream_t: int = 1,
    stream: int = 0,
) -> tuple[Tensor, ...]:
    """Quantize x (M, K) with random stream ``stream``, and its transpose (K, M) by spec_t with ``stream_t``.

    By default, both by their own amaxes. All operands with one rng_state, which makes EDEN's rotations cancel, need
    streams of their own for independent draws.
    """
    if row0 < 0 or row0 % BLOCK:
        raise ValueError(f"row0 must be a multiple of {BLOCK}, where a block of the transpose begins, not {row0}")
    if full_rows < 0:
        raise ValueError(f"full_rows must not be negative, not {full_rows}")
    if (amax is None) != (amax_t is None):
        raise ValueError("amax and amax_t are given together, or neither is")
    if amax is None or amax_t is None:
        amax, amax_t = torch.ops.nvfp4.amax_pair(x, rng_state, spec, spec_t, row0, col0)
    return (
        *quantize(x, amax, rng_state, spec, row0, col0, full_width, stream),
        *quantize(x.t(), amax_t, rng_state, spec_t, col0, row0, full_rows, stream_t),
    )


@op(returns="values, per_tensor_scale, t, scale_t, per_tensor_scale_t", is_fake=True)
def quantize_pair_values(
    x: Tensor,
    amax: Tensor | None,
    amax_t: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    codes_t: bool,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_rows: SymInt = 0,
    full_width: SymInt = 0,
    stream_t: int = 1,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run ``quantize_pair`` and decode for dense products: (values, per_tensor_scale, t, scale_t, per_tensor_scale_t).

    values, bfloat16 (M, K), is code x block scale of x (M, K), exact. If ``codes_t``, (t, scale_t) are the codes and
    scales of the transpose, to be saved and decoded later. Otherwise t has its values, bfloat16 (K, M), and scale_t is
    empty (0,). A transformed operand keeps its columns padded to 16, or to 128 for EDEN.

    Without FP4 tensor cores, a training step calls this with codes_t for x, whose values fprop multiplies and whose
    transpose is saved for backward, and without codes_t for dy, whose values are both multiplied in backward. It is one
    pass over x or dy; quantize_pair and dequantize, with the same bits, would move each value two more times.
    """
    qdata, scale, factor, qdata_t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair(
        x, amax, amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t, stream
    )
    rows, columns = x.shape
    dequantize = torch.ops.nvfp4.dequantize
    values = dequantize(qdata, scale, None, columns_of_values(columns, spec), torch.bfloat16)
    if codes_t:
        return values, factor, qdata_t, scale_t, factor_t
    values_t = dequantize(qdata_t, scale_t, None, columns_of_values(rows, spec_t), torch.bfloat16)
    return values, factor, values_t, scale_t.new_empty((0,)), factor_t


@op(returns="qdata_t, scale_t")
def transpose_codes(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose codes (R, C/2) in 16x16 tiles and their scales: (C, R/2), with R padded to 16.

    A tile has the same scale in both directions, so nothing is rounded. With 1x16 blocks the result would be wrong;
    this does not check that all rows of a tile have equal scales.

    dgrad calls it in training for a weight that the forward quantized.
    """
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    codes = pad(layout.unpack(qdata), (0, 0, 0, -rows % BLOCK)).t().contiguous()
    tile_scale = layout.unswizzle(scale.view(torch.uint8), rows, columns // BLOCK)[::BLOCK]
    scale_t = layout.swizzle(tile_scale.t().repeat_interleave(BLOCK, dim=0))
    return layout.pack(codes), scale_t.view(torch.float8_e4m3fn)


# --- dequantize, fake quantize ---------------------------------------------------------------------------------------


@op()
def dequantize(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: SymInt, dtype: torch.dtype
) -> Tensor:
    """Decode to (..., columns) in dtype; without per_tensor_scale, return code * block scale (exact in bfloat16)."""
    return reference.dequantize(qdata, scale, per_tensor_scale, columns, dtype)


@op(mutates_args=["out"])
def decode_fp8(codes: Tensor, scale: Tensor, height: int, width: int, first: int, out: Tensor) -> None:
    """Write rows of FP8 weights to ``out``, in its dtype: code x scale in float32, rounded once.

    codes: e4m3 (*leading, rows, K), or its bytes, the rows from row ``first`` on.
    scale: float32 (*leading, R, C), one for each height x width of all rows; 0 is the height, or width, of all.
    """
    out.copy_(fp8.decode(codes.view(torch.float8_e4m3fn), scale, (height, width), first))


def columns_of_values(columns: int, spec: int) -> int:
    """Return the number of decoded columns: a transform fills the padding of its last columns, which is kept."""
    how = QuantizeSpec.unpack(spec)
    return columns if how.rotation is None else ceil_to(columns, how.rotation)


@op(returns="values, per_tensor_scale")
def fake_quantize(
    x: Tensor,
    amax: Tensor,
    rng_state: Tensor | None,
    spec: int,
    dtype: torch.dtype,
    scaled: bool = True,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_width: SymInt = 0,
) -> tuple[Tensor, Tensor]:
    """Quantize and decode x. Return values, and the per-tensor scale, which values include only if ``scaled``."""
    qdata, scale, factor = quantize(x, amax, rng_state, spec, row0, col0, full_width)
    columns = columns_of_values(x.shape[-1], spec)
    return dequantize(qdata, scale, factor if scaled else None, columns, dtype), factor


@op(returns="values, per_tensor_scale", is_fake=True)
def quantize_activation(x: Tensor, rng_state: Tensor | None, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Run :func:`fake_quantize` with the amax of x and without the per-tensor scale, for W4A4 products.

    With ``row_scaled``, each row (leading dimensions flattened) has its own amax, and per_tensor_scale is (rows,).
    """
    if QuantizeSpec.unpack(spec).row_scaled:
        qdata, scale, factor = torch.ops.nvfp4.quantize_rows(x, None, rng_state, spec)
        columns = columns_of_values(x.shape[-1], spec)
        return torch.ops.nvfp4.dequantize(qdata, scale, None, columns, dtype), factor
    amax = own_amax(x, QuantizeSpec.unpack(spec), rng_state)
    return torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec, dtype, False)
