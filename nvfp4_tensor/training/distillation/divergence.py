"""The loss of distillation: the Kullback-Leibler divergence of two models' logits, in little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 26
"""Logits in float32 at a time: 256 MiB each for some copies."""


class _Divergence(torch.autograd.Function):
    """The mean over rows of ``(1 - reverse) * KL(p || q) + reverse * KL(q || p)``, with q of the student's logits.

    The forward computes the gradient too, some rows at a time, so that no copy of all logits is in float32.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, reverse: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        rows = max(_CHUNK // student.shape[1], 1)
        for start in range(0, len(student), rows):
            part = slice(start, start + rows)
            log_q, log_p = (each[part].log_softmax(-1, dtype=torch.float32) for each in (student, teacher))
            p, weight = log_p.exp(), weights[part, None]
            difference = log_q - log_p
            forward = -(p * difference).sum(-1, keepdim=True)
            total += ((1 - reverse) * forward * weight).sum()
            slope = (1 - reverse) * (log_q.exp() - p) if reverse < 1 else torch.zeros_like(p)
            if reverse:
                q = log_q.exp()
                backward = (q * difference).sum(-1, keepdim=True)
                total += (reverse * backward * weight).sum()
                slope += reverse * q * (difference - backward)
            if gradient is not None:
                gradient[part] = slope.mul_(weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * dy, None, None, None


def divergence(student: Tensor, teacher: Tensor, mask: Tensor | None = None, *, reverse: float = 0.0) -> Tensor:
    """Return the mean divergence of logits (..., classes) over tokens, or over those that a mask (...) selects."""
    if student.shape != teacher.shape:
        raise ValueError(
            f"the logits are {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}: give the dense model of "
            "the same vocabulary"
        )
    student, teacher = (each.flatten(0, -2) for each in (student, teacher))
    weights = (
        torch.ones(len(student), dtype=torch.float32, device=student.device) if mask is None else mask.flatten().float()
    )
    found: Tensor = _Divergence.apply(student, teacher, weights / weights.sum().clamp(min=1), reverse)
    return found
