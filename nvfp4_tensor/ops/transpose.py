"""The op that transposes codes in 16x16 tiles, its schema in ``definitions.py``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to, scale_tiles
from nvfp4_tensor.ops.definitions import _fake, _implement


@_implement("transpose_codes")
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


@_fake("transpose_codes")
def _(qdata: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = ceil_to(qdata.shape[0], BLOCK), qdata.shape[1] * 2
    tiles = scale_tiles(columns, rows)
    return qdata.new_empty((columns, rows // 2)), qdata.new_empty((*tiles, 32, 16), dtype=torch.float8_e4m3fn)
