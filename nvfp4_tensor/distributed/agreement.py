"""Check, before communication, that all ranks have equal recipes and equal kinds of weights in codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from nvfp4_tensor.tensor.fp8 import FP8Tensor
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear

M = TypeVar("M", bound=nn.Module)


def coded_parameters(model: nn.Module) -> dict[str, NVFP4Tensor | FP8Tensor]:
    """Return the parameters in NVFP4 or FP8, by name; for a DTensor, this rank's shard."""
    parameters = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    return {name: p for name, p in parameters.items() if isinstance(p, NVFP4Tensor | FP8Tensor)}


def check_ranks(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that the weights in NVFP4 or FP8 and the recipes of a model agree on all ranks of a group.

    :func:`prepare_ddp`, :func:`set_token_sharding` and the tensor parallel plans check the modules that they change.
    FSDP2 and PyTorch's own plans cannot: call this function before them, because gathering shards that were quantized
    differently mixes formats.

    Raises:
        ValueError: on all ranks, if two ranks differ; the message names the module and the ranks.
    """
    check_agreement("the weight", {name: kind(w) for name, w in coded_parameters(model).items()}, group)
    recipes = {name: m.active_recipe for name, m in model.named_modules() if isinstance(m, NVFP4TrainingLinear)}
    check_agreement("the recipe", recipes, group)


def kind(w: NVFP4Tensor | FP8Tensor) -> str:
    """Describe a weight without its values and its device index."""
    if isinstance(w, NVFP4Tensor):
        scales, amax = w.per_tensor_scale, w.activation_amax
    else:
        scales, amax = w.scale, w.input_scale
    description = repr(w).replace(f"device={w.device}", f"device={w.device.type}")
    return f"{description} with scales {tuple(scales.shape)}{', static' * (amax is not None)}"


def check_agreement(what: str, local: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raise the same ValueError on all ranks of the group unless all have the same names with the same ``str(value)``.

    ``what`` is the subject of the message, "the recipe" for instance.
    """
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, {name: str(value) for name, value in local.items()}, group)
    first = by_rank[0]
    for rank, values in enumerate(by_rank):
        for name in sorted({*first, *values}):
            expected, found = first.get(name, "missing"), values.get(name, "missing")
            if expected != found:
                raise ValueError(
                    f"{what} of {name!r} is {expected} on rank 0 and {found} on rank {rank}: give all ranks the same "
                    "model"
                )
