"""The model card (README.md) of a quantized model: how it was quantized, its size and its quality."""

from __future__ import annotations

import collections
import math
from typing import Any

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

import nvfp4_tensor
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.names import dense_linears
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_BODY = """
# {name}

{what} in [NVFP4](https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/):
4-bit numbers in blocks of 16 that share an 8-bit scale. The files have the layout of NVIDIA's ModelOpt.

## Quantization
| | |
| --- | --- |
{done}

## Quality
{quality}

## Use
vLLM, SGLang and TensorRT-LLM read this folder directly. In transformers, on any GPU or on a CPU:

```python
import nvfp4_tensor.integrations.transformers  # pip install nvfp4-tensor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}")
```
"""


def model_card(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    name: str,
    knows_specs: bool,
    base_model: str | None = None,
    perplexity: dict[str, float] | None = None,
    text: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> ModelCard:
    """Return the card of a model that is saved as ``checkpoint``.

    Args:
        model: the quantized model.
        checkpoint: the model as a checkpoint.
        name: the name of the folder or repository.
        knows_specs: whether the weights have the specs of their quantization. Files do not store complete specs.
        base_model, perplexity, text, metadata: as in :func:`save`.
    """
    results = None
    if perplexity:
        measured = next(iter(perplexity.values()))
        results = [EvalResult("text-generation", "text", text or "text", "perplexity", measured)]
    header: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["nvfp4", "modelopt", "nvfp4_tensor"],
        "model_name": name,
        "eval_results": results,
        **({} if base_model is None else {"base_model": base_model, "base_model_relation": "quantized"}),
        **(metadata or {}),
    }
    body = _BODY.format(
        name=name,
        what=base_model or type(model).__name__,
        done="\n".join(f"| {row} | {value} |" for row, value in _table(model, checkpoint, knows_specs).items()),
        quality=_quality(perplexity, text),
    )
    return ModelCard(f"---\n{ModelCardData(**header)}\n---\n{body}")


def _table(model: PreTrainedModel, checkpoint: Checkpoint, knows_specs: bool) -> dict[str, str]:
    """Return the rows of the table of properties."""
    quantized = [entry for entry in checkpoint.entries.values() if entry.quantized]
    stored, dense, bits, elements = 0, 0, 0, 0
    for entry in checkpoint.entries.values():
        count = math.prod(entry.shape)
        stored += round(entry.bits * count / 8)
        dense += count * entry.dtype.itemsize
        bits += entry.quantized * round(entry.bits * count)
        elements += entry.quantized * count
    in_fp8 = sum(entry.fp8 is not None for entry in checkpoint.entries.values())
    specs = collections.Counter(str(weight.spec) for weight in model.parameters() if isinstance(weight, NVFP4Tensor))
    rounding = "; ".join(f"{spec} ({count})" if len(specs) > 1 else spec for spec, count in specs.most_common())
    w4a4 = sum(entry.quantizes_activations for entry in quantized)
    of = "all matrices" if w4a4 == len(quantized) else f"{w4a4} matrices"
    return {
        "weights": f"{modelopt.quantization_of(checkpoint)['quant_algo']}: {len(quantized)} matrices, "
        f"{bits / max(elements, 1):.2f} bits per weight{f', {in_fp8} in FP8' if in_fp8 else ''}",
        "rounding (nvfp4_tensor.QuantizeSpec)": rounding
        if knows_specs
        else "as in the checkpoint that it was loaded from",
        "activations": f"NVFP4 with static scales, for {of}" if w4a4 else "not quantized",
        "left dense": ", ".join(dense_linears(checkpoint)) or "no linear",
        "size": f"{stored / 1e6:,.1f} MB, {stored / dense:.3f} of {dense / 1e6:,.1f} MB",
        "versions": f"nvfp4_tensor {nvfp4_tensor.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    }


def _quality(perplexity: dict[str, float] | None, text: str | None) -> str:
    if not perplexity:
        return "Not measured."
    rows = "\n".join(f"| {model} | {value:.3f} |" for model, value in perplexity.items())
    return f"Perplexity{f' on {text}' if text else ''}, lower is better:\n\n| | |\n| --- | ---: |\n{rows}"
