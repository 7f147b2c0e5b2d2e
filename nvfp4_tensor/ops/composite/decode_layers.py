"""Plain-torch implementation of the op that runs one token through all layers of a Llama on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from nvfp4_tensor.ops.composite.step import normed, rotated_heads
from nvfp4_tensor.ops.schemas import op

WEIGHTS = 7
"""Number of weights per layer: q, k, v, o, gate, up, down."""

CODES = 6
"""Number of tensors per layer of a cache of codes: codes, block scales and row factors of keys, then of values."""


@op()
def decode_layers_plan(
    x: Tensor,
    norms: Sequence[Tensor],
    qdata: Sequence[Tensor],
    scales: Sequence[Tensor],
    per_tensor_scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    codes: Sequence[Tensor],
    front: Sequence[Tensor],
) -> Tensor:
    """Return the plan of these tensors for :func:`decode_layers`: uint8, device memory that refers to them.

    Empty where there is no kernel for them. The tensors must outlive the plan. ``x`` names the device.
    """
    return x.new_empty((0,), dtype=torch.uint8)


@op(mutates_args=("plan", "keys", "values", "codes"))
def decode_layers(
    x: Tensor,
    plan: Tensor,
    norms: Sequence[Tensor],
    qdata: Sequence[Tensor],
    scales: Sequence[Tensor],
    per_tensor_scales: Sequence[Tensor],
    biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    codes: Sequence[Tensor],
    front: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
    eps: float,
    scaling: float,
    spec: int,
    rotated: bool,
) -> Tensor:
    """Run one token x (1, D) through all layers of a Llama and the last norm: (1, D). All values are bfloat16.

    Rounds where a model in PyTorch does, except in attention, which is float32 from the queries to the sums.

    Args:
        plan: of :func:`decode_layers_plan` for the same tensors. One call at a time may use it.
        norms: two per layer (before attention and before the feed-forward), then the last one: (D,).
        qdata, scales, per_tensor_scales: of WEIGHTS weights per layer.
        biases: of q, k and v per layer, or empty.
        head_norms: of each head of q and of k per layer (dim,), or empty.
        keys, values: caches (1, kv_heads, length, dim) per layer with ``position`` tokens; this token is appended. Of a
            cache of codes, the ring of its latest tokens: the token is written to slot ``position % length``.
        codes: empty, or the :data:`CODES` parts of a cache of codes per layer, as of ``attend_codes``. They have the
            tokens up to ``position - length + 1``, to which the oldest token of the ring is appended.
        front: keys and values of the dense tokens before the codes per layer (1, kv_heads, tokens, dim), or empty.
        cos, sin: (dim,) of this position.
        position: int64 (1,), less than ``length``. Of a cache of codes, that behind the front, at least ``length - 1``.
        scaling: factor of the products of queries and keys.
        spec, rotated: how codes are made, as of ``append_codes``.
    """
    weights = iter(zip(qdata, scales, per_tensor_scales, strict=True))
    for i, (k_cache, v_cache) in enumerate(zip(keys, values, strict=True)):
        q_w, k_w, v_w, o_w, gate_w, up_w, down_w = islice(weights, WEIGHTS)
        bias: list[Tensor | None] = [*biases[3 * i : 3 * i + 3]] or [None] * 3
        y = normed(x, norms[2 * i], eps)
        q, k, v = (_product(y, w, b) for w, b in zip((q_w, k_w, v_w), bias, strict=True))
        kv_heads, length, dim = k_cache.shape[1:]
        q, k = q.view(-1, dim), k.view(kv_heads, dim)
        if head_norms:
            q, k = (normed(each, head_norms[2 * i + j], eps) for j, each in enumerate((q, k)))
        at = int(position) % length if codes else int(position)
        q, k = (rotated_heads(each[None], cos, sin)[0] for each in (q, k))
        k_cache[0, :, at] = k
        v_cache[0, :, at] = v.view(kv_heads, dim)
        if codes:
            coded, its_front = codes[CODES * i : CODES * (i + 1)], front[2 * i : 2 * i + 2] or (None, None)
            lengths, oldest = position - (length - 1), (at + 1) % length
            attended = torch.ops.nvfp4.attend_codes(
                q[None, :, None], *coded, lengths, None, *its_front, k_cache, v_cache, scaling, 0.0, 0, rotated
            )
            new = (cache[:, :, oldest : oldest + 1] for cache in (k_cache, v_cache))
            torch.ops.nvfp4.append_codes(*new, spec, *coded, lengths, rotated)
        else:
            seen_keys, seen_values = (cache[0, :, : at + 1].float() for cache in (k_cache, v_cache))
            scores = q.view(kv_heads, -1, dim).float() @ seen_keys.mT * scaling
            attended = torch.softmax(scores, -1) @ seen_values
        x = x + _product(attended.to(x.dtype).view(1, -1), o_w, None)
        y = normed(x, norms[2 * i + 1], eps)
        gate, up = _product(y, gate_w, None), _product(y, up_w, None)
        x = x + _product(torch.nn.functional.silu(gate) * up, down_w, None)
    return normed(x, norms[-1], eps)


def _product(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.nvfp4.matmul(x, None, *weight, bias, x.shape[-1], False, x.dtype)
    return y
