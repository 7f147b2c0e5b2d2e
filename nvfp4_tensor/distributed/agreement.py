"""What has to be the same on all ranks before anything travels, compared by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

M = TypeVar("M", bound=nn.Module)


def nvfp4_parameters(model: nn.Module) -> dict[str, NVFP4Tensor]:
    """The parameters that are NVFP4Tensors, by name."""
    return {name: p for name, p in model.named_parameters() if isinstance(p, NVFP4Tensor)}


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
