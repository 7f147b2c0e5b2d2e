"""Pipeline parallelism by torch.distributed.pipelining: micro-batches that draw random bits of their own."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage

from nvfp4_tensor.distributed.bits import set_step


class NVFP4PipelineStage(PipelineStage):
    """A PipelineStage of linears that :func:`seed_rounding` gave a seed, each micro-batch of which is a step.

    Seed the whole model before it is cut, so that its linears have the names that they have on any number of stages.
    Codes, random bits and gradients are then those of one process that takes the micro-batches one after the other,
    with :func:`set_step` before each. In all else it is a PipelineStage, with its arguments; a stage without a seed
    draws from its rank's generator and needs nothing.

    >>> seed_rounding(model, seed=0)
    >>> stage = NVFP4PipelineStage(model.stages[rank], rank, world, device)
    >>> schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    >>> for step in range(steps):
    ...     stage.first_step = 4 * step
    ...     schedule.step(x)
    """

    first_step = 0
    """The step of the first micro-batch of the next call of the schedule."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **how: Any) -> Any:
        """Called by the schedule."""
        set_step(self.submod, self.first_step + fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **how)
