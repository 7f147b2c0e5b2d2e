"""Steps inside the backward: the hooks of NVFP4AdamW's parameters, and the norms that it clips by."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nvfp4_tensor.training.weights.base import check_dense, local_of, refuse_capture
from nvfp4_tensor.training.weights.step_tensors import StepTensors

if TYPE_CHECKING:
    from nvfp4_tensor.training.weights.adamw import NVFP4AdamW


class StepsInBackward:
    """Hooks that step each parameter of an optimizer when its gradient is there, and the clipping."""

    def __init__(self, optimizer: NVFP4AdamW, clip_norm: float | None, clip: str) -> None:
        self._optimizer, self._clip_norm, self._clip = optimizer, clip_norm, clip
        self._tensors: StepTensors | None = None
        self._stepped: set[int] = set()
        self._norms: list[Tensor] = []
        self._group: Any = None
        self._hooked: set[int] = set()
        self._is_checked = False
        self._add_hooks()

    def _add_hooks(self) -> None:
        for index, parameter in enumerate(self._optimizer._parameters()):
            if parameter.requires_grad and index not in self._hooked:
                parameter.register_post_accumulate_grad_hook(self._hook(index))
                self._hooked.add(index)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        # The parameter holds the hook where the garbage collector does not look, so a hook that held the optimizer
        # would keep both forever.
        reference = weakref.ref(self)

        def step(parameter: Tensor) -> None:
            if (steps := reference()) is not None:
                steps._step(parameter, index)

        return step

    def _step(self, parameter: Tensor, index: int) -> None:
        refuse_capture("NVFP4AdamW")
        self._refuse_ddp()
        if index in self._stepped:
            raise RuntimeError(
                "a second backward before optimizer.step(): gradients cannot accumulate with step_in_backward, "
                "which steps in each backward. Use one larger batch, or an optimizer without step_in_backward. (If an "
                "error ended the last backward, optimizer.step() ends its step.)"
            )
        assert parameter.grad is not None
        check_dense(parameter.grad)
        self._stepped.add(index)
        with torch.no_grad():
            if self._tensors is None:
                self._tensors = StepTensors(self._optimizer, self._late_scale())
            self._optimizer._update(parameter, index, self._tensors, self._own_scale(parameter.grad))
        parameter.grad = None

    def _refuse_ddp(self) -> None:
        """Raise a RuntimeError if DistributedDataParallel has a parameter: looked for once, with several ranks.

        Neither a parameter nor its gradient shows that, and with find_unused_parameters or static_graph nothing would
        fail later. So this looks through the objects of the process.
        """
        if self._is_checked or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        mine = {id(parameter) for parameter in self._optimizer._parameters()}
        models = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        if any(id(parameter) in mine for model in models for parameter in model.parameters()):
            raise RuntimeError(
                "step_in_backward steps by each rank's own gradients, before DistributedDataParallel averages them: "
                "use fully_shard, or an optimizer without step_in_backward"
            )
        self._is_checked = True

    def _late_scale(self) -> Tensor | None:
        """Return what all gradients are multiplied by if the norm of the last step clips them."""
        norm = self._optimizer.param_groups[0]["late_norm"]
        if self._clip_norm is None or self._clip != "late" or norm is None:
            return None
        return self._coefficient(torch.as_tensor(norm, dtype=torch.float32))

    def _own_scale(self, grad: Tensor) -> Tensor | None:
        """Return what a gradient is multiplied by if its own norm clips it; keep the norm for the next step if not."""
        if self._clip_norm is None:
            return None
        norm = torch.linalg.vector_norm(local_of(grad), dtype=torch.float32)
        if isinstance(grad, DTensor):
            self._group = grad.device_mesh.get_group() if grad.device_mesh.ndim == 1 else dist.group.WORLD
        if self._clip == "late":
            self._norms.append(norm)
            return None
        return self._coefficient(_over_ranks(norm, self._group) if isinstance(grad, DTensor) else norm)

    def _coefficient(self, norm: Tensor) -> Tensor:
        assert self._clip_norm is not None
        return (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def end_step(self) -> None:
        """Step what has no hook yet, such as parameters that were unfrozen, and let the next backward step again."""
        for index, parameter in enumerate(self._optimizer._parameters()):
            if parameter.grad is not None:
                self._step(parameter, index)
        self._add_hooks()
        if self._norms:
            norm = torch.linalg.vector_norm(torch.stack([norm.to(self._norms[0].device) for norm in self._norms]))
            norm = norm if self._group is None else _over_ranks(norm, self._group)
            for group in self._optimizer.param_groups:
                group["late_norm"] = norm
        self._norms, self._tensors = [], None
        self._stepped.clear()


def _over_ranks(norm: Tensor, group: Any) -> Tensor:
    square = norm * norm
    dist.all_reduce(square, group=group)
    return square.sqrt()
