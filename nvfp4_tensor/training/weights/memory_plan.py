"""What a fine-tuning of all weights takes in memory, before it starts."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor, nn

from nvfp4_tensor.numerics.layout import BLOCK

_CODES = 0.5 + 1 / BLOCK
"""Bytes per element of an NVFP4 weight, and of each moment."""
_CONTEXT = 600 << 20
"""CUDA's context, libraries and kernels, outside of torch's allocator."""
_RESERVE = 1.05
"""What torch's allocator reserves, relative to what is allocated: 19.11 of 18.34 GiB with Llama 8B on an H200."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose at the peak; ``str`` formats a table.

    Attributes:
        weights: NVFP4 and dense weights.
        moments: AdamW's, in four bits, and float32 for small parameters.
        layer_inputs: what checkpointing keeps of all layers.
        work: the larger of two phases: the loss (one chunk's logits, and the gradient of the output layer), or the
            backward of one layer (what it saves, its intermediate gradients, the gradient and values of a weight; and
            the gradient of an output layer that is tied to the embedding).
        reserve: what torch's allocator holds beyond that.
        context: CUDA's own memory.
    """

    weights: int
    moments: int
    layer_inputs: int
    work: int
    reserve: int
    context: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))

    def check(self, limit: int) -> None:
        """Raise a MemoryError, with what would help, if the total exceeds ``limit`` bytes."""
        if self.total <= limit:
            return
        fixed = self.weights + self.moments + self.context
        advice = (
            "shorten the sequences or the batch, or make chunks of the loss smaller"
            if fixed < limit
            else f"weights and moments alone take {_gib(fixed)}: choose a smaller model"
        )
        raise MemoryError(f"the plan needs {_gib(self.total)}, and the limit is {_gib(limit)}: {advice}")

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return "\n".join(
            f"{name.replace('_', ' '):<14}{_gib(size):>11}" for name, size in [*rows, ("total", self.total)]
        )


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def plan_finetuning(model: nn.Module, tokens: int, *, loss_chunk: int = 512, on_cuda: bool = True) -> MemoryPlan:
    """Plan the memory of training all weights of a Llama-shaped transformers model with :class:`NVFP4AdamW`.

    Linears of the decoder's layers are NVFP4 weights, all others bfloat16. Each decoder layer is checkpointed, the step
    runs inside the backward, and the loss is computed in chunks.

    Args:
        model: a transformers model with a config; it may be on the meta device.
        tokens: tokens per backward, batch times length.
        loss_chunk: tokens whose logits exist at a time.
        on_cuda: whether a CUDA context counts.

    Raises:
        ValueError: if the model's config lacks the sizes of a Llama.

    >>> print(plan_finetuning(model, tokens=4 * 2048))
    """
    config: Any = getattr(model, "config", None)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [name for name in names if not hasattr(config, name)]:
        raise ValueError(f"the model's config has no {', '.join(missing)}: plan_finetuning knows Llama-shaped models")
    coded = _linears_of_layers(model)
    weights = moments = 0.0
    for parameter in model.parameters():
        count = parameter.numel()
        is_matrix = parameter.dim() >= 2 and math.prod(parameter.shape[1:]) >= BLOCK
        weights += count * (_CODES if id(parameter) in coded else 2)
        moments += count * (2 * _CODES if is_matrix else 8)
    hidden, wide = config.hidden_size, config.intermediate_size
    inputs = 2 * tokens * hidden * config.num_hidden_layers
    head = max((2 * p.numel() for p in model.parameters() if id(p) not in coded and p.dim() >= 2), default=0)
    logits = min(loss_chunk, tokens) * config.vocab_size * (2 + 4 + 4 + 2)  # in bfloat16 and float32, and gradients
    weight = max((2 * p.numel() for p in model.parameters() if id(p) in coded), default=0)
    kept = head if _is_tied(model) else 0  # its gradient waits for that of the embedding, at the end
    of_layer = tokens * _bytes_of_layer(config, hidden, wide) + 2 * weight + kept
    work = max(head + logits + 3 * 2 * tokens * hidden, of_layer)
    reserve = (weights + moments + inputs + work) * (_RESERVE - 1)
    return MemoryPlan(int(weights), int(moments), inputs, work, int(reserve), _CONTEXT if on_cuda else 0)


def _bytes_of_layer(config: Any, hidden: int, wide: int) -> int:
    """Return bytes per token that one layer saves for its backward, and of two gradients of its widest part."""
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    keys = head * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    queries = head * config.num_attention_heads
    norms = 2 * (4 + 2 + 2) * hidden  # float32 and bfloat16 copies
    return norms + 4 * queries + 4 * keys + 8 * wide + 4 * wide


def _is_tied(model: nn.Module) -> bool:
    """Return whether the output layer's weight is that of the embedding."""
    parts = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    embedding, head = (getattr(part, "weight", None) for part in parts)
    return embedding is not None and embedding is head


def _linears_of_layers(model: nn.Module) -> set[int]:
    """Return the ids of the weights of linears that are not the output layer."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head: Tensor | None = getattr(output, "weight", None)
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not head}
