"""Quantize the operands of a training step: x (M, K), dy (M, N), w (N, K) and their transposes.

Each function takes the sharding of its matrix; a matrix that is not sharded is the ordinary case, whose amax is its own
and whose random bits start at offset 0. What multiplies the operands is :func:`nvfp4_tensor.matmul.product.multiply`.
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
from nvfp4_tensor.ops.composite import own_amax
from nvfp4_tensor.sharding.layout import UNSHARDED, MatrixSharding, agree_on_amax, all_reduce_amax

Quantized: TypeAlias = "Codes | Decoded"


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
    """Quantize x (R, C) by its amax over all ranks, by each row's, or by ``amax`` if it is known already.

    Raises:
        ValueError: a shard begins inside a block; the message calls the operand ``name``.
    """
    sharding.check(x, spec, name)
    tiles = sharding.tiles(x, spec)
    amaxes: Sequence[Tensor | None]
    if spec.row_scaled:
        quantize, amaxes = torch.ops.nvfp4.quantize_rows, _row_amaxes(x, spec, sharding, [len(t.x) for t in tiles])
    else:
        quantize = torch.ops.nvfp4.quantize
        amaxes = [_amax(x, spec, rng_state, sharding) if amax is None else amax] * len(tiles)
    return _join(
        [
            Codes(*quantize(tile.x, each, rng_state, spec.pack(), *tile.origin, stream))
            for tile, each in zip(tiles, amaxes, strict=True)
        ],
        sharding.split_dim,
    )


def decode_operand(
    x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, sharding: MatrixSharding = UNSHARDED
) -> Decoded:
    """The values of :func:`quantize_operand`, without storing codes; for a spec with one per-tensor scale."""
    if not sharding.is_sharded:
        return Decoded(*torch.ops.nvfp4.quantize_activation(x, rng_state, spec.pack(), torch.bfloat16))
    amax = _amax(x, spec, rng_state, sharding)
    return _join(
        [
            Decoded(*torch.ops.nvfp4.fake_quantize(t.x, amax, rng_state, spec.pack(), torch.bfloat16, False, *t.origin))
            for t in sharding.tiles(x, spec)
        ],
        sharding.split_dim,
    )


def _amax(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, sharding: MatrixSharding) -> Tensor:
    amax = _local_amax(x, spec, rng_state, sharding)
    return agree_on_amax(amax.view(1), x, sharding)[0] if sharding.is_sharded else amax


def _local_amax(x: Tensor, spec: QuantizeSpec, rng_state: Tensor | None, sharding: MatrixSharding) -> Tensor:
    if not (spec.is_eden and sharding.is_sharded):
        return own_amax(x, spec, rng_state)
    # EDEN's rotation depends on the column offset.
    return torch.stack([own_amax(t.x, spec, rng_state, t.col0) for t in sharding.tiles(x, spec)]).amax()


def _row_amaxes(
    x: Tensor, spec: QuantizeSpec, sharding: MatrixSharding, tile_rows: list[int]
) -> Sequence[Tensor | None]:
    if not sharding.is_sharded:
        return [None]  # the op finds them itself
    amax = all_reduce_amax(reference.row_amax(x, spec.hadamard_sign), (sharding.columns,))
    return amax.split(tile_rows) if sharding.split_dim == 0 and len(tile_rows) > 1 else [amax] * len(tile_rows)


# --- an operand and its transpose ------------------------------------------------------------------------------------


def quantize_left_operands(
    x: Tensor,
    spec: QuantizeSpec | None,
    spec_t: QuantizeSpec | None,
    rng_state: Tensor | None,
    stream_t: int,
    sharding: MatrixSharding = UNSHARDED,
    *,
    name: str = "x",
    codes_t: bool = False,
    codes: bool = False,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize x (R, C) and x^T (C, R), each by its spec and amax, in one pass; None for a spec of None.

    Args:
        stream_t: the random stream of the transpose; that of x is 0.
        codes_t: x^T as codes, to be saved for the backward.
        codes: both as codes, for products with a dense right operand. Otherwise the form is the one that a product on
            this device reads on its left: codes on FP4 tensor cores, decoded values elsewhere.

    Raises:
        ValueError: a shard begins inside a block; the message calls the operand ``name``.
    """
    row_scaled = any([each is not None and each.row_scaled for each in (spec, spec_t)])
    codes = codes or row_scaled or multiplies_codes(x.device)
    if spec is not None and spec_t is not None and not row_scaled:
        sharding.check(x, spec, name)
        sharding.t.check(x.t(), spec_t, f"{name}^T")
        return _quantize_pair(x, spec, spec_t, rng_state, stream_t, sharding, codes_t, codes)
    of_x: Quantized | None = None
    of_t: Quantized | None = None
    if spec is not None:
        sharding.check(x, spec, name)
    if spec_t is not None:
        of_t = quantize_operand(x.t().contiguous(), spec_t, rng_state, stream_t, sharding.t, name=f"{name}^T")
    if spec is not None:
        of_x = (
            quantize_operand(x, spec, rng_state, 0, sharding, name=name)
            if codes
            else decode_operand(x, spec, rng_state, sharding)
        )
    return of_x, of_t


def _quantize_pair(
    x: Tensor,
    spec: QuantizeSpec,
    spec_t: QuantizeSpec,
    rng_state: Tensor | None,
    stream_t: int,
    sharding: MatrixSharding,
    codes_t: bool,
    codes: bool,
) -> tuple[Quantized, Quantized]:
    amax, amax_t = _amax_pair(x, spec, spec_t, rng_state, sharding)
    packed = spec.pack(), spec_t.pack()
    of_x: list[Quantized] = []
    of_t: list[Quantized] = []
    for tile in sharding.tiles(x, spec, spec_t):
        offsets = tile.row0, tile.col0, tile.full_rows, tile.full_width
        if codes:
            parts = torch.ops.nvfp4.quantize_pair(tile.x, amax, amax_t, rng_state, *packed, *offsets, stream_t)
            of_x.append(Codes(*parts[:3]))
            of_t.append(Codes(*parts[3:]))
            continue
        values, factor, t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair_values(
            tile.x, amax, amax_t, rng_state, *packed, codes_t, *offsets, stream_t
        )
        of_x.append(Decoded(values, factor))
        of_t.append(Codes(t, scale_t, factor_t) if codes_t else Decoded(t, factor_t))
    return _join(of_x, sharding.split_dim), _join(of_t, sharding.t.split_dim)


def _amax_pair(
    x: Tensor, spec: QuantizeSpec, spec_t: QuantizeSpec, rng_state: Tensor | None, sharding: MatrixSharding
) -> tuple[Tensor, Tensor]:
    if spec.rotation is None and not spec_t.is_eden:  # in one pass over x
        own = torch.ops.nvfp4.amax_pair(x, -1 if spec_t.hadamard_sign is None else spec_t.hadamard_sign)
    else:
        own = (
            _local_amax(x, spec, rng_state, sharding),
            _local_amax(x.t().contiguous(), spec_t, rng_state, sharding.t),
        )
    if not sharding.is_sharded:
        return own
    amax, amax_t = agree_on_amax(torch.stack(own), x, sharding).unbind()  # both in one all-reduce
    return amax, amax_t


# --- operands as they were -------------------------------------------------------------------------------------------


def _join(parts: Sequence[Any], dim: int | None) -> Any:
    """Operands of adjacent ranges along a dimension, each in complete blocks, as one operand."""
    if len(parts) == 1:
        return parts[0]
    assert dim is not None
    factor = parts[0].per_tensor_scale
    if isinstance(parts[0], Decoded):
        return Decoded(torch.cat([part.values for part in parts], dim), factor)
    linear = [layout.unswizzle(p.scale, p.qdata.shape[0], p.columns // BLOCK).view(torch.uint8) for p in parts]
    if factor.dim() and dim == 0:
        factor = torch.cat([part.per_tensor_scale for part in parts])
    scale = layout.swizzle(torch.cat(linear, dim)).view(torch.float8_e4m3fn)
    return Codes(torch.cat([part.qdata for part in parts], dim), scale, factor)


def transpose(w: Codes) -> Codes:
    """The codes of w (R, C) in 16x16 blocks as those of w^T (C, R), R padded to 16: the same codes, moved."""
    qdata, scale = torch.ops.nvfp4.transpose_codes(w.qdata, w.scale)
    return Codes(qdata, scale, w.per_tensor_scale)


def rotate_back(
    a: Quantized, columns: int, rng_state: Tensor | None, dtype: torch.dtype | None = None, col0: int = 0
) -> Decoded | Tensor:
    """Undo EDEN's rotation of ``a``: bfloat16 values (R, columns), or a dense tensor in ``dtype``.

    col0: the global offset of its first column.
    """
    values, factor = decode_values(a)
    values = torch.ops.nvfp4.rotate(values.float(), rng_state, True, col0)[:, :columns]
    return Decoded(values.bfloat16(), factor) if dtype is None else (values * factor).to(dtype)
