"""What the demo measures of a model: perplexity, size, and how it goes on from a prompt."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from nvfp4_tensor.sizes import stored_bytes


def perplexity(model: nn.Module, tokens: Tensor, window: int, tick: Callable[[], object] = lambda: None) -> float:
    """exp of the mean negative log likelihood of tokens (count,), in windows that do not see each other.

    A window's first token is not predicted. ``tick`` is called after each window.
    """
    total, predicted = 0.0, 0
    with torch.no_grad():
        for ids in tokens.split(window):
            logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
            total += cross_entropy(logits, ids[1:], reduction="sum").item()
            predicted += len(ids) - 1
            tick()
    return math.exp(total / predicted)


def greedy(
    model: nn.Module, prompt: Tensor, count: int, end_token: int | None, tick: Callable[[], object] = lambda: None
) -> Tensor:
    """The ``count`` most likely next tokens after prompt (1, length), one at a time: int64 (at most count,).

    Stops before ``end_token``. ``tick`` is called after each token.
    """
    ids, cache, output = prompt, None, []
    with torch.no_grad():
        for _ in range(count):
            result = model(ids, past_key_values=cache, use_cache=True)
            ids, cache = result.logits[:, -1:].argmax(dim=-1), result.past_key_values
            tick()
            if ids.item() == end_token:
                break
            output.append(ids.item())
    return torch.tensor(output, dtype=torch.int64)


def bits_per_weight(model: nn.Module, is_quantized: Callable[[nn.Module, str], bool]) -> float:
    """Bits a weight of the modules that ``is_quantized(module, name)`` picks, scales and padding included."""
    weights = [module.weight for name, module in model.named_modules() if is_quantized(module, name)]
    return 8 * sum(map(stored_bytes, weights)) / sum(weight.numel() for weight in weights)
