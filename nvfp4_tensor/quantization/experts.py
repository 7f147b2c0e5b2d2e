"""Experts of transformers models, which are parameters (E, N, K) of one module instead of linears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.dispatch.second_quantizer import TRAINED_EXPERTS
from nvfp4_tensor.quantization.model_families import JOINED_AS, MIXTRAL_EXPERTS, MIXTRAL_TYPES

_NAMES = ("gate_up_proj", "up_proj", "gate_proj", "down_proj")
"""The names of experts' weights in transformers."""


def is_transposed(module: object) -> bool:
    """Return whether a transformers module stores its experts' weights as (E, K, N), like gpt-oss and Llama 4."""
    return getattr(module, "is_transposed", False) is True or holds_llama4_experts(module)


def holds_llama4_experts(module: object) -> bool:
    """Return whether the module is Llama 4's experts, for which transformers does not declare the memory layout."""
    return any(each.__name__ == "Llama4TextExperts" for each in type(module).__mro__)


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds the experts of a transformers model, by its decorator or by name."""
    undecorated = type(module).__name__ == "LongcatFlashExperts"
    return hasattr(module, "is_transposed") or holds_llama4_experts(module) or undecorated


def expert_weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the experts' weights, parameters with three dimensions, of a transformers module."""
    if not is_experts(module):
        return ()
    weights = ((name, module._parameters.get(name)) for name in _NAMES)
    return tuple(name for name, weight in weights if weight is not None and weight.dim() == 3)


def names_of_experts(model: nn.Module) -> set[str]:
    """Return the names of all experts' weights of a transformers model."""
    return {f"{path}.{name}".lstrip(".") for path, module in model.named_modules() for name in expert_weights(module)}


def matrix_of(module: object, weight: Tensor, expert: int) -> Tensor:
    """Return the weight (N, K) of one expert."""
    return weight[expert].mT if is_transposed(module) else weight[expert]


# --- the names of experts in files -----------------------------------------------------------------------------------


def names_in_files(module: Any, name: str, count: int) -> tuple[tuple[str, ...], ...]:
    """Return the names in files of the parts (gate and up) of each expert of a transformers module; () if files have
    its parameter ``name`` as one tensor."""
    is_joined = is_experts(module) and not is_transposed(module) and name.rpartition(".")[2] in JOINED_AS
    if not is_joined or (name.endswith("gate_up_proj") and not getattr(module, "is_concatenated", True)):
        return ()
    if getattr(getattr(module, "config", None), "model_type", None) in MIXTRAL_TYPES:
        return tuple(expert_group(in_mixtral(name), expert, MIXTRAL_EXPERTS) for expert in range(count))
    return tuple(expert_group(name, expert) for expert in range(count))


def in_mixtral(name: str) -> str:
    """Return the name in Mixtral's files: "layers.0.block_sparse_moe.gate.weight" for "layers.0.mlp.gate.weight"."""
    return name.replace(".mlp.", ".block_sparse_moe.")


def expert_group(name: str, expert: int, called: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return ("experts.0.gate_proj.weight", "experts.0.up_proj.weight") for "experts.gate_up_proj" and expert 0.

    called: other names of gate_proj, up_proj and down_proj.
    """
    prefix, _, last = name.rpartition(".")
    called = {} if called is None else called
    return tuple(f"{prefix}.{expert}.{called.get(part, part)}.weight" for part in JOINED_AS.get(last, ()))


# --- the inputs of experts -------------------------------------------------------------------------------------------


def arguments_of(args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return the hidden states (T, H) and the chosen experts (T, k) of a call of an experts' module."""
    values = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    hidden = next(value for value in values if value.is_floating_point())
    chosen = next((value for value in values if not value.is_floating_point()), None)
    return hidden.reshape(-1, hidden.shape[-1]), chosen


def tokens_of(count: int, hidden: Tensor, chosen: Tensor | None) -> Tensor:
    """Return how many tokens the router sent to each of ``count`` experts, int64 (count,)."""
    if chosen is None:  # Llama 4: one copy of all tokens per expert, those of other experts times zero
        return hidden.view(count, -1, hidden.shape[-1]).any(-1).sum(-1)
    return torch.bincount(chosen.flatten().clamp(max=count), minlength=count + 1)[:count]  # past it: other ranks


UNROUTED = 0.03
"""How much a token counts in the statistics of an expert that the router did not send it to. GPTQ of 16 experts of 96
rows erred by 0.026 with 256 tokens and 0.018 with 2,048; by 0.028 and 0.025 with 1; by 0.027 and 0.019 with 0."""


@torch.no_grad()
def inputs_of(module: Any, hidden: Tensor, chosen: Tensor | None) -> Iterator[tuple[str, slice, Tensor, Tensor | None]]:
    """Yield (attribute, experts, input rows, weights) of the experts' products, with all tokens sent to every expert.

    The first weights of all experts have the same input (T, H). The outputs of the experts are not computed, so whoever
    observes them leaves the model's own routing as it is. weights: float32 (T, experts), 1 for a token that the router
    sent to the expert, else :data:`UNROUTED`; None if all count alike.
    """
    first = expert_weights(module)[0]
    weight, llama4 = getattr(module, first), holds_llama4_experts(module)
    tokens = hidden.detach().to(weight.dtype, copy=True)  # the model may write to its own
    counts = None if chosen is None else _counts(chosen, len(weight))
    if not llama4:
        yield first, slice(None), tokens, counts
    for expert in range(len(module.down_proj)):  # Longcat's experts without weights have a gate_up_proj
        own, x = slice(expert, expert + 1), tokens
        if llama4:
            x = tokens.view(len(weight), -1, tokens.shape[-1])[expert]
            yield first, own, x, None
        y = x @ matrix_of(module, weight, expert).mT
        if llama4:
            yield "down_proj", own, _gated(module, y), None
            continue
        if getattr(module, "has_bias", False):
            y = y + getattr(module, f"{first}_bias")[expert]
        if getattr(module, "has_gate", True):
            inner = module._apply_gate(y) if hasattr(module, "_apply_gate") else _gated(module, y)
        else:
            inner = module.act_fn(y)
        yield "down_proj", own, inner, None if counts is None else counts[:, own]


def _gated(module: Any, y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def _counts(chosen: Tensor, count: int) -> Tensor:
    """Return how much each token counts for each expert, float32 (T, E)."""
    counts = torch.full((len(chosen), count + 1), UNROUTED, dtype=torch.float32, device=chosen.device)
    return counts.scatter_(1, chosen.long().clamp(max=count), 1.0)[:, :count]


# --- experts that train ----------------------------------------------------------------------------------------------


def training_configs(model: nn.Module) -> list[Any]:
    """Return the configs of a model by which its experts run an implementation that trains them in NVFP4."""
    return [each for each in experts_configs(model) if str(each._experts_implementation).startswith(TRAINED_EXPERTS)]


def stop_training(model: nn.Module) -> None:
    """Run the experts of a model by transformers' default implementation, if they train in NVFP4."""
    for config in training_configs(model):
        config._experts_implementation_internal = "grouped_mm"


def experts_configs(model: nn.Module) -> list[Any]:
    """Return the configs of a model by which its experts choose their implementation."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(each): each for each in configs if hasattr(each, "_experts_implementation")}.values())
