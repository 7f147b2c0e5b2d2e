"""Warn of what peft, transformers and torch do with a quantized model that the user hardly means."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from nvfp4_tensor._compat.frames import caller_frame_locals, warn_user
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

_trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_MERGES = (
    ("merge_adapter", "unmerge_adapter", "peft/tuners/tuners_utils.py"),
    ("fuse_lora", "unfuse_lora", "diffusers/loaders/peft.py"),
)


def warn_of_merge() -> None:
    """Warn if peft or diffusers merges adapters into NVFP4 weights to remove them again later."""
    for merge, undo, file in _MERGES:
        if caller_frame_locals(merge, file) is not None:
            warn_user(
                f"{merge} rounds the sums to NVFP4, and {undo} rounds again: it does not bring the weights back. Keep "
                "the adapters apart, or merge for good by nvfp4_tensor.training.merge_lora"
            )


def warn_of_trainer() -> None:
    """Warn if the Trainer of transformers trains a model whose weights quantize_ has frozen: once for each model.

    A model with adapters has other frozen parameters, and so has one whose user chose what to train.
    """
    model = (caller_frame_locals("training_step", "transformers/trainer.py") or {}).get("model")
    if not isinstance(model, nn.Module) or model in _trained:
        return
    _trained.add(model)
    parameters = list(model.parameters())
    frozen = [p for p in parameters if not p.requires_grad]
    if frozen and all(isinstance(p, NVFP4Tensor) for p in frozen):
        share = sum(p.numel() for p in frozen) / sum(p.numel() for p in parameters)
        warn_user(
            f"the NVFP4 weights of {type(model).__name__}, {share:.0%} of its parameters, are frozen, and the Trainer "
            "trains only the others: add adapters (peft.get_peft_model), train before quantize_ "
            "(NVFP4TrainingConfig), or train NVFP4 weights by training.to_nvfp4_parameters and NVFP4AdamW"
        )


def warn_of_dense_weight(weight: Any, new: Any) -> None:
    """Warn if load_state_dict(assign=True) replaces an NVFP4 weight by a dense one."""
    if isinstance(weight, NVFP4Tensor) and isinstance(new, Tensor) and not isinstance(new, NVFP4Tensor):
        warn_user(
            f"load_state_dict(assign=True) replaces NVFP4 weights by dense ones of {new.dtype}: leave assign out to "
            "quantize them, or quantize the model again afterwards"
        )
