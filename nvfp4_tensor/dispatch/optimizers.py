"""Warn of torch's optimizers that would write NVFP4 weights: they quantize them again after each operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.dispatch.second_quantizer import holds_nvfp4

_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _warn(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn once for each optimizer, before its step; those of this package round once."""
    if torch.compiler.is_dynamo_compiling() or optimizer in _warned:
        return
    if any(base.__module__.startswith("nvfp4_tensor") for base in type(optimizer).__mro__):
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(type(p) is not nn.Parameter and p.requires_grad and holds_nvfp4(p) for p in parameters):
        return
    _warned.add(optimizer)
    name = type(optimizer).__name__
    instead = "NVFP4AdamW" if "Adam" in name else f"NVFP4Optimizer(parameters, {name}, ...)"
    warn_user(
        f"{name} quantizes NVFP4 weights again after each operation of its steps: small updates are lost, and weights "
        f"may diverge. Use nvfp4_tensor.training.{instead}, which rounds once, without bias",
    )


register_optimizer_step_pre_hook(_warn)
