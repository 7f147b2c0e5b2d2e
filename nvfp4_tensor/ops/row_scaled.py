"""The op that quantizes each row by its own amax, its schema in ``definitions.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.definitions import _fake, _implement, check_place, fake_quantized


@_implement("quantize_rows")
def quantize_rows(
    x: Tensor,
    amax: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    row0: int = 0,
    col0: int = 0,
    full_width: int = 0,
    stream: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (..., K) to (qdata, scale, per_tensor_scale (rows,)), rows being the leading dimensions flattened.

    The op ``quantize`` of each row by itself, with that row's amax: amax (rows,) where it is given. ``spec`` has
    ``row_scaled`` set.
    """
    how = QuantizeSpec.unpack(spec)
    rows = math.prod(x.shape[:-1])
    if not how.row_scaled:
        raise ValueError("quantize_rows takes a spec with row_scaled=True")
    if amax is not None and (amax.shape != (rows,) or amax.dtype != torch.float32):
        raise ValueError(f"amax is float32 ({rows},), one a row, not {amax.dtype} {tuple(amax.shape)}")
    check_place(rows, x.shape[-1], row0, col0, full_width, how.column_multiple)
    amax = reference.row_amax(x, how.hadamard_sign) if amax is None else amax
    return reference.quantize(x, amax, rng_state, how, row0, col0, full_width, stream)


@_fake("quantize_rows")
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
    rows = math.prod(x.shape[:-1])
    qdata, scale, _ = fake_quantized(x, rows, x.shape[-1], x.shape[:-1], spec)
    return qdata, scale, x.new_empty((rows,), dtype=torch.float32)
