"""Find the weights to quantize in a model, and record the inputs of each."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.quantization.conv1d import as_linear, is_linear
from nvfp4_tensor.quantization.experts import (
    arguments_of,
    inputs_of,
    is_experts,
    joined,
    matrix_of,
    nothing_matched,
    tokens_of,
)
from nvfp4_tensor.quantization.linear import NVFP4Linear, quantizable, set_weight
from nvfp4_tensor.quantization.shards import refuse_shards
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

Filter = Callable[[nn.Module, str], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class WeightRef:
    """A parameter of a model: a linear's weight (N, K), or the weights (E, N, K) of experts.

    Attributes:
        name: the full name of the parameter, for instance ``model.layers.0.mlp.down_proj.weight``.
        module, attribute: the module that has the parameter, and its name there.
        dense: the original parameter. gpt-oss and Llama 4 store experts as (E, K, N).
    """

    name: str
    module: nn.Module
    attribute: str
    dense: nn.Parameter

    @property
    def experts(self) -> int:
        """The number of matrices, each with an input of its own; 1 for a linear."""
        return len(self.dense) if self.dense.dim() == 3 else 1

    @property
    def sees_all_tokens(self) -> bool:
        """Whether the inputs are those of all tokens of the layer through every expert of a transformers module."""
        return self.dense.dim() == 3 and is_experts(self.module)

    @property
    def columns(self) -> int:
        """The number of inputs of each matrix, K."""
        return self.matrix(0).shape[1]

    def matrix(self, expert: int) -> Tensor:
        """Return the dense weight (N, K) of an expert."""
        dense = self.dense.detach()
        return matrix_of(self.module, dense, expert) if self.dense.dim() == 3 else dense

    def put(self, weights: Sequence[NVFP4Tensor]) -> None:
        """Replace the parameter by the weights (N, K) of its experts; by one weight for a linear."""
        self.set(joined(self.module, weights) if self.dense.dim() == 3 else weights[0])

    def set(self, weight: NVFP4Tensor) -> None:
        """Replace the parameter."""
        if isinstance(self.module, nn.Linear):
            set_weight(self.module, weight)
        else:
            setattr(self.module, self.attribute, nn.Parameter(weight, requires_grad=False))

    def restore(self) -> None:
        """Restore the dense parameter."""
        setattr(self.module, self.attribute, self.dense)
        if type(self.module) is NVFP4Linear:
            self.module.__class__ = nn.Linear  # type: ignore[assignment]


def find_targets(model: nn.Module, filter_fn: Filter | None) -> list[WeightRef]:
    """Return the weights of the modules that the filter selects: linears, and modules with parameters (E, N, K).

    Shared weights are left out, with a warning.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    chosen = {
        module: name
        for name, module in model.named_modules()
        if (filter_fn(module, name) if filter_fn is not None else is_quantizable(module))
    }
    refuse_shards(model, chosen)
    targets = [target for module, name in chosen.items() for target in _of_module(name, as_linear(module))]
    if not targets:
        raise ValueError(nothing_matched(model, filter_fn))
    shared = [target.name for target in targets if holders[id(target.dense)] > 1]
    if shared:
        warnings.warn(f"left dense, because several modules share the weight: {', '.join(shared)}", stacklevel=3)
    return [target for target in targets if target.name not in shared]


def is_quantizable(module: nn.Module) -> bool:
    """Return whether the module is a linear or has the weights of experts."""
    return is_linear(module) or any(True for _ in _expert_weights(module))


def _expert_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    if isinstance(module, nn.modules.conv._ConvNd):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() == 3 and parameter.dtype in HIGH_PRECISION_DTYPES:
            yield name, parameter


def _of_module(name: str, module: nn.Module) -> Iterator[WeightRef]:
    prefix = f"{name}." if name else ""
    if isinstance(module, nn.Linear) or not is_quantizable(module):
        yield WeightRef(f"{prefix}weight", module, "weight", quantizable(module).weight)  # type: ignore[arg-type]
        return
    for attribute, parameter in _expert_weights(module):
        if isinstance(parameter.data, NVFP4Tensor):
            raise ValueError(f"{prefix}{attribute} is NVFP4 already: start from the dense model")
        yield WeightRef(f"{prefix}{attribute}", module, attribute, parameter)


Fed = tuple[WeightRef, int]
"""A parameter and the index of its expert (0 for a linear): one matrix with an input of its own."""


class Watch(TorchFunctionMode):
    """Record the inputs by which dense weights are multiplied, while the mode is active.

    Products are recognized by the storage of their weight: ``linear`` with the full weight or one expert's slice,
    ``x @ weight.T``, and torch's grouped product over all experts. Inputs are copied, because the model may write to
    them later.

    Every expert of a transformers module gets all tokens of its layer, whatever the router chooses, so that each has
    statistics; the outputs that flow on are the router's choice.

    Attributes:
        routed: int64 (E,), the tokens that the router sent to each expert, by experts' module.
    """

    def __init__(self, targets: Sequence[WeightRef]) -> None:
        super().__init__()
        self.targets: dict[int, list[WeightRef]] = {}
        self.routed: dict[nn.Module, Tensor] = {}
        self._hooked: dict[nn.Module, dict[str, WeightRef]] = {}
        for target in targets:
            if target.sees_all_tokens:
                self._hooked.setdefault(target.module, {})[target.attribute] = target
            else:
                self.targets.setdefault(target.dense.untyped_storage().data_ptr(), []).append(target)
        self._fed: dict[Fed, list[Tensor]] = {}
        self._weights: dict[Fed, list[Tensor]] = {}
        self._inputs: dict[tuple[Any, ...], Tensor] = {}
        """The latest copy of the input at each (address, shape, strides), so that a shared input is stored once."""

    def __enter__(self) -> Watch:
        self._hooks = [
            module.register_forward_pre_hook(self._record_experts, with_kwargs=True) for module in self._hooked
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear:
            self._record(*_two(args, kwargs, "input", "weight"))
        elif func in _GROUPED:
            x, weight = _two(args, kwargs, "input" if "input" in kwargs else "self", "mat2")
            self._record_grouped(x, weight, kwargs["offs"] if "offs" in kwargs else args[2])
        elif func in _MATMUL and len(args) == 2 and isinstance(args[1], Tensor) and args[1].dim() == 2:
            self._record(args[0], args[1].mT)
        return func(*args, **kwargs)

    def rows(self, fed: Fed) -> Tensor | None:
        """Return the inputs of a weight, concatenated over its products (tokens, K); None if it was not used."""
        if fed not in self._fed:
            return None
        every = self._fed[fed]
        return every[0] if len(every) == 1 else torch.cat(every)

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
        targets = self._hooked[module]
        tokens = tokens_of(next(iter(targets.values())).experts, hidden, chosen)
        self.routed[module] = self.routed[module] + tokens if module in self.routed else tokens
        for name, experts, x, weights in inputs_of(module, hidden, chosen):
            for i, expert in enumerate(range(targets[name].experts)[experts] if name in targets else ()):
                self._fed.setdefault((targets[name], expert), []).append(x)
                if weights is not None:
                    self._weights.setdefault((targets[name], expert), []).append(weights[:, i])

    def _record(self, x: Tensor, weight: Tensor) -> None:
        fed = self._find(weight)
        if fed is not None and weight.stride() == fed[0].dense.stride()[-2:] and x.shape[-1] == weight.shape[-1]:
            self._add(fed, x.detach())

    def _add(self, fed: Fed, x: Tensor) -> None:
        key, rows = (x.data_ptr(), x.shape, x.stride()), x.reshape(-1, x.shape[-1])
        if key not in self._inputs or not torch.equal(self._inputs[key], rows):
            self._inputs[key] = rows.clone()
        self._fed.setdefault(fed, []).append(self._inputs[key])

    def _record_grouped(self, x: Tensor, weight: Tensor, offs: Tensor) -> None:
        if (fed := self._find(weight)) is None:
            return
        target, start = fed[0], 0
        if weight.stride() != target.dense.mT.stride():
            raise ValueError(f"{target.name} has shape (E, K, N): GPTQ supports only experts (E, N, K), blocks along K")
        for expert, end in enumerate(offs.tolist()):
            if end > start:
                self._add((target, expert), x.detach()[start:end])
            start = end

    def _find(self, weight: Tensor) -> Fed | None:
        if type(weight) not in (Tensor, nn.Parameter) or weight.device.type == "meta":
            return None
        for target in self.targets.get(weight.untyped_storage().data_ptr(), ()):
            offset = weight.storage_offset() - target.dense.storage_offset()
            if 0 <= offset < target.dense.numel():
                return target, offset // target.dense.stride(0) if target.experts > 1 else 0
        return None


_GROUPED = {
    getattr(module, name)
    for module, name in ((torch, "_grouped_mm"), (nn.functional, "grouped_mm"))
    if hasattr(module, name)
}


_MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}


def _two(args: tuple[Any, ...], kwargs: dict[str, Any], first: str, second: str) -> tuple[Tensor, Tensor]:
    x = args[0] if args else kwargs[first]
    return x, args[1] if len(args) > 1 else kwargs[second]
