"""NVFP4 over several ranks: FSDP2, DDP, tensor parallelism and sharded checkpoints, by PyTorch's own engine."""

import nvfp4_tensor.tensor  # noqa: F401  first, for it imports torchao without the lines that torchao prints
from nvfp4_tensor.distributed.checkpoint import from_plain, to_plain
from nvfp4_tensor.distributed.ddp import prepare_ddp

__all__ = ["from_plain", "prepare_ddp", "to_plain"]
