"""Plain-torch implementations of the ops of one token's step: norms, attention over a static cache, gates, products.

They round where the models of transformers round, except inside attention, which is float32 from the rotated queries to
the sums. None of them waits for the device, so that a CUDA graph can have them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_tensor.ops.composite.attention import attention
from nvfp4_tensor.ops.schemas import op


class Activation(enum.IntEnum):
    """How :func:`gated` combines gate and up."""

    SILU = 0
    """``silu(gate) * up``."""
    GELU_TANH = 1
    """``gelu(gate, approximate="tanh") * up``."""
    GELU = 2
    """``gelu(gate) * up``."""
    CLAMPED_GLU = 3
    """``(up + 1) * gate * sigmoid(alpha * gate)``, gate and up clamped to ``limit`` (gpt-oss)."""


@op(returns="y, sum", is_fake=True)
def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_before_weight: bool = True,
    multiplier: float = 1.0,
    first_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm of ``sum``, and ``sum = residual + multiplier * x``, both of x's shape (..., D) and dtype.

    ``norm(x) = x / sqrt(mean(x^2) + eps) * (weight + offset)`` in float32, rounded once at the end, and if
    ``round_before_weight`` also before the weight.

    Args:
        residual: of x's shape and dtype; None: nothing is added.
        weight: (D,), of x's dtype or float32; None: ``y`` is empty, (0,).
        first_weight: the weight of a norm of x before the multiplier (blocks with a norm behind attention).

    Returns:
        ``y``, and ``sum``, which is empty, (0,), if it would equal x.
    """
    total = x = x.contiguous()
    if first_weight is not None:
        total = normed(total, first_weight, eps, offset, round_before_weight)
    if multiplier != 1.0:
        total = total * multiplier
    if residual is not None:
        total = residual.contiguous() + total
    y = x.new_empty((0,)) if weight is None else normed(total, weight, eps, offset, round_before_weight)
    return y, x.new_empty((0,)) if total is x else total


def normed(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, round_before_weight: bool = True) -> Tensor:
    """Return the norm of x (..., D) as in :func:`rms_norm`."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        unit = unit.to(x.dtype).float()
    return (unit * (weight.float() + offset)).to(x.dtype)


@op(mutates_args=("keys", "values"))
def attend_one(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    round_before_weight: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    heads: int,
    scaling: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Append one token's key and value to a static cache, and return its attention (B, heads * dim), of qkv's dtype.

    A token at ``position`` sees positions ``starts`` to ``position``, or the last ``window`` of them. Position p is in
    slot p of the cache, or, if ``0 < window <= length``, in slot p % length: such a cache is a ring without an end. For
    any other position that is not in the cache nothing is written and the result is NaN.

    Args:
        qkv: (B, (heads + 2 * kv_heads) * dim): queries, keys and values of one token per row.
        q_norm, k_norm: weights of RMS norms as in :func:`rms_norm`: (dim,) for a norm of each head, or
            (heads * dim,), (kv_heads * dim,) for one of all heads; None: no norm.
        cos, sin: (1 or B, rotary), of qkv's dtype or float32, for the first ``rotary`` of ``dim`` elements, an even
            number; their dtype is that of the rotation's products. None: no rotation.
        keys, values: the cache, (B, kv_heads, length, dim), contiguous, of qkv's dtype.
        position: int64 on qkv's device: one for all rows, or one per row.
        scaling: factor of the products of queries and keys.
        window: number of positions that a token sees, itself included; 0: all.
        softcap: ``softcap * tanh(score / softcap)`` replaces a score; 0: none.
        sinks: (heads,): one more score per head, which has no value; None: none.
        starts: int64 (B,) on qkv's device, the first position that each row sees, 0 for None: left padding is before
            it. A token sees itself, whatever its start.
    """
    batch, kv_heads, length, dim = keys.shape
    q, k, v = normed_and_rotated(qkv, q_norm, k_norm, eps, offset, round_before_weight, cos, sin, heads, kv_heads, dim)

    is_ring = 0 < window <= length
    at = position.reshape(-1).expand(batch)
    inside = at >= 0 if is_ring else (at >= 0) & (at < length)
    slot = torch.where(inside, at % length, 0)
    rows = torch.arange(batch, device=qkv.device)
    for cache, new in ((keys, k), (values, v)):
        cache[rows, :, slot] = torch.where(inside[:, None, None], new, cache[rows, :, slot])

    age = (slot[:, None] - torch.arange(length, device=qkv.device)) % length
    oldest = at if starts is None else (at - starts).clamp(min=0)
    seen = (age <= oldest[:, None]) & (age < window) if window else age <= oldest[:, None]
    q = q.view(batch, kv_heads, -1, dim)
    attended = attention(q, keys, values, seen[:, None, None], scaling, softcap, sinks)
    attended = torch.where(inside[:, None, None, None], attended, torch.nan)
    return attended.to(qkv.dtype).view(batch, -1)


@op(
    returns="q",
    mutates_args=(
        "keys", "values", "key_codes", "key_scale", "key_factor", "value_codes", "value_scale", "value_factor",
    ),
)  # fmt: skip
def place_one(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    round_before_weight: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    heads: int,
    spec: int,
    key_codes: Tensor,
    key_scale: Tensor,
    key_factor: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_factor: Tensor,
    starts: Tensor,
    rotate: bool,
) -> Tensor:
    """Put one token's key and value into a ring, the ring's oldest token into codes, and return the token's queries.

    Position p is in slot p % length of the ring, of 2 slots or more; positions are not negative. The oldest token is
    that of the slot behind it, which the next token overwrites.

    Args:
        qkv, q_norm, k_norm, eps, offset, round_before_weight, cos, sin, keys, values, position, heads: those of
            :func:`attend_one`.
        spec, key_codes, key_scale, key_factor, value_codes, value_scale, value_factor, starts, rotate: those of
            ``append_codes``.

    Returns:
        Queries (B, heads, 1, dim) of qkv's dtype.
    """
    batch, kv_heads, length, dim = keys.shape
    q, k, v = normed_and_rotated(qkv, q_norm, k_norm, eps, offset, round_before_weight, cos, sin, heads, kv_heads, dim)
    slot = position.reshape(-1).expand(batch) % length
    rows = torch.arange(batch, device=qkv.device)
    for ring, new in ((keys, k), (values, v)):
        ring[rows, :, slot] = new
    oldest = (slot + 1) % length
    torch.ops.nvfp4.append_codes(
        keys[rows, :, oldest].unsqueeze(2), values[rows, :, oldest].unsqueeze(2), spec,
        key_codes, key_scale, key_factor, value_codes, value_scale, value_factor, starts, rotate,
    )  # fmt: skip
    return q.unsqueeze(2)


def normed_and_rotated(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: float,
    round_before_weight: bool,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    kv_heads: int,
    dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v (B, heads or kv_heads, dim)."""
    norm = eps, offset, round_before_weight
    q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    q, k = (rotated_heads(_heads(x, weight, dim, norm), cos, sin) for x, weight in ((q, q_norm), (k, k_norm)))
    return q, k, v.view(-1, kv_heads, dim)


def _heads(x: Tensor, weight: Tensor | None, dim: int, norm: tuple[float, float, bool]) -> Tensor:
    """Split x (B, n * dim) into heads, normed where there is a weight."""
    if weight is not None and weight.numel() != dim:
        x = normed(x, weight, *norm)
    x = x.view(x.shape[0], -1, dim)
    return x if weight is None or weight.numel() != dim else normed(x, weight, *norm)


def rotated_heads(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Rotate the first elements of each head of x (B, heads, dim) by cos and sin as in :func:`attend_one`."""
    if cos is None or sin is None:
        return x
    rotary = cos.shape[-1]
    cos, sin = (each.reshape(-1, 1, rotary) for each in (cos, sin))
    low, high = x[..., :rotary].chunk(2, -1)
    rotated = x[..., :rotary] * cos + torch.cat((-high, low), -1) * sin
    return torch.cat((rotated.to(x.dtype), x[..., rotary:]), -1)


@op(is_fake=True)
def gated(
    gate_up: Tensor, activation: int, limit: float = 7.0, alpha: float = 1.702, interleaved: bool = False
) -> Tensor:
    """Combine gate and up, the halves of gate_up (..., 2 * I), by an :class:`Activation`: (..., I).

    Each step is rounded to the dtype, as in the models of transformers.

    Args:
        limit, alpha: of ``CLAMPED_GLU``.
        interleaved: gate and up alternate in gate_up (gpt-oss's experts), in place of two halves.
    """
    gate_up = gate_up.contiguous()
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    if activation == Activation.CLAMPED_GLU:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    if activation == Activation.SILU:
        return torch.nn.functional.silu(gate) * up
    if activation not in (Activation.GELU_TANH, Activation.GELU):
        raise ValueError(f"nvfp4::gated: activation must be one of {[int(a) for a in Activation]}, not {activation}")
    approximate = "tanh" if activation == Activation.GELU_TANH else "none"
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


@op(is_fake=True)
def linear_row(x: Tensor, w: Tensor) -> Tensor:
    """Return x (B, K) @ w (N, K)^T, both dense bfloat16: (B, N), each row as if alone. K is a multiple of 32."""
    return (x.float() @ w.mT.float()).to(x.dtype)


@op(is_fake=True)
def linears(
    x: Tensor,
    qdata: Sequence[Tensor],
    scales: Sequence[Tensor],
    per_tensor_scales: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> Tensor:
    """Multiply x (B, K) by NVFP4 weights (N_i, K) that share it: (B, sum of N_i).

    Each product has the bits that ``matmul`` gives it; with more than 8 rows of x up to the order of its sums.

    Args:
        qdata, scales, per_tensor_scales: the parts of each weight.
        biases: one (N_i,) per weight, or an empty list. An empty tensor: no bias for that weight.
    """
    products = [
        torch.ops.nvfp4.matmul(x, None, *parts, _bias(biases, i), x.shape[-1], False, x.dtype)
        for i, parts in enumerate(zip(qdata, scales, per_tensor_scales, strict=True))
    ]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def _bias(biases: Sequence[Tensor], i: int) -> Tensor | None:
    return biases[i] if biases and biases[i].numel() else None


@op(returns="y, sum", is_fake=True)
def norm_linears(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    offset: float,
    round_before_weight: bool,
    multiplier: float,
    first_norm: Tensor | None,
    qdata: Sequence[Tensor],
    scales: Sequence[Tensor],
    per_tensor_scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: int = -1,
    limit: float = 7.0,
    alpha: float = 1.702,
) -> tuple[Tensor, Tensor]:
    """Return :func:`linears` of the y of :func:`rms_norm`, through :func:`gated` if activation >= 0; and its sum.

    On Hopper this is one kernel where it can be. The norm's squares may be added in another order than in ``rms_norm``.

    Args:
        norm, first_norm: ``weight`` and ``first_weight`` of ``rms_norm``. norm None: x is multiplied itself.
        activation: an :class:`Activation`, then there are two weights, gate and up, of one shape; -1: none.
    """
    y, total = x, x.new_empty((0,))
    if norm is not None:
        y, total = torch.ops.nvfp4.rms_norm(x, residual, norm, eps, offset, round_before_weight, multiplier, first_norm)
    elif residual is not None or first_norm is not None or multiplier != 1.0:
        raise ValueError("nvfp4::norm_linears: residual, first_norm and multiplier need a norm")
    y = torch.ops.nvfp4.linears(y, qdata, scales, per_tensor_scales, biases)
    return (y if activation < 0 else torch.ops.nvfp4.gated(y, activation, limit, alpha)), total
