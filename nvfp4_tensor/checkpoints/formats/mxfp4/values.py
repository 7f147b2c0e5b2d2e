"""Convert MXFP4 (gpt-oss, DeepSeek, GGUF's type 39) to NVFP4 with the same values, if the exponents allow it.

In MXFP4, 32 elements share a power of two, 2^(byte - 127); in NVFP4, 16 elements share an e4m3 number. The codes are
the same. e4m3 has the powers 2^-9 to 2^8, and the per-tensor scale is a power of two, so blocks whose exponents differ
by up to 17 are converted without rounding. For larger differences, the codes of a block change: a block without 0.5 and
1.5 can be halved exactly, which raises its exponent by one, and a block without 4 and 6 can be doubled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.parts import LinearParts, tensor_of
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, E4M3_NAN, code_values, pack, unpack
from nvfp4_tensor.numerics.reference import round_e2m1
from nvfp4_tensor.tensor import NVFP4Tensor

MX_BLOCK = 32
"""Elements that share one MXFP4 scale."""
_BIAS, _NAN = 127, 0xFF  # of e8m0
_LEAST, _MOST = -9, 8  # the powers of two that e4m3 has
_SHIFTS = 4  # 0.5 doubles to 4 in three steps; the fourth fails


def to_nvfp4(
    blocks: Tensor, scales: Tensor, *, orig_dtype: torch.dtype = torch.bfloat16, lossy: bool = False
) -> NVFP4Tensor:
    """Convert MXFP4 codes and scales to an NVFP4Tensor (*leading, N, K) with the same values.

    Args:
        blocks, scales, lossy: see :func:`parts_of_mxfp4`.
        orig_dtype: the dtype that it decodes to by default.

    Raises:
        ValueError: see :func:`parts_of_mxfp4`.

    Example::

        with safe_open("model.safetensors", "pt") as f:  # of gpt-oss
            name = "model.layers.0.mlp.experts.down_proj"
            weight = to_nvfp4(f.get_tensor(f"{name}_blocks"), f.get_tensor(f"{name}_scales"))
    """
    return tensor_of(parts_of_mxfp4(blocks, scales, lossy=lossy), orig_dtype)


def parts_of_mxfp4(blocks: Tensor, scales: Tensor, *, lossy: bool = False) -> LinearParts:
    """Convert MXFP4 codes and scales to the plain tensors of NVFP4, with one per-tensor scale per matrix.

    Args:
        blocks: uint8, (*leading, N, K/32, 16), as in gpt-oss's files, or (*leading, N, K/2); two codes per byte, the
            even element in the low nibble. leading is () or (E,).
        scales: uint8 (*leading, N, K/32), e8m0: 2^(byte - 127); 255 is NaN.
        lossy: round blocks that are too far below a matrix's largest exponent, instead of raising an error.

    Raises:
        ValueError: shapes or dtypes do not match, or exponents differ too much and ``lossy`` is False.
    """
    _check(blocks, scales)
    *leading, rows, groups = scales.shape
    blocks = blocks.reshape(-1, rows, groups * MX_BLOCK // 2)
    matrices = [_converted(*matrix, lossy) for matrix in zip(blocks, scales.reshape(-1, rows, groups), strict=True)]
    codes, scale, per_tensor = map(torch.stack, zip(*matrices, strict=True))
    return LinearParts(
        qdata=codes.view(*leading, rows, -1),
        scale=scale.view(torch.float8_e4m3fn).view(*leading, rows, -1),
        per_tensor_scale=per_tensor.unsqueeze(1) if leading else per_tensor.squeeze(0),
        columns=groups * MX_BLOCK,
    )


def _converted(codes: Tensor, scales: Tensor, lossy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Convert one matrix, codes (N, K/2) and scales (N, K/32), to codes, bytes of block scales, and per-tensor
    scale."""
    rows, groups = scales.shape
    values = unpack(codes).view(rows, 2 * groups, BLOCK)
    exponents = scales.to(torch.int32).repeat_interleave(2, dim=-1) - _BIAS
    nan = exponents == _NAN - _BIAS
    counts = ~nan & (values & 7 != 0).any(-1)  # a block of zeros can have any scale
    base = _base(exponents[counts], _steps(values, 2.0)[counts], _steps(values, 0.5)[counts], lossy)
    target = exponents.clamp(base + _LEAST, base + _MOST)
    moved = round_e2m1(torch.ldexp(code_values(values), (exponents - target).unsqueeze(-1)), RoundingMode.RNE)
    scale = (
        torch.ldexp(torch.ones(target.shape, dtype=torch.float32), target - base)
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)
    )
    scale = torch.where(nan, E4M3_NAN, torch.where(counts, scale, 0))
    # Computed in float64 and rounded, because ldexp in float32 loses subnormal results.
    per_tensor = torch.ldexp(torch.ones((), dtype=torch.float64), torch.tensor(base, dtype=torch.int64)).float()
    return pack(moved.view(rows, -1)), scale, per_tensor


def _steps(values: Tensor, factor: float) -> Tensor:
    """Return how many times each block of codes (..., 16) can be multiplied by ``factor`` exactly: int32 (...)."""
    steps = torch.zeros(values.shape[:-1], dtype=torch.int32)
    exact, moved = torch.ones_like(steps, dtype=torch.bool), code_values(values)
    for _ in range(_SHIFTS):
        moved = moved * factor
        exact &= (code_values(round_e2m1(moved, RoundingMode.RNE)) == moved).all(-1)
        steps += exact
    return steps


def _base(exponents: Tensor, doublings: Tensor, halvings: Tensor, lossy: bool) -> int:
    """Return the exponent of the per-tensor scale for nonzero blocks, (n,) each, without changing codes if possible."""
    if not len(exponents):
        return 0
    lowest, highest = int(exponents.min()), int(exponents.max())
    first, last = highest - _MOST, lowest - _LEAST
    if first <= last:
        return first
    least = int((exponents - doublings).max()) - _MOST
    most = int((exponents + halvings).min()) - _LEAST
    if least <= most:
        return min(max(first, least), most)
    if lossy:
        return least
    raise ValueError(
        f"MXFP4 scales from 2^{lowest} to 2^{highest} exceed the range 2^{_MOST - _LEAST} of NVFP4 block scales with "
        "one per-tensor scale: in Python, checkpoints.mxfp4.to_nvfp4 has an argument lossy, which rounds the smallest "
        "blocks"
    )


def _check(blocks: Tensor, scales: Tensor) -> None:
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"expected MXFP4 codes and scales in uint8, got {blocks.dtype} and {scales.dtype}")
    fits = (*scales.shape, MX_BLOCK // 2), (*scales.shape[:-1], scales.shape[-1] * MX_BLOCK // 2)
    if scales.dim() not in (2, 3) or tuple(blocks.shape) not in fits:
        raise ValueError(
            f"expected MXFP4 scales (N, K/32) or (E, N, K/32), and codes with 16 bytes per scale, got scales "
            f"{tuple(scales.shape)} and codes {tuple(blocks.shape)}"
        )
