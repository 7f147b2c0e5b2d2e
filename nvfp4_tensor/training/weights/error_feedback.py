"""Error feedback: return the rounding error of a weight's update to the optimizer's momentum (ECO, arXiv 2601.22101).

e is the updated value minus the written value, and h the step size of the momentum m (update = -h m): for SGD the
learning rate, for Adam lr / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) per element. After each step,

    m += (1 - 1 / beta) / h * e

so that the next steps add e to the weight: beta (1 / beta - 1) of it at first, and all of it in total. The method uses
the error of a step as an estimate of that of the step before, and so needs no memory. When the learning rate rises, the
errors in the momentum would be added with the new, larger step size: the momentum is first multiplied by old / new.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LAST_LR = "error_feedback_lr"
"""The state with the learning rate of the last error in the momentum, a 0-d tensor like "step"."""
_SMALLEST_LR = 1e-24


def check_error_feedback(group: dict[str, Any], inner: type[torch.optim.Optimizer]) -> None:
    """Raise a ValueError if the options of a group are not supported."""
    if group["error_feedback"] not in (False, "momentum"):
        raise ValueError(f"error_feedback is False or 'momentum', got {group['error_feedback']!r}")
    if not group["error_feedback"]:
        return
    if inner is torch.optim.SGD:
        if not group["momentum"] or group["nesterov"]:
            raise ValueError("error_feedback='momentum' needs SGD with momentum above 0, without nesterov")
    elif inner in (torch.optim.Adam, torch.optim.AdamW):
        if group["amsgrad"] or not group["betas"][0]:
            raise ValueError(f"error_feedback='momentum' needs {inner.__name__} with beta1 above 0, without amsgrad")
    else:
        raise ValueError(f"error_feedback='momentum' supports SGD, Adam and AdamW, not {inner.__name__}")


def shrink_momentum(state: dict[str, Any], group: dict[str, Any]) -> None:
    """Multiply the momentum by old / new learning rate if it has risen; call this before the inner step."""
    if _LAST_LR not in state:
        return
    old, new = (float(torch.tensor(float(lr), dtype=torch.float32)) for lr in (state[_LAST_LR], group["lr"]))
    if old < new:
        state["exp_avg" if "betas" in group else "momentum_buffer"].mul_(old / new)


def add_error(state: dict[str, Any], error: Tensor, group: dict[str, Any]) -> None:
    """Add (1 - 1 / beta) / h * error to the momentum, unless the learning rate is 0 or so small that this overflows."""
    lr = float(group["lr"])
    if lr < _SMALLEST_LR:
        return
    state[_LAST_LR] = torch.tensor(lr, dtype=torch.float32)
    if "betas" not in group:
        state["momentum_buffer"] += error * ((1 - 1 / group["momentum"]) / lr)
        return
    beta1, beta2 = map(float, group["betas"])
    step = float(state["step"])
    per_update = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"]) * ((1 - beta1**step) / lr)
    state["exp_avg"] += error * per_update * (1 - 1 / beta1)
