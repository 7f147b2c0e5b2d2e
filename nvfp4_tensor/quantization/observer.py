"""ObservedLinear: a linear that records how large its inputs are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.nested import is_nested, over_nested
from nvfp4_tensor.numerics.layout import BLOCK, FLOAT32_MAX, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.fast_path import keep_called, release

MAGNITUDE_BINS = 1 << 13
"""Bins of the histogram of magnitudes: the exponent and five mantissa bits of float32, so 3 % wide at most."""

HEADROOM = 1 << 14
"""How far an amax may lie above a block's own: that block's scale is then 0.027 of 448, which e4m3 has at full
precision (from 2^-6 on)."""


def check_observable(linear: nn.Linear) -> None:
    """Raises a TypeError for a subclass of nn.Linear, whose own forward an observer would put aside."""
    if not is_observable(linear):
        raise TypeError(f"only a plain nn.Linear is observed, not {linear}: leave it out with filter_fn")


def is_observable(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is an nn.Linear, or one like Falcon's, whose forward stands by itself: it calls no super()."""
    forward: Any = getattr(type(module).forward, "__code__", None)
    return type(module) is nn.Linear or (
        isinstance(module, nn.Linear)
        and not isinstance(module, ObservedLinear)
        and forward is not None
        and "__class__" not in forward.co_freevars
    )


@functools.partial(pin, loadable=False)
class ObservedLinear(nn.Linear):
    """An nn.Linear that counts the magnitudes of its inputs, in buffers that a state_dict carries along.

    What is seen is the input after the Hadamard transform, if the activation gets one.

    Attributes:
        activation_amax: float32 0-d, the largest finite magnitude seen.
        activation_histogram: int64 (8192,), how many magnitudes fell into each bin.
        activation_block_histogram: int64 (8192,), how many blocks of 16 have their largest magnitude in each bin.
        activation_squares: float32 (K,), the sum of the squares of each column's finite inputs.
        activation_nonfinite: int64 0-d, how many inputs were NaN or infinite, which no other buffer counts. For
            messages; no state_dict has it.
    """

    activation_amax: Tensor
    activation_histogram: Tensor
    activation_block_histogram: Tensor
    activation_squares: Tensor
    activation_nonfinite: Tensor
    hadamard_sign: int | None
    observed_class: type[nn.Linear]

    @classmethod
    def observe(cls, linear: nn.Linear, spec: QuantizeSpec) -> ObservedLinear:
        """The same module, observed from now on."""
        check_observable(linear)
        kind = type(linear)
        linear.__class__ = cls
        assert isinstance(linear, ObservedLinear)
        keep_called(linear)
        device = linear.weight.device
        linear.observed_class = kind
        linear.hadamard_sign = spec.hadamard_sign
        columns = linear.in_features if spec.hadamard_sign is None else ceil_to(linear.in_features, BLOCK)
        for name, size, dtype in (
            ("activation_amax", (), torch.float32),
            ("activation_histogram", (MAGNITUDE_BINS,), torch.int64),
            ("activation_block_histogram", (MAGNITUDE_BINS,), torch.int64),
            ("activation_squares", (columns,), torch.float32),
        ):
            linear.register_buffer(name, torch.zeros(size, dtype=dtype, device=device))
        nonfinite = torch.zeros((), dtype=torch.int64, device=device)
        linear.register_buffer("activation_nonfinite", nonfinite, persistent=False)
        return linear

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ObservedLinear:
        """As any module's, but that floats stay float32: an amax rounded down by a cast would clip what was seen."""
        before = {name: getattr(self, name) for name in ("activation_amax", "activation_squares")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            moved = getattr(self, name)
            setattr(self, name, moved.float() if value.is_meta else value.to(moved.device))
        return self

    def forward(self, input: Tensor) -> Tensor:
        if is_nested(input):
            return over_nested(self.forward, input)
        with torch.no_grad():
            x = input.detach()
            if self.hadamard_sign is not None:
                x = torch.ops.nvfp4.hadamard(x, self.hadamard_sign)
            self.activation_amax.copy_(torch.maximum(self.activation_amax, torch.ops.nvfp4.amax(x)))
            magnitude = x.reshape(-1, x.shape[-1]).float().abs()
            finite = magnitude.isfinite()
            self.activation_nonfinite += (~finite).sum()
            magnitude = torch.where(finite, magnitude, -1.0)
            blocks = nn.functional.pad(magnitude, (0, -magnitude.shape[-1] % BLOCK), value=-1.0).unflatten(
                -1, (-1, BLOCK)
            )
            self.activation_histogram += _counts(magnitude)
            self.activation_block_histogram += _counts(blocks.amax(dim=-1))
            self.activation_squares += magnitude.clamp(min=0).square().sum(dim=0)
        return self.observed_class.forward(self, input)

    def check_observed(self) -> None:
        """Raises a RuntimeError where nothing has been observed."""
        if self.activation_histogram.sum() == 0:
            seen = "nothing but NaN and infinities" if self.activation_nonfinite else "no input"
            raise RuntimeError(
                f"{self} has seen {seen}, so nothing was converted: run the model on data that reach it, or leave it "
                "dense with its stop_observing(), then convert"
            )

    def amax_at(self, percentile: float | None) -> Tensor:
        """The observed amax, or the magnitude below which that percentage of what was seen lies: float32 0-d.

        Raises:
            RuntimeError: nothing has been observed.
        """
        self.check_observed()
        if percentile is None:
            return self.activation_amax.clone()
        return torch.minimum(_percentile(self.activation_histogram, percentile), self.activation_amax)

    def amax_with_headroom(self) -> Tensor:
        """As large as 99 % of the blocks allow, whose scales keep their precision; but no block of 10,000 saturates.

        That is the larger of :data:`HEADROOM` times the first percentile of the blocks' amaxes (of those that are not
        zero) and their 99.99th percentile: float32 0-d.

        Raises:
            RuntimeError: nothing has been observed.
        """
        self.check_observed()
        blocks = self.activation_block_histogram.clone()
        blocks[0] = 0  # zeros, and what is below 2^-126: their scales are zero under any amax
        if blocks.sum() == 0:
            return self.activation_amax.clone()
        most = torch.minimum(_percentile(blocks, 99.99), self.activation_amax)
        return torch.maximum(HEADROOM * _percentile(blocks, 1), most).clamp(max=FLOAT32_MAX)

    def stop_observing(self) -> nn.Linear:
        """The same module, a linear of its own class again."""
        for name in ("amax", "histogram", "block_histogram", "squares", "nonfinite"):
            delattr(self, f"activation_{name}")
        kind = self.observed_class
        del self.hadamard_sign, self.observed_class
        release(self)
        self.__class__ = kind  # type: ignore[assignment]
        return self


def _counts(magnitude: Tensor) -> Tensor:
    """How many magnitudes, those below zero left out, fall into each bin: int64 (8192,)."""
    return torch.bincount(magnitude[magnitude >= 0].view(torch.int32) >> 18, minlength=MAGNITUDE_BINS)


def _percentile(histogram: Tensor, percentile: float) -> Tensor:
    """The upper edge of the bin in which that percentage is reached: float32 0-d."""
    counts = histogram.cumsum(0)
    bin_ = torch.searchsorted(counts, torch.ceil(counts[-1].double() * (percentile / 100)).long().clamp(min=1))
    return (((bin_ + 1) << 18).int() - 1).view(torch.float32)
