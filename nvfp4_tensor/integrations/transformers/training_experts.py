"""Train the experts of transformers models in NVFP4: an experts implementation per recipe, like "grouped_mm".

And load the state dicts that save_pretrained writes into a model in memory, as Trainer does when it resumes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from nvfp4_tensor.checkpoints.models.origins import gather, origins_in_model, shape_of
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.dispatch.second_quantizer import TRAINED_EXPERTS
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training import RECIPES, Recipe, grouped_linear
from nvfp4_tensor.training.recipe import resolve


def train_experts(model: PreTrainedModel, recipe: Recipe | str = "nvidia") -> None:
    """Train a model's experts with a recipe, like ``model.set_experts_implementation("nvfp4_nvidia")``.

    Both products of the experts use :func:`training.grouped_linear`. Routers, attention and shared experts are linears:
    use ``quantize_(model, NVFP4TrainingConfig(...))`` for them. Parameters are not changed.
    :func:`training.to_dense` restores transformers' default, as configs for inference do with ``experts=True``. Trainer
    resumes the model with its experts: see :func:`accept_checkpoint_names`.

    Args:
        model: a transformers mixture of experts: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss, ...
        recipe: a :class:`training.Recipe`, or the name of one.

    Raises:
        ValueError: the model has no such experts, the recipe is unknown, or another recipe has its name.
        TypeError: the experts are already quantized.

    >>> train_experts(model, "nvidia")
    """
    recipe = resolve(recipe)
    decorated = ("has_gate", "is_transposed")  # attributes that transformers' decorator sets
    experts = {name: m for name, m in model.named_modules() if all(hasattr(m, each) for each in decorated)}
    if not experts:
        raise ValueError(
            f"{type(model).__name__} has no experts with interchangeable implementations: use "
            "quantize_(model, NVFP4TrainingConfig()) for its linears"
        )
    for name, module in experts.items():
        if any(isinstance(parameter, NVFP4Tensor) for parameter in module.parameters()):
            raise TypeError(f"{name} has NVFP4 weights, which cannot be trained: load the model without quantization")
    model.set_experts_implementation(_registered(recipe))
    accept_checkpoint_names(model)


def _registered(recipe: Recipe) -> str:
    """Register the recipe with transformers, and return its name there."""
    name = f"{TRAINED_EXPERTS}{recipe.name}"
    known = ALL_EXPERTS_FUNCTIONS.get(name)
    if known is None:
        ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(_forward, recipe=recipe))
    elif known.keywords["recipe"] != recipe:
        raise ValueError(f"another recipe is named {recipe.name!r}: rename this one, recipe.replace(name=...)")
    return name


def _forward(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, recipe: Recipe
) -> Tensor:
    """Compute the output (T, H) of tokens (T, H), each with k experts and their weights (T, k).

    Rows are sorted by expert, and restored to token order. Indices past the last expert are experts of another rank,
    whose rows are zero.
    """
    tokens, chosen = top_k_index.shape
    ids, order = torch.sort(top_k_index.flatten(), stable=True)
    offs = torch.searchsorted(ids, torch.arange(experts.num_experts, device=ids.device), right=True, out_int32=True)
    rows = hidden_states[order // chosen]
    names = ("gate_up_proj", "down_proj") if experts.has_gate else ("up_proj", "down_proj")
    rows = _linear(experts, names[0], rows, ids, offs, recipe)
    rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
    rows = _linear(experts, names[1], rows, ids, offs, recipe)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    is_local = (ids < experts.num_experts)[:, None]  # a bias or a norm may have written to rows of other ranks
    rows = torch.where(is_local, rows * top_k_weights.flatten()[order][:, None], 0)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows[back].view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _linear(experts: Any, name: str, rows: Tensor, ids: Tensor, offs: Tensor, recipe: Recipe) -> Tensor:
    weight = getattr(experts, name)
    if not (experts.training or torch.is_grad_enabled()):
        weight = weight.detach()  # evaluation must not advance the random state of training
    y = grouped_linear(rows, weight.mT if experts.is_transposed else weight, offs, recipe)
    if experts.has_bias:
        y = y + getattr(experts, f"{name}_bias")[ids.clamp(max=experts.num_experts - 1)]
    return y


for each in RECIPES.values():
    _registered(each)


# --- resuming --------------------------------------------------------------------------------------------------------

_HOOKED = "_nvfp4_accepts_checkpoint_names"


def accept_checkpoint_names(model: PreTrainedModel) -> PreTrainedModel:
    """Let ``model.load_state_dict`` take the tensor names of its files, which differ for mixtures of experts.

    transformers saves Mixtral's experts one by one, ``block_sparse_moe.experts.0.w1.weight``, and joins them in
    ``from_pretrained``. Its Trainer resumes by ``load_state_dict(state, strict=False)``, which joins nothing: the
    experts and routers keep their initial values, with a warning. After this call they are loaded.
    :func:`train_experts` includes it. State dicts with the model's own names load as before.

    Returns:
        ``model``.

    Example::

        model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
        trainer = Trainer(nvfp4.accept_checkpoint_names(model), ...)
        trainer.train(resume_from_checkpoint=True)
    """
    if not getattr(model, _HOOKED, False):
        model.register_load_state_dict_pre_hook(_rename)
        setattr(model, _HOOKED, True)
    return model


def _rename(model: Any, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
    """Replace the tensors of files by the model's parameters, in place, before they are loaded."""
    own = model.state_dict(keep_vars=True)
    names = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    foreign = {name: state_dict[f"{prefix}{name}"] for name in names if name not in own}
    if not foreign:
        return
    checkpoint = ModelCheckpoint(foreign, {})
    for target, origin in origins_in_model(model, own, checkpoint.entries).items():
        if f"{prefix}{target}" in state_dict:
            continue  # torch reports the names as unexpected
        shape_of(origin, checkpoint.entries)  # an error names those that cannot be joined
        value, _ = gather(origin, checkpoint.value)
        if isinstance(value, LinearParts):
            continue
        for name in origin.names:
            del state_dict[f"{prefix}{name}"]
        state_dict[f"{prefix}{target}"] = value
