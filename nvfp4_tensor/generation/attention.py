"""Attention to a cache of codes, for transformers: ``model.set_attn_implementation("nvfp4")``.

The function registered here reads the keys and values of an ``nvfp4_cache`` where they are stored, for one new token or
a chunk of a prompt, with padding on the left, a soft cap or a window. Anything else is transformers' sdpa over the
decoded cache, and the reason is logged once.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from nvfp4_tensor.generation.coded_states import CodedStates, StoredStates, attend, why_not
from nvfp4_tensor.ops import native

NAME = "nvfp4"
MOST_NEW_TOKENS = 32
"""On CUDA, of longer chunks the cache is decoded, and torch attends to it: its products are faster for many tokens."""
_FIRST = "_nvfp4_first"
"""An attribute of masks that are causal: the first position that each sequence sees."""

_LONG = "there are many new tokens"

logger = logging.getLogger(__name__)


def reads_codes(x: Tensor) -> bool:
    """Return whether attention of tokens like x reads codes in place: with native kernels, not compiled."""
    return (
        x.device.type in ("cpu", "cuda")
        and not torch.compiler.is_compiling()
        and native.library(x.device.type).loaded
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and not (torch.is_grad_enabled() and x.requires_grad)
    )


def nvfp4_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return sdpa's mask, which remembers its first positions if it is causal with padding on the left only."""
    mask = sdpa_mask(*args, **kwargs)
    if mask is None or not _is_plain(**kwargs):
        return mask
    batch, kv_length, padding = kwargs["batch_size"], kwargs["kv_length"], kwargs.get("attention_mask")
    first = torch.zeros(batch, dtype=torch.int64, device=mask.device)
    if padding is not None:
        seen = padding[:, :kv_length].bool()
        if seen.shape != (batch, kv_length):
            return mask
        first = (~seen).sum(dim=1)
        position = torch.arange(kv_length, device=mask.device)
        if not torch.equal(seen, position >= first[:, None]):
            return mask
    setattr(mask, _FIRST, first)
    return mask


def _is_plain(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    **kwargs: Any,
) -> bool:
    """Return whether a mask is causal, of the latest tokens, over all tokens, as far as padding lets them be seen."""
    if torch.compiler.is_compiling() or isinstance(q_offset, Tensor):
        return False
    return mask_function is causal_mask_function and kv_offset == 0 and q_offset + q_length == kv_length


def nvfp4_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "nvfp4" of transformers: output (batch, tokens, heads, head_dim) and no weights.

    Raises:
        ValueError: the model has attention sinks: only ``attn_implementation="eager"`` supports them.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError('attention sinks need model.set_attn_implementation("eager"), which decodes the cache')
    given = {"softcap": softcap, "sliding_window": sliding_window, **kwargs}
    reason = _why_not(module, query, key, value, attention_mask, dropout, given)
    if not reason:
        first = None if attention_mask is None else getattr(attention_mask, _FIRST)
        if first is not None and not first.any():
            first = None
        out = attend(query, key, value, scaling, softcap=softcap or 0.0, first=first)  # type: ignore[arg-type]
        return out.transpose(1, 2).contiguous(), None
    if isinstance(key, StoredStates) or isinstance(value, StoredStates):
        if reason != _LONG:
            _log_once(reason)
        key, value = (x.dense() if isinstance(x, StoredStates) else x for x in (key, value))
    if softcap:
        dropout = dropout if module.training else 0.0
        causal = _is_causal(module, given)
        out = _with_softcap(query, key, value, attention_mask, dropout, scaling, softcap, causal)
        return out.transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


def _why_not(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    given: dict[str, Any],
) -> str:
    """Return why codes are not read in place; empty if they are."""
    if reason := why_not(query, key, value):
        return reason
    if query.is_cuda and query.shape[2] > MOST_NEW_TOKENS and not given["softcap"]:
        return _LONG
    if dropout and module.training:
        return "there is dropout"
    if given.get("position_bias") is not None:
        return "there is a position bias"
    if not _is_causal(module, given):
        return "attention is not causal"
    if given["sliding_window"] is not None and given["sliding_window"] < key.shape[2]:
        return "a layer with a sliding window keeps all tokens"
    if mask is None:  # transformers leaves it out for one new token, and for all tokens at once
        return "" if query.shape[2] in (1, key.shape[2]) else "there is no mask"
    return "" if hasattr(mask, _FIRST) else "the mask is not causal with padding on the left"


def _is_causal(module: nn.Module, given: dict[str, Any]) -> bool:
    """Return whether a token sees no later ones where there is no mask."""
    is_causal = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


@functools.cache
def _log_once(reason: str) -> None:
    logger.warning("attention decodes the NVFP4 cache, which costs time: %s", reason)


def _with_softcap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float,
    causal: bool,
) -> Tensor:
    """Attention with capped scores to dense tokens, which sdpa does not have, as a cache without codes.

    The operator has no gradient, no dropout, and no other mask than a causal one; encoders and sliding layers have
    others. Then torch computes the same, with float32 scores in memory.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not has_gradient and not dropout and (causal if mask is None else hasattr(mask, _FIRST)):
        keys, values = (StoredStates(CodedStates(x), 0, x) for x in (key, value))  # of which all is dense
        return attend(query, keys, values, scale, softcap=softcap, first=getattr(mask, _FIRST, None))
    tokens, length = query.shape[2], key.shape[2]
    shape = query.shape[0], key.shape[1], -1, tokens, query.shape[-1]  # heads that share keys side by side
    scores = (query.float().reshape(shape) @ key.float().unsqueeze(2).mT).flatten(1, 2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal:  # transformers leaves it out
        mask = torch.ones((tokens, length), dtype=torch.bool, device=query.device).tril(length - tokens)
    if mask is not None:
        lowest = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = torch.nn.functional.dropout(torch.softmax(scores, dim=-1), dropout)
    out = weights.unflatten(1, (key.shape[1], -1)) @ value.float().unsqueeze(2)
    return out.flatten(1, 2).to(query.dtype)


AttentionInterface.register(NAME, nvfp4_attention)
AttentionMaskInterface.register(NAME, nvfp4_mask)
