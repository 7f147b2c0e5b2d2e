"""What quantization does to a model while it trains, by layer and step: clipped, vanished, signal against noise.

The linears themselves are not touched: hooks quantize their inputs and gradients a second time, with random bits of
their own, and compare. That costs about a dense step more and keeps inputs until the backward, so look now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvfp4_tensor.matmul.product import decode_values
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.training.config import training_linears
from nvfp4_tensor.training.linear.function import DY_T_STREAM, X_T_STREAM, apply_autocast
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.linear.operands import quantize_operand
from nvfp4_tensor.training.recipe import transform_of

SIGNAL_LIMIT = math.sqrt(3)
"""Of the gradient's norm over that of its noise: below, quantized training stops helping (arXiv 2505.19115)."""

_FACTS = ("x_clipped", "x_error", "w_error", "dy_clipped", "dy_vanished", "dy_error", "signal")


@dataclasses.dataclass(frozen=True)
class Record:
    """One linear in one backward; nan where the recipe leaves the operand dense.

    Attributes:
        name, step: which linear, and how many of its backwards came before.
        x_clipped, dy_clipped: share of elements beyond the largest that their block holds.
        x_error, w_error, dy_error: norm of the rounding error over that of the tensor.
        dy_vanished: share of the nonzero elements of dy that become zero.
        signal: norm of dw over that of what quantization adds to it; inf where nothing does.
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
    """What :func:`diagnose` has seen, a :class:`Record` a linear and backward; ``str`` is a table of means."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def means(self) -> dict[str, dict[str, float]]:
        """For each linear, the mean of each fact over its steps."""
        names = dict.fromkeys(record.name for record in self.records)
        return {name: {fact: self._mean(name, fact) for fact in _FACTS} for name in names}

    def _mean(self, name: str, fact: str) -> float:
        values = [getattr(record, fact) for record in self.records if record.name == name]
        return sum(values) / len(values)

    def weak(self, limit: float = SIGNAL_LIMIT) -> list[str]:
        """Linears whose gradient does not stand out of its noise: give them a bf16 backward, or all of them the end."""
        return [name for name, facts in self.means().items() if facts["signal"] < limit]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("linear", "x clipped", "x error", "w error", "dy clipped", "dy vanished", "dy error", "|dw|/noise")
        ]
        for name, facts in self.means().items():
            shares = [_percent(facts[fact]) for fact in _FACTS[:-1]]
            rows.append((name, *shares, f"{facts['signal']:.1f}" + (" !" if name in self.weak() else "")))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            [cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(row)] for row in rows
        ]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def log(self, writer: Any, step: int) -> None:
        """The means as scalars ``nvfp4/<fact>/<linear>``.

        Args:
            writer: a TensorBoard SummaryWriter, anything with its ``add_scalar(tag, value, step)``, or a folder.
            step: the training step that they are of.

        Raises:
            ImportError: a folder was given, and the package tensorboard is not installed.
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
        """Draw the means, a panel a fact, a bar a linear; needs matplotlib."""
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


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


@contextlib.contextmanager
def diagnose(model: nn.Module) -> Iterator[Report]:
    """Look at what the NVFP4 linears of a model round away, in the forwards and backwards inside ``with``.

    The training itself gives the bits that it gives without. Eager mode only: a compiled model has no hooks.

    Raises:
        ValueError: the model has no such linear.

    >>> with diagnose(model) as report:
    ...     loss(model(x)).backward()
    >>> print(report)
    """
    report = Report()
    generator = torch.Generator().manual_seed(0)
    handles = []
    for name, linear in training_linears(model).items():
        handles.append(linear.register_forward_hook(_Observer(name, report, generator)))
    try:
        yield report
    finally:
        for handle in handles:
            handle.remove()


class _Observer:
    """The forward hook of one linear, which hangs a hook on y for dy."""

    def __init__(self, name: str, report: Report, generator: torch.Generator) -> None:
        self.name, self.report, self.generator, self.step = name, report, generator, 0

    def __call__(self, linear: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        assert isinstance(linear, NVFP4TrainingLinear)
        if not y.requires_grad:
            return
        x = apply_autocast(args[0].detach()).reshape(-1, linear.in_features)

        def of_gradient(dy: Tensor) -> None:
            rng_state = torch.randint(-(2**63), 2**63 - 1, (2,), generator=self.generator).to(x.device)
            facts = _facts(linear, x, dy.detach().reshape(-1, linear.out_features), rng_state)
            self.report.records.append(Record(self.name, self.step, **facts))
            self.step += 1

        y.register_hook(of_gradient)


@torch.no_grad()
def _facts(linear: NVFP4TrainingLinear, x: Tensor, dy: Tensor, rng_state: Tensor) -> dict[str, float]:
    recipe, facts = linear.active_recipe, {}
    if recipe.x is not None:
        facts["x_clipped"], _, facts["x_error"] = _rounding(x, recipe.x, rng_state)
    if recipe.w is not None:
        facts["w_error"] = _rounding(linear.weight, recipe.w, rng_state)[2]
    of_dy = recipe.dy or recipe.dy_t
    if of_dy is not None:
        rows = dy if recipe.dy is not None else dy.t().contiguous()
        facts["dy_clipped"], facts["dy_vanished"], facts["dy_error"] = _rounding(rows, of_dy, rng_state)
    if recipe.dy_t is not None or recipe.x_t is not None:
        exact = dy.float().t() @ x.float()
        noise = _wide(dy.t(), recipe.dy_t, rng_state, DY_T_STREAM) @ _wide(x.t(), recipe.x_t, rng_state, X_T_STREAM).t()
        facts["signal"] = _ratio(exact, noise - exact)
    return facts


def _ratio(a: Tensor, b: Tensor) -> float:
    below = float(b.norm())
    return float(a.norm()) / below if below else math.inf


def _wide(x: Tensor, spec: QuantizeSpec | None, rng_state: Tensor, stream: int) -> Tensor:
    """x as wgrad multiplies it, float32."""
    if spec is None:
        return x.float()
    operand = quantize_operand(x.contiguous(), spec, rng_state, stream)
    columns = x.shape[1] if transform_of(spec) is None else None  # padding that a transform has filled is summed, too
    return decode_values(operand, columns)[0].float() * _factor(operand)


def _rounding(x: Tensor, spec: QuantizeSpec, rng_state: Tensor) -> tuple[float, float, float]:
    """(share clipped, share of the nonzero vanished, relative error) of x (R, C), in the basis that spec rounds in."""
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
    """Its per-tensor scale, or that of each row as a column."""
    factor = operand.per_tensor_scale
    return factor.unsqueeze(1) if factor.dim() else factor


def _largest(operand: Codes) -> Tensor:
    """The largest magnitude that each element's block holds, float32 (R, C); a hair more, for its own rounding."""
    blocks = layout.unswizzle(operand.scale, operand.qdata.shape[0], operand.columns // BLOCK)
    largest = layout.scale_values(blocks) * _factor(operand) * (E2M1_MAX * (1 + 2**-20))
    return largest.repeat_interleave(BLOCK, dim=1)
