"""torchtitan's linears, trained by our recipes on any device: an override, and a converter, for torchtitan 0.3.

The override needs no code, only ``--override.imports``; the converter goes into a config function, and chooses linears
by name. Both build :class:`NVFP4Linear`, whose recipe :func:`nvfp4_tensor.training.set_recipe` changes on a live model.
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
"""Those of a decoder's blocks; neither lm_head, nor routers and other gates."""


class NVFP4Linear(NVFP4TrainingLinear, Linear):
    """torchtitan's Linear, trained by a recipe. Parameters, files and sharding stay those of torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """A Linear.Config with a recipe, by its name: torchtitan writes configs down as JSON.

        Raises:
            ValueError: no recipe has that name.
        """

        recipe: str = "nvidia"

        def __post_init__(self) -> None:
            resolve(self.recipe)

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config)
        NVFP4Linear.convert(self, resolve(config.recipe))

    def to_dense(self) -> nn.Linear:
        """The same module, torchtitan's Linear again."""
        dense = super().to_dense()
        dense.__class__ = Linear
        return dense

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """As any module's. Under tensor parallelism the ranks agree on amaxes, so that codes are those of one rank.

        Raises:
            ValueError: the backend full_dtensor, under which no linear gets a local tensor; a weight that the ranks do
                not cut, or cannot in whole blocks; a bias where the ranks' outputs are summed.
        """
        if parallel_dims.spmd_backend == "full_dtensor":
            raise ValueError(
                f"{self} takes local tensors, which it does not get under full_dtensor: set "
                "--parallelism.spmd_backend to spmd_types or partial_dtensor"
            )
        if parallel_dims.tp_enabled and self._sharding_config is not None:
            self._share_features(parallel_dims)
        Module.parallelize(self, parallel_dims)

    def _share_features(self, parallel_dims: ParallelDims) -> None:
        """The weight is one rank's piece, and forward runs on local tensors."""
        sharding: Any = self._sharding_config  # type: ignore[has-type]  # where torchtitan is not installed
        cut = sharding.state_shardings["weight"].per_axis_spmd_types().get(MeshAxisName.TP)
        if not isinstance(cut, spmd.Shard):
            raise ValueError(f"{self} has a weight that tensor parallelism does not cut: leave this linear out")
        if cut.dim == 1 and self.bias is not None:
            raise ValueError(
                f"{self} has a bias, and would add it on each rank before their sum: leave this linear out"
            )
        share_weight(self, cut.dim, parallel_dims.get_mesh("tp"))
        x = dense_activation_placement(tp=spmd.R if cut.dim == 0 else spmd.S(2))  # of (batch, tokens, features)
        dx = dense_activation_placement(tp=spmd.P if cut.dim == 0 else spmd.S(2))
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
    """Train the linears of attention and feed-forward blocks by a recipe.

    >>> # torchrun -m torchtitan.train --module llama3 --config llama3_debugmodel \\
    >>> #   --override.imports 'nvfp4_tensor.integrations.torchtitan.nvfp4_linear={"recipe":"nvidia"}'
    """
    return derive(config, NVFP4Linear.Config, recipe=recipe)


class NVFP4Converter(QuantizationConverter):
    """Trains linears by a recipe, chosen by name: for ``model_registry(flavor, converters=[NVFP4Converter.Config()])``.

    The names of ``fqns`` are globs, of which ``*`` crosses dots; those of ``dense`` stay as they are. The last
    ``dense_tail`` of a decoder's layers, rounded up, stay dense too: 0.15 is usual.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """What is converted to what.

        Raises:
            ValueError: no recipe has that name, or dense_tail is not from 0 to 1.
        """

        recipe: str = "nvidia"
        fqns: list[str] = field(default_factory=lambda: list(MOST_LINEARS))
        dense: list[str] = field(default_factory=list)
        dense_tail: float = 0.0

        def __post_init__(self) -> None:
            resolve(self.recipe)
            if not 0 <= self.dense_tail <= 1:
                raise ValueError(f"dense_tail is a part of the layers, from 0 to 1, got {self.dense_tail!r}")

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Module.Config) -> Module.Config:
        """model_config, changed in place.

        Raises:
            ValueError: no linear is chosen.
        """
        dense = [*self.config.dense, *_last_layers(model_config, self.config.dense_tail)]
        chosen = [
            (config, parent, attribute)
            for fqn, config, parent, attribute in model_config.traverse(Linear.Config)
            if type(config) is Linear.Config and _matches(fqn, self.config.fqns) and not _matches(fqn, dense)
        ]
        if not chosen:
            raise ValueError(f"{self.config} chooses no Linear of {type(model_config).__qualname__}: see its fqns")
        for config, parent, attribute in chosen:
            _put(parent, attribute, derive(config, NVFP4Linear.Config, recipe=self.config.recipe))
        return model_config


def _last_layers(model_config: Any, share: float) -> list[str]:
    """Globs of a decoder's last layers."""
    if not share:
        return []
    layers = len(model_config.layers)
    return [f"layers.{i}.*" for i in range(layers - math.ceil(share * layers - 1e-9), layers)]


def _matches(fqn: str, globs: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(fqn, glob) for glob in globs)


def _put(parent: Any, attribute: Any, config: Module.Config) -> None:
    """In place of what is there: an entry of a list, or an attribute."""
    if isinstance(parent, list):
        parent[attribute] = config
    else:
        setattr(parent, attribute, config)
