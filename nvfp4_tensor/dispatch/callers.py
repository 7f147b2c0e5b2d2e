"""Warn of functions of torch that write what a weight then does not have: optimizers and load_state_dict."""

from __future__ import annotations

import warnings
import weakref

from torch import Tensor, nn
from torch.optim import Optimizer

from nvfp4_tensor._compat.frames import caller_frame_locals, user_level

_warned: weakref.WeakSet[Optimizer | nn.Module] = weakref.WeakSet()


def warn_of_optimizer() -> None:
    """Warn if a torch optimizer writes dense values into an NVFP4Tensor: once for each optimizer."""
    frame = caller_frame_locals("wrapper", "torch/optim/optimizer.py")
    optimizer = None if frame is None else frame.get("self")
    if not isinstance(optimizer, Optimizer) or optimizer in _warned:
        return
    _warned.add(optimizer)
    name = type(optimizer).__name__
    instead = "NVFP4AdamW" if "Adam" in name else f"NVFP4Optimizer(parameters, {name}, ...)"
    warnings.warn(
        f"{name} quantizes NVFP4 weights again after each operation of its steps: small updates are lost, and weights "
        f"may diverge. Use nvfp4_tensor.training.{instead}, which rounds once, without bias",
        stacklevel=user_level(),
    )


def warn_of_decoding(destination: Tensor) -> None:
    """Warn if load_state_dict decodes NVFP4 into a dense parameter: once for each call."""
    if caller_frame_locals("_load_from_state_dict", "torch/nn/modules/module.py") is None:
        return
    frame = caller_frame_locals("load_state_dict", "torch/nn/modules/module.py")
    model = None if frame is None else frame.get("self")
    if isinstance(model, nn.Module) and model not in _warned:
        _warned.add(model)
        warnings.warn(
            f"load_state_dict decodes NVFP4 weights to {destination.dtype}, because those of the model are dense: to "
            "keep them in NVFP4, pass assign=True, or quantize the model in the same way first",
            stacklevel=user_level(),
        )
