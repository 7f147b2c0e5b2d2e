"""What weights are fed, summed up as GPTQ needs it: X^T X, and Z^T X where Z is what the dense model feeds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.accuracy.gptq.stages import Call
from nvfp4_tensor.quantization.accuracy.gptq.targets import Fed, Watch, WeightRef
from nvfp4_tensor.tensor.fake_quantize import fake_quantize

_CHUNK = 4096
"""Rows taken at a time, in float32."""


@dataclasses.dataclass
class Statistics:
    """Of the weights that share an input.

    Attributes:
        fed: which.
        hessian: float32 (K, K), X^T X over all rows, K rounded up to 16.
        cross: float32 (K, K), Z^T X; None where X is what it should be.
        rows: how many X had.
    """

    fed: list[Fed]
    hessian: Tensor
    cross: Tensor | None
    rows: int = 0

    @classmethod
    def empty(cls, fed: list[Fed], with_cross: bool) -> Statistics:
        """Of no rows yet."""
        target = fed[0][0]
        width = ceil_to(target.dense.shape[-1], BLOCK)
        hessian = torch.zeros((width, width), dtype=torch.float32, device=target.dense.device)
        return cls(fed, hessian, hessian.clone() if with_cross else None)

    def add(self, x: Tensor, z: Tensor | None) -> None:
        """x: (rows, K), what is multiplied; z: what should be, or None where that is x."""
        self.rows += len(x)
        square = square_of(x)
        self.hessian += square
        if self.cross is not None:
            self.cross += square if z is None else product_of(z, x)


def square_of(x: Tensor) -> Tensor:
    """X^T X of x (rows, K), in float32, K rounded up to 16."""
    return product_of(x, x)


def product_of(z: Tensor, x: Tensor) -> Tensor:
    """Z^T X of two (rows, K), in float32, K rounded up to 16."""
    columns = ceil_to(x.shape[1], BLOCK)
    total = torch.zeros((columns, columns), dtype=torch.float32, device=x.device)
    for start in range(0, len(x), _CHUNK):
        left, right = (pad(t[start : start + _CHUNK].float(), (0, columns - t.shape[1])) for t in (z, x))
        total.addmm_(left.mT, right)
    return total


@dataclasses.dataclass
class Streams:
    """Hidden states before a layer, for each batch: those of the model as it is by now, and of the dense model."""

    met: list[Tensor]
    dense: list[Tensor] | None

    def advance_dense(
        self, layer: nn.Module, calls: Sequence[Call], targets: Sequence[WeightRef]
    ) -> list[Watch] | None:
        """Move the dense ones behind a layer that is dense still; what it fed its weights, for each batch."""
        if self.dense is None:
            return None
        seen = []
        for i, call in enumerate(calls):
            with Watch(targets) as watch:
                self.dense[i] = call.run(layer, self.dense[i])
            seen.append(watch)
        return seen

    def advance(self, layer: nn.Module, calls: Sequence[Call]) -> None:
        """Move the others behind a layer that is quantized."""
        for i, call in enumerate(calls):
            self.met[i] = call.run(layer, self.met[i])


class Collected:
    """The statistics of places over batches, those of one input together.

    Args:
        activation: what a product quantizes its input to (W4A4); weights then make up for that error.
        dense_target_weight: from 0, the inputs met are what they should be, to 1, those of the dense model are.
    """

    def __init__(
        self, targets: Sequence[WeightRef], activation: QuantizeSpec | None, dense_target_weight: float
    ) -> None:
        self.targets = targets
        self.activation = activation
        self.dense_target_weight = dense_target_weight
        self.of: dict[Fed, Statistics] = {}

    def add(self, watch: Watch, dense: Watch | None = None, rows: int | None = None) -> None:
        """What ``watch`` saw of one batch; ``dense`` what the dense model fed, used where a weight got all ``rows``."""
        for group in watch.groups():
            for fed in [(group[0], expert) for expert in range(group[0].experts)]:
                x = watch.rows(fed)
                if x is None:
                    continue
                if fed not in self.of:
                    together = [fed] if fed[0].experts > 1 else [(target, 0) for target in group]
                    self.of.update(dict.fromkeys(together, self._empty(together)))
                z = None if dense is None or len(x) != rows else dense.rows(fed)
                self._add(self.of[fed], x, z)

    def _empty(self, together: list[Fed]) -> Statistics:
        return Statistics.empty(together, self.activation is not None or self.dense_target_weight > 0)

    def _add(self, to: Statistics, x: Tensor, dense: Tensor | None) -> None:
        """x: what was met, ``dense``: what the dense model fed for the same tokens, where that is known."""
        should_be = x if dense is None else torch.lerp(x.float(), dense.float(), self.dense_target_weight)
        if self.activation is None:
            to.add(x, None if dense is None else should_be)
        else:
            to.add(fake_quantize(x, self.activation), should_be)

    def statistics(self) -> list[Statistics]:
        """Of each input once, experts in order; an expert that no batch reached has nothing but zeros."""
        result: dict[int, Statistics] = {}
        for target in self.targets:
            every = [(target, expert) for expert in range(target.experts)]
            if not any(fed in self.of for fed in every):
                raise RuntimeError(
                    f"no batch reached {target.name}: the model is as it was; leave it out with filter_fn, or give "
                    "batches that use it"
                )
            for fed in every:
                each = self.of[fed] if fed in self.of else Statistics.empty([fed], False)
                result[id(each)] = each
        return list(result.values())
