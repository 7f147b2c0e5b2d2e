"""GPTQConfig, the config of :func:`gptq`."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvfp4_tensor.numerics.choices import RoundingMode, ScaleSearch
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig


def _default_base_config() -> NVFP4WeightOnlyConfig:
    """Return the default config, the one in the accuracy table."""
    return NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(scale_search=ScaleSearch.MSE, scale_ceiling=448))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQConfig:
    """The config of :func:`gptq`.

    Args:
        base_config: the format: weights only (NVFP4WeightOnlyConfig), or weights and activations (NVFP4Config). With
            quantized activations, the Hessian is that of quantized inputs, and the target is the output on unquantized
            inputs. By default weights only, with a scale search.
        damping: the fraction of the mean of the Hessian's diagonal that is added to its diagonal.
        act_order: round blocks, and columns within each block, in descending order of the Hessian's diagonal. False
            rounds them in memory order.
        dense_target_weight: interpolates the target between the weight's output on the quantized model's inputs (0, the
            default) and the dense model's output on the dense model's inputs (1), with which each layer compensates for
            the errors of the layers before it. Values above 0 need more runs of each layer. SmolLM2 gained slightly
            with 8,192 tokens; toy models with fewer tokens gained nothing.
        sequential_within_layer: run a layer again for each of its inputs, so that ``o_proj`` is fitted to the outputs
            of the quantized ``q_proj``, ``k_proj`` and ``v_proj``. By default all inputs of a layer are recorded before
            its first weight changes.

    Raises:
        ValueError: a number out of range, or a spec other than 1x16 blocks rounded to nearest without a transform.
        TypeError: base_config has another type.
    """

    base_config: NVFP4WeightOnlyConfig = dataclasses.field(default_factory=_default_base_config)
    damping: float = 0.01
    act_order: bool = True
    dense_target_weight: float = 0.0
    sequential_within_layer: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.base_config, NVFP4WeightOnlyConfig):
            raise TypeError(
                f"base_config must be an NVFP4WeightOnlyConfig or NVFP4Config, not {type(self.base_config).__name__}"
            )
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"damping must be positive and finite, for instance 0.01, got {self.damping!r}")
        if not 0 <= self.dense_target_weight <= 1:
            raise ValueError(f"dense_target_weight must be from 0 to 1, got {self.dense_target_weight!r}")
        for name, spec in (("weight", self.base_config.weight), ("activation", self.base_config.activation)):
            if spec is not None and (spec.round_mode != RoundingMode.RNE or spec.hadamard_sign is not None):
                raise ValueError(
                    f"GPTQ needs a {name} spec with round_mode 'rne' and without a Hadamard transform, got {spec}"
                )
        if self.base_config.weight.block_rows != 1:
            raise ValueError(f"GPTQ needs 1x16 blocks: give block_rows=1, not {self.base_config.weight.block_rows}")
        if any(getattr(self.base_config, name, None) for name in ("step", "weighted", "percentile", "headroom")):
            raise ValueError(
                "step, weighted, percentile and headroom are only for calibrate: GPTQ weighs errors by the full "
                "Hessian, and each call computes the amax of its activations"
            )

    @property
    def weight(self) -> QuantizeSpec:
        """The spec of the weights."""
        return self.base_config.weight

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of an NVFP4Tensor that configure products."""
        return self.base_config.fields
