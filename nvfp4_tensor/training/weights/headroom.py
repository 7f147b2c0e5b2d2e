"""Room for the block scales of a weight to grow: a step of NVFP4AdamW does not change the per-tensor scale."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from nvfp4_tensor.dispatch.writes import writes_of
from nvfp4_tensor.numerics.layout import E4M3_MAX
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights.base import local_of

SCALE = "per_tensor_scale"
"""State of an NVFP4 weight beside its moments: its per-tensor scale at the last step, a number."""

HEADROOM = 8
"""How far block scales may grow before they clip."""
_SEEN = "_nvfp4_writes_at_step"
"""An attribute of the storage of a weight's codes: how many writes to it had been counted at the last step."""


def make_headroom(parameter: Tensor) -> None:
    """Divide block scales by a power of two, and multiply the per-tensor scale by it, until they can grow eightfold.

    Blocks with scales below 1/3584 of the largest keep fewer bits of their scale. Shards agree on the power.
    """
    w = local_of(parameter)
    assert isinstance(w, NVFP4Tensor)
    scale = w.scale.float()
    largest = scale.nan_to_num(0.0).max() if w.numel() else scale.new_zeros(())
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(dim))
    top = largest.item()
    if top * HEADROOM <= E4M3_MAX:
        return
    power = 2.0 ** math.ceil(math.log2(top * HEADROOM / E4M3_MAX))
    move_to_per_tensor_scale(w, power)


def move_to_per_tensor_scale(w: NVFP4Tensor, power: float) -> None:
    """Divide the block scales of w in place by a power of two, and multiply the per-tensor scale by it."""
    scale = w.scale.float()
    scaled = torch.where(scale.isnan(), torch.nan, scale / power).to(torch.float8_e4m3fn)
    w.scale.view(torch.uint8).copy_(scaled.view(torch.uint8))
    w.per_tensor_scale.mul_(power)


def keep_headroom(parameter: Tensor, state: dict[str, Any]) -> None:
    """Make headroom before the first step, and again if others wrote to the weight since the last one.

    Writes to the storage of its codes are counted. A storage that no step has seen is a copy's, a loaded model's, or
    that of a weight that replaced another one: it has the weight of the last step if the per-tensor scale is that
    step's.
    """
    weight = local_of(parameter)
    assert isinstance(weight, NVFP4Tensor)
    storage = weight.qdata.untyped_storage()
    seen = getattr(storage, _SEEN, None)
    if seen == writes_of(storage) and SCALE in state:
        return
    if seen is not None or state.get(SCALE) != weight.per_tensor_scale.item():
        make_headroom(parameter)
    state[SCALE] = weight.per_tensor_scale.item()
    setattr(storage, _SEEN, writes_of(storage))


def forget_writes(parameter: Tensor) -> None:
    """Let the next step compare scales: a state was loaded, and its weight is loaded as well, before or after it."""
    weight = local_of(parameter)
    if isinstance(weight, NVFP4Tensor) and hasattr(storage := weight.qdata.untyped_storage(), _SEEN):
        delattr(storage, _SEEN)
