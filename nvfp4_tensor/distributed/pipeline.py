"""Pipeline parallelism with torch.distributed.pipelining, where each micro-batch has its own random bits."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import PipelineStage

from nvfp4_tensor.distributed.bits import set_step


class NVFP4PipelineStage(PipelineStage):
    """A PipelineStage for linears seeded by :func:`seed_rounding`, where each micro-batch is a step.

    Call :func:`seed_rounding` on the full model before splitting it into stages, so that the names of its linears do
    not depend on the number of stages. Codes, random bits and gradients are then those of one process that runs the
    micro-batches in sequence, with :func:`set_step` before each. The arguments are those of PipelineStage. Without
    :func:`seed_rounding`, an ordinary PipelineStage suffices: random bits come from the rank's generator.

    >>> seed_rounding(model, seed=0)
    >>> stage = NVFP4PipelineStage(model.stages[rank], rank, world, device)
    >>> schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss)
    >>> for step in range(steps):
    ...     stage.first_step = 4 * step
    ...     schedule.step(x)
    """

    first_step = 0
    """The step of the first micro-batch of the next call of the schedule."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Set the step of a micro-batch and run its forward; the schedule calls this."""
        set_step(self.submod, self.first_step + fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
