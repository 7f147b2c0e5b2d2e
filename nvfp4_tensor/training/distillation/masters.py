"""The dense float32 values behind the trained parameters of a quantized model, and how they become codes again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nvfp4_tensor.dispatch.writes import count_write
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.tensor.tiles import requantize
from nvfp4_tensor.training.weights.base import local_of
from nvfp4_tensor.training.weights.headroom import HEADROOM


def is_coded(parameter: Tensor) -> bool:
    """Return whether a parameter, or this rank's shard of it, is NVFP4."""
    return isinstance(local_of(parameter.detach()), NVFP4Tensor)


class Masters:
    """A float32 copy of each parameter that trains: the optimizer's parameters.

    After each step, :meth:`write` quantizes them into the parameters that the model multiplies by. The per-tensor scale
    of a linear is kept until an element outgrows it, and then doubled: a scale that followed the largest element would
    move every other one. Linears that servers join keep one scale.

    Args:
        parameters: the parameters that train, by name.
        dense: dense values to begin from, by name. A weight whose codes are not theirs begins from its codes.
        groups: names of linears that share a per-tensor scale.
    """

    bytes_per_element: tuple[float, float, float] = (4, 4, 8)
    """Of values, gradients and moments."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dense: Mapping[str, Tensor], groups: Sequence[Sequence[str]]
    ) -> None:
        self.parameters = dict(parameters)
        coded = {name: local_of(each.detach()) for name, each in self.parameters.items() if is_coded(each)}
        scales = {
            name: w.per_tensor_scale * w.spec.largest_value  # type: ignore[attr-defined]
            for name, w in coded.items()
            if w.dim() == 2 and not w.per_tensor_scale.dim()  # type: ignore[attr-defined]
        }
        self._scaled = list(scales)
        self._amax_of: dict[str, Tensor] = {}
        first = {name: group[0] for group in groups for name in group if all(each in scales for each in group)}
        leaders = [self._scaled.index(first.get(name, name)) for name in self._scaled]
        if scales:
            device = scales[self._scaled[0]].device
            self._leaders = torch.tensor(leaders, dtype=torch.int64, device=device)
            self._set_amax(torch.stack([each.to(device) for each in scales.values()]))
        self.values = {name: nn.Parameter(self._begin(name, dense.get(name))) for name in self.parameters}

    def _set_amax(self, amax: Tensor) -> None:
        """Set the largest magnitudes that the per-tensor scales of linears allow, float32 (linears,), in place."""
        if not self._amax_of:
            self._amax = amax.clone()
            self._amax_of = dict(zip(self._scaled, self._amax.unbind(), strict=True))
        self._amax.copy_(amax)

    def _begin(self, name: str, dense: Tensor | None) -> Tensor:
        """Return the float32 values from which a parameter begins: dense ones that round to it, else its own."""
        own = local_of(self.parameters[name].detach())
        if not isinstance(own, NVFP4Tensor):
            return own.float().clone()
        exact = None if dense is None else local_of(dense.detach())
        forms = () if exact is None or isinstance(exact, NVFP4Tensor) else (exact, exact.mT)  # Conv1D's is (K, N)
        for form in forms:
            values = form.to(own.device, torch.float32, copy=True).contiguous()
            if values.shape == own.shape and torch.equal(self._quantized(name, own, values).qdata, own.qdata):
                return values
        if own.spec.hadamard_sign is not None:
            raise ValueError(f"{name} has a Hadamard transform, and not the codes of the teacher's weight: give both")
        return own.dequantize(torch.float32)

    def _quantized(self, name: str, own: NVFP4Tensor, values: Tensor) -> NVFP4Tensor:
        amax = {"amax": self._amax_of[name]} if name in self._amax_of else {}
        return requantize(own, values, own.spec, **amax)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the gradients of the parameters to those of the masters, and free them."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master, grad = self.values[name], local_of(parameter.grad).float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the parameters of the model."""
        self._fit_scales()
        for name, parameter in self.parameters.items():
            own, values = local_of(parameter.detach()), self.values[name].detach()
            own.copy_(self._quantized(name, own, values) if isinstance(own, NVFP4Tensor) else values)
        self.count_writes()

    def count_writes(self) -> None:
        """Let autograd and caches of decoded weights know that the parameters of the model were written."""
        for parameter in self.parameters.values():
            torch.autograd.graph.increment_version(parameter)
            if isinstance(own := local_of(parameter.detach()), NVFP4Tensor):
                count_write(own)

    def _fit_scales(self) -> None:
        """Double the per-tensor scales that an element has outgrown, on all ranks alike."""
        if not self._scaled:
            return
        values = (self.values[name].detach() for name in self._scaled)
        norms = torch._foreach_norm([each if each.numel() else each.new_zeros(1) for each in values], math.inf)
        largest = torch.stack([each.to(self._amax.device) for each in norms])
        if isinstance(self.parameters[self._scaled[0]], DTensor):
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        of_group = torch.zeros_like(largest).scatter_reduce_(0, self._leaders, largest, "amax")[self._leaders]
        self._set_amax(torch.where(of_group > self._amax, 2 * self._amax, self._amax))

    def state_dict(self) -> dict[str, Any]:
        """Return what :meth:`load_state_dict` takes."""
        values = {name: local_of(each.detach()) for name, each in self.values.items()}
        return {"values": values, "amax": self._amax if self._scaled else None}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, and write it into the model."""
        for name, value in state["values"].items():
            local_of(self.values[name].detach()).copy_(value)
        if self._scaled:
            self._set_amax(state["amax"].to(self._amax.device))
        self.write()


class CodedMasters(Masters):
    """No copies: NVFP4AdamW updates the codes of the parameters themselves, by stochastic rounding."""

    bytes_per_element = (0, 2, 1.125)

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dense: Mapping[str, Tensor], groups: Sequence[Sequence[str]]
    ) -> None:
        super().__init__(parameters, dense, groups)
        # Room for scales to grow, alike in linears that share one; the optimizer then need not make it for each.
        if self._scaled:
            self._set_amax(HEADROOM * self._amax)
        self.write()
        self.values = self.parameters

    def take_gradients(self) -> None:
        """Do nothing: gradients stay where the optimizer reads them."""

    def write(self) -> None:
        """Do nothing after a step, which wrote the codes."""
        if self.values is not self.parameters:
            super().write()
