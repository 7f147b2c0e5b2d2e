"""Generate calibration text with the model itself, for models without calibration data."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.quantization.accuracy.gptq.stages import in_eval_mode

_AT_ONCE = 256
"""Windows that are written together, which bounds the memory of their cache."""
_MESSAGE_TOKENS = 64
"""The most tokens of a message that the model writes as the user."""


@torch.no_grad()
def generate_calibration_text(
    model: nn.Module, tokens: int = 4096, *, window: int = 512, seed: int = 0, tokenizer: Any = None
) -> list[Tensor]:
    """Sample batches for :func:`calibrate`, :func:`gptq` and ``distill`` from a transformers language model.

    Each window starts with a token sampled uniformly from the vocabulary. The model samples the following tokens at
    temperature 1 from its 50 most likely ones, excluding end-of-text tokens. With the tokenizer of a chat model, the
    second half of the windows are conversations in its template: a message that the model writes as the user (as in
    Magpie, arXiv 2406.08464), and the answer.

    Args:
        model: a dense model with transformers' ``generate``.
        tokens: the minimum number of tokens in total.
        window: the number of tokens per batch, at least 2.
        seed: the seed of all sampling. The state of torch's generators is not changed.
        tokenizer: that of the model; one without a chat template changes nothing.

    Returns:
        Batches (1, window), int64, on the model's device.

    Raises:
        TypeError: the model has no ``generate``.
        ValueError: tokens below 1 or window below 2.
    """
    generate: Any = getattr(model, "generate", None)
    config: Any = getattr(model, "config", None)
    if generate is None or config is None:
        raise TypeError(f"generate_calibration_text needs a transformers language model, not a {type(model).__name__}")
    if tokens < 1 or window < 2:
        raise ValueError(f"tokens must be at least 1 and window at least 2, got {tokens} and {window}")
    device = next(model.parameters()).device
    count = -(-tokens // window)
    conversations = 0 if getattr(tokenizer, "chat_template", None) is None else count // 2
    with in_eval_mode(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        first = torch.randint(config.get_text_config().vocab_size, (count - conversations, 1), device="cpu")
        found = [each for part in first.split(_AT_ONCE) for each in _go_on(model, part.tolist(), window)]
        for start in range(0, conversations, _AT_ONCE):
            openings = _openings(model, tokenizer, min(conversations - start, _AT_ONCE))
            found += _go_on(model, openings, window)
    return found


def _go_on(model: Any, openings: list[list[int]], window: int) -> list[Tensor]:
    """Return windows (1, window) that begin with the given tokens and do not end before."""
    device, most = next(model.parameters()).device, max(map(len, openings))
    text = torch.tensor([[0] * (most - len(each)) + each for each in openings], dtype=torch.int64, device=device)
    begins = torch.tensor([most - len(each) for each in openings], dtype=torch.int64, device=device)[:, None]
    new = max(window - min(map(len, openings)), 0)
    if new:
        mask = (torch.arange(most, device=device) >= begins).long()
        text = _sample(model, text, mask, min_new_tokens=new, max_new_tokens=new)
    return [row[start : start + window][None] for row, start in zip(text, begins.flatten().tolist(), strict=True)]


def _openings(model: Any, tokenizer: Any, count: int) -> list[list[int]]:
    """Return conversations up to where the answer begins: the model writes the user's messages."""
    mark = "[message]"
    template = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, after = (tokenizer(each, add_special_tokens=False).input_ids for each in template.split(mark))
    first = torch.tensor([before] * count, dtype=torch.int64, device=next(model.parameters()).device)
    text = _sample(model, first, torch.ones_like(first), max_new_tokens=_MESSAGE_TOKENS)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    messages = (
        list(itertools.takewhile(lambda token: token not in ends, row)) for row in text[:, len(before) :].tolist()
    )
    return [[*before, *message, *after] for message in messages]


def _sample(model: Any, first: Tensor, mask: Tensor, **length: int) -> Tensor:
    found: Tensor = model.generate(
        first, attention_mask=mask, do_sample=True, temperature=1.0, top_k=50, pad_token_id=0, **length
    )
    return found
