"""What one token passes through in a model of transformers: its weights, norms, rotations and constants, no kernels.

:func:`~nvfp4_tensor.generation.families.describe` reads a model into these dataclasses. Both native steps, on a CPU and
on CUDA, compute what a description says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.ops.composite.decode_step import KINDS, NUMBERS
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@dataclass(frozen=True, eq=False)
class Linear:
    """x (B, K) @ weight (N, K)^T + bias (N,), with x times input_scale (K,) if there is one.

    Of experts weight is (experts, N, K), or (experts, K, N) if ``transposed``, and bias (experts, N).
    """

    name: str
    weight: Tensor
    bias: Tensor | None
    input_scale: Tensor | None = None
    transposed: bool = False

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

    @property
    def constants(self) -> tuple[float, float, bool]:
        """What operators take of it besides the weight."""
        return self.eps, self.offset, self.rounds_before_weight


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
class Block:
    """Attention and feed-forward of a layer: a row of the table of ``ops/composite/decode_step.py``, by name.

    Attributes:
        parts: what is present of PARTS. A bias is its linear's; the matrices of experts are one linear each.
        kinds, numbers: those of KINDS and NUMBERS, but for what follows from the parts.
        experts: transformers' router and experts of a mixture, modules with the weights of the parts, or None.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    numbers: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NUMBERS, 0.0))
    experts: tuple[nn.Module, nn.Module] | None = None

    def linears(self, *names: str) -> tuple[Linear, ...]:
        """Return those of some linears that are present: one may be in the place of several."""
        return tuple(self.parts[name] for name in names if name in self.parts)

    @property
    def norms(self) -> list[Norm]:
        """All norms."""
        return [each for each in self.parts.values() if isinstance(each, Norm)]


@dataclass(frozen=True, eq=False)
class Model:
    """head(norm(blocks(embedding[token] * embedding_multiplier))) / logits_divisor, with a soft cap of the logits.

    Attributes:
        family: the family's name, "Llama".
        embedding: (vocabulary, D).
        logits_softcap: c of c * tanh(logits / c), 0 for none.
        has_router_logits: whether the outputs of its class have ``router_logits``, also without a mixture in any block.
    """

    family: str
    embedding: Tensor
    embedding_multiplier: float
    rotaries: tuple[Rotary, ...]
    blocks: tuple[Block, ...]
    norm: Norm
    head: Linear
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
    has_router_logits: bool = False
