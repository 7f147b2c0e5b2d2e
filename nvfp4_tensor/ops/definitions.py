"""The operators ``torch.ops.nvfp4.*``: schema, shape inference, the reference as their implementation.

The native extension registers faster kernels for CPU and CUDA under the same schemas; the dispatcher picks. All of
them are functional and take their randomness as a tensor, so that torch.compile, CUDA graphs, activation
checkpointing and export need nothing special. ``spec`` is :meth:`QuantizeSpec.pack`'s integer.

None has a gradient: they stand below autograd, where NVFP4Tensor's aten operators call them (torch's own formulas
differentiate those) and :func:`tensor.fake_quantize`, which passes its gradient through. Called on a tensor that needs
one, backward warns and leaves none. With torch's stable ABI a kernel for autograd can only be registered from Python,
and a graph would pay for it at each call: 5 us of a CPU, under no_grad too.

Where a tensor is part of a larger one, ``row0`` and ``col0`` say where its first element lies in it and ``full_width``
(and ``full_rows``) how large it is, 0 meaning its own size: only the random bits depend on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm  # type: ignore[attr-defined]  # stub

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import BLOCK, TILE_ROWS, ceil_to, scale_tiles, swizzle, unswizzle
from nvfp4_tensor.numerics.spec import QuantizeSpec

_Function = TypeVar("_Function", bound=Callable[..., object])
_library = torch.library.Library("nvfp4", "DEF")

_QUANTIZED = "Tensor qdata, Tensor scale, Tensor per_tensor_scale"
_PLACE = "SymInt row0=0, SymInt col0=0, SymInt full_width=0"

_library.define(
    "draw_rng_state(Tensor like) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded)
)
for _schema in (
    "amax(Tensor x, int hadamard_sign=-1) -> Tensor",
    "amax_pair(Tensor x, int hadamard_sign=-1) -> (Tensor amax, Tensor amax_t)",
    "hadamard(Tensor x, int sign) -> Tensor",
    "rotate(Tensor x, Tensor rng_state, bool inverse=False, SymInt col0=0) -> Tensor",
    "amax_rotated(Tensor x, Tensor rng_state, SymInt col0=0) -> Tensor",
    f"quantize(Tensor x, Tensor? amax, Tensor? rng_state, int spec, {_PLACE}, int stream=0) -> ({_QUANTIZED})",
    f"quantize_rows(Tensor x, Tensor? amax, Tensor? rng_state, int spec, {_PLACE}, int stream=0) -> ({_QUANTIZED})",
    "quantize_pair(Tensor x, Tensor amax, Tensor amax_t, Tensor? rng_state, int spec, int spec_t,"
    " SymInt row0=0, SymInt col0=0, SymInt full_rows=0, SymInt full_width=0, int stream_t=1)"
    f" -> ({_QUANTIZED}, Tensor qdata_t, Tensor scale_t, Tensor per_tensor_scale_t)",
    "quantize_pair_values(Tensor x, Tensor amax, Tensor amax_t, Tensor? rng_state, int spec, int spec_t, bool codes_t,"
    " SymInt row0=0, SymInt col0=0, SymInt full_rows=0, SymInt full_width=0, int stream_t=1)"
    " -> (Tensor values, Tensor per_tensor_scale, Tensor t, Tensor scale_t, Tensor per_tensor_scale_t)",
    "transpose_codes(Tensor qdata, Tensor scale) -> (Tensor qdata_t, Tensor scale_t)",
    "dequantize(Tensor qdata, Tensor scale, Tensor? per_tensor_scale, SymInt columns, ScalarType dtype) -> Tensor",
    f"fake_quantize(Tensor x, Tensor amax, Tensor? rng_state, int spec, ScalarType dtype, bool scaled=True, {_PLACE})"
    " -> (Tensor values, Tensor per_tensor_scale)",
    "quantize_activation(Tensor x, Tensor? rng_state, int spec, ScalarType dtype)"
    " -> (Tensor values, Tensor per_tensor_scale)",
    "matmul(Tensor x, Tensor? x_scale, Tensor qdata, Tensor scale, Tensor per_tensor_scale, Tensor? bias,"
    " SymInt columns, bool across_blocks, ScalarType out_dtype) -> Tensor",
    "grouped_matmul(Tensor x, Tensor? x_scale, Tensor qdata, Tensor scale, Tensor per_tensor_scale, Tensor offs,"
    " SymInt columns, bool across_blocks, ScalarType out_dtype) -> Tensor",
    "grouped_linear(Tensor x, Tensor? x_scale, Tensor qdata, Tensor scale, Tensor per_tensor_scale, Tensor offs,"
    " ScalarType out_dtype) -> Tensor",
    "grouped_fp4_matmul(Tensor x, Tensor x_scale, Tensor x_factor, Tensor w, Tensor w_scale, Tensor w_factor,"
    " Tensor offs) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _implement(name: str) -> Callable[[_Function], _Function]:
    """Register a function as op ``name`` on every device that has no kernel of its own."""

    def register(function: _Function) -> _Function:
        _library.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def _fake(name: str) -> Callable[[_Function], _Function]:
    return torch.library.register_fake(f"nvfp4::{name}", lib=_library)


# --- randomness ------------------------------------------------------------------------------------------------------


@_implement("draw_rng_state")
def draw_rng_state(like: Tensor) -> Tensor:
    """A fresh (seed, offset), int64 (2,), from torch's generator of the device of ``like``.

    An op of its own, not a torch.randint in the graph: Inductor would give randint other bits than eager gives, and
    fold two calls with equal arguments where it does not know them to be random.
    """
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=like.device)


@_fake("draw_rng_state")
def _(like: Tensor) -> Tensor:
    return like.new_empty((2,), dtype=torch.int64)


# --- amax and Hadamard -----------------------------------------------------------------------------------------------


@_implement("amax")
def amax(x: Tensor, hadamard_sign: int = -1) -> Tensor:
    """Largest finite magnitude of x, or of its Hadamard transform along the last dimension: float32 0-d."""
    return reference.amax(x if hadamard_sign == -1 else reference.hadamard(x, hadamard_sign))


@_fake("amax")
def _(x: Tensor, hadamard_sign: int = -1) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@_implement("amax_pair")
def amax_pair(x: Tensor, hadamard_sign: int = -1) -> tuple[Tensor, Tensor]:
    """amax of x (2-D) and of its transpose, the latter Hadamard-transformed if a sign is given: float32 0-d each."""
    return amax(x), amax(x.t(), hadamard_sign)


@_fake("amax_pair")
def _(x: Tensor, hadamard_sign: int = -1) -> tuple[Tensor, Tensor]:
    return x.new_empty((), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


@_implement("hadamard")
def hadamard(x: Tensor, sign: int) -> Tensor:
    """Random Hadamard transform of each 16 elements of the last dimension, padded to 16: bfloat16."""
    return reference.hadamard(x, sign)


@_fake("hadamard")
def _(x: Tensor, sign: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], BLOCK)), dtype=torch.bfloat16)


# --- quantize --------------------------------------------------------------------------------------------------------


@_implement("quantize")
def quantize(
    x: Tensor,
    amax: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., K) to (qdata, scale, per_tensor_scale), amax that of x by default; see :func:`reference.quantize`."""
    how = QuantizeSpec.unpack(spec)
    if how.row_scaled:
        raise ValueError(
            "a spec with row_scaled=True goes to the op quantize_rows, whose per-tensor scales are one a row"
        )
    check_place(math.prod(x.shape[:-1]), x.shape[-1], row0, col0, full_width, how.column_multiple)
    if amax is None:
        amax = own_amax(x, how, rng_state, col0)
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


def check_place(rows: int, columns: int, row0: int, col0: int, full_width: int, multiple: int) -> None:
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


def fake_quantized(
    x: Tensor, rows: int, columns: int, leading: Sequence[int], spec: int
) -> tuple[Tensor, Tensor, Tensor]:
    columns = ceil_to(columns, QuantizeSpec.unpack(spec).column_multiple)
    tiles = scale_tiles(rows, columns)
    return (
        x.new_empty((*leading, columns // 2), dtype=torch.uint8),
        x.new_empty((*tiles, 32, 16), dtype=torch.float8_e4m3fn),
        x.new_empty((), dtype=torch.float32),
    )


@_fake("quantize")
def _(
    x: Tensor,
    amax: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    return fake_quantized(x, math.prod(x.shape[:-1]), x.shape[-1], x.shape[:-1], spec)


@_implement("quantize_pair")
def quantize_pair(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    row0: int = 0,
    col0: int = 0,
    full_rows: int = 0,
    full_width: int = 0,
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


@_fake("quantize_pair")
def _(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    row0: int = 0,
    col0: int = 0,
    full_rows: int = 0,
    full_width: int = 0,
    stream_t: int = 1,
) -> tuple[Tensor, ...]:
    rows, columns = x.shape
    return (
        *fake_quantized(x, rows, columns, (rows,), spec),
        *fake_quantized(x, columns, rows, (columns,), spec_t),
    )


# --- dequantize, fake quantize ---------------------------------------------------------------------------------------


@_implement("dequantize")
def dequantize(
    qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: int, dtype: torch.dtype
) -> Tensor:
    """Decode to (..., columns) of dtype; without per_tensor_scale, code * block scale alone (exact in bfloat16)."""
    return reference.dequantize(qdata, scale, per_tensor_scale, columns, dtype)


@_fake("dequantize")
def _(qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-1], columns), dtype=dtype)


def columns_of_values(columns: int, spec: int) -> int:
    """A transform fills the padding of the last columns that it takes together, so what it returns keeps it."""
    how = QuantizeSpec.unpack(spec)
    return columns if how.rotation is None else ceil_to(columns, how.rotation)


@_implement("fake_quantize")
def fake_quantize(
    x: Tensor,
    amax: Tensor,
    rng_state: Tensor | None,
    spec: int,
    dtype: torch.dtype,
    scaled: bool = True,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
) -> tuple[Tensor, Tensor]:
    """What x decodes to after quantization, and the per-tensor scale, which values hold only where ``scaled``."""
    qdata, scale, factor = quantize(x, amax, rng_state, spec, row0, col0, full_width)
    columns = columns_of_values(x.shape[-1], spec)
    return dequantize(qdata, scale, factor if scaled else None, columns, dtype), factor


@_fake("fake_quantize")
def _(
    x: Tensor,
    amax: Tensor,
    rng_state: Tensor | None,
    spec: int,
    dtype: torch.dtype,
    scaled: bool = True,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
) -> tuple[Tensor, Tensor]:
    values = x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype)
    return values, x.new_empty((), dtype=torch.float32)


@_implement("quantize_activation")
def quantize_activation(x: Tensor, rng_state: Tensor | None, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """:func:`fake_quantize` by the amax of x itself, the per-tensor scale left out: what a W4A4 product multiplies."""
    amax = own_amax(x, QuantizeSpec.unpack(spec), rng_state)
    return torch.ops.nvfp4.fake_quantize(x, amax, rng_state, spec, dtype, False)


@_fake("quantize_activation")
def _(x: Tensor, rng_state: Tensor | None, spec: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = x.new_empty((*x.shape[:-1], columns_of_values(x.shape[-1], spec)), dtype=dtype)
    return values, x.new_empty((), dtype=torch.float32)


# --- products --------------------------------------------------------------------------------------------------------


@_implement("matmul")
def matmul(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    columns: int,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """x @ w^T (or x @ w where ``across_blocks``) of a dense x and an NVFP4 w; see :func:`reference.matmul`."""
    with torch.autocast(x.device.type, enabled=False):  # which would multiply in 16 bits
        return reference.matmul(x, x_scale, qdata, scale, per_tensor_scale, bias, columns, across_blocks, out_dtype)


@_fake("matmul")
def _(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    columns: int,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


def _group_ends(offs: Tensor, experts: int, rows: int) -> list[int]:
    if offs.dtype != torch.int32 or offs.shape != (experts,):
        raise ValueError(f"offs is int32 ({experts},), where each group ends, not {offs.dtype} {tuple(offs.shape)}")
    ends = offs.tolist()
    if any(start > end for start, end in itertools.pairwise([0, *ends, rows])):
        raise ValueError(f"offs are the ends of groups in order, from 0 to the {rows} rows of x, not {ends}")
    return ends


@_implement("grouped_matmul")
def grouped_matmul(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    columns: int,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rows offs[e-1]..offs[e] of x (M, K) times expert e of qdata (E, N, K/2), as ``matmul``; zeros behind the last.

    offs: int32 (E,), the ends of the groups. x_scale: 0-d or one per row. per_tensor_scale: 0-d, (E, 1) or one per
    row of w (E * N,). This implementation reads offs on the host and calls ``matmul`` for each expert that has rows.
    """
    experts, rows, half = qdata.shape
    ends = _group_ends(offs, experts, x.shape[0])
    linear = None if rows % TILE_ROWS == 0 else unswizzle(scale, experts * rows, half * 2 // BLOCK)
    factors = per_tensor_scale if per_tensor_scale.dim() == 2 else per_tensor_scale.expand(experts * rows)
    factors = factors.reshape(experts, -1)
    y = x.new_zeros((x.shape[0], columns if across_blocks else rows), dtype=out_dtype)
    start = 0
    for expert, end in enumerate(ends if rows else ()):
        if end > start:
            own = slice(expert * rows, (expert + 1) * rows)
            tiles = slice(own.start // TILE_ROWS, own.stop // TILE_ROWS)
            y[start:end] = torch.ops.nvfp4.matmul(
                x[start:end],
                x_scale[start:end] if x_scale is not None and x_scale.dim() else x_scale,
                qdata[expert],
                scale[tiles] if linear is None else swizzle(linear[own]),
                factors[expert] if per_tensor_scale.dim() == 1 else factors[expert, 0],
                None,
                columns,
                across_blocks,
                out_dtype,
            )
        start = end
    return y


@_fake("grouped_matmul")
def _(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    columns: int,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], columns if across_blocks else qdata.shape[-2]), dtype=out_dtype)


@_implement("grouped_linear")
def grouped_linear(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """``grouped_matmul`` along the blocks, for x in bfloat16 or float16: on CUDA nothing waits for offs."""
    return grouped_matmul(x, x_scale, qdata, scale, per_tensor_scale, offs, x.shape[-1], False, out_dtype)


@_fake("grouped_linear")
def _(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], qdata.shape[-2]), dtype=out_dtype)


@_implement("grouped_fp4_matmul")
def grouped_fp4_matmul(
    x: Tensor, x_scale: Tensor, x_factor: Tensor, w: Tensor, w_scale: Tensor, w_factor: Tensor, offs: Tensor
) -> Tensor:
    """x (M, K/2) times w (E, N, K/2), transposed, by group, on FP4 tensor cores: bfloat16 (M, N).

    torch's scaled_grouped_mm as an op, because it has no shape inference of its own (2.13). Codes are uint8, two each;
    x_scale is what :func:`scaled_mm.grouped_scale` gives, w_scale (E, swizzled); x_factor 0-d, w_factor (E,).
    """
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    x, w = x.view(torch.float4_e2m1fn_x2), w.view(torch.float4_e2m1fn_x2).mT
    scales = [x_scale, x_factor], recipe, [w_scale, w_factor], recipe
    return scaled_grouped_mm(x, w, *scales, swizzle, swizzle, offs=offs, output_dtype=torch.bfloat16)


@_fake("grouped_fp4_matmul")
def _(
    x: Tensor, x_scale: Tensor, x_factor: Tensor, w: Tensor, w_scale: Tensor, w_factor: Tensor, offs: Tensor
) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=torch.bfloat16)
