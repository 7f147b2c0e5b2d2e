"""The statistics of weights' inputs that GPTQ needs: X^T X, and Z^T X with Z the inputs in the dense model."""

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
"""Rows converted to float32 at a time."""


@dataclasses.dataclass
class Statistics:
    """The statistics of weights that share an input.

    Attributes:
        fed: the weights.
        hessian: float32 (K, K), X^T X over all rows, K rounded up to a multiple of 16.
        cross: float32 (K, K), Z^T X; None if Z is always X.
        rows: the number of rows of X.
    """

    fed: list[Fed]
    hessian: Tensor
    cross: Tensor | None
    rows: int = 0

    @classmethod
    def empty(cls, fed: list[Fed], with_cross: bool) -> Statistics:
        """Return the statistics of zero rows."""
        target = fed[0][0]
        width = ceil_to(target.columns, BLOCK)
        hessian = torch.zeros((width, width), dtype=torch.float32, device=target.dense.device)
        return cls(fed, hessian, hessian.clone() if with_cross else None)

    def add(self, x: Tensor, z: Tensor | None) -> None:
        """Add the actual inputs x (rows, K), and the target inputs z, or None if they are x."""
        self.rows += len(x)
        square = square_of(x)
        self.hessian += square
        if self.cross is not None:
            self.cross += square if z is None else product_of(z, x)


def square_of(x: Tensor) -> Tensor:
    """Return X^T X of x (rows, K), in float32, with K padded to a multiple of 16."""
    return product_of(x, x)


def product_of(z: Tensor, x: Tensor) -> Tensor:
    """Return Z^T X of z and x (rows, K), in float32, with K padded to a multiple of 16."""
    columns = ceil_to(x.shape[1], BLOCK)
    total = torch.zeros((columns, columns), dtype=torch.float32, device=x.device)
    for start in range(0, len(x), _CHUNK):
        left, right = (pad(t[start : start + _CHUNK].float(), (0, columns - t.shape[1])) for t in (z, x))
        total.addmm_(left.mT, right)
    return total


@dataclasses.dataclass
class Streams:
    """Hidden states before a layer, one per batch: of the partly quantized model, and of the dense model."""

    quantized: list[Tensor]
    dense: list[Tensor] | None

    def advance_dense(
        self, layer: nn.Module, calls: Sequence[Call], targets: Sequence[WeightRef]
    ) -> list[Watch] | None:
        """Run the dense hidden states through a layer that is still dense. Return the weights' inputs of each batch."""
        if self.dense is None:
            return None
        watches = []
        for i, call in enumerate(calls):
            with Watch(targets) as watch:
                self.dense[i] = call.run(layer, self.dense[i])
            watches.append(watch)
        return watches

    def advance(self, layer: nn.Module, calls: Sequence[Call]) -> None:
        """Run the other hidden states through a quantized layer."""
        for i, call in enumerate(calls):
            self.quantized[i] = call.run(layer, self.quantized[i])


class Collected:
    """The statistics of weights over batches; weights that share an input share their statistics.

    Args:
        activation: the spec by which products quantize their input (W4A4). Weights then compensate for that error.
        dense_target_weight: interpolates the target inputs between the actual ones (0) and the dense model's (1).
    """

    def __init__(
        self, targets: Sequence[WeightRef], activation: QuantizeSpec | None, dense_target_weight: float
    ) -> None:
        self.targets = targets
        self.activation = activation
        self.dense_target_weight = dense_target_weight
        self.of: dict[Fed, Statistics] = {}
        self.routed: dict[nn.Module, Tensor] = {}

    def add(self, watch: Watch, dense: Watch | None = None, rows: int | None = None) -> None:
        """Add the inputs recorded for one batch.

        ``dense`` has the inputs in the dense model. They are used for weights whose input has all ``rows``.
        """
        for module, tokens in watch.routed.items():
            self.routed[module] = self.routed[module] + tokens if module in self.routed else tokens
        for group in watch.groups():
            x = watch.rows(group[0])
            assert x is not None
            if group[0] not in self.of:
                self.of.update(dict.fromkeys(group, self._empty(group)))
            z = None if dense is None or len(x) != rows else dense.rows(group[0])
            self._add(self.of[group[0]], x, z, watch.weights(group[0]))

    def _empty(self, together: list[Fed]) -> Statistics:
        return Statistics.empty(together, self.activation is not None or self.dense_target_weight > 0)

    def _add(self, to: Statistics, x: Tensor, dense: Tensor | None, weights: Tensor | None) -> None:
        """Add the inputs x, and the dense model's inputs of the same tokens if they are known, by their weights."""
        z: Tensor | None = x if dense is None else torch.lerp(x.float(), dense.float(), self.dense_target_weight)
        if self.activation is not None:
            x = fake_quantize(x, self.activation)
        elif dense is None:
            z = None
        if weights is not None:
            root = weights.sqrt().unsqueeze(1)
            x, z = x.float() * root, None if z is None else z.float() * root
        to.add(x, z)

    def statistics(self) -> list[Statistics]:
        """Return the statistics, one per input, experts in order. They are zero for an expert that no batch reached."""
        result: dict[int, Statistics] = {}
        for target in self.targets:
            every = [(target, expert) for expert in range(target.experts)]
            if not any(fed in self.of for fed in every):
                raise RuntimeError(
                    f"no batch reached {target.name}, and the model is unchanged: exclude it with filter_fn, or give "
                    "batches that use it"
                )
            for fed in every:
                each = self.of[fed] if fed in self.of else Statistics.empty([fed], False)
                result[id(each)] = each
        return list(result.values())
