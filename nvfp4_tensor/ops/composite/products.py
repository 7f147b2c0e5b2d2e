"""Plain-torch implementations of products of x with an NVFP4 weight or NVFP4 experts, and of their FP8 operands."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm  # type: ignore[attr-defined]  # stub

from nvfp4_tensor.numerics import fp8, reference
from nvfp4_tensor.numerics.layout import BLOCK, HIGH_PRECISION_DTYPES, TILE_ROWS, ceil_to, swizzle, unswizzle
from nvfp4_tensor.ops.schemas import SymInt, op


@op()
def matmul(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    columns: SymInt,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return x @ w^T, or x @ w if ``across_blocks``, of a dense x and an NVFP4 w; see :func:`reference.matmul`."""
    with torch.autocast(x.device.type, enabled=False):  # autocast would multiply in 16 bits
        return reference.matmul(x, x_scale, qdata, scale, per_tensor_scale, bias, columns, across_blocks, out_dtype)


def _group_ends(offs: Tensor, experts: int, rows: int) -> list[int]:
    if offs.dtype != torch.int32 or offs.shape != (experts,):
        raise ValueError(f"offs must be int32 ({experts},), the ends of groups, got {offs.dtype} {tuple(offs.shape)}")
    ends = offs.tolist()
    if any(start > end for start, end in itertools.pairwise([0, *ends, rows])):
        raise ValueError(f"offs must be ascending ends of groups from 0 to the {rows} rows of x, got {ends}")
    return ends


@op()
def grouped_matmul(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    columns: SymInt,
    across_blocks: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return rows offs[e-1]..offs[e] of x (M, K) times expert e of qdata (E, N, K/2), as ``matmul`` computes it.

    Rows after the last group are zero. offs: int32 (E,), the ends of the groups. x_scale: 0-d or one per row.
    per_tensor_scale: 0-d, (E, 1) or one per row of w (E * N,). This implementation copies offs to the host, and calls
    ``matmul`` for each expert that has rows.
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


@op()
def grouped_linear(
    x: Tensor,
    x_scale: Tensor | None,
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return ``grouped_matmul`` along the blocks for bfloat16 or float16 x, without synchronizing on CUDA."""
    return grouped_matmul(x, x_scale, qdata, scale, per_tensor_scale, offs, x.shape[-1], False, out_dtype)


@op()
def grouped_fp4_matmul(
    x: Tensor, x_scale: Tensor, x_factor: Tensor, w: Tensor, w_scale: Tensor, w_factor: Tensor, offs: Tensor
) -> Tensor:
    """Return groups of rows of x (M, K/2) times w (E, N, K/2), transposed, on FP4 tensor cores: bfloat16 (M, N).

    This is torch's scaled_grouped_mm as an op, because torch 2.13 has no shape inference for it. Codes are uint8, two
    per byte; x_scale is from :func:`scaled_mm.grouped_scale`, w_scale is (E, swizzled); x_factor 0-d, w_factor (E,).
    """
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    x, w = x.view(torch.float4_e2m1fn_x2), w.view(torch.float4_e2m1fn_x2).mT
    scales = [x_scale, x_factor], recipe, [w_scale, w_factor], recipe
    return scaled_grouped_mm(x, w, *scales, swizzle, swizzle, offs=offs, output_dtype=torch.bfloat16)


# --- FP8 (numerics contract, section 13) ----------------------------------------------------------------------------


@op(returns="x_values, x_scale, w_values, w_factor")
def fp8_operands(x: Tensor, qdata: Tensor, scale: Tensor, per_tensor_scale: Tensor) -> tuple[Tensor, ...]:
    """Round rows of x (..., K) and code x block scale of a weight (..., N, K) to e4m3, with a power of two per row.

    qdata, scale, per_tensor_scale: the weight, its per-tensor scale 0-d or one per row.

    Returns:
        x_values: e4m3 (..., K rounded up to 16); x_scale: float32, one per row of x (:func:`fp8.quantize_rows`).
        w_values: e4m3 (..., N, K rounded up to 16); w_factor: float32, one per row of w (:func:`fp8.of_codes`).
    """
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension: x.reshape(1) has")
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, not {x.dtype}; cast it")
    if ceil_to(x.shape[-1], BLOCK) != qdata.shape[-1] * 2:
        raise ValueError(f"qdata of {qdata.shape[-1] * 2} columns does not fit x of {x.shape[-1]}")
    return *fp8.quantize_rows(x), *fp8.of_codes(qdata, scale, per_tensor_scale)


@op()
def fp8_matmul(
    x: Tensor, x_scale: Tensor, w: Tensor, w_factor: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """Return x (M, K) @ w (N, K)^T of e4m3 operands with their factors per row; see :func:`fp8.matmul`.

    For devices whose FP8 tensor cores :mod:`nvfp4_tensor.matmul.backends` does not choose.
    """
    with torch.autocast(x.device.type, enabled=False):  # autocast would multiply in 16 bits
        return fp8.matmul(x, x_scale, w, w_factor, bias, out_dtype)
