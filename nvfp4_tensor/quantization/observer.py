"""Record how large the inputs of products are: ObservedLinear, a linear that does, and the statistics it keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from nvfp4_tensor._compat.modules import change_class, check_forward
from nvfp4_tensor._compat.pickles import pin
from nvfp4_tensor.dispatch.linears import is_nested, over_nested
from nvfp4_tensor.numerics.layout import BLOCK, E2M1_MAX, E4M3_MAX, FLOAT32_MAX, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.config import NVFP4Config
from nvfp4_tensor.quantization.shards import refuse_dtensors

MAGNITUDE_BINS = 1 << 13
"""Bins of the histogram of magnitudes: the exponent and five mantissa bits of float32, so 3 % wide at most."""

HEADROOM = 1 << 14
"""The largest ratio of an amax to a block's own amax. The scale of that block is then 448 / 2^14 = 0.027, which e4m3
represents at full precision (from 2^-6 on)."""


def check_observable(linear: nn.Module) -> None:
    """Raise a TypeError for a subclass of nn.Linear whose own forward an observer would bypass.

    A forward that does not call super(), like that of Falcon's linears, is called by the observer.
    """
    check_forward(linear)
    code = getattr(type(linear).forward, "__code__", None)
    if isinstance(linear, ObservedLinear) or code is None or "__class__" in code.co_freevars:
        raise TypeError(f"only a plain nn.Linear can be observed, not {linear}: exclude it with filter_fn")


@functools.partial(pin, loadable=False)
class InputStatistics(nn.Module):
    """The magnitudes of the inputs (..., K) of a product, in buffers, which are part of the state_dict.

    If the activation has a Hadamard transform, the transformed inputs are recorded.

    Attributes:
        activation_amax: float32 0-d, the largest finite magnitude observed.
        activation_histogram: int64 (8192,), the number of magnitudes in each bin.
        activation_block_histogram: int64 (8192,), the number of blocks of 16 whose amax is in each bin.
        activation_squares: float32 (K,), the sum of squares of the finite inputs of each column; (E, K) for E experts,
            each of whose tokens count as the router chose (experts.py).
        activation_nonfinite: int64 0-d, the number of NaN or infinite inputs, which no other buffer counts. Used in
            messages; not in the state_dict.
    """

    activation_amax: Tensor
    activation_histogram: Tensor
    activation_block_histogram: Tensor
    activation_squares: Tensor
    activation_nonfinite: Tensor
    hadamard_sign: int | None

    def _start(self, columns: int, device: torch.device, spec: QuantizeSpec, experts: tuple[int, ...] = ()) -> None:
        """Register the buffers, of zeros, for inputs of a number of columns, optionally (E,) experts."""
        self.hadamard_sign = spec.hadamard_sign
        columns = columns if spec.hadamard_sign is None else ceil_to(columns, BLOCK)
        for name, size, dtype in (
            ("amax", (), torch.float32),
            ("histogram", (MAGNITUDE_BINS,), torch.int64),
            ("block_histogram", (MAGNITUDE_BINS,), torch.int64),
            ("squares", (*experts, columns), torch.float32),
            ("nonfinite", (), torch.int64),
        ):
            zeros = torch.zeros(size, dtype=dtype, device=device)
            self.register_buffer(f"activation_{name}", zeros, persistent=name != "nonfinite")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InputStatistics:
        """Apply ``fn``, but keep float buffers in float32: an amax rounded down by a cast would clip."""
        before = {name: getattr(self, name) for name in ("activation_amax", "activation_squares")}
        super()._apply(fn, recurse)
        for name, value in before.items():
            moved = getattr(self, name)
            setattr(self, name, moved.float() if value.is_meta else value.to(moved.device))
        return self

    @torch.no_grad()
    def record(self, x: Tensor, experts: slice = slice(None), weights: Tensor | None = None) -> None:
        """Add inputs x (..., K), of all experts or of some, by which its rows count with weights (rows, experts)."""
        x = x.detach()
        if self.hadamard_sign is not None:
            x = torch.ops.nvfp4.hadamard(x, self.hadamard_sign)
        self.activation_amax.copy_(torch.maximum(self.activation_amax, torch.ops.nvfp4.amax(x)))
        magnitude = x.reshape(-1, x.shape[-1]).float().abs()
        finite = magnitude.isfinite()
        self.activation_nonfinite += (~finite).sum()
        magnitude = torch.where(finite, magnitude, -1.0)
        blocks = nn.functional.pad(magnitude, (0, -magnitude.shape[-1] % BLOCK), value=-1.0).unflatten(-1, (-1, BLOCK))
        self.activation_histogram += _counts(magnitude)
        self.activation_block_histogram += _counts(blocks.amax(dim=-1))
        squares = magnitude.clamp(min=0).square()
        with torch.autocast(x.device.type, enabled=False):  # it would round the squares
            self.activation_squares[experts] += squares.sum(dim=0) if weights is None else weights.mT @ squares

    def _check_observed(self) -> None:
        if self.activation_histogram.sum() == 0:
            raise RuntimeError(f"{self} has observed no finite input: run the model on data that reach it")

    def amax_for(self, config: NVFP4Config) -> Tensor:
        """Return the static amax that a config chooses, float32 0-d: a number that files, with amax / 2688, keep."""
        amax = self.amax_with_headroom() if config.headroom else self.amax_at(config.percentile)
        largest = amax.new_full((), E2M1_MAX * E4M3_MAX)
        kept = amax / largest * largest  # at most a bit apart, and kept from then on
        return torch.where(kept.isfinite() & (kept > 0), kept, amax)

    def amax_at(self, percentile: float | None) -> Tensor:
        """Return the observed amax, or the given percentile of the observed magnitudes, as a float32 0-d tensor.

        Raises:
            RuntimeError: nothing has been observed.
        """
        self._check_observed()
        if percentile is None:
            return self.activation_amax.clone()
        return torch.minimum(_percentile(self.activation_histogram, percentile), self.activation_amax)

    def amax_with_headroom(self) -> Tensor:
        """Return the largest amax at which the scales of 99 % of the blocks keep full precision.

        It is :data:`HEADROOM` times the 1st percentile of the nonzero block amaxes, but at least their 99.99th
        percentile, so that no more than 1 block in 10,000 saturates. The result is a float32 0-d tensor.

        Raises:
            RuntimeError: nothing has been observed.
        """
        self._check_observed()
        blocks = self.activation_block_histogram.clone()
        blocks[0] = 0  # blocks of zeros and subnormals, whose scales are zero with any amax
        if blocks.sum() == 0:
            return self.activation_amax.clone()
        least = torch.minimum(_percentile(blocks, 99.99), self.activation_amax)
        return torch.maximum(HEADROOM * _percentile(blocks, 1), least).clamp(max=FLOAT32_MAX)


@functools.partial(pin, loadable=False)
class ObservedLinear(InputStatistics, nn.Linear):
    """An nn.Linear that records the magnitudes of its inputs: see :class:`InputStatistics`."""

    use_of_nvfp4: ClassVar[str] = "is prepared for NVFP4"
    observed_class: type[nn.Linear]

    @classmethod
    def observe(cls, linear: nn.Linear, spec: QuantizeSpec) -> ObservedLinear:
        """Start observing ``linear`` and return it."""
        check_observable(linear)
        kind = type(linear)
        change_class(linear, cls)
        assert isinstance(linear, ObservedLinear)
        keep_called(linear)
        linear.observed_class = kind
        linear._start(linear.in_features, linear.weight.device, spec)
        return linear

    def forward(self, input: Tensor) -> Tensor:
        if is_nested(input):
            return over_nested(self.forward, input)
        refuse_dtensors(self)
        self.record(input)
        return self.observed_class.forward(self, input)

    def stop_observing(self) -> nn.Linear:
        """Restore the original class of the module and return it."""
        for name in ("amax", "histogram", "block_histogram", "squares", "nonfinite"):
            delattr(self, f"activation_{name}")
        kind = self.observed_class
        del self.hadamard_sign, self.observed_class
        release(self)
        change_class(self, kind)
        return self


def check_observed(observed: Mapping[str, InputStatistics], weighted: bool) -> None:
    """Raise a RuntimeError if a weight, by name, observed no finite input, or too large ones for a weighted search."""
    unseen = [name for name, each in observed.items() if each.activation_histogram.sum() == 0]
    if broken := [name for name in unseen if observed[name].activation_nonfinite > 0]:
        raise RuntimeError(
            f"all inputs of {', '.join(broken)} were NaN or infinite, and no weight was quantized: look for NaN in the "
            "batches and in the dense model's weights, and for overflow if the model runs in float16"
        )
    if unseen:
        raise RuntimeError(
            f"no input reached {', '.join(unseen)}, and no weight was quantized: run the model on batches that use "
            "them, exclude them with filter_fn, or keep prepared linears dense with stop_observing() of each"
        )
    infinite = [name for name, each in observed.items() if not each.activation_squares.isfinite().all()]
    if weighted and infinite:
        raise RuntimeError(
            f"the squares of the inputs of {', '.join(infinite)} are not finite, and no weight was quantized: "
            "calibrate on other data, or give a config without weighted"
        )


def _counts(magnitude: Tensor) -> Tensor:
    """Return the number of magnitudes in each bin, ignoring negative ones: int64 (8192,)."""
    return torch.bincount(magnitude[magnitude >= 0].view(torch.int32) >> 18, minlength=MAGNITUDE_BINS)


def _percentile(histogram: Tensor, percentile: float) -> Tensor:
    """Return the upper edge of the bin that contains the percentile: float32 0-d."""
    counts = histogram.cumsum(0)
    bin_ = torch.searchsorted(counts, torch.ceil(counts[-1].double() * (percentile / 100)).long().clamp(min=1))
    return (((bin_ + 1) << 18).int() - 1).view(torch.float32)


# --- torch's fast path of transformer encoders, which reads the weights of linears without calling them ---------------
# nn.TransformerEncoderLayer uses it in eval mode without gradients, unless one of its modules has a hook or one of its
# weights has a class with __torch_function__, such as NVFP4Tensor. nn.TransformerEncoder checks only the weights of its
# first layer before it converts a padded batch to a nested tensor, which all layers then receive: see is_nested.


@functools.partial(pin, loadable=False)
def _no_fast_path(linear: nn.Module, args: object) -> None:
    """Do nothing: the presence of a hook disables the fast path."""


def keep_called(linear: nn.Linear) -> None:
    """Disable the fast path for a linear whose forward does more than multiply by its weight."""
    linear.register_forward_pre_hook(_no_fast_path)


def release(linear: nn.Linear) -> None:
    """Undo :func:`keep_called`."""
    for key in [key for key, hook in linear._forward_pre_hooks.items() if hook is _no_fast_path]:
        del linear._forward_pre_hooks[key]
