"""Plain-torch implementations of the ops of an AdamW step whose moments are four-bit codes (contract, section 12).

A parameter is a matrix (R, K) of B = ceil(K / 16) blocks per row. Its moments are four tensors in rows: ``r`` uint8
(R, 8 B), ``r_scale`` e4m3 (R, B), ``v`` uint8 (R, 8 B) and ``v_exponent`` uint8 (R, B). ``hyper`` holds the numbers of
the step, float32 (8,), in the order of :data:`HYPER`. For a shard, ``row0`` is its first row in the full tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import layout, optimizer_step
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.optimizer_step import HYPER, Moments
from nvfp4_tensor.ops.schemas import SymInt, op

_CHUNK_ELEMENTS = 1 << 20
"""Number of elements that are updated at a time, so that the intermediates of a large matrix are small."""


@op(mutates_args=("weight", "r", "r_scale", "v", "v_exponent"))
def adamw_step(
    weight: Tensor,
    grad: Tensor,
    r: Tensor,
    r_scale: Tensor,
    v: Tensor,
    v_exponent: Tensor,
    hyper: Tensor,
    rng_state: Tensor,
    row0: SymInt = 0,
) -> None:
    """Update a dense weight (R, K), bfloat16 (rounded stochastically) or float32, and its moments in place.

    grad: (R, K), bfloat16 or float32. rng_state: int64 (seed, offset).
    """
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"weight must be bfloat16 or float32, not {weight.dtype}")
    moments = Moments(r, r_scale, v, v_exponent)
    _check(tuple(weight.shape), grad, moments, hyper, row0)
    for rows in layout.chunks(len(weight), weight.shape[1], _CHUNK_ELEMENTS):
        ratio = _step_moments(moments, rows, grad, hyper, rng_state, row0)
        weight[rows] = optimizer_step.dense_weight(weight[rows], ratio, hyper, rng_state, row0 + rows.start)


@op(mutates_args=("qdata", "scale", "r", "r_scale", "v", "v_exponent"))
def adamw_step_codes(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor,
    grad: Tensor,
    r: Tensor,
    r_scale: Tensor,
    v: Tensor,
    v_exponent: Tensor,
    hyper: Tensor,
    rng_state: Tensor,
    row0: SymInt = 0,
) -> None:
    """Update a weight (R, K) in NVFP4, in 1x16 blocks with swizzled scales, and its moments in place.

    grad: (R, K), bfloat16 or float32. per_tensor_scale: float32, one number, which stays as it is.
    """
    rows, blocks = grad.shape[0], qdata.shape[-1] * 2 // BLOCK
    moments = Moments(r, r_scale, v, v_exponent)
    _check((rows, grad.shape[-1]), grad, moments, hyper, row0)
    if qdata.shape != r.shape or scale.shape != (*layout.scale_tiles(rows, blocks * BLOCK), 32, 16):
        raise ValueError(f"qdata {tuple(qdata.shape)} and scale {tuple(scale.shape)} are not those of {rows} rows")
    scales = layout.unswizzle(scale, rows, blocks)
    factor = per_tensor_scale.reshape(())
    for part in layout.chunks(len(grad), grad.shape[1], _CHUNK_ELEMENTS):
        ratio = _step_moments(moments, part, grad, hyper, rng_state, row0)
        qdata[part], scales[part] = optimizer_step.coded_weight(
            qdata[part], scales[part], factor, ratio, hyper, rng_state, row0 + part.start
        )
    scale.view(torch.uint8).copy_(layout.swizzle(scales).view(torch.uint8))


@op(mutates_args=("weight", "exp_avg", "exp_avg_sq"))
def adamw_step_vector(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rng_state: Tensor,
    element0: SymInt = 0,
) -> None:
    """Update a small weight (N,), bfloat16 (rounded stochastically) or float32, and its float32 moments (N,) in place.

    grad: (N,), bfloat16 or float32. For a shard, ``element0`` is its first element in the full tensor.
    """
    if weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"weight must be bfloat16 or float32, not {weight.dtype}")
    if weight.dim() != 1 or grad.shape != weight.shape:
        raise ValueError(
            f"weight and grad must be vectors of one size, not {tuple(weight.shape)} and {tuple(grad.shape)}"
        )
    _check_numbers(grad, hyper, element0)
    for name, t in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if t.shape != weight.shape or t.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 ({weight.numel()},), not {t.dtype} {tuple(t.shape)}")
    if weight.numel():
        optimizer_step.step_vector(weight, grad, exp_avg, exp_avg_sq, hyper, rng_state, element0)


def _step_moments(moments: Moments, rows: slice, grad: Tensor, hyper: Tensor, rng_state: Tensor, row0: int) -> Tensor:
    """Update the moments of some rows in place, and return their new m / root(v), float32 (rows, B, 16)."""
    old = Moments(*(part[rows] for part in moments))
    ratio, new = optimizer_step.ratio(grad[rows], old, hyper, rng_state, row0 + rows.start)
    for part, value in zip(old, new, strict=True):
        part.view(torch.uint8).copy_(value.view(torch.uint8))
    return ratio


def _check(shape: tuple[int, ...], grad: Tensor, moments: Moments, hyper: Tensor, row0: int) -> None:
    """Raise a ValueError for arguments that the kernels do not accept."""
    if len(shape) != 2 or tuple(grad.shape) != shape:
        raise ValueError(f"weight and grad must be matrices of one shape, not {shape} and {tuple(grad.shape)}")
    _check_numbers(grad, hyper, row0)
    rows, blocks = shape[0], -(-shape[1] // BLOCK)
    for name, t in moments._asdict().items():
        width = 8 * blocks if name in ("r", "v") else blocks
        if tuple(t.shape) != (rows, width) or t.element_size() != 1:
            raise ValueError(f"{name} must be bytes ({rows}, {width}), not {t.dtype} {tuple(t.shape)}")


def _check_numbers(grad: Tensor, hyper: Tensor, row0: int) -> None:
    if grad.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"grad must be bfloat16 or float32, not {grad.dtype}")
    if tuple(hyper.shape) != (len(HYPER),) or hyper.dtype != torch.float32:
        raise ValueError(f"hyper must be float32 ({len(HYPER)},), not {hyper.dtype} {tuple(hyper.shape)}")
    if row0 < 0:
        raise ValueError(f"the first row or element must not be negative, not {row0}")
