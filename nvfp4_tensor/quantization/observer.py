"""ObservedLinear: a linear that records how large its inputs are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.pickles import pin

MAGNITUDE_BINS = 1 << 13
"""Bins of the histogram of magnitudes: the exponent and five mantissa bits of float32, so 3 % wide at most."""


def check_observable(linear: nn.Linear) -> None:
    """Raises a TypeError for a subclass of nn.Linear, whose own forward an observer would put aside."""
    if type(linear) is not nn.Linear:
        raise TypeError(f"only a plain nn.Linear is observed, not {linear}: leave it out with filter_fn")


@functools.partial(pin, loadable=False)
class ObservedLinear(nn.Linear):
    """An nn.Linear that counts the magnitudes of its inputs, in buffers that a state_dict carries along.

    Attributes:
        activation_amax: float32 0-d, the largest finite magnitude seen, after the Hadamard transform if the
            activation gets one.
        activation_histogram: int64 (8192,), how many magnitudes fell into each bin.
    """

    activation_amax: Tensor
    activation_histogram: Tensor
    hadamard_sign: int | None

    @classmethod
    def observe(cls, linear: nn.Linear, spec: QuantizeSpec) -> ObservedLinear:
        """The same module, observed from now on."""
        check_observable(linear)
        linear.__class__ = cls
        assert isinstance(linear, ObservedLinear)
        device = linear.weight.device
        linear.hadamard_sign = spec.hadamard_sign
        linear.register_buffer("activation_amax", torch.zeros((), dtype=torch.float32, device=device))
        linear.register_buffer("activation_histogram", torch.zeros(MAGNITUDE_BINS, dtype=torch.int64, device=device))
        return linear

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ObservedLinear:
        """As any module's, but that the amax stays float32: rounded down by a cast it would clip what was seen."""
        amax = self.activation_amax
        super()._apply(fn, recurse)
        moved = self.activation_amax
        self.activation_amax = moved.float() if amax.is_meta else amax.to(moved.device)
        return self

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            x = input.detach()
            if self.hadamard_sign is not None:
                x = torch.ops.nvfp4.hadamard(x, self.hadamard_sign)
            self.activation_amax.copy_(torch.maximum(self.activation_amax, torch.ops.nvfp4.amax(x)))
            magnitude = x.float().abs()
            bins = magnitude[magnitude.isfinite()].view(torch.int32) >> 18
            self.activation_histogram += torch.bincount(bins, minlength=MAGNITUDE_BINS)
        return super().forward(input)

    def amax_at(self, percentile: float | None) -> Tensor:
        """The observed amax, or the magnitude below which that percentage of what was seen lies: float32 0-d.

        Raises:
            RuntimeError: nothing has been observed.
        """
        counts = self.activation_histogram.cumsum(0)
        if counts[-1] == 0:
            raise RuntimeError(
                f"{self} has seen no input, so nothing was converted: run the model on data that reach it, or leave it "
                "dense with its stop_observing(), then convert"
            )
        if percentile is None:
            return self.activation_amax.clone()
        bin_ = torch.searchsorted(counts, torch.ceil(counts[-1] * (percentile / 100)).long().clamp(min=1))
        upper_edge = (((bin_ + 1) << 18).int() - 1).view(torch.float32)
        return torch.minimum(upper_edge, self.activation_amax)

    def stop_observing(self) -> nn.Linear:
        """The same module, a plain nn.Linear again."""
        del self.activation_amax, self.activation_histogram, self.hadamard_sign
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self
