"""DistributedDataParallel over a model with frozen weights in NVFP4 or FP8."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nvfp4_tensor.distributed.agreement import M, check_agreement, coded_parameters, kind


@torch.no_grad()
def prepare_ddp(model: M, process_group: dist.ProcessGroup | None = None) -> M:
    """Prepare a model with frozen weights in NVFP4 or FP8 for DDP. Call it on every rank, before
    DistributedDataParallel.

    DDP first broadcasts all parameters in one buffer, which does not support codes. This function broadcasts
    their codes and scales from rank 0 of the group and lets DDP ignore them. Linears that train in NVFP4 have dense
    parameters and do not need this call.

    Returns:
        the same model.

    Raises:
        ValueError: if such a weight has requires_grad, or the ranks' weights differ in shape or spec.

    >>> model = DistributedDataParallel(prepare_ddp(model))
    """
    weights = coded_parameters(model)
    trained = [name for name, w in weights.items() if w.requires_grad]
    if trained:
        raise ValueError(
            f"{trained[0]!r} is in NVFP4 or FP8 with requires_grad, and DDP cannot reduce its gradient: freeze it with "
            "requires_grad_(False), or keep it dense and train with NVFP4TrainingConfig"
        )
    check_agreement("the weight", {name: kind(w) for name, w in weights.items()}, process_group)
    source = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    for w in weights.values():
        for name in w.__tensor_flatten__()[0]:
            part = getattr(w, name)
            dist.broadcast(part.view(torch.uint8) if part.element_size() == 1 else part, source, process_group)
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *weights}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model
