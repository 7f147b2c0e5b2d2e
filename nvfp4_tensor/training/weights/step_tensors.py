"""The numbers and random states of a step of NVFP4AdamW, on its devices."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor

from nvfp4_tensor.numerics.optimizer_step import SMALLEST_LEAST_EXPONENT, UNBIASED
from nvfp4_tensor.numerics.random_state import rng_state_row

_LARGEST_LEAST_EXPONENT = 240


class StepTensors:
    """What the parameters of one step need on their devices: a copy for all of them, which the host does not await.

    moves: for each parameter, whether its learning rate is not 0. At 0, as in the step by which torch's
        set_optimizer_state_dict makes the states of a new optimizer, a weight keeps its codes and scales.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, grad_scale: Tensor | None = None) -> None:
        """grad_scale: what all gradients are multiplied by, 0-d; None for 1."""
        self._optimizer, self._grad_scale = weakref.proxy(optimizer), grad_scale
        self._copies: dict[tuple[torch.device, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self.moves = [float(group["lr"]) != 0 for group in optimizer.param_groups for _ in group["params"]]

    def of(self, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a parameter's numbers of the step (HYPER), float32 (8,), and its random state, int64 (2,)."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        if (device, stream) not in self._copies:  # what is copied in a stream can be read there without waiting
            self._copies[device, stream] = self._copied_to(device)
        numbers, states = self._copies[device, stream]
        return numbers[index], states[index]

    def _copied_to(self, device: torch.device) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        numbers: list[list[float]] = []
        states: list[tuple[int, int]] = []
        for group in self._optimizer.param_groups:
            of_count: dict[int, list[float]] = {}
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                count = (int(state["step"].item()) if state else 0) + 1
                if count not in of_count:
                    of_count[count] = numbers_of(group, count)
                numbers.append(of_count[count])
                states.append(rng_state_row("adamw", group["seed"], str(len(states)), count))
        on_device = _copied(numbers, torch.float32, device)
        if self._grad_scale is not None:
            on_device[:, 0] = self._grad_scale.to(device)
        return on_device.unbind(), _copied(states, torch.int64, device).unbind()


def _copied(rows: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    host = torch.tensor(rows, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def numbers_of(group: dict[str, Any], step: int) -> list[float]:
    """Return the numbers of a step (HYPER), with a gradient scale of 1."""
    lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
    beta1, beta2 = map(float, group["betas"])
    step_size = UNBIASED * lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return [1.0, beta1, 1 - beta1, beta2, 1 - beta2, step_size, 1 - lr * decay, float(least_exponent(eps))]


def least_exponent(eps: float) -> int:
    """Return the float32 exponent field of the smallest power of two that is at least eps^2, within v's range."""
    if eps <= 0:
        return SMALLEST_LEAST_EXPONENT
    mantissa, exponent = math.frexp(eps * eps)
    field = exponent + 127 - (mantissa == 0.5)
    return min(max(field, SMALLEST_LEAST_EXPONENT), _LARGEST_LEAST_EXPONENT)
