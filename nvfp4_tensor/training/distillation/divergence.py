"""The loss of distillation: the Kullback-Leibler divergence of two models' logits, in little memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1 << 26
"""Logits in float32 at a time: 256 MiB each for some copies."""


def _of_rows(student: Tensor, teacher: Tensor, weights: Tensor, reverse: float) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the divergence of rows of logits, float32, and its gradient."""
    log_q, log_p = (each.log_softmax(-1, dtype=torch.float32) for each in (student, teacher))
    p, difference = log_p.exp(), log_q - log_p
    rows = -(1 - reverse) * (p * difference).sum(-1)
    slope = (1 - reverse) * (log_q.exp() - p) if reverse < 1 else torch.zeros_like(p)
    if reverse:
        q = log_q.exp()
        backward = (q * difference).sum(-1)
        rows = rows + reverse * backward
        slope += reverse * q * (difference - backward[:, None])
    return (rows * weights).sum(), slope.mul_(weights[:, None]).to(student.dtype)


_compiled_rows = torch.compile(_of_rows, dynamic=False)


class _Divergence(torch.autograd.Function):
    """The mean over rows of ``(1 - reverse) * KL(p || q) + reverse * KL(q || p)``, with q of the student's logits.

    The forward computes the gradient too: some rows at a time, or all by one compiled kernel, so that no copy of all
    logits is in float32.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, reverse: float, compiled: bool) -> Tensor:
        if compiled:
            total, gradient = _compiled_rows(student, teacher, weights, reverse)
        else:
            total = torch.zeros((), dtype=torch.float32, device=student.device)
            gradient = torch.empty_like(student)
            rows = max(_CHUNK // student.shape[1], 1)
            for start in range(0, len(student), rows):
                part = slice(start, start + rows)
                added, gradient[part] = _of_rows(student[part], teacher[part], weights[part], reverse)
                total += added
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * dy, None, None, None, None


def divergence(
    student: Tensor, teacher: Tensor, mask: Tensor | None = None, *, reverse: float = 0.0, compiled: bool = False
) -> Tensor:
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
    found: Tensor = _Divergence.apply(student, teacher, weights / weights.sum().clamp(min=1), reverse, compiled)
    return found
