"""Masters that are offsets in units of each code's step, for comparison: learned rounding (FAAR, AutoRound)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from nvfp4_tensor.dispatch import straight_through
from nvfp4_tensor.tensor.fake_quantize import fake_quantize
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.distillation import run
from nvfp4_tensor.training.distillation.masters import Masters


def steps_of(w: NVFP4Tensor, values: Tensor) -> Tensor:
    """The distance of the codes around each value: of E2M1 0.5 up to 2, 1 up to 4, and 2, times the block scale."""
    unit = w.unswizzled_scale().float().repeat_interleave(16, -1)[:, : values.shape[1]] * w.row_scale().view(-1, 1)
    magnitude = values.abs() / unit.clamp(min=1e-30)
    return unit * torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))


class Offsets(Masters):
    """Values are offsets within ``bound`` steps of the dense weights; scales may follow a block's largest element."""

    bound = 0.5

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.origin = {name: each.detach().clone() for name, each in self.values.items()}
        self.unit = {}
        for name, value in self.origin.items():
            own = self.parameters[name].detach()
            self.unit[name] = steps_of(own, value) if isinstance(own, NVFP4Tensor) else torch.full_like(value, 0.01)
        self.values = {name: nn.Parameter(torch.zeros_like(each)) for name, each in self.origin.items()}

    def take_gradients(self) -> None:
        super().take_gradients()
        for name, value in self.values.items():
            if value.grad is not None:
                value.grad.mul_(self.unit[name])

    @torch.no_grad()
    def write(self) -> None:
        offsets = self.values
        for each in offsets.values():
            each.clamp_(-self.bound, self.bound)
        self.values = {n: nn.Parameter(self.origin[n].addcmul(v, self.unit[n])) for n, v in offsets.items()}
        super().write()
        self.values = offsets


class SignSGD(torch.optim.Optimizer):
    """AutoRound's optimizer: the sign of the gradient times the learning rate."""

    def __init__(self, params: Any, lr: float, **unused: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(each.grad.sign() * group["lr"])  # a tensor, where a step is a CUDA graph


def _product_of_codes(ctx: Any, a: Tensor, b: NVFP4Tensor, bias: Tensor | None, offs: Tensor | None) -> Tensor:
    """The forward of a W4A4 product whose gradient of the weight reads the quantized activations."""
    with torch.no_grad():
        rounded = fake_quantize(a, b.activation_spec, amax=b.activation_amax)
    ctx.save_for_backward(rounded, b, offs)
    ctx.bias = None if bias is None else (bias.shape, bias.dtype)
    return straight_through._matmul(a, b, offs) if bias is None else torch.addmm(bias, a, b)


@contextlib.contextmanager
def instead(bound: str | None, optimizer: str | None, inputs: str | None) -> Iterator[None]:
    """Let :func:`distill` learn offsets within ``bound`` steps, if it is given, and use the optimizer "sign".

    inputs: "quantized" for gradients of weights by quantized activations.
    """
    with contextlib.ExitStack() as stack:
        if bound is not None:
            kind = type("BoundOffsets", (Offsets,), {"bound": float(bound)})
            stack.enter_context(mock.patch.object(run, "Masters", kind))
        if inputs == "quantized":
            stack.enter_context(
                mock.patch.object(straight_through._Product, "forward", staticmethod(_product_of_codes))
            )
        if optimizer == "sign":
            stack.enter_context(mock.patch.object(torch.optim, "AdamW", SignSGD))
        yield
