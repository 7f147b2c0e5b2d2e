"""Generate calibration text with the model itself, for models without calibration data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.quantization.accuracy.gptq.stages import in_eval_mode


@torch.no_grad()
def generate_calibration_text(
    model: nn.Module, tokens: int = 4096, *, window: int = 512, seed: int = 0
) -> list[Tensor]:
    """Sample batches for :func:`calibrate` and :func:`gptq` from a transformers language model.

    Each window starts with a token sampled uniformly from the vocabulary. The model samples the following tokens at
    temperature 1 from its 50 most likely ones, excluding end-of-text tokens.

    Args:
        model: a dense model with transformers' ``generate``.
        tokens: the minimum number of tokens in total.
        window: the number of tokens per batch, at least 2.
        seed: the seed of all sampling. The state of torch's generators is not changed.

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
    vocabulary = config.get_text_config().vocab_size
    with in_eval_mode(model), torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        first = torch.randint(vocabulary, (-(-tokens // window), 1)).to(device)
        windows = generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            temperature=1.0,
            top_k=50,
            min_new_tokens=window - 1,
            max_new_tokens=window - 1,
            pad_token_id=0,
        )
    return list(windows.split(1))
