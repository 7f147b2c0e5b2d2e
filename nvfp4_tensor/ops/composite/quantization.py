"""Plain-torch implementations of the ops that quantize and decode: every device without a kernel of its own runs them.

All ops are functional and take their randomness as a tensor (``rng_state``), so that torch.compile, CUDA graphs,
activation checkpointing and export need nothing special. ``spec`` is :meth:`QuantizeSpec.pack`'s integer.

No op has a gradient. They run below autograd: NVFP4Tensor's aten operators call them, which torch differentiates, and
so does :func:`tensor.fake_quantize`, which passes its gradient through. Called on a tensor that requires a gradient,
backward warns and gives none. With torch's stable ABI a kernel for autograd can only be registered from Python, and a
compiled graph would pay 5 us of CPU time for it at each call, under no_grad too.

Where x is part of a larger tensor, ``row0`` and ``col0`` are the offsets of its first element there, and
``full_width`` (and ``full_rows``) the size of that tensor, 0 for x's own: only the random bits depend on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import eden, layout, reference
from nvfp4_tensor.numerics.layout import BLOCK, ROTATION, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.schemas import SymInt, op

# --- randomness ------------------------------------------------------------------------------------------------------


@op(tags=(torch.Tag.nondeterministic_seeded,))
def draw_rng_state(like: Tensor) -> Tensor:
    """A fresh (seed, offset), int64 (2,), from torch's generator of the device of ``like``.

    An op of its own, not a torch.randint in the graph: Inductor would give randint other bits than eager gives, and
    fold two calls with equal arguments where it does not know them to be random.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


# --- amax and Hadamard -----------------------------------------------------------------------------------------------


@op()
def amax(x: Tensor, hadamard_sign: int = -1) -> Tensor:
    """Largest finite magnitude of x, or of its Hadamard transform along the last dimension: float32 0-d."""
    return reference.amax(x if hadamard_sign == -1 else reference.hadamard(x, hadamard_sign))


@op(returns="amax, amax_t")
def amax_pair(x: Tensor, hadamard_sign: int = -1) -> tuple[Tensor, Tensor]:
    """amax of x (2-D) and of its transpose, the latter Hadamard-transformed if a sign is given: float32 0-d each."""
    return amax(x), amax(x.t(), hadamard_sign)


@op()
def hadamard(x: Tensor, sign: int) -> Tensor:
    """Random Hadamard transform of each 16 elements of the last dimension, padded to 16: bfloat16."""
    return reference.hadamard(x, sign)


# --- rotation (EDEN; contract, section 9) -----------------------------------------------------------------------------


@op()
def rotate(x: Tensor, rng_state: Tensor, inverse: bool = False, col0: SymInt = 0) -> Tensor:
    """EDEN's rotation of each 128 columns (contract, section 9): float32 (..., K rounded up to 128); or its inverse.

    x: (..., K), a multiple of 128 for the inverse. col0: where x begins in the tensor that it is a shard of.
    """
    _check_rotation(x, col0)
    if inverse and x.shape[-1] % ROTATION:
        raise ValueError(f"a rotated tensor has a multiple of {ROTATION} columns, not {x.shape[-1]}")
    return eden.rotate(x, rng_state, inverse, col0)


def _check_rotation(x: Tensor, col0: int) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension: x.reshape(1) has")
    if col0 < 0 or col0 % ROTATION:
        raise ValueError(f"col0 must be a multiple of {ROTATION}, where a rotation begins, not {col0}")


@op()
def amax_rotated(x: Tensor, rng_state: Tensor, col0: SymInt = 0) -> Tensor:
    """The largest magnitude of ``rotate(x)``, float32 0-d; groups that hold a NaN or an Inf are left out."""
    _check_rotation(x, col0)
    return eden.amax(x, rng_state, col0)


# --- quantize --------------------------------------------------------------------------------------------------------


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
    """x (..., K) to (qdata, scale, per_tensor_scale), amax that of x by default; see :func:`reference.quantize`."""
    how = QuantizeSpec.unpack(spec)
    if how.row_scaled:
        raise ValueError(
            "a spec with row_scaled=True goes to the op quantize_rows, whose per-tensor scales are one a row"
        )
    check_origin(math.prod(x.shape[:-1]), x.shape[-1], row0, col0, full_width, how.column_multiple)
    if amax is None:
        amax = own_amax(x, how, rng_state, col0)
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


def check_origin(rows: int, columns: int, row0: int, col0: int, full_width: int, multiple: int) -> None:
    """Refuse what block_numbers of csrc/arguments.h refuses."""
    if min(row0, col0, full_width) < 0:
        raise ValueError(
            "row0, col0 and full_width, where x lies in a larger tensor, must not be negative, not "
            f"{row0}, {col0} and {full_width}"
        )
    if col0 % multiple:
        begins = "a block" if multiple == BLOCK else "a rotation"
        raise ValueError(f"col0 must be a multiple of {multiple}, where {begins} begins, not {col0}")
    width = full_width or columns
    last = (row0 + rows) * (ceil_to(width, multiple) // multiple) + (col0 + ceil_to(columns, multiple)) // multiple
    if last >= 1 << 63:
        raise ValueError(f"blocks are numbered in 63 bits: row0 {row0} of a tensor of {width} columns lies beyond them")


def own_amax(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, col0: int = 0) -> Tensor:
    """The amax of what the spec quantizes: of x, of its Hadamard transform, or of its rotation (EDEN): float32 0-d."""
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
    """x (..., K) to (qdata, scale, per_tensor_scale (rows,)), rows being the leading dimensions flattened.

    The op ``quantize`` of each row by itself, with that row's amax: amax (rows,) where it is given. ``spec`` has
    ``row_scaled`` set.
    """
    how = QuantizeSpec.unpack(spec)
    rows = math.prod(x.shape[:-1])
    if not how.row_scaled:
        raise ValueError("quantize_rows takes a spec with row_scaled=True")
    if amax is not None and (amax.shape != (rows,) or amax.dtype != torch.float32):
        raise ValueError(f"amax is float32 ({rows},), one a row, not {amax.dtype} {tuple(amax.shape)}")
    check_origin(rows, x.shape[-1], row0, col0, full_width, how.column_multiple)
    amax = reference.row_amax(x, how.hadamard_sign) if amax is None else amax
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


@op(returns="qdata, scale, per_tensor_scale, qdata_t, scale_t, per_tensor_scale_t")
def quantize_pair(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_rows: SymInt = 0,
    full_width: SymInt = 0,
    stream_t: int = 1,
) -> tuple[Tensor, ...]:
    """x (M, K) quantized, and its transpose (K, M) quantized by spec_t from random stream ``stream_t``.

    Two operands of one rng_state whose EDEN rotations are to cancel give different streams: their draws then differ.
    """
    if row0 < 0 or row0 % BLOCK:
        raise ValueError(f"row0 must be a multiple of {BLOCK}, where a block of the transpose begins, not {row0}")
    if full_rows < 0:
        raise ValueError(f"full_rows must not be negative, not {full_rows}")
    return (
        *quantize(x, amax, rng_state, spec, row0, col0, full_width, 0),
        *quantize(x.t(), amax_t, rng_state, spec_t, col0, row0, full_rows, stream_t),
    )


@op(returns="values, per_tensor_scale, t, scale_t, per_tensor_scale_t")
def quantize_pair_values(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    codes_t: bool,
    row0: SymInt = 0,
    col0: SymInt = 0,
    full_rows: SymInt = 0,
    full_width: SymInt = 0,
    stream_t: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op ``quantize_pair`` to what dense products read: (values, per_tensor_scale, t, scale_t, per_tensor_scale_t).

    values, bfloat16 (M, K): code x block scale of x (M, K), exact, the per-tensor scale left out. The transpose is
    (t, scale_t) = (qdata_t, its scales), to be saved and decoded later, where ``codes_t``; else t is its values,
    bfloat16 (K, M), and scale_t empty (0,). A side that is transformed keeps its columns padded to 16, or 128 for EDEN.

    A training step off FP4 tensor cores calls it with codes_t for x (whose values fprop multiplies, and whose transpose
    waits for backward), and without for dy, both of whose sides are multiplied at once: one pass over x or dy, where
    quantize_pair and dequantize move each value twice more. Bits are theirs.
    """
    qdata, scale, factor, qdata_t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair(
        x, amax, amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t
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
    """Codes (R, C/2) in 16x16 tiles and their scales as those of the transpose: (C, R/2), R padded to 16.

    A tile's scale serves both directions, so nothing is rounded: codes and scales move. With 1x16 blocks the result
    would mean something else; that the scales of a tile's rows are equal is not looked at.

    A training step's dgrad calls it for a weight that the forward quantized.
    """
    rows, columns = qdata.shape[0], qdata.shape[1] * 2
    codes = pad(layout.unpack(qdata), (0, 0, 0, -rows % BLOCK)).t().contiguous()
    of_tiles = layout.unswizzle(scale.view(torch.uint8), rows, columns // BLOCK)[::BLOCK]
    scale_t = layout.swizzle(of_tiles.t().repeat_interleave(BLOCK, dim=0))
    return layout.pack(codes), scale_t.view(torch.float8_e4m3fn)


# --- dequantize, fake quantize ---------------------------------------------------------------------------------------


@op()
def dequantize(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: SymInt, dtype: torch.dtype
) -> Tensor:
    """Decode to (..., columns) of dtype; without per_tensor_scale, code * block scale alone (exact in bfloat16)."""
    return reference.dequantize(qdata, scale, per_tensor_scale, columns, dtype)


def columns_of_values(columns: int, spec: int) -> int:
    """A transform fills the padding of the last columns that it takes together, so what it returns keeps it."""
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
    """What x decodes to after quantization, and the per-tensor scale, which values hold only where ``scaled``."""
    qdata, scale, factor = quantize(x, amax, rng_state, spec, row0, col0, full_width)
    columns = columns_of_values(x.shape[-1], spec)
    return dequantize(qdata, scale, factor if scaled else None, columns, dtype), factor


@op(returns="values, per_tensor_scale")
def quantize_activation(x: Tensor, rng_state: Tensor | None, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`fake_quantize` by the amax of x itself, the per-tensor scale left out: what a W4A4 product multiplies."""
    amax = own_amax(x, QuantizeSpec.unpack(spec), rng_state)
    return torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec, dtype, False)
