"""Quantize the operands of a training step: x (M, K), dy (M, N), w (N, K) and their transposes.

Each function splits its matrix into the tiles of its sharding, reduces their amax over all ranks, and calls an op on
each tile with its global offset. A matrix that is not sharded is one tile at offset 0. The ops (``nvfp4::...``):

=========================================  =================================================================
result                                     op
=========================================  =================================================================
codes                                      ``quantize``
codes with one scale per row               ``quantize_rows``
values                                     ``quantize_activation``; of a shard, its decoded codes
codes of x and of x^T                      ``quantize_pair``
values of x, and codes or values of x^T    ``quantize_pair_values``
=========================================  =================================================================

:func:`nvfp4_tensor.matmul.product.multiply` multiplies the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nvfp4_tensor.matmul.backends import multiplies_codes
from nvfp4_tensor.matmul.product import decode_values
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.numerics.codes import Codes, Decoded
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import own_amax
from nvfp4_tensor.sharding.layout import UNSHARDED, MatrixSharding, agree_on_amax, all_reduce_amax

Quantized: TypeAlias = "Codes | Decoded"
"""A quantized operand. Products read codes on FP4 tensor cores, and decoded bfloat16 values elsewhere."""


# --- one operand -----------------------------------------------------------------------------------------------------


def quantize_operand(
    x: Tensor,
    spec: QuantizeSpec,
    rng_state: Tensor | None = None,
    stream: int = 0,
    sharding: MatrixSharding = UNSHARDED,
    *,
    name: str = "x",
    amax: Tensor | None = None,
) -> Codes:
    """Quantize x (R, C) to codes, by ``amax``, by its amax over all ranks, or by the amax of each row (row_scaled).

    Raises:
        ValueError: if a shard has incomplete blocks; the message calls the operand ``name``.
    """
    sharding.check(x, spec, name)
    tiles = sharding.tiles(x, spec)
    op = torch.ops.nvfp4.quantize_rows if spec.row_scaled else torch.ops.nvfp4.quantize
    amaxes: Sequence[Tensor | None] = [amax] * len(tiles)
    if sharding.is_sharded and spec.row_scaled:
        rows = all_reduce_amax(reference.row_amax(x, spec.hadamard_sign), (sharding.columns,))  # of all that share them
        amaxes = rows.split([len(tile.x) for tile in tiles]) if sharding.split_dim == 0 else [rows] * len(tiles)
    elif sharding.is_sharded and amax is None:
        own = [own_amax(tile.x, spec, rng_state, tile.col0) for tile in tiles]
        amaxes = [agree_on_amax(torch.stack(own).amax().view(1), x, sharding)[0]] * len(tiles)
    codes = [
        Codes(*op(tile.x, tile_amax, rng_state, spec.pack(), *tile.origin, stream))
        for tile, tile_amax in zip(tiles, amaxes, strict=True)
    ]
    return _join(codes, sharding.split_dim)


# --- an operand and its transpose ------------------------------------------------------------------------------------


def quantize_left_operands(
    x: Tensor,
    spec: QuantizeSpec | None,
    spec_t: QuantizeSpec | None,
    rng_state: Tensor | None,
    streams: tuple[int, int],
    sharding: MatrixSharding = UNSHARDED,
    *,
    name: str = "x",
    codes_t: bool = False,
    codes: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x (R, C) and x^T (C, R), each by its spec and its amax; None for an operand whose spec is None.

    If both specs have one per-tensor scale, one pass over x quantizes both.

    Args:
        streams: the random streams of x and of x^T.
        codes_t: return x^T as codes, to save them for the backward.
        codes: return both as codes, for products with a dense right operand. Otherwise, the left operand has the form
            that a product on this device reads: codes on FP4 tensor cores, decoded values elsewhere.

    Raises:
        ValueError: if a shard has incomplete blocks; the message calls the operand ``name``.
    """
    row_scaled = any([each is not None and each.row_scaled for each in (spec, spec_t)])
    codes = codes or row_scaled or multiplies_codes(x.device)
    if spec is not None:
        sharding.check(x, spec, name)
    if spec is not None and spec_t is not None and not row_scaled:
        sharding.t.check(x.t(), spec_t, f"{name}^T")
        return _quantize_pair(x, spec, spec_t, rng_state, streams, sharding, codes_t, codes)
    x_operand: Quantized | None = None
    x_t: Quantized | None = None
    if spec_t is not None:
        x_t = quantize_operand(x.t().contiguous(), spec_t, rng_state, streams[1], sharding.t, name=f"{name}^T")
    if spec is not None and (codes or sharding.is_sharded or (streams[0] and spec.is_stochastic)):
        x_operand = found = quantize_operand(x, spec, rng_state, streams[0], sharding, name=name)
        if not codes:
            columns = x.shape[-1] if spec.rotation is None else found.columns
            x_operand = Decoded(decode_values(found, columns)[0], found.per_tensor_scale)
    elif spec is not None:  # the op has stream 0, and no offsets
        x_operand = Decoded(*torch.ops.nvfp4.quantize_activation(x, rng_state, spec.pack(), torch.bfloat16))
    return x_operand, x_t


def _quantize_pair(
    x: Tensor,
    spec: QuantizeSpec,
    spec_t: QuantizeSpec,
    rng_state: Tensor | None,
    streams: tuple[int, int],
    sharding: MatrixSharding,
    codes_t: bool,
    codes: bool,
) -> tuple[Quantized, Quantized]:
    packed, (stream, stream_t), tiles = (spec.pack(), spec_t.pack()), streams, sharding.tiles(x, spec, spec_t)
    amax = amax_t = None
    if sharding.is_sharded:
        own = [torch.ops.nvfp4.amax_pair(t.x, rng_state, *packed, t.row0, t.col0) for t in tiles]
        largest = torch.stack([torch.stack(each).amax() for each in zip(*own, strict=True)])
        amax, amax_t = agree_on_amax(largest, x, sharding).unbind()  # both in one all-reduce
    x_tiles: list[Quantized] = []
    t_tiles: list[Quantized] = []
    for tile in tiles:
        arguments = tile.x, amax, amax_t, rng_state, *packed
        offsets = tile.row0, tile.col0, tile.full_rows, tile.full_width, stream_t, stream
        if codes:
            pair = torch.ops.nvfp4.quantize_pair.default(*arguments, *offsets)
            x_tiles.append(Codes(*pair[:3]))
            t_tiles.append(Codes(*pair[3:]))
            continue
        values, factor, t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair_values.default(
            *arguments, codes_t, *offsets
        )
        x_tiles.append(Decoded(values, factor))
        t_tiles.append(Codes(t, scale_t, factor_t) if codes_t else Decoded(t, factor_t))
    return _join(x_tiles, sharding.split_dim), _join(t_tiles, sharding.t.split_dim)


# --- operands already quantized --------------------------------------------------------------------------------------


def _join(tiles: Sequence[Any], dim: int | None) -> Any:
    """Concatenate operands (Codes, or Decoded) along a dimension; each has complete blocks."""
    if len(tiles) == 1:
        return tiles[0]
    assert dim is not None
    per_tensor_scale = tiles[0].per_tensor_scale
    if isinstance(tiles[0], Decoded):
        return Decoded(torch.cat([tile.values for tile in tiles], dim), per_tensor_scale)
    scales = [layout.unswizzle(t.scale, t.qdata.shape[0], t.columns // BLOCK).view(torch.uint8) for t in tiles]
    if per_tensor_scale.dim() and dim == 0:
        per_tensor_scale = torch.cat([tile.per_tensor_scale for tile in tiles])
    scale = layout.swizzle(torch.cat(scales, dim)).view(torch.float8_e4m3fn)
    return Codes(torch.cat([tile.qdata for tile in tiles], dim), scale, per_tensor_scale)


def rotate_back(
    a: Quantized, columns: int, rng_state: Tensor | None, dtype: torch.dtype | None = None, col0: int = 0
) -> Decoded | Tensor:
    """Undo EDEN's rotation of ``a``, and return bfloat16 values (R, columns), or a dense tensor in ``dtype``.

    col0: the global offset of the first column of ``a``.
    """
    values, factor = decode_values(a)
    if dtype is None:
        return Decoded(torch.ops.nvfp4.rotate_back(values, rng_state, columns, col0), factor)
    values = torch.ops.nvfp4.rotate(values.float(), rng_state, True, col0)[:, :columns]
    return (values * factor).to(dtype)
