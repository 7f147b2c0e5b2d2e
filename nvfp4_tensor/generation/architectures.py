"""What one token passes through in a model of transformers: its weights, norms, rotations and constants, no kernels.

:func:`~nvfp4_tensor.generation.families.describe` reads a model into these frozen dataclasses. Both native steps, on a
CPU and on CUDA, compute what a description says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nvfp4_tensor.ops.composite.decode_step import Routing
from nvfp4_tensor.ops.composite.step import Activation
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

__all__ = ["Activation", "Attention", "Block", "FeedForward", "Linear", "Mixture", "Model", "Norm", "Rotary", "Routing"]


@dataclass(frozen=True, eq=False)
class Linear:
    """x (B, K) @ weight (N, K)^T + bias (N,), with x times input_scale (K,) if there is one."""

    name: str
    weight: Tensor
    bias: Tensor | None
    input_scale: Tensor | None = None

    @property
    def is_weight_only(self) -> bool:
        """Whether the weight is NVFP4 in one piece of memory, not transformed, and x is neither scaled nor rounded."""
        weight = self.weight
        return (
            self.input_scale is None
            and type(weight) is NVFP4Tensor
            and weight.activation_spec is None
            and not weight.transposed
            and weight.spec.hadamard_sign is None
            and all(part.is_contiguous() for part in (weight.qdata, weight.scale, weight.per_tensor_scale))
        )


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm over the last dimension: x / rms(x) in float32, times (offset + weight).

    Attributes:
        weight: (D,).
        offset: 0, or 1 for Gemma.
        rounds_before_weight: x / rms(x) is rounded to the dtype of x, and its product with the weight once more. False:
            the product is float32, and is rounded once.
    """

    name: str
    weight: Tensor
    eps: float
    offset: float = 0.0
    rounds_before_weight: bool = True


@dataclass(frozen=True, eq=False)
class Rotary:
    """One of the rotary embeddings of a model. The first ``dim`` elements of a head are rotated, as two halves.

    Attributes:
        module: transformers' module with the frequencies.
        layer_type: its argument for one of several embeddings (Gemma 3), otherwise None.
        dim: number of rotated elements, at most the head dimension.
        changes: the frequencies depend on the length of the text ("dynamic", "longrope").
        wide: cos and sin are float32, and a rotation is rounded once (OLMo 2). Otherwise they have the dtype of x, and
            each of the two products and their sum are rounded.
    """

    module: nn.Module
    layer_type: str | None
    dim: int
    changes: bool
    wide: bool

    @property
    def frequencies(self) -> Tensor:
        """The frequencies (dim / 2,) in use."""
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        tensor: Tensor = getattr(self.module, f"{prefix}inv_freq")
        return tensor

    @property
    def scaling(self) -> float:
        """The factor of cos and sin."""
        prefix = "" if self.layer_type is None else f"{self.layer_type}_"
        return float(getattr(self.module, f"{prefix}attention_scaling"))

    def cos_sin(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (B, n, dim) of positions, int64 (B, n), float32 if ``wide``, otherwise as x."""
        kind = () if self.layer_type is None else (self.layer_type,)
        cos, sin = self.module(x, positions, *kind)
        if cos.shape[-1] * 2 == self.dim:  # gpt-oss returns one half of two equal ones
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return cos, sin


@dataclass(frozen=True, eq=False)
class Attention:
    """o(attention(q, k, v)), causal, with the keys and values of earlier tokens.

    Attributes:
        qkv: the linears of q, k and v, or one that returns all three in this order, heads * head_dim elements and twice
            kv_heads * head_dim.
        scaling: factor of the products of queries and keys.
        rotary: index into ``Model.rotaries``; None: this layer has no rotary embedding.
        window: a token attends to itself and the ``window - 1`` tokens before it; 0: to all.
        softcap: c of c * tanh(score / c), 0 for none.
        q_norm, k_norm: norms before the rotation, of head_dim elements each, or with ``norms_span_heads`` of all.
        sinks: (heads,), scores that take part in the softmax and have no value; None for none.
    """

    qkv: tuple[Linear, ...]
    o: Linear
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    rotary: int | None
    window: int = 0
    softcap: float = 0.0
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norms_span_heads: bool = False
    sinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FeedForward:
    """down(round(activation(gate(x))) * up(x)).

    Attributes:
        gate_up: the linears of gate and up, or one that returns them in this order.
    """

    gate_up: tuple[Linear, ...]
    down: Linear
    activation: Activation


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of experts: each token is the weighted sum of ``top_k`` experts' outputs.

    Attributes:
        router_module: its router, from (B, D) to a tuple of scores, weights and indices of experts (B, top_k).
        experts: its experts, a module with the weights below.
        router: (experts, D) and its bias.
        routing: how scores become weights of experts.
        gate_up: (experts, 2 I, D), or (experts, D, 2 I) if ``transposed``: outputs of the gate, then of up
            (alternating for ``Activation.CLAMPED_GLU``).
        down: (experts, D, I), or (experts, I, D) if ``transposed``.
        gate_up_bias, down_bias: (experts, 2 I) and (experts, D), or None.
        alpha, limit: constants of ``Activation.CLAMPED_GLU``.
    """

    name: str
    router_module: nn.Module
    experts: nn.Module
    router: Linear
    top_k: int
    routing: Routing
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool
    activation: Activation
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, eq=False)
class Block:
    """x = x + m * post_attention(attention(pre_attention(x))), then likewise for the feed-forward, norms where given.

    ``residual_multiplier`` m is a float: its product is rounded, then the sum.
    """

    pre_attention: Norm | None
    attention: Attention
    post_attention: Norm | None
    pre_feed_forward: Norm | None
    feed_forward: FeedForward | Mixture
    post_feed_forward: Norm | None
    residual_multiplier: float = 1.0


@dataclass(frozen=True, eq=False)
class Model:
    """head(norm(blocks(embedding[token] * embedding_multiplier))) / logits_divisor, with a soft cap of the logits.

    Attributes:
        family: the family's name, "Llama".
        embedding: (vocabulary, D).
        head: None if only the inner model, which returns hidden states, was described.
        logits_softcap: c of c * tanh(logits / c), 0 for none.
        has_router_logits: whether the outputs of its class have ``router_logits``, also without a mixture in any block.
    """

    family: str
    embedding: Tensor
    embedding_multiplier: float
    rotaries: tuple[Rotary, ...]
    blocks: tuple[Block, ...]
    norm: Norm
    head: Linear | None
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    has_router_logits: bool = False
