"""What has to be the same on all ranks before anything travels, compared by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.linear.module import NVFP4TrainingLinear

M = TypeVar("M", bound=nn.Module)


def nvfp4_parameters(model: nn.Module) -> dict[str, NVFP4Tensor]:
    """The parameters that are NVFP4Tensors, by name; of a DTensor this rank's piece."""
    parameters = {name: getattr(p, "_local_tensor", p) for name, p in model.named_parameters()}
    return {name: p for name, p in parameters.items() if isinstance(p, NVFP4Tensor)}


def check_ranks(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Compare what the ranks of a group are about to share: NVFP4 weights and recipes, by name.

    :func:`prepare_ddp`, :func:`set_token_sharding` and the plans of tensor parallelism do so for what they touch; FSDP2
    and PyTorch's own plans have no place for it, and ranks that quantized differently would gather a mixture.

    Raises:
        ValueError: on all ranks alike; the message names the module, and the ranks that differ.
    """
    check_agreement("the NVFP4 weight", {name: kind(w) for name, w in nvfp4_parameters(model).items()}, group)
    recipes = {name: m.active_recipe for name, m in model.named_modules() if isinstance(m, NVFP4TrainingLinear)}
    check_agreement("the recipe", recipes, group)


def kind(w: NVFP4Tensor) -> str:
    """All but the numbers, and which of its devices a rank uses."""
    static = ", static" if w.activation_amax is not None else ""
    said = repr(w).replace(f"device={w.device}", f"device={w.device.type}")
    return f"{said} with scales {tuple(w.per_tensor_scale.shape)}{static}"


def check_agreement(what: str, mine: Mapping[str, object], group: dist.ProcessGroup | None = None) -> None:
    """Raises the same ValueError on all ranks of the group where one has others' names with other values.

    The values are compared as they print.
    """
    said = {name: str(value) for name, value in mine.items()}
    everyone: list[dict[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, said, group)
    first = everyone[0]
    assert first is not None
    for rank, theirs in enumerate(everyone):
        assert theirs is not None
        for name in sorted({*first, *theirs}):
            one, other = first.get(name, "nothing"), theirs.get(name, "nothing")
            if one != other:
                raise ValueError(
                    f"{what} of {name!r} is {one} on rank 0 and {other} on rank {rank}: make all ranks' models alike"
                )
