"""Batch invariance: the bits of a text do not depend on the texts beside it, on its place, or on padding.

Products and attention add in an order that depends on how many rows they have, and on a GPU beyond 16 on which row it
is. Here each text is at its own positions, prompts are read one by one, and every step is for the same number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.generation.cache_argument import cache_argument
from nvfp4_tensor.generation.fixed_cache import FixedCache, append
from nvfp4_tensor.generation.plan import Plan
from nvfp4_tensor.numerics.choices import FP8Activations
from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

ROWS = 16
"""Rows of a step in a graph: the most that no product adds in two orders (many_rows_sm90/share.cuh: units of 16)."""


def rows_of(plan: Plan, by_operators: bool) -> int:
    """Return the rows of each step of a plan; by_operators: see :class:`Plan`.

    A CPU's operator takes one: numbers of another text beyond the range of a kernel would choose another for all.

    Raises:
        ValueError: the bits of a text depend on the texts beside it. The message has the reason.
    """
    reason = _reason(plan)
    if plan.device.type == "cpu" and not plan.takes_one_operator and not by_operators:
        reason = "on a CPU linears in FP8, or that scale their inputs, take operators that see the size of a cache"
    if reason is not None:
        raise ValueError(f"batch_invariant=True: {reason}")
    return 1 if plan.takes_one_operator else ROWS


def _reason(plan: Plan) -> str | None:
    if plan.description is None:
        return f"the model has no native step{'' if plan.reason is None else ': ' + plan.reason}"
    if plan.changing_rotaries:
        return "rotary embeddings depend on the longest text of a batch (rope_type dynamic or longrope)"
    if not plan.takes_one_operator and any(each.experts is not None for each in plan.description.blocks):
        return "on a GPU the product of an expert depends on how many tokens of the batch choose it"
    for name, each in plan.model.named_parameters():
        if isinstance(each, NVFP4Tensor):
            spec = each.activation_spec
            is_dynamic = spec is not None and not spec.row_scaled and each.activation_amax is None
        else:
            is_batch = isinstance(each, FP8Tensor) and each.spec.activations == FP8Activations.TENSOR
            is_dynamic = is_batch and each.input_scale is None
        if is_dynamic:
            return f"{name} scales its activations by the largest of the batch: calibrate them, or scale them by row"
    return None


def keeps(cache: Any, padding: Any) -> bool:
    """Return whether the padding before texts is that with which their prompts were read into a cache of ours."""
    if getattr(cache, "rows", None) is None or padding is cache.padding:
        return True
    if _starts(cache.padding) != _starts(padding):
        return False
    cache.padding = padding
    return True


def _starts(padding: Any) -> list[int] | None:
    return None if padding is None else padding.starts.tolist()


def read(
    model: Any, plan: Plan, tokens: Tensor, positions: Tensor | None, padding: Any, cache: FixedCache, kept: int
) -> Tensor:
    """Append prompts (B, T) to a cache, text by text, and return the logits (B, kept, vocabulary), 0 for padding.

    Args:
        positions: (1 or B, T), for the rotary embeddings; None: those behind padding.
        padding: before the texts, None for none.
    """
    batch, count = tokens.shape
    before = cache.layers[0].length
    cache.padding = padding
    plan.prompts.make_room(cache, batch, before + count)
    whole = None
    for row, start in enumerate(_starts(padding) or [0] * batch):
        first, skipped = max(before - start, 0), max(start - before, 0)
        ids = tokens[row : row + 1, skipped:]
        if positions is None:
            its = torch.arange(first, first + count - skipped, device=tokens.device)[None]
        else:
            its = positions[row if len(positions) > 1 else 0][None, skipped:]
        logits = _read_one(model, plan, ids, its, cache.of_text(row, first), min(kept, ids.shape[1]))
        if whole is None:
            whole = logits.new_zeros((batch, kept, logits.shape[-1]))
        whole[row, kept - logits.shape[1] :] = logits[0]
    append(cache, count)
    assert whole is not None
    return whole


def _read_one(model: Any, plan: Plan, ids: Tensor, positions: Tensor, cache: FixedCache, kept: int) -> Tensor:
    if plan.reads_prompts:
        return plan.prompts.read(ids, positions, None, cache, kept)
    output = type(model).forward(
        model, input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=kept,
        **{cache_argument(model): cache},
    )  # fmt: skip
    logits: Tensor = output.logits
    return logits
