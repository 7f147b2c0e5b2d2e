"""Record the inputs of a model's weights, and collect the statistics of them that GPTQ needs: X^T X and Z^T X."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.experts import arguments_of, inputs_of, tokens_of
from nvfp4_tensor.quantization.weights import WeightRef
from nvfp4_tensor.tensor.fake_quantize import fake_quantize

Fed = tuple[WeightRef, int]
"""A parameter and the index of its expert (0 for a linear): one matrix with an input of its own."""

_CHUNK = 4096
"""Rows converted to float32 at a time."""


class Watch:
    """Record the inputs of dense weights while the context is active.

    Inputs are copied, because the model may write to them later. Those of experts are all tokens of their layer.

    Attributes:
        routed: int64 (E,), the tokens that the router sent to each expert, by experts' module.
    """

    def __init__(self, targets: Sequence[WeightRef]) -> None:
        self.routed: dict[nn.Module, Tensor] = {}
        self._targets: dict[nn.Module, dict[str, WeightRef]] = {}
        for target in targets:
            self._targets.setdefault(target.module, {})[target.attribute] = target
        self._fed: dict[Fed, list[Tensor]] = {}
        self._weights: dict[Fed, list[Tensor]] = {}
        self._inputs: dict[tuple[Any, ...], Tensor] = {}
        """The latest copy of the input at each (address, shape, strides), so that a shared input is stored once."""

    def __enter__(self) -> Watch:
        self._hooks = [
            module.register_forward_pre_hook(
                self._record if isinstance(module, nn.Linear) else self._record_experts, with_kwargs=True
            )
            for module in self._targets
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def rows(self, fed: Fed) -> Tensor | None:
        """Return the inputs of a weight, concatenated over its products (tokens, K); None if it was not used."""
        every = self._fed.get(fed, ())
        return torch.cat(tuple(every)) if len(every) > 1 else next(iter(every), None)

    def weights(self, fed: Fed) -> Tensor | None:
        """Return how much each row of :meth:`rows` counts, float32 (tokens,); None if all count alike."""
        return torch.cat(self._weights[fed]) if fed in self._weights else None

    def groups(self) -> list[list[Fed]]:
        """Return the recorded weights in order of their first product, grouped by shared input."""
        groups: dict[tuple[int, ...], list[Fed]] = {}
        for fed, every in self._fed.items():
            key = tuple(id(rows) for rows in (*every, *self._weights.get(fed, ())))
            groups.setdefault(key, []).append(fed)
        return list(groups.values())

    def _record_experts(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        hidden, chosen = arguments_of(args, keywords)
        targets = self._targets[module]
        tokens = tokens_of(next(iter(targets.values())).experts, hidden, chosen)
        self.routed[module] = self.routed[module] + tokens if module in self.routed else tokens
        for name, experts, x, weights in inputs_of(module, hidden, chosen):
            for i, expert in enumerate(range(targets[name].experts)[experts] if name in targets else ()):
                self._fed.setdefault((targets[name], expert), []).append(x)
                if weights is not None:
                    self._weights.setdefault((targets[name], expert), []).append(weights[:, i])

    def _record(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x, target = (args[0] if args else keywords["input"]).detach(), self._targets[module]["weight"]
        key, rows = (x.data_ptr(), x.shape, x.stride()), x.reshape(-1, x.shape[-1])
        if key not in self._inputs or not torch.equal(self._inputs[key], rows):
            self._inputs[key] = rows.clone()
        self._fed.setdefault((target, 0), []).append(self._inputs[key])


@dataclasses.dataclass
class Statistics:
    """The statistics of weights that share an input, X the actual rows and Z those whose outputs are the target.

    Attributes:
        fed: the weights.
        hessian: float32 (K, K), X^T X over all rows, K rounded up to a multiple of 16.
        cross: float32 (K, K), Z^T X; None if Z is always X.
    """

    fed: list[Fed]
    hessian: Tensor
    cross: Tensor | None

    @classmethod
    def zeros(cls, fed: list[Fed], with_cross: bool) -> Statistics:
        """Return the statistics of no rows."""
        width = ceil_to(fed[0][0].columns, BLOCK)
        hessian = torch.zeros((width, width), dtype=torch.float32, device=fed[0][0].dense.device)
        return cls(fed, hessian, hessian.clone() if with_cross else None)

    def add(
        self,
        x: Tensor,
        dense: Tensor | None,
        weights: Tensor | None,
        activation: QuantizeSpec | None,
        dense_target_weight: float,
    ) -> None:
        """Add rows of inputs x (rows, K), which count with weights (rows,).

        dense: the same rows in the dense model, if they are known; ``dense_target_weight`` interpolates Z to them.
        activation: the spec by which products quantize their input (W4A4), for whose error weights compensate.
        """
        z = x if dense is None else torch.lerp(x.float(), dense.float(), dense_target_weight)
        if activation is not None:
            x = fake_quantize(x, activation)
        if weights is not None:
            root, same = weights.sqrt().unsqueeze(1), z is x
            x = x.float() * root
            z = x if same else z.float() * root
        square = product_of(x, x)
        self.hessian += square
        if self.cross is not None:
            self.cross += square if z is x else product_of(z, x)


def product_of(z: Tensor, x: Tensor) -> Tensor:
    """Return Z^T X of z and x (rows, K), in float32, with K padded to a multiple of 16."""
    columns = ceil_to(x.shape[1], BLOCK)
    total = torch.zeros((columns, columns), dtype=torch.float32, device=x.device)
    for start in range(0, len(x), _CHUNK):
        left, right = (pad(t[start : start + _CHUNK].float(), (0, columns - t.shape[1])) for t in (z, x))
        total.addmm_(left.mT, right)
    return total
