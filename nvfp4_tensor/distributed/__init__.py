"""NVFP4 on several ranks with PyTorch's FSDP2, DDP, tensor, context and pipeline parallelism, and its checkpoints."""

import nvfp4_tensor.dispatch  # noqa: F401  first: the tensor with its operators, and torchao without its log lines
from nvfp4_tensor.distributed.agreement import check_ranks
from nvfp4_tensor.distributed.bits import seed_rounding, set_step, set_token_sharding
from nvfp4_tensor.distributed.checkpoint import from_plain, to_plain
from nvfp4_tensor.distributed.ddp import prepare_ddp
from nvfp4_tensor.distributed.experts import share_amax
from nvfp4_tensor.distributed.fsdp import enable_nvfp4_all_gather, precompute_amaxes
from nvfp4_tensor.distributed.gradients import NVFP4Reduction, reduce_gradients_in_nvfp4
from nvfp4_tensor.distributed.pipeline import NVFP4PipelineStage
from nvfp4_tensor.distributed.tensor_parallel import NVFP4ColwiseParallel, NVFP4RowwiseParallel

__all__ = [
    "NVFP4ColwiseParallel",
    "NVFP4PipelineStage",
    "NVFP4Reduction",
    "NVFP4RowwiseParallel",
    "check_ranks",
    "enable_nvfp4_all_gather",
    "from_plain",
    "precompute_amaxes",
    "prepare_ddp",
    "reduce_gradients_in_nvfp4",
    "seed_rounding",
    "set_step",
    "set_token_sharding",
    "share_amax",
    "to_plain",
]
