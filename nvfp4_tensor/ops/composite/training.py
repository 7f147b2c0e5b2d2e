"""Plain-torch implementations of the ops of a training linear: its forward or a part of it, and its backward.

Each does what the other ops of this package do one by one, to the same bits. As one op it takes one call of the
dispatcher instead of five, which is most of the host time of a small linear. ``train_linear_forward`` is the whole
forward of an eager call. ``train_linear`` is the rest of one whose input is quantized: by another linear that has the
same input, or by ``quantize_pair_values`` in a compiled graph, which merges equal calls of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.schemas import op

DY_STREAM, DY_T_STREAM, W_FOR_DX_STREAM, X_T_STREAM, W_STREAM, X_STREAM = range(6)
"""Streams of random bits (contract, section 8). All operands of a call share one rng_state, because EDEN's rotations
must be equal to cancel. Each has a stream of its own: dy depends on what x and w were rounded to."""


@op(returns="y, qdata, scale, per_tensor_scale", is_fake=True)
def train_linear(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Quantize w (N, K) by ``spec``; return y (..., N) = x_scale * x (..., K) @ w^T + bias, and the codes of w.

    x: dense, or the values of a quantized input with ``x_scale``, its per-tensor scale. w may use random bits.
    """
    codes = torch.ops.nvfp4.quantize(w, None, rng_state, spec, 0, 0, 0, W_STREAM)
    return torch.ops.nvfp4.matmul(x, x_scale, *codes, bias, x.shape[-1], False, out_dtype), *codes


@op(
    returns="y, state, values, factor, x_qdata, x_scale, x_per_tensor_scale, qdata, scale, per_tensor_scale",
    tags=(torch.Tag.nondeterministic_seeded,),
    is_fake=True,
)
def train_linear_forward(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    rng_state: Tensor | None,
    spec: int,
    spec_t: int,
    spec_w: int,
    out_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Quantize x (..., K) by ``spec``, its transpose by ``spec_t``, and w (N, K) by ``spec_w``; multiply x and w.

    rng_state: the source of random bits; by default, torch's generator draws one, as ``draw_rng_state`` does.

    Returns:
        y (..., N) = x @ w^T + bias; a copy of rng_state, or the drawn one; the values of x (M, K) and their factor; the
        codes of x^T (K, M); the codes of w.
    """
    nvfp4 = torch.ops.nvfp4
    state = nvfp4.draw_rng_state(x) if rng_state is None else rng_state.clone()
    x_MK = x.reshape(-1, x.shape[-1])
    values, factor, *codes_t = nvfp4.quantize_pair_values(
        x_MK, None, None, state, spec, spec_t, True, 0, 0, 0, 0, X_T_STREAM, X_STREAM
    )
    left = values.view(*x.shape[:-1], values.shape[-1])
    y, *codes = nvfp4.train_linear(left, factor, w, bias, state, spec_w, out_dtype)
    return y, state, values, factor, *codes_t, *codes


@op(returns="dx, dw", is_fake=True)
def train_linear_backward(
    dy: Tensor,
    rng_state: Tensor | None,
    x_qdata: Tensor,
    x_scale: Tensor,
    x_per_tensor_scale: Tensor,
    w: Tensor | None,
    w_qdata: Tensor | None,
    w_scale: Tensor | None,
    w_per_tensor_scale: Tensor | None,
    spec: int,
    spec_t: int,
    spec_w: int,
    transposes_w: bool,
    dx_dtype: torch.dtype,
    dw_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Quantize dy (M, N) by ``spec`` and dy^T by ``spec_t``; return dx (M, K) = dy @ w and dw (N, K) = dy^T @ x.

    Args:
        x_qdata, x_scale, x_per_tensor_scale: the codes of x^T (K, M).
        w: the dense weight (N, K), which is quantized by ``spec_w`` if the codes of w are not given.
        w_qdata, w_scale, w_per_tensor_scale: the codes of w (N, K).
        transposes_w: multiply by the transposed codes of w, which needs 16x16 blocks, instead of summing across them.

    If ``spec`` is EDEN, its rotation is undone before the product with w, which is not rotated.
    """
    nvfp4 = torch.ops.nvfp4
    values, factor, values_t, _, factor_t = nvfp4.quantize_pair_values(
        dy, None, None, rng_state, spec, spec_t, False, 0, 0, 0, 0, DY_T_STREAM, DY_STREAM
    )
    if w_qdata is None or w_scale is None or w_per_tensor_scale is None:
        if w is None:
            raise ValueError("train_linear_backward needs w or its codes")
        w_qdata, w_scale, w_per_tensor_scale = nvfp4.quantize(w, None, rng_state, spec_w, 0, 0, 0, W_STREAM)
    columns = x_qdata.shape[0]
    if QuantizeSpec.unpack(spec).is_eden:
        values = nvfp4.rotate_back(values, rng_state, dy.shape[1])
    if transposes_w:
        codes = *nvfp4.transpose_codes(w_qdata, w_scale), w_per_tensor_scale
        dx = nvfp4.matmul(values, factor, *codes, None, values.shape[1], False, dx_dtype)[:, :columns].contiguous()
    else:
        codes = w_qdata, w_scale, w_per_tensor_scale
        dx = nvfp4.matmul(values, factor, *codes, None, columns, True, dx_dtype)
    codes = x_qdata, x_scale, x_per_tensor_scale
    return dx, nvfp4.matmul(values_t, factor_t, *codes, None, values_t.shape[1], False, dw_dtype)
