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
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.experts import expert_weights, is_transposed, matrix_of, names_in_files
from nvfp4_tensor.quantization.linear import linear_of_values, set_weight
from nvfp4_tensor.quantization.observer import InputStatistics
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
    def columns(self) -> int:
        """The number of inputs of each matrix, K."""
        return self.matrix(0).shape[1]

    def matrix(self, expert: int) -> Tensor:
        """Return the dense weight (N, K) of an expert."""
        dense = self.dense.detach()
        return matrix_of(self.module, dense, expert) if dense.dim() == 3 else dense

    def quantized(
        self, config: NVFP4WeightOnlyConfig, *, amax: Tensor | None = None, observed: Sequence[InputStatistics] = ()
    ) -> NVFP4Tensor:
        """Quantize the weight by a config, with blocks along the dimension that products sum over.

        amax: of a linear, the largest magnitude that its per-tensor scale allows, by default its own.
        observed: the inputs of the weight, which weigh a scale search and set the static amax.
        """
        spec, dense, squares = config.weight, self.dense.detach(), None
        if observed and config.weighted:
            squares = torch.stack([each.activation_squares for each in observed]).sum(dim=0)
        if dense.dim() == 3:
            quantized = self._quantized_experts(spec, config.seed, squares)._replace(activation_spec=config.activation)
        else:
            state = self._rng_state(config.seed)
            if squares is None:
                quantized = quantize(dense, spec, amax=amax, rng_state=state)
            else:
                quantized = quantize_weighted(dense, spec, squares, amax, state)
            quantized = quantized._replace(**config.fields)
        return with_static_amax(quantized, config, observed)

    def _quantized_experts(self, spec: QuantizeSpec, seed: int | None, squares: Tensor | None) -> NVFP4Tensor:
        dense = self.dense.detach()
        if squares is not None:
            states = [self._rng_state(seed, f".{expert}") for expert in range(len(dense))]
            pairs = zip(squares, states, strict=True)
            return self.joined(
                [quantize_weighted(self.matrix(e), spec, own, rng_state=state) for e, (own, state) in enumerate(pairs)]
            )
        if seed is not None and (files := names_in_files(self.module, self.name, len(dense))):
            return self.joined([_by_parts(w, names, seed, spec) for w, names in zip(dense, files, strict=True)])
        if is_transposed(self.module):
            return quantize_experts(dense.mT.contiguous(), spec, rng_state=self._rng_state(seed)).mT  # type: ignore[return-value]
        return quantize_experts(dense, spec, rng_state=self._rng_state(seed))

    def _rng_state(self, seed: int | None, part: str = "") -> Tensor | None:
        return None if seed is None else rng_state_of_weight(seed, f"{self.name}{part}", self.dense.device)

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
        return stacked.mT if is_transposed(self.module) else stacked  # type: ignore[return-value]

    def set(self, weight: NVFP4Tensor) -> None:
        """Replace the parameter."""
        if isinstance(self.module, nn.Linear):
            set_weight(self.module, weight)
        else:
            setattr(self.module, self.attribute, nn.Parameter(weight, requires_grad=False))

    def restore(self) -> None:
        """Restore the dense parameter."""
        setattr(self.module, self.attribute, self.dense)
        linear_of_values(self.module)


def with_static_amax(
    weight: NVFP4Tensor, config: NVFP4WeightOnlyConfig, observed: Sequence[InputStatistics]
) -> NVFP4Tensor:
    """Return a weight with the largest amax that a config chooses of its inputs, so that none of them clips."""
    if not observed or not isinstance(config, NVFP4Config) or config.activation.row_scaled:
        return weight
    return weight._replace(activation_amax=torch.stack([each.amax_for(config) for each in observed]).amax())


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
