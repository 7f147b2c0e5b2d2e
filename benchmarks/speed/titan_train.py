"""torchtitan's train.py, also on torch 2.11 and 2.12, which lack names that torchtitan 0.3 imports or calls.

torchrun --nproc-per-node 2 -m benchmarks.speed.titan_train --module llama3 --config llama3_debugmodel ...
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
import torch.distributed.fsdp as fsdp


@dataclasses.dataclass(frozen=True)
class DataParallelMeshDims:
    """FSDP2's of later torch: which dimensions of a mesh are data-parallel. Only full_dtensor makes one."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None


def complete_torch() -> None:
    """Give torch the names that it lacks."""
    if not hasattr(fsdp, "DataParallelMeshDims"):
        fsdp.DataParallelMeshDims = DataParallelMeshDims
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # its name until it became public


if __name__ == "__main__":
    complete_torch()
    from torchtitan.train import main

    main()
