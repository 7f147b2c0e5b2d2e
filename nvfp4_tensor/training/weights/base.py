"""What NVFP4AdamW and NVFP4Optimizer share: checks of groups, steps outside of captures, and loading a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nvfp4_tensor.quantization.linear import joined_linears
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def local_of(t: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return t._local_tensor if isinstance(t, DTensor) else t


def scale_groups(model: nn.Module, coded: Mapping[str, Tensor]) -> Iterator[tuple[str, ...]]:
    """Yield the names of linears in NVFP4 that servers join, and that share a per-tensor scale."""
    names = {module: f"{path}.weight".lstrip(".") for path, module in model.named_modules()}
    for group in dict.fromkeys(joined_linears(model, [each for each in names if names[each] in coded]).values()):
        scales = [local_of(coded[names[each]].detach()).per_tensor_scale for each in group]  # type: ignore[attr-defined]
        if all(scale.shape == () and torch.equal(scale, scales[0]) for scale in scales):
            yield tuple(names[each] for each in group)


class WeightOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps depend on a count on the host, by groups that are checked when they are added."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise a TypeError or ValueError if the options or parameters of a group are not supported."""
        if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
            raise TypeError(f"seed is an integer, not {group['seed']!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; if the group is not valid, raise an error and do not add it."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        """Return the result of a step's closure; raise a RuntimeError in a CUDA graph's capture."""
        refuse_capture(type(self).__name__)
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def _load(self, state_dict: dict[str, Any], *, casts_dense: bool) -> None:
        """Load a state dict, whose dtypes stay; torch alone would cast it to the dtypes of the parameters.

        casts_dense: whether states of dense parameters are cast, all but 0-d ones.
        """
        super().load_state_dict(state_dict)
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        for i, parameter in zip(saved, self._parameters(), strict=True):
            weight, state = local_of(parameter), self.state[parameter] if i in state_dict["state"] else {}
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    casts = casts_dense and value.dim() and not isinstance(weight, NVFP4Tensor)
                    device = torch.device("cpu") if name == "step" else weight.device
                    exact = value.detach().clone(memory_format=torch.contiguous_format)
                    state[name] = exact.to(device, state[name].dtype if casts else value.dtype)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def named(group: dict[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the name of each parameter of a group, for messages, and the parameter."""
    names = group.get("param_names") or [f"parameter {i} of its group" for i in range(len(group["params"]))]
    return zip(names, group["params"], strict=True)


def refuse_capture(name: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} counts its steps on the host, so every replay of a CUDA graph would repeat the random bits and "
            "the step size: capture only forward and backward, and call step() after each replay"
        )


def check_dense(grad: Tensor | None) -> None:
    """Raise a RuntimeError if there is a gradient that is not a dense tensor."""
    if grad is not None and (isinstance(grad, NVFP4Tensor) or grad.layout != torch.strided):
        raise RuntimeError(
            f"a step needs a gradient that is a dense tensor, not a {type(grad).__name__} of {grad.layout}: make "
            "embeddings with sparse=False, and weights of linears by F.linear"
        )
