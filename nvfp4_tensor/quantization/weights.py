"""The weights of a model that are quantized: those of linears, and the parameters (E, N, K) of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES
from nvfp4_tensor.numerics.random_state import rng_state_of_weight
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.ops.composite.quantization import own_amax
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.experts import expert_weights, is_experts, is_transposed, matrix_of, names_in_files
from nvfp4_tensor.quantization.linear import NVFP4Linear, set_weight
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts


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
    dense: Tensor

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
        return matrix_of(self.module, dense, expert) if dense.dim() == 3 else dense

    def quantized(
        self, config: NVFP4WeightOnlyConfig, *, amax: Tensor | None = None, squares: Tensor | None = None
    ) -> NVFP4Tensor:
        """Quantize the weight by a config, with blocks along the dimension that products sum over.

        amax: of a linear, the largest magnitude that its per-tensor scale allows, by default its own.
        squares: (K,), or (E, K) of experts: weights of the columns' errors in the scale search.
        """
        spec, dense, seed = config.weight, self.dense.detach(), config.seed
        rng_state = None if seed is None else rng_state_of_weight(seed, self.name, dense.device)
        if dense.dim() == 2:
            if squares is None:
                return quantize(dense, spec, amax=amax, rng_state=rng_state)._replace(**config.fields)
            return quantize_weighted(dense, spec, squares, amax, rng_state)._replace(**config.fields)
        if squares is not None:
            states = self._states(seed)
            quantized = self.joined(
                [quantize_weighted(self.matrix(e), spec, squares[e], rng_state=state) for e, state in enumerate(states)]
            )
        elif seed is not None and (files := names_in_files(self.module, self.name, len(dense))):
            quantized = self.joined([_by_parts(w, names, seed, spec) for w, names in zip(dense, files, strict=True)])
        elif is_transposed(self.module):
            experts = quantize_experts(dense.mT.contiguous(), spec, rng_state=rng_state)
            quantized = experts.transpose(-2, -1)  # type: ignore[assignment]
        else:
            quantized = quantize_experts(dense, spec, rng_state=rng_state)
        return quantized._replace(activation_spec=config.activation)

    def _states(self, seed: int | None) -> list[Tensor | None]:
        """Return the random state of each expert, for those whose parts are not quantized apart."""
        names = [f"{self.name}.{expert}" for expert in range(self.experts)]
        return [None if seed is None else rng_state_of_weight(seed, name, self.dense.device) for name in names]

    def joined(self, experts: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
        """Stack the weights (N, K) of experts as the module stores them, each with a per-tensor scale of its own.

        A linear has one weight, which is returned.
        """
        if self.dense.dim() == 2:
            return experts[0]
        stacked = torch.stack(tuple(experts))
        assert isinstance(stacked, NVFP4Tensor)
        scales = torch.stack([expert.per_tensor_scale for expert in experts]).reshape(len(experts), -1)
        stacked = stacked._replace(per_tensor_scale=scales)
        return stacked.transpose(-2, -1) if is_transposed(self.module) else stacked  # type: ignore[return-value]

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


def _by_parts(weight: Tensor, names: Sequence[str], seed: int, spec: QuantizeSpec) -> NVFP4Tensor:
    """Quantize the weight (N, K) of an expert, the rows of each part with the random bits of its name in files."""
    amax = own_amax(weight, spec, None, 0)
    states = [rng_state_of_weight(seed, name, weight.device) for name in names]
    parts = zip(weight.chunk(len(names)), states, strict=True)
    return torch.cat([quantize(part, spec, amax=amax, rng_state=state) for part, state in parts])  # type: ignore[return-value]


def shared_amax(weights: Collection[Tensor], spec: QuantizeSpec) -> Tensor:
    """Return the largest amax of weights that share a per-tensor scale, float32 0-d on the device of the first."""
    each = [own_amax(weight, spec, None, 0) for weight in weights]
    return torch.stack([amax.to(each[0].device) for amax in each]).amax()


def dense_experts(model: nn.Module) -> Iterator[WeightRef]:
    """Yield each dense experts' weight of a transformers model."""
    for path, module in model.named_modules():
        for attribute in expert_weights(module):
            weight = getattr(module, attribute)
            if type(weight.data) is Tensor and weight.dtype in HIGH_PRECISION_DTYPES:
                yield WeightRef(f"{path}.{attribute}".lstrip("."), module, attribute, weight)
