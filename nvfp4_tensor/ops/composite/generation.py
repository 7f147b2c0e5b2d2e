"""Plain-torch implementations of the ops for generation: one token through a Llama, and its output layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_tensor.ops.schemas import op

LAYER_TENSORS = 23
"""Number of tensors per layer: first norm; q, k, v and o; second norm; gate, up and down. A norm is one tensor, a
weight three: qdata, scale, per_tensor_scale."""


@op(mutates_args=("keys", "values"))
def decode_llama(
    x: Tensor,
    weights: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    position: int,
    eps: float,
    scaling: float,
) -> Tensor:
    """Run one token x (1, D) through all layers and the last norm: (1, D). All tensors are bfloat16.

    Rounds where a model in PyTorch does, except in attention, which is float32 from the queries to the sums.

    Args:
        weights: LAYER_TENSORS per layer, then the last norm.
        keys, values: caches (1, heads, length, dim) per layer with ``position`` tokens; this token is appended.
        cos, sin: (dim,) of this position.
        scaling: factor of the products of queries and keys.
    """
    cos, sin = cos.flatten(), sin.flatten()
    for i, (k_cache, v_cache) in enumerate(zip(keys, values, strict=True)):
        norm, *qkvo, inner_norm = weights[i * LAYER_TENSORS : i * LAYER_TENSORS + 14]
        gate_up_down = weights[i * LAYER_TENSORS + 14 : (i + 1) * LAYER_TENSORS]
        q, k, v = (_product(_norm(x, norm, eps), qkvo[at : at + 3]) for at in (0, 3, 6))
        attended = _attend(q, k, v, k_cache, v_cache, cos, sin, position, scaling)
        x = x + _product(attended, qkvo[9:])
        normed = _norm(x, inner_norm, eps)
        gate, up = (_product(normed, gate_up_down[at : at + 3]) for at in (0, 3))
        x = x + _product(torch.nn.functional.silu(gate) * up, gate_up_down[6:])
    return _norm(x, weights[-1], eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _product(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch.ops.nvfp4.matmul(x, None, *weight, None, x.shape[-1], False, x.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: int,
    scaling: float,
) -> Tensor:
    """Rotate q (1, heads * dim) and k (1, kv_heads * dim), append k and v to the caches, and return the attention."""
    kv_heads, dim = k_cache.shape[1], k_cache.shape[3]
    k_cache[0, :, position] = _rotate(k.view(kv_heads, dim), cos, sin)
    v_cache[0, :, position] = v.view(kv_heads, dim)
    queries = _rotate(q.view(-1, dim), cos, sin).view(kv_heads, -1, dim).float()
    seen_keys, seen_values = (cache[0, :, : position + 1].float() for cache in (k_cache, v_cache))
    weights = torch.softmax(queries @ seen_keys.mT * scaling, -1)
    return (weights @ seen_values).to(q.dtype).view(1, -1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@op()
def linear_row(x: Tensor, w: Tensor) -> Tensor:
    """Return x (1, K) @ w (N, K)^T, both dense bfloat16: (1, N). K is a multiple of 32."""
    return (x.float() @ w.mT.float()).to(x.dtype)
