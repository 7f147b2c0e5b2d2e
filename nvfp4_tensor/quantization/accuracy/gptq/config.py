"""GPTQConfig: how :func:`gptq` quantizes."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvfp4_tensor.numerics.choices import RoundingMode, ScaleSearch
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig


def _searched() -> NVFP4WeightOnlyConfig:
    """What the accuracy table measures."""
    return NVFP4WeightOnlyConfig(weight_spec=QuantizeSpec(scale_search=ScaleSearch.MSE, scale_ceiling=448))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQConfig:
    """What :func:`gptq` makes of linears, and by which means.

    Args:
        base_config: weights alone (NVFP4WeightOnlyConfig) or activations too (NVFP4Config): inputs are then summed up
            as they are multiplied, quantized, and weights aim at what they give on these inputs unquantized. By default
            weights alone, by a scale search.
        damping: this share of the mean of the Hessian's diagonal is added to its diagonal.
        act_order: round blocks, and the columns of each, in the order of how much their inputs weigh; else as they
            stand.
        dense_target_weight: aim at what the dense model's linears give on the dense model's inputs, so that each layer
            makes up for the errors of those before it (1); by default at what the weight gives on the inputs met (0).
            It takes more runs of each layer; by 8,192 tokens SmolLM2 gained a little, on toys of fewer nothing.
        sequential_within_layer: run a layer anew for each of its inputs, so that ``o_proj`` is fitted to what quantized
            ``q_proj``, ``k_proj`` and ``v_proj`` make; by default all inputs of a layer are taken before its first
            weight changes.
        share_scales: linears that share an input get one per-tensor scale, as libraries that fuse them want it.

    Raises:
        ValueError: a number out of range; a spec that does not round 1x16 blocks to nearest without a transform.
        TypeError: base_config is of another kind.
    """

    base_config: NVFP4WeightOnlyConfig = dataclasses.field(default_factory=_searched)
    damping: float = 0.01
    act_order: bool = True
    dense_target_weight: float = 0.0
    sequential_within_layer: bool = False
    share_scales: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.base_config, NVFP4WeightOnlyConfig):
            raise TypeError(
                f"base_config is an NVFP4WeightOnlyConfig or an NVFP4Config, not {type(self.base_config).__name__}"
            )
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"damping is above 0, 0.01 for instance, got {self.damping!r}")
        if not 0 <= self.dense_target_weight <= 1:
            raise ValueError(f"dense_target_weight is from 0 to 1, got {self.dense_target_weight!r}")
        for name, spec in (("weight", self.base_config.weight), ("activation", self.base_config.activation)):
            if spec is not None and (spec.round_mode != RoundingMode.RNE or spec.hadamard_sign is not None):
                raise ValueError(
                    f"GPTQ takes a {name} spec of round_mode 'rne' without a Hadamard transform, got {spec}"
                )
        if self.share_scales and self.base_config.weight.row_scaled:
            raise ValueError("share_scales is for one scale a weight: leave it out where the weight has row_scaled")
        if self.base_config.weight.block_rows != 1:
            raise ValueError(f"GPTQ makes 1x16 blocks: give block_rows=1, not {self.base_config.weight.block_rows}")
        if any(getattr(self.base_config, name, None) for name in ("step", "weighted", "percentile", "headroom")):
            raise ValueError(
                "step, weighted, percentile and headroom belong to calibrate: GPTQ weighs errors by all of the "
                "Hessian, and its activations have the amax of each call"
            )

    @property
    def weight(self) -> QuantizeSpec:
        """How weights are quantized."""
        return self.base_config.weight

    @property
    def fields(self) -> dict[str, Any]:
        """What the tensors say of activations."""
        if not isinstance(self.base_config, NVFP4Config):
            return {}
        return {"activation_spec": self.base_config.activation, "product_backend": self.base_config.product_backend}
