"""Convert the bytes of GGUF's 4-bit types to codes and scales, and back.

NVFP4 is type 40: a super-block has 64 elements of a row in 36 bytes, four block scales (e4m3 bytes) followed by 8 bytes
per block. Byte j has element j in its low nibble and element j + 8 in its high nibble. (llama.cpp halves the scales and
doubles the codes, which is equivalent.) MXFP4 is type 39: 32 elements in 17 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.checkpoints.formats.mxfp4.values import MX_BLOCK
from nvfp4_tensor.numerics.layout import BLOCK, pack, unpack

SUPER_BLOCK, _BYTES = 64, 36
_BLOCKS = SUPER_BLOCK // BLOCK


def pack_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Pack codes uint8 (N, K/2), the even element low, and scales e4m3 (N, K/16) to bytes (N, K/64 * 36)."""
    rows, blocks = scale.shape
    elements = unpack(codes).view(rows, blocks, BLOCK)
    nibbles = elements[..., : BLOCK // 2] | elements[..., BLOCK // 2 :] << 4
    parts = scale.view(torch.uint8).view(rows, -1, _BLOCKS), nibbles.view(rows, blocks // _BLOCKS, -1)
    return torch.cat(parts, dim=-1).view(rows, -1)


def unpack_blocks(data: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack bytes (N, K/64 * 36) to codes uint8 (N, K/2) and scales e4m3 (N, K/16)."""
    rows = len(data)
    scale, nibbles = data.view(rows, -1, _BYTES).split([_BLOCKS, _BYTES - _BLOCKS], dim=-1)
    nibbles = nibbles.reshape(rows, -1, BLOCK // 2)
    codes = pack(torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).view(rows, -1))
    return codes, scale.reshape(rows, -1).contiguous().view(torch.float8_e4m3fn)


def unpack_mxfp4(data: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack bytes (N, K/32 * 17) to codes uint8 (N, K/2), the even element low, and e8m0 scales uint8 (N, K/32)."""
    rows = len(data)
    scale, nibbles = data.view(rows, -1, 1 + MX_BLOCK // 2).split([1, MX_BLOCK // 2], dim=-1)
    return pack(torch.cat((nibbles & 0xF, nibbles >> 4), dim=-1).reshape(rows, -1)), scale.reshape(rows, -1)
