"""Which blocks of a tensor are 16x16 tiles: read from the block scales, which every write maintains.

A spec says how values are quantized that are written to a tensor. Codes come from elsewhere, too (``copy_``, a
checkpoint, gathered rows, a slice at an odd row), and then need not be in the tiles that the spec names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.reference import over_tile
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import resolve_rng_state
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts


def tiled(scale: Tensor) -> Tensor:
    """Return which block scales, e4m3 (rows, blocks), are the same in all of their 16 rows: bool (rows, blocks)."""
    data = scale.view(torch.uint8)
    largest, smallest = over_tile(data), 255 - over_tile(255 - data)
    return largest == smallest


def quantized_like(t: NVFP4Tensor, values: Tensor, spec: QuantizeSpec, **options: Any) -> NVFP4Tensor:
    """Quantize ``values``, dense with the shape of t, by ``spec`` in the layout of t.

    Args:
        **options: arguments of :func:`quantize`, or of :func:`quantize_experts` if t has a scale for each matrix.
    """
    create = quantize_experts if t.per_tensor_scale.dim() == 2 and len(t) > 0 else quantize
    new = create(values.mT if t.transposed else values, spec, **options)
    return new.mT if t.transposed else new  # type: ignore[return-value]


def requantize(t: NVFP4Tensor, values: Tensor, spec: QuantizeSpec, **options: Any) -> NVFP4Tensor:
    """Quantize ``values``, a new version of those of t, by ``spec``, in 16x16 tiles only where t has them.

    In other places rows may differ in size, and a tile would lose the small ones.

    Args:
        values, options: as in :func:`quantized_like`.
    """
    if spec.block_rows == 1 or t.numel() == 0:
        return quantized_like(t, values, spec, **options)
    options["rng_state"] = resolve_rng_state(values, spec, options.get("rng_state"), options.pop("generator", None))
    new = (quantized_like(t, values, each, **options) for each in (spec, spec.replace(block_rows=1)))
    tiles, rows = (each.mT if t.transposed else each for each in new)
    by_matrix = t.per_tensor_scale.dim() == 2
    old = t.unswizzled_scale().view(len(t) if by_matrix else 1, -1, tiles.qdata.shape[-1] * 2 // BLOCK)
    mask = torch.stack([tiled(scale) for scale in old]).view(*tiles.qdata.shape[:-1], -1)
    of_tiles, of_rows = (each.unswizzled_scale().view(torch.uint8) for each in (tiles, rows))
    scale = torch.where(mask, of_tiles, of_rows)
    merged = tiles._replace(
        qdata=torch.where(mask.repeat_interleave(BLOCK // 2, dim=-1), tiles.qdata, rows.qdata),
        scale=layout.swizzle(scale.view(-1, scale.shape[-1])).view(torch.float8_e4m3fn),
    )
    return merged.mT if t.transposed else merged
