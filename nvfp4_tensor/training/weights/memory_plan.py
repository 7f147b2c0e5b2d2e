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
"""CUDA's context, libraries and kernels: about 0.5 GiB on an H200, outside of torch's allocator."""
_RESERVE = 1.05
"""What torch's allocator reserves, relative to what is allocated."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose; ``str`` formats a table.

    Attributes:
        weights: NVFP4 and dense weights.
        moments: AdamW's, in four bits, and float32 for small parameters.
        gradients: the largest two that exist at a time, since the step runs inside the backward.
        activations: the inputs of all blocks, and all that one block saves for its backward.
        loss: logits of one chunk of tokens in bfloat16 and float32.
        overhead: the allocator's reserve, and the device's context.
    """

    weights: int
    moments: int
    gradients: int
    activations: int
    loss: int
    overhead: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(dataclasses.astuple(self))

    def check(self, limit: int) -> None:
        """Raise a MemoryError, with what would help, if the total exceeds ``limit`` bytes."""
        if self.total <= limit:
            return
        fixed = self.total - self.activations - self.loss
        advice = (
            "shorten the sequences or the batch, or make chunks of the loss smaller"
            if fixed < limit
            else f"weights, moments and gradients alone take {_gib(fixed)}: choose a smaller model"
        )
        raise MemoryError(f"the plan needs {_gib(self.total)}, and the limit is {_gib(limit)}: {advice}")

    def __str__(self) -> str:
        rows = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return "\n".join(f"{name:<12}{_gib(size):>11}" for name, size in [*rows, ("total", self.total)])


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
    gradients = []
    for parameter in model.parameters():
        count = parameter.numel()
        is_matrix = parameter.dim() >= 2 and math.prod(parameter.shape[1:]) >= BLOCK
        weights += count * (_CODES if id(parameter) in coded else 2)
        moments += count * (2 * _CODES if is_matrix else 8)
        gradients.append(2 * count)
    hidden, wide = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    keys = head * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    queries = head * config.num_attention_heads
    # What one layer saves per token: bfloat16 inputs and results of its linears, rotated queries and keys, the norms'
    # float32 copies; and the gradients of the widest part.
    saved = 2 * (6 * hidden + 4 * queries + 6 * keys + 4 * wide) + 4 * 4 * hidden + 2 * 2 * wide
    decoded = max((2 * p.numel() for p in model.parameters() if id(p) in coded), default=0)
    activations = tokens * (2 * hidden * (config.num_hidden_layers + 3) + saved) + decoded
    loss = min(loss_chunk, tokens) * config.vocab_size * (2 + 4 + 4 + 2)
    largest = sum(sorted(gradients)[-2:])
    allocated = weights + moments + largest + activations + loss
    overhead = allocated * (_RESERVE - 1) + (_CONTEXT if on_cuda else 0)
    return MemoryPlan(
        weights=int(weights),
        moments=int(moments),
        gradients=largest,
        activations=activations,
        loss=loss,
        overhead=int(overhead),
    )


def _linears_of_layers(model: nn.Module) -> set[int]:
    """Return the ids of the weights of linears that are not the output layer."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head: Tensor | None = getattr(output, "weight", None)
    return {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not head}
