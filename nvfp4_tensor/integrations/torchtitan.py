"""Train torchtitan's linears with our recipes on any device: an override and a converter for torchtitan 0.3.

The override needs no code, only ``--override.imports``. The converter is used in a config function and chooses linears
by name. Both create :class:`NVFP4Linear`, whose recipe :func:`nvfp4_tensor.training.set_recipe` can change later.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import spmd_types as spmd
from torch import nn
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import derive, override
from torchtitan.distributed.parallel_dims import MeshAxisName, ParallelDims
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig

from nvfp4_tensor.distributed.tensor_parallel import share_weight
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear
from nvfp4_tensor.training.recipe import resolve

MOST_LINEARS = ("*.attention.*", "*.feed_forward.w[123]", "*.shared_experts.w[123]")
"""The linears of a decoder's blocks, without lm_head, routers and other gates."""


class NVFP4Linear(NVFP4TrainingLinear, Linear):
    """torchtitan's Linear, trained with a recipe. Its parameters, checkpoints and sharding do not change."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A Linear.Config with the name of a recipe (torchtitan stores configs as JSON).

        Raises:
            ValueError: unknown recipe.
        """

        recipe: str = "nvidia"

        def __post_init__(self) -> None:
            resolve(self.recipe)

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        NVFP4Linear.convert(self, resolve(config.recipe))

    def to_dense(self) -> nn.Linear:
        """Convert the module back to torchtitan's Linear, in place, and return it."""
        dense = super().to_dense()
        dense.__class__ = Linear
        return dense

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """Parallelize the module. Under tensor parallelism, amaxes are all-reduced, so codes equal those on one rank.

        Raises:
            ValueError: the backend is full_dtensor, which passes no local tensors to linears; the weight is not
                sharded, or cannot be sharded at block boundaries; or the linear has a bias and its outputs are summed
                over ranks.
        """
        if parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(
                f"{self} needs local tensors, which full_dtensor does not provide: set "
                "--parallelism.spmd_backend to spmd_types or partial_dtensor"
            )
        if parallel_dims.tp_enabled and self._sharding_config is not None:
            self._share_features(parallel_dims)
        Module.parallelize(self, parallel_dims)

    def _share_features(self, parallel_dims: ParallelDims) -> None:
        """Register the sharding of the weight, and run forward on local tensors."""
        sharding: Any = self._sharding_config  # type: ignore[has-type]  # if torchtitan is not installed
        shard = sharding.state_shardings["weight"].per_axis_spmd_types().get(MeshAxisName.TP)
        if not isinstance(shard, spmd.Shard):
            raise ValueError(f"the weight of {self} is not sharded by tensor parallelism: exclude this linear")
        if shard.dim == 1 and self.bias is not None:
            raise ValueError(
                f"{self} has a bias, which each rank would add before outputs are summed: exclude this linear"
            )
        share_weight(self, shard.dim, parallel_dims.get_mesh("tp"))
        x = dense_activation_placement(tp=spmd.R if shard.dim == 0 else spmd.S(2))  # (batch, tokens, features)
        dx = dense_activation_placement(tp=spmd.P if shard.dim == 0 else spmd.S(2))
        self._sharding_config = dataclasses.replace(
            sharding,
            in_src_shardings={**(sharding.in_src_shardings or {}), "input": x},
            in_dst_shardings={**(sharding.in_dst_shardings or {}), "input": x},
            local_map=LocalMapConfig(in_grad_placements=(dx,)),
        )


@override(
    target=Linear.Config,
    fqns=list(MOST_LINEARS),
    exact=True,
    description="attention and feed-forward linears train in NVFP4, on any device (nvfp4_tensor)",
)
def nvfp4_linear(config: Linear.Config, *, recipe: str = "nvidia") -> NVFP4Linear.Config:
    """Train the linears of attention and feed-forward blocks with a recipe.

    >>> # torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel \\
    >>> #   --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}'
    """
    return derive(config, NVFP4Linear.Config, recipe=recipe)


class NVFP4Converter(QuantizationConverter):
    """Train selected linears with a recipe: ``model_registry(flavor, converters=[NVFP4Converter.Config()])``."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """The config of the converter.

        Args:
            recipe: the name of the recipe.
            fqns: globs of the names of linears to convert; ``*`` also matches dots.
            dense: globs of the names of linears to leave dense.
            dense_tail: the fraction of the decoder's layers, at its end, to leave dense, rounded up; 0.15 is usual.

        Raises:
            ValueError: unknown recipe, or dense_tail is not from 0 to 1.
        """

        recipe: str = "nvidia"
        fqns: list[str] = field(default_factory=lambda: list(MOST_LINEARS))
        dense: list[str] = field(default_factory=list)
        dense_tail: float = 0.0

        def __post_init__(self) -> None:
            resolve(self.recipe)
            if not 0 <= self.dense_tail <= 1:
                raise ValueError(f"dense_tail must be a fraction of the layers, from 0 to 1, got {self.dense_tail!r}")

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """Change model_config in place, and return it.

        Raises:
            ValueError: no linear is selected.
        """
        dense = [*self.config.dense, *_last_layers(model_config, self.config.dense_tail)]
        chosen = [
            (config, parent, attribute)
            for fqn, config, parent, attribute in model_config.traverse(Linear.Config)
            if type(config) is Linear.Config and _matches(fqn, self.config.fqns) and not _matches(fqn, dense)
        ]
        if not chosen:
            raise ValueError(f"{self.config} selects no Linear of {type(model_config).__qualname__}: check its fqns")
        for config, parent, attribute in chosen:
            ours = derive(config, NVFP4Linear.Config, recipe=self.config.recipe)
            if isinstance(parent, list):
                parent[attribute] = ours
            else:
                setattr(parent, attribute, ours)
        return model_config


def _last_layers(model_config: Any, fraction: float) -> list[str]:
    """Return globs of the last layers of a decoder."""
    if not fraction:
        return []
    layers = len(model_config.layers)
    return [f"layers.{i}.*" for i in range(layers - math.ceil(fraction * layers - 1e-9), layers)]


def _matches(fqn: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, glob) for glob in globs)
