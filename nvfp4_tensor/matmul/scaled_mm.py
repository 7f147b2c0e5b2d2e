"""Products of two NVFP4 operands on FP4 tensor cores: torch's scaled_mm and scaled_grouped_mm, fbgemm's f4f4bf16.

All need two codes per byte and block scales in the 128x4 order, as an :class:`NVFP4Tensor` stores them. K must be a
multiple of 32 (16 bytes of codes) and N of 16, so operands are padded with zeros; the tiles of scales already cover it.
This module has not been run on the hardware. The calls pass torch's validation, and products computed from the bytes
of the arguments have the right values (test_scaled_mm.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm

from nvfp4_tensor.matmul import fbgemm
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import BLOCK, TILE_COLUMNS, TILE_ROWS, ceil_to
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

FP4 = torch.float4_e2m1fn_x2
K_ALIGNMENT, N_ALIGNMENT = 32, 16
_RECIPE = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
_SWIZZLE = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]


# --- one product -----------------------------------------------------------------------------------------------------


def scaled_mm_product(a: Codes, b: Codes, bias: Tensor | None, alpha: float, out_dtype: torch.dtype) -> Tensor:
    """Return alpha * a (M, K) @ b (N, K)^T + bias by cuBLASLt; a and b have one per-tensor scale each.

    cuBLASLt adds a bias (N,) if out_dtype is a 16-bit dtype. With any other bias, or an alpha, the product is computed
    in float32, so that the result is rounded once.
    """
    rows, codes_b = b.qdata.shape[0], _padded(b.qdata, N_ALIGNMENT)
    fused = None
    if alpha == 1 and bias is not None and bias.dim() == 1 and bias.dtype == out_dtype != torch.float32:
        fused, bias = pad(bias, (0, len(codes_b) - rows)), None
    epilogue = bias is not None or alpha != 1
    y = scaled_mm(
        _padded(a.qdata).view(FP4),
        codes_b.view(FP4).t(),
        [a.scale.reshape(-1), a.per_tensor_scale],
        _RECIPE,
        [b.scale.reshape(-1), b.per_tensor_scale],
        _RECIPE,
        _SWIZZLE,
        _SWIZZLE,
        bias=fused,
        output_dtype=torch.float32 if epilogue else out_dtype,
    )[:, :rows]
    if alpha != 1:
        y = y * alpha
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype).contiguous()


def fbgemm_product(a: Codes, b: Codes, bias: Tensor | None, alpha: float, out_dtype: torch.dtype) -> Tensor:
    """Return alpha * a (M, K) @ b (N, K)^T + bias by fbgemm; a and b have one per-tensor scale each.

    alpha multiplies the float32 sums. The op returns bfloat16, so adding a bias rounds a second time.
    """
    op = fbgemm.product().op
    assert op is not None  # check_backend
    y = op(
        _padded(a.qdata),  # as bytes: the op ignores the dtype, and Inductor does not support FP4
        _padded(b.qdata, N_ALIGNMENT),
        a.scale.contiguous(),
        b.scale.contiguous(),
        global_scale=(a.per_tensor_scale * b.per_tensor_scale * alpha).reshape(1),
    )[:, : b.qdata.shape[0]]
    if bias is not None:
        y = y.float() + bias.float()
    return y.to(out_dtype).contiguous()


def _padded(qdata: Tensor, row_alignment: int = 1) -> Tensor:
    """Pad codes (..., rows, K/2) with zeros to multiples of K_ALIGNMENT and row_alignment."""
    *_, rows, half = qdata.shape
    return pad(qdata.contiguous(), (0, -half % (K_ALIGNMENT // 2), 0, -rows % row_alignment))


# --- grouped products ------------------------------------------------------------------------------------------------


def scaled_grouped_product(x: NVFP4Tensor, w: NVFP4Tensor, offs: Tensor) -> Tensor:
    """Return rows offs[e-1]..offs[e] of x (M, K) times the stored w[e] (N, K), transposed: bfloat16 (M, N).

    Rows after the last group are undefined.
    """
    experts, rows, _ = w.qdata.shape
    w_scale = w.scale
    if rows % TILE_ROWS:  # a tile would contain rows of two experts
        w_scale = torch.stack([layout.swizzle(scale) for scale in w.unswizzled_scale()])
    y = torch.ops.nvfp4.grouped_fp4_matmul(
        _padded(x.qdata),
        grouped_scale(x, offs),
        x.per_tensor_scale,
        _padded(w.qdata, N_ALIGNMENT),
        w_scale.reshape(experts, -1),
        w.per_tensor_scale.expand(experts, 1).reshape(-1),
        offs,
    )
    return y[:, :rows]


def grouped_scale(x: NVFP4Tensor, offs: Tensor) -> Tensor:
    """Return the block scales of x (M, K) as scaled_grouped_mm requires: each group starts a new tile of 128 rows.

    There are as many tiles as any offsets can need, so that offs stays on the device. Unused tiles are zero; rows after
    the last group come last.
    """
    m, groups = x.qdata.shape[0], offs.shape[0]
    ends = torch.cat([offs, offs.new_full((1,), m)]).long()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - begins + TILE_ROWS - 1) // TILE_ROWS
    shift = (tiles.cumsum(0) - tiles) * TILE_ROWS - begins  # from a row of x to the row of its scales
    row = torch.arange(m, device=offs.device)
    target = row + shift[torch.searchsorted(offs.long(), row, right=True)]
    scale = x.unswizzled_scale().view(torch.uint8)
    padded = scale.new_zeros((m // TILE_ROWS + groups + 1) * TILE_ROWS, scale.shape[1]).index_copy(0, target, scale)
    columns = ceil_to(x.qdata.shape[1] * 2 // BLOCK, TILE_COLUMNS)
    return layout.swizzle(padded).reshape(-1, columns).view(torch.float8_e4m3fn)
