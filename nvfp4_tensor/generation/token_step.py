"""One token of each text of a batch through a described model, from the embedding to the logits.

    step = TokenStep(describe(model))
    logits = step(tokens, place, rotations, buffers)

A step is a sequence of torch operators and of the operators of ``ops/composite/step.py``, none of which waits for the
device: on CUDA a graph captures it once for all positions. The same operators in plain torch run on every device. On
Hopper a dense block with NVFP4 weights takes five kernels: norm, q, k and v; attention; o; norm, gate, up and their
activation; down. All blocks of a Llama for one text are a single kernel (``fused_layers.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations import moe

from nvfp4_tensor.generation.architectures import Block, Linear, Model, Norm
from nvfp4_tensor.generation.fused_layers import Rotation
from nvfp4_tensor.generation.ring import Place, StepBuffers
from nvfp4_tensor.matmul import backends, fp8
from nvfp4_tensor.matmul.backends import has_fp8_tensor_cores
from nvfp4_tensor.matmul.product import codes_of
from nvfp4_tensor.numerics.choices import ProductBackend
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import TILE_ROWS
from nvfp4_tensor.quantization.linear import pre_scaled
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


class Sum(NamedTuple):
    """``residual + multiplier * first(x)``, to be computed by the operator that needs it. All (B, D)."""

    x: Tensor
    residual: Tensor | None = None
    first: Norm | None = None
    multiplier: float = 1.0


Attend = Callable[[int, Block, Tensor], Tensor]
"""From a layer's index, its block, and q, k and v of rows to what they attend to (rows, heads * head_dim)."""


class TokenStep:
    """The step of a described model. It reads the model's own tensors at each call.

    Args:
        model: what :func:`~nvfp4_tensor.generation.families.describe` returned.
        is_fp8: weights with ``activations="fp8"`` round both operands, if there are as many rows as that takes.
    """

    def __init__(self, model: Model, is_fp8: bool = False) -> None:
        self.model = model
        self.blocks = [_Block(block, is_fp8) for block in model.blocks]
        self.head = norm_project(model.norm, (model.head,), -1, is_fp8)
        self.plain_head = project((model.head,), is_fp8)

    def __call__(
        self,
        tokens: Tensor,
        place: Place,
        rotations: Sequence[Rotation],
        buffers: Sequence[StepBuffers],
        fused: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Append one token per row to the caches, and return the logits (B, vocabulary) after it.

        Args:
            tokens: int64 (B,).
            place: where the token is written, in all layers.
            rotations: cos and sin (1 or B, rotary) of the tokens for each of ``model.rotaries``.
            buffers: of each layer.
            fused: all blocks as one operator for these buffers, where there is one.
        """
        x = self.embedded(tokens)
        if fused is not None:
            return self._capped(self.plain_head(fused(x, place, rotations)))

        def attend_one(layer: int, block: Block, qkv: Tensor) -> Tensor:
            before = (qkv, *head_norms(block), *rotation_of(block, rotations))
            return buffers[layer].attend(block, before, place)

        return self.logits(self.blocks_of(x, attend_one))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return what goes into the first block (rows, D) for tokens (rows,)."""
        x = torch.nn.functional.embedding(tokens, self.model.embedding)
        return x if self.model.embedding_multiplier == 1.0 else x * self.model.embedding_multiplier

    def blocks_of(self, x: Tensor, attend: Attend) -> Sum:
        """Run rows (rows, D) through all blocks."""
        total = Sum(x)
        for i, block in enumerate(self.blocks):
            total = block(total, functools.partial(attend, i))
        return total

    def logits(self, total: Sum) -> Tensor:
        """Return the logits (rows, vocabulary) behind the last block."""
        logits, _ = self.head(total)
        return self._capped(logits)

    def _capped(self, logits: Tensor) -> Tensor:
        if self.model.logits_divisor != 1.0:
            logits = logits / self.model.logits_divisor
        if cap := self.model.logits_softcap:
            logits = torch.tanh(logits / cap) * cap
        return logits


class _Block:
    """Attention and feed-forward of one block."""

    def __init__(self, block: Block, is_fp8: bool) -> None:
        parts, activation = block.parts, block.kinds["activation"]
        self.block = block
        self.qkv = norm_project(parts.get("norm_before_attention"), block.linears("q", "k", "v"), -1, is_fp8)
        self.o = project(block.linears("o"), is_fp8)
        self.after_attention, self.after_feed_forward = (
            parts.get(f"norm_after_{name}") for name in ("attention", "feed_forward")
        )
        norm = parts.get("norm_before_feed_forward")
        self.hidden: Callable[[Sum], tuple[Tensor, Tensor]]
        self.down: Callable[[Tensor], Tensor] | None = None
        if block.experts is not None:
            self.hidden = functools.partial(_mixture, norm, *block.experts)
        else:
            self.hidden = norm_project(norm, block.linears("gate", "up"), activation, is_fp8)
            self.down = project(block.linears("down"), is_fp8)

    def __call__(self, total: Sum, attend: Callable[[Block, Tensor], Tensor]) -> Sum:
        """Return the sum after the block; total: the one before it."""
        residual = self.block.numbers["residual"]
        qkv, x = self.qkv(total)
        y, x = self.hidden(Sum(self.o(attend(self.block, qkv)), x, self.after_attention, residual))
        return Sum(y if self.down is None else self.down(y), x, self.after_feed_forward, residual)


def head_norms(block: Block) -> tuple[Tensor | None, Tensor | None, float, float, bool]:
    """Return the weights of the norms of queries and keys, and their constants."""
    q_norm, k_norm = block.parts.get("q_norm"), block.parts.get("k_norm")
    return _weight(q_norm), _weight(k_norm), *((0.0, 0.0, True) if q_norm is None else q_norm.constants)


def rotation_of(block: Block, rotations: Sequence[Rotation]) -> tuple[Tensor | None, Tensor | None]:
    """Return the rotation of a block, None for none."""
    return (None, None) if block.kinds["rotary"] < 0 else rotations[block.kinds["rotary"]]


def _mixture(norm: Norm | None, router: Any, experts: Any, total: Sum) -> tuple[Tensor, Tensor]:
    """Run the router, and the experts by transformers' grouped products, which read no value on the host.

    ``generate`` of transformers switches to products that copy the chosen experts' weights, and back after a text.
    """
    normed, x = add_and_norm(total, norm)
    _, weights, indices = router(normed)
    return moe.grouped_mm_experts_forward(experts, normed, indices, weights), x


def norm_project(
    norm: Norm | None, linears: Sequence[Linear], activation: int = -1, is_fp8: bool = False
) -> Callable[[Sum], tuple[Tensor, Tensor]]:
    """Return a function from a sum to the outputs (B, sum of N) of linears of its norm, and the sum's value (B, D).

    Args:
        activation: outputs are gate and up, and those returned are (B, N): ``activation(gate) * up``. -1: none.
    """
    halves = _halves(linears) if activation >= 0 else linears
    if norm is not None and halves is not None and all(_is_plain(each, is_fp8) for each in (*linears, *halves)):
        return functools.partial(_norm_linears, norm, *_parts(halves), activation)
    products = project(linears, is_fp8)

    def run(total: Sum) -> tuple[Tensor, Tensor]:
        normed, x = add_and_norm(total, norm)
        y = products(normed)
        return (y if activation < 0 else torch.ops.nvfp4.gated(y, activation)), x

    return run


def _norm_linears(
    norm: Norm,
    parts: list[list[Tensor]],
    biases: list[Tensor],
    activation: int,
    total: Sum,
) -> tuple[Tensor, Tensor]:
    if total.first is not None and total.first.constants != norm.constants:
        total = Sum(add_and_norm(total, None)[1])
    y, x = torch.ops.nvfp4.norm_linears(
        total.x, total.residual, norm.weight, *norm.constants, total.multiplier, _weight(total.first),
        *parts, biases, activation,
    )  # fmt: skip
    return y, x if x.numel() else total.x  # empty: it would equal x


def project(linears: Sequence[Linear], is_fp8: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function from x (B, K) to the outputs (B, sum of N) of linears that share x.

    Weight-only NVFP4 weights take one operator. Others (dense, W4A4, transformed) take torch's linear each, and those
    that scale their inputs take operators of their own.
    """
    if any(each.input_scale is not None for each in linears):
        plain = [(dataclasses.replace(each, input_scale=None), each.input_scale) for each in linears]
        products = [(project((each,), is_fp8), scale) for each, scale in plain]
        return lambda x: torch.cat([product(pre_scaled(x, scale)) for product, scale in products], -1)
    if all(_is_plain(each, is_fp8) for each in linears):
        parts, biases = _parts(linears)
        return lambda x: torch.ops.nvfp4.linears(x, *parts, biases)
    if is_fp8 and all(map(takes_fp8, linears)):
        weights: list[Any] = [each.weight for each in linears]
        on_tensor_cores = has_fp8_tensor_cores(weights[0].device)
        return functools.partial(_fp8_products, linears, [codes_of(each) for each in weights], on_tensor_cores)
    if len(linears) == 1:
        return functools.partial(_linear, linears[0])
    if all(type(each.weight.data) is Tensor and each.bias is None for each in linears):
        return functools.partial(_products, [each.weight for each in linears])
    return functools.partial(_linears, linears)


def _linears(linears: Sequence[Linear], x: Tensor) -> Tensor:
    return torch.cat([torch.nn.functional.linear(x, each.weight, each.bias) for each in linears], -1)


def _fp8_products(linears: Sequence[Linear], codes: Sequence[Codes], on_tensor_cores: bool, x: Tensor) -> Tensor:
    if len(x) < backends.FP8_ROWS:  # an output layer of the last tokens
        return _linears(linears, x)
    return fp8.products(x, codes, [each.bias for each in linears], on_tensor_cores)


ROWS_OF_LINEAR_ROW = 4
"""Rows up to which ``nvfp4::linear_row`` is faster on a CPU than torch's product."""


def _linear(linear: Linear, x: Tensor) -> Tensor:
    weight = linear.weight
    fits = x.is_cpu and len(x) <= ROWS_OF_LINEAR_ROW and linear.bias is None and type(weight.data) is Tensor
    if fits and weight.dtype == x.dtype == torch.bfloat16 and weight.is_contiguous() and x.shape[1] % 32 == 0:
        y: Tensor = torch.ops.nvfp4.linear_row(x, weight.detach())  # reads the weight once, in memory order
        return y
    return torch.nn.functional.linear(x, weight, linear.bias)


def _products(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the products (B, sum of N) of x (B, K) and dense weights (N, K), each written where it belongs."""
    sizes = [weight.shape[0] for weight in weights]
    y = x.new_empty((x.shape[0], sum(sizes)))
    for weight, part in zip(weights, y.split(sizes, -1), strict=True):
        torch.mm(x, weight.detach().mT, out=part)
    return y


def _is_plain(linear: Linear, is_fp8: bool) -> bool:
    """Return whether the product is that of a weight-only NVFP4 weight."""
    return linear.is_weight_only and not (is_fp8 and takes_fp8(linear))


def takes_fp8(linear: Linear) -> bool:
    """Return whether a linear rounds many rows of activations to FP8."""
    weight: Any = linear.weight
    return linear.is_weight_only and weight.product_backend == ProductBackend.FP8


def _halves(linears: Sequence[Linear]) -> Sequence[Linear] | None:
    """Return gate and up, also if one weight has both; None if its halves are no views."""
    if len(linears) == 2:
        return linears
    (both,) = linears
    rows = both.weight.shape[0] // 2
    if rows % TILE_ROWS or not both.is_weight_only:
        return None
    weights = both.weight.detach().split(rows)
    biases = (None, None) if both.bias is None else both.bias.detach().split(rows)
    return [Linear(both.name, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _parts(linears: Sequence[Linear]) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return qdata, scales and per-tensor scales, a list each, and biases: none, or one per weight, empty for none."""
    weights: list[NVFP4Tensor] = [each.weight for each in linears]  # type: ignore[misc]
    parts = [list(each) for each in zip(*((w.qdata, w.scale, w.per_tensor_scale) for w in weights), strict=True)]
    if all(each.bias is None for each in linears):
        return parts, []
    dtype = next(each.bias.dtype for each in linears if each.bias is not None)
    none = weights[0].qdata.new_empty((0,), dtype=dtype)
    return parts, [none if each.bias is None else each.bias.detach() for each in linears]


def add_and_norm(total: Sum, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the norm of a sum, and the sum; the sum for both if ``norm`` is None."""
    x, residual, first, multiplier = total
    if first is not None and norm is not None and first.constants != norm.constants:
        return add_and_norm(Sum(add_and_norm(total, None)[1]), norm)
    constants = next((each.constants for each in (norm, first) if each is not None), None)
    if constants is None:
        x = x * multiplier if multiplier != 1.0 else x
        x = x if residual is None else residual + x
        return x, x
    normed, added = torch.ops.nvfp4.rms_norm(x, residual, _weight(norm), *constants, multiplier, _weight(first))
    added = added if added.numel() else x  # empty: it would equal x
    return (added if norm is None else normed), added


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
