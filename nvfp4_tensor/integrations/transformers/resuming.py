"""Load the state dicts that save_pretrained writes into a model in memory, as Trainer does when it resumes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from nvfp4_tensor.checkpoints.models.origins import gather
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.integrations.transformers.experts import origins_in_model

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
    for target, origin in origins_in_model(model, checkpoint.entries, checkpoint).items():
        if target not in own or f"{prefix}{target}" in state_dict:
            continue  # torch reports the names as unexpected
        value, _ = gather(origin, checkpoint)
        if isinstance(value, LinearParts):
            continue
        for name in origin.names:
            del state_dict[f"{prefix}{name}"]
        state_dict[f"{prefix}{target}"] = value
