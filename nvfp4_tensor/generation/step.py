"""Native decoding of transformers models: one op per token on a CPU, one graph per token on CUDA (decoder.py)."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nvfp4_tensor.generation.decoder import CACHES, KWARGS, DecodeCounts, Decoder


def decode_natively(model: PreTrainedModel, enable: bool = True, *, batch_invariant: bool = False) -> PreTrainedModel:
    """Generate text at the speed of memory: one CUDA graph per token on a GPU, one native op per token on a CPU.

    After this call, a token after the prompt is computed natively by ``generate``, by a call of the model with the
    cache that ``generate`` returned, and by :func:`nvfp4_tensor.generation.generate`, for up to 256 texts, which may
    have padding before them. Everything else still uses transformers: beam search, assistant models, other caches,
    training and autocast. ``generate`` gets a cache with fixed buffers for greedy search and sampling, unless another
    one is requested; it lacks the tokens behind texts that ended before the others. On CUDA,
    ``nvfp4_cache(config, max_tokens=...)`` serves too. Results are rounded where the model rounds, except inside
    attention, which accumulates in float32. Nothing is compiled. :func:`decode_counts` says how many calls were native.

    On CUDA, a token of each text is one replay of a graph, from the embeddings to the logits, and prompts take the
    operators of that graph, without soft caps and sinks. Models of the families in
    ``nvfp4_tensor.generation.families`` run natively; for others, the graph contains the model's own forward. Weights
    may be NVFP4 or dense. On a CPU, weights of the layers are NVFP4, and prompts use transformers.

    Before each token, the model is checked for changes. After a change that the step does not support (an adapter, a
    hook, another module, dtype, activation or attention), tokens use transformers until the change is undone, and one
    warning has the reason. New weights, norms and rotations are used without a warning. Copies and pickles of the model
    decode natively too.

    Args:
        model: a causal language model of transformers. On a CPU a bfloat16 model of one of those families, in which the
            weight of each linear of its layers must be an :class:`NVFP4Tensor` without ``activation_spec``
            (``quantize_(model.model, NVFP4WeightOnlyConfig(experts=True))``). The output layer may be NVFP4 or dense; a
            dense one also gets a faster product for one token.
        enable: False restores the model's own forward, and frees graphs and the buffers of caches.
        batch_invariant: a text's tokens and logits have the same bits alone and in any batch, at any place, padded or
            not. Prompts are read one by one, and each step is for 16 texts, or for one on a CPU. What cannot be so
            raises a RuntimeError: calls with a cache that is not of this model's ``generate``, beam search.

    Returns:
        The model.

    Raises:
        TypeError: not a causal language model of transformers, or on a CPU one of another family.
        ValueError: the step does not support a weight, activation or size of the model, or ``model.forward`` is not
            that of its class; on CUDA, a model on several devices, with hooks, or without a cache of keys and values;
            with ``batch_invariant``, a model without a native step, whose activations have one dynamic scale for all
            tokens, with rotations that depend on the longest text, or on CUDA with experts.

    Example::

        decode_natively(model).generate(prompt, max_new_tokens=100)
    """
    if enable and hasattr(model, "get_base_model"):
        raise TypeError(
            f"decode_natively supports models of transformers, not a {type(model).__name__} of peft: merge its "
            "adapters, or pass model.get_base_model(), whose tokens use transformers while it has adapters"
        )
    if not enable:
        return _restore(model)
    is_of_text = isinstance(model, PreTrainedModel) and model.can_generate()
    if not is_of_text or not isinstance(model.get_output_embeddings(), nn.Module):
        raise TypeError(f"decode_natively supports models of transformers that generate text, not {type(model)}")
    decoder = Decoder(_restore(model), invariant=batch_invariant)
    decoder.install()
    return model


def decode_counts(model: PreTrainedModel) -> DecodeCounts:
    """Return how many calls since :func:`decode_natively` were native, and how many took the model's own forward.

    A call is one for a prompt, or for one token of each text.

    Raises:
        ValueError: the model does not decode natively.
    """
    decoder = vars(model).get("forward")
    if not isinstance(decoder, Decoder):
        raise ValueError("the model does not decode natively: call decode_natively(model) first")
    return decoder.counts


def _restore(model: Any) -> Any:
    """Remove what an earlier call has set."""
    for name in ("forward", CACHES, KWARGS):
        own = vars(model).get(name)
        if isinstance(getattr(own, "__self__", own), Decoder):
            delattr(model, name)
    return model
