"""Products of two NVFP4 operands on FP4 tensor cores: torch's scaled_mm and scaled_grouped_mm, fbgemm's f4f4bf16.

All take codes two a byte and block scales in the 128x4 order, as an :class:`NVFP4Tensor` stores them. They want K in
multiples of 32 (16 bytes of codes) and N of 16, so zeros fill up what does not divide; the scales' tiles cover it.
None of this has run on the hardware: the calls pass torch's validation, and products computed from the arguments' bytes
have the right values (test_scaled_mm.py).
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
    """alpha * a (M, K) @ b (N, K)^T + bias by cuBLASLt; a and b have one per-tensor scale each.

    It adds a bias (N,) of a 16-bit out_dtype itself. With any other bias, or an alpha, the product leaves the tensor
    cores in float32, so that it is rounded once.
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
    """alpha * a (M, K) @ b (N, K)^T + bias by fbgemm; a and b have one per-tensor scale each.

    alpha multiplies the float32 sums; the op gives bfloat16, so a bias, added afterwards, rounds a second time.
    """
    op = fbgemm.product().op
    assert op is not None  # check_backend
    y = op(
        _padded(a.qdata),  # as bytes: it does not look at their dtype, and Inductor cannot write FP4
        _padded(b.qdata, N_ALIGNMENT),
        a.scale.contiguous(),
        b.scale.contiguous(),
        global_scale=(a.per_tensor_scale * b.per_tensor_scale * alpha).reshape(1),
    )[:, : b.qdata.shape[0]]
    if bias is not None:
        y = y.float() + bias.float()
    return y.to(out_dtype).contiguous()


def _padded(qdata: Tensor, row_alignment: int = 1) -> Tensor:
    """Codes (..., rows, K/2), zeros filling K up to K_ALIGNMENT and the rows up to row_alignment."""
    *_, rows, half = qdata.shape
    return pad(qdata.contiguous(), (0, -half % (K_ALIGNMENT // 2), 0, -rows % row_alignment))


# --- products of groups ----------------------------------------------------------------------------------------------


def scaled_grouped_product(x: NVFP4Tensor, w: NVFP4Tensor, offs: Tensor) -> Tensor:
    """Rows offs[e-1]..offs[e] of x (M, K) times the stored w[e] (N, K), transposed: bfloat16 (M, N).

    What the op leaves of the rows beyond the last group is undefined.
    """
    experts, rows, _ = w.qdata.shape
    w_scale = w.scale
    if rows % TILE_ROWS:  # its tiles would hold rows of two experts
        w_scale = torch.stack([layout.swizzle(part) for part in w.unswizzled_scale()])
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
    """The block scales of x (M, K) as scaled_grouped_mm reads them: each group's begin on a tile of 128 rows.

    There are as many tiles as the worst offsets need, so that offs stays on the device; those that no group has are
    zero, and so are rows beyond the last group, behind all others.
    """
    m, groups = x.qdata.shape[0], offs.shape[0]
    ends = torch.cat([offs, offs.new_full((1,), m)]).long()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - begins + TILE_ROWS - 1) // TILE_ROWS
    shift = (tiles.cumsum(0) - tiles) * TILE_ROWS - begins  # from a row of x to where its scales go
    row = torch.arange(m, device=offs.device)
    to = row + shift[torch.searchsorted(offs.long(), row, right=True)]
    scale = x.unswizzled_scale().view(torch.uint8)
    placed = scale.new_zeros((m // TILE_ROWS + groups + 1) * TILE_ROWS, scale.shape[1]).index_copy(0, to, scale)
    columns = ceil_to(x.qdata.shape[1] * 2 // BLOCK, TILE_COLUMNS)
    return layout.swizzle(placed).reshape(-1, columns).view(torch.float8_e4m3fn)
