"""The op that quantizes a matrix and its transpose to values, its schema in ``definitions.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.ops.definitions import _fake, _implement, columns_of_values, fake_quantized


@_implement("quantize_pair_values")
def quantize_pair_values(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    codes_t: bool,
    row0: int = 0,
    col0: int = 0,
    full_rows: int = 0,
    full_width: int = 0,
    stream_t: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The op ``quantize_pair`` to what dense products read: (values, per_tensor_scale, t, scale_t, per_tensor_scale_t).

    values, bfloat16 (M, K): code x block scale of x (M, K), exact, the per-tensor scale left out. The transpose is
    (t, scale_t) = (qdata_t, its scales), to be saved and decoded later, where ``codes_t``; else t is its values,
    bfloat16 (K, M), and scale_t empty (0,). A side that is transformed keeps its columns padded to 16, or 128 for EDEN.

    A training step off FP4 tensor cores calls it with codes_t for x (whose values fprop multiplies, and whose transpose
    waits for backward), and without for dy, both of whose sides are multiplied at once: one pass over x or dy, where
    quantize_pair and dequantize move each value twice more. Bits are theirs.
    """
    qdata, scale, factor, qdata_t, scale_t, factor_t = torch.ops.nvfp4.quantize_pair(
        x, amax, amax_t, rng_state, spec, spec_t, row0, col0, full_rows, full_width, stream_t
    )
    rows, columns = x.shape
    dequantize = torch.ops.nvfp4.dequantize
    values = dequantize(qdata, scale, None, columns_of_values(columns, spec), torch.bfloat16)
    if codes_t:
        return values, factor, qdata_t, scale_t, factor_t
    values_t = dequantize(qdata_t, scale_t, None, columns_of_values(rows, spec_t), torch.bfloat16)
    return values, factor, values_t, scale_t.new_empty((0,)), factor_t


@_fake("quantize_pair_values")
def _(
    x: Tensor,
    amax: Tensor,
    amax_t: Tensor,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    codes_t: bool,
    row0: int = 0,
    col0: int = 0,
    full_rows: int = 0,
    full_width: int = 0,
    stream_t: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    values = x.new_empty((rows, columns_of_values(columns, spec)), dtype=torch.bfloat16)
    factor = x.new_empty((), dtype=torch.float32)
    if codes_t:
        return values, factor, *fake_quantized(x, columns, rows, (columns,), spec_t)
    values_t = x.new_empty((columns, columns_of_values(rows, spec_t)), dtype=torch.bfloat16)
    return values, factor, values_t, x.new_empty((0,), dtype=torch.float8_e4m3fn), torch.empty_like(factor)
