"""Text for a calibration where there is none: what the model itself writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.quantization.accuracy.gptq.stages import in_eval_mode


@torch.no_grad()
def generate_calibration_text(
    model: nn.Module, tokens: int = 4096, *, window: int = 512, seed: int = 0
) -> list[Tensor]:
    """Batches for :func:`calibrate` and :func:`gptq`, sampled from a language model of transformers.

    Each window starts from a token drawn uniformly from the vocabulary and goes on as the model samples, at temperature
    1 among its 50 likeliest tokens; an end of text is not taken.

    Args:
        model: dense, with transformers' ``generate``.
        tokens: how many at least.
        window: of how many tokens each batch is, at least 2.
        seed: of all draws; torch's own generators are left as they are.

    Returns:
        Batches (1, window), int64, on the model's device.

    Raises:
        TypeError: the model has no ``generate``.
        ValueError: tokens below 1 or window below 2.
    """
    generate: Any = getattr(model, "generate", None)
    config: Any = getattr(model, "config", None)
    if generate is None or config is None:
        raise TypeError(
            f"generate_calibration_text samples from a language model of transformers, not a {type(model).__name__}"
        )
    if tokens < 1 or window < 2:
        raise ValueError(f"tokens is at least 1 and window at least 2, got {tokens} and {window}")
    device = next(model.parameters()).device
    vocabulary = config.get_text_config().vocab_size
    with in_eval_mode(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        first = torch.randint(vocabulary, (-(-tokens // window), 1)).to(device)
        written = generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            temperature=1.0,
            top_k=50,
            min_new_tokens=window - 1,
            max_new_tokens=window - 1,
            pad_token_id=0,
        )
    return list(written.split(1))
