"""Measure quantization errors while a model trains, per linear and step: clipping, vanishing values, signal to noise.

Training itself does not change: hooks quantize the linears' inputs and gradients a second time, with separate random
bits, and compare. This costs about as much as a dense step and keeps inputs until the backward, so do it occasionally.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.matmul.product import decode_values
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.training import DY_T_STREAM, X_T_STREAM
from nvfp4_tensor.quantization.model_plan import aligned
from nvfp4_tensor.training.config import training_linears
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.linear.operands import quantize_operand
from nvfp4_tensor.training.linear.plan import apply_autocast
from nvfp4_tensor.training.recipe import transform_of

SIGNAL_LIMIT = math.sqrt(3)
"""The least ratio of the gradient's norm to that of its noise: below it, quantized training stops making progress
(arXiv 2505.19115)."""

_FACTS = ("x_clipped", "x_error", "w_error", "dy_clipped", "dy_vanished", "dy_error", "signal")


@dataclasses.dataclass(frozen=True)
class Record:
    """The errors of one linear in one backward; nan for an operand that the recipe leaves dense.

    Attributes:
        name, step: the linear, and the number of its backwards before this one.
        x_clipped, dy_clipped: the share of elements larger than the largest value that their block can represent.
        x_error, w_error, dy_error: the norm of the rounding error divided by that of the tensor.
        dy_vanished: the share of the nonzero elements of dy that become zero.
        signal: the norm of dw divided by that of its quantization error; inf if there is no error.
    """

    name: str
    step: int
    x_clipped: float = math.nan
    x_error: float = math.nan
    w_error: float = math.nan
    dy_clipped: float = math.nan
    dy_vanished: float = math.nan
    dy_error: float = math.nan
    signal: float = math.inf


class Report:
    """The result of :func:`diagnose`: one :class:`Record` per linear and backward. ``str`` returns a table of means."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def means(self) -> dict[str, dict[str, float]]:
        """Return, for each linear, the mean of each measure over its steps."""
        names = dict.fromkeys(record.name for record in self.records)
        return {name: {fact: self._mean(name, fact) for fact in _FACTS} for name in names}

    def _mean(self, name: str, fact: str) -> float:
        values = [getattr(record, fact) for record in self.records if record.name == name]
        return sum(values) / len(values)

    def weak(self, limit: float = SIGNAL_LIMIT) -> list[str]:
        """Return the linears whose ratio of gradient to noise is below the limit; give them a bf16 backward."""
        return [name for name, facts in self.means().items() if facts["signal"] < limit]

    def __str__(self) -> str:
        heads = [*(fact.replace("_", " ") for fact in _FACTS[:-1]), "|dw|/noise"]
        rows = [["linear", *heads]]
        for name, facts in self.means().items():
            cells = ["-" if math.isnan(facts[fact]) else f"{facts[fact]:.2%}" for fact in _FACTS[:-1]]
            cells.append(f"{facts['signal']:.1f}" + (" !" if name in self.weak() else ""))
            rows.append([name, *(cell.rjust(len(head)) for cell, head in zip(cells, heads, strict=True))])
        return "\n".join(aligned(rows))

    def log(self, writer: Any, step: int) -> None:
        """Log the means as scalars ``nvfp4/<measure>/<linear>``.

        Args:
            writer: a TensorBoard SummaryWriter, an object with ``add_scalar(tag, value, step)``, or a folder.
            step: the training step of the means.

        Raises:
            ImportError: if writer is a folder, and the package tensorboard is not installed.
        """
        if isinstance(writer, str | Path):
            from torch.utils.tensorboard import SummaryWriter

            with SummaryWriter(str(writer)) as own:
                self.log(own, step)
            return
        for name, facts in self.means().items():
            for fact, value in facts.items():
                if math.isfinite(value):
                    writer.add_scalar(f"nvfp4/{fact}/{name}", value, step)

    def picture(self, path: str | Path) -> None:
        """Plot the means, with one panel per measure and one bar per linear; needs matplotlib."""
        from matplotlib.figure import Figure

        means = self.means()
        panels = [fact for fact in _FACTS if any(math.isfinite(facts[fact]) for facts in means.values())]
        figure = Figure(figsize=(3 + 2.2 * len(panels), 1.5 + 0.22 * len(means)), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0] if panels else []
        for axis, fact in zip(axes, panels, strict=True):
            axis.barh(list(means), [facts[fact] if math.isfinite(facts[fact]) else 0 for facts in means.values()])
            axis.set_title("|dw| / noise" if fact == "signal" else fact.replace("_", " "), fontsize=9)
            axis.tick_params(labelsize=7)
            if fact == "signal":
                axis.axvline(SIGNAL_LIMIT, color="tab:red", linewidth=1)
        for axis in axes[:1]:
            axis.invert_yaxis()
        figure.savefig(path, dpi=150)


@contextlib.contextmanager
def diagnose(model: nn.Module) -> Iterator[Report]:
    """Measure the quantization errors of a model's NVFP4 linears in the forwards and backwards inside ``with``.

    The results of training do not change. Only eager mode is supported, because a compiled model runs no hooks.

    Raises:
        ValueError: if the model has no such linear.

    >>> with diagnose(model) as report:
    ...     loss(model(x)).backward()
    >>> print(report)
    """
    report = Report()
    generator = torch.Generator().manual_seed(0)
    with contextlib.ExitStack() as hooks:
        for name, linear in training_linears(model).items():
            hooks.enter_context(linear.register_forward_hook(_observer(name, report, generator)))
        yield report


def _observer(name: str, report: Report, generator: torch.Generator) -> Callable[[nn.Module, Any, Tensor], None]:
    """Return the forward hook of one linear, which registers a hook on y to get dy."""
    steps = itertools.count()

    def observe(linear: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        assert isinstance(linear, NVFP4TrainingLinear)
        if not y.requires_grad:
            return
        x = apply_autocast(args[0].detach()).reshape(-1, linear.in_features)

        def of_gradient(dy: Tensor) -> None:
            rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator).to(x.device)
            facts = _facts(linear, x, dy.detach().reshape(-1, linear.out_features), rng_state)
            report.records.append(Record(name, next(steps), **facts))

        y.register_hook(of_gradient)

    return observe


@torch.no_grad()
def _facts(linear: NVFP4TrainingLinear, x: Tensor, dy: Tensor, rng_state: Tensor) -> dict[str, float]:
    recipe, facts = linear.active_recipe, {}
    if recipe.x is not None:
        facts["x_clipped"], _, facts["x_error"] = _rounding(x, recipe.x, rng_state)
    if recipe.w is not None:
        facts["w_error"] = _rounding(linear.weight, recipe.w, rng_state)[2]
    dy_spec = recipe.dy or recipe.dy_t
    if dy_spec is not None:
        rows = dy if recipe.dy is not None else dy.t().contiguous()
        facts["dy_clipped"], facts["dy_vanished"], facts["dy_error"] = _rounding(rows, dy_spec, rng_state)
    if recipe.dy_t is not None or recipe.x_t is not None:
        exact = dy.float().t() @ x.float()
        dy_t = _rounded(dy.t(), recipe.dy_t, rng_state, DY_T_STREAM)
        x_t = _rounded(x.t(), recipe.x_t, rng_state, X_T_STREAM)
        noise = float((dy_t @ x_t.t() - exact).norm())
        facts["signal"] = float(exact.norm()) / noise if noise else math.inf
    return facts


def _rounded(x: Tensor, spec: QuantizeSpec | None, rng_state: Tensor, stream: int) -> Tensor:
    """Return the values of x that wgrad multiplies, float32."""
    if spec is None:
        return x.float()
    operand = quantize_operand(x.contiguous(), spec, rng_state, stream)
    columns = x.shape[1] if transform_of(spec) is None else None  # wgrad also sums padding that a transform filled
    return decode_values(operand, columns)[0].float() * _factor(operand)


def _rounding(x: Tensor, spec: QuantizeSpec, rng_state: Tensor) -> tuple[float, float, float]:
    """Return (share clipped, share of nonzeros that vanish, relative error) of x (R, C), after the spec's transform."""
    x = x.contiguous()
    operand = quantize_operand(x, spec, rng_state)
    if spec.is_eden:
        basis = torch.ops.nvfp4.rotate(x, rng_state)
    elif spec.hadamard_sign is not None:
        basis = torch.ops.nvfp4.hadamard(x, spec.hadamard_sign).float()
    else:
        basis = x.float()
    decoded = decode_values(operand)[0][:, : basis.shape[1]].float() * _factor(operand)
    clipped = (basis.abs() > _largest(operand)[:, : basis.shape[1]]).sum()
    vanished = ((decoded == 0) & (basis != 0)).sum() / (basis != 0).sum().clamp(min=1)
    error = (decoded - basis).norm() / basis.norm().clamp(min=torch.finfo(torch.float32).tiny)
    return float(clipped) / max(basis.numel(), 1), float(vanished), float(error)


def _factor(operand: Codes) -> Tensor:
    """Return the per-tensor scale, or the scales per row as a column."""
    factor = operand.per_tensor_scale
    return factor.unsqueeze(1) if factor.dim() else factor


def _largest(operand: Codes) -> Tensor:
    """Return the largest magnitude of each element's block, float32 (R, C), plus a margin for its rounding error."""
    blocks = layout.unswizzle(operand.scale, operand.qdata.shape[0], operand.columns // BLOCK)
    largest = layout.scale_values(blocks) * _factor(operand) * (E2M1_MAX * (1 + 2**-20))
    return largest.repeat_interleave(BLOCK, dim=1)
