"""Plain-torch implementation of the op that runs one token through all layers of a Llama on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from nvfp4_tensor.ops.composite.step import normed
from nvfp4_tensor.ops.schemas import op, plain

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
    for i, caches in enumerate(zip(keys, values, strict=True)):
        *qkv, o, gate, up, down = islice(weights, WEIGHTS)
        bias: list[Tensor | None] = [*biases[3 * i : 3 * i + 3]] or [None] * 3
        y = normed(x, norms[2 * i], eps)
        token = torch.cat([_product(y, weight, b) for weight, b in zip(qkv, bias, strict=True)], -1)
        kv_heads, length, dim = caches[0].shape[1:]
        heads = token.shape[1] // dim - 2 * kv_heads
        before = token, *(head_norms[2 * i : 2 * i + 2] or (None, None)), eps, 0.0, True, cos, sin, *caches, position
        if codes:
            coded, its_front = codes[CODES * i : CODES * (i + 1)], front[2 * i : 2 * i + 2] or (None, None)
            lengths = position - (length - 1)
            q = plain.place_one(*before, heads, spec, *coded, lengths, rotated)
            attended = torch.ops.nvfp4.attend_codes(
                q, *coded, lengths, None, *its_front, *caches, scaling, 0.0, 0, rotated
            ).flatten(1)
        else:
            attended = plain.attend_one(*before, heads, scaling)
        x = x + _product(attended, o, None)
        y = normed(x, norms[2 * i + 1], eps)
        x = x + _product(torch.nn.functional.silu(_product(y, gate, None)) * _product(y, up, None), down, None)
    return normed(x, norms[-1], eps)


def _product(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.nvfp4.matmul(x, None, *weight, bias, x.shape[-1], False, x.dtype)
    return y
