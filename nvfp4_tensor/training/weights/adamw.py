"""NVFP4AdamW: AdamW with moments in four bits, for dense and NVFP4 parameters, in one pass over memory per step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights.base import WeightOptimizer, check_dense, local_of, named
from nvfp4_tensor.training.weights.headroom import SCALE, forget_writes, keep_headroom
from nvfp4_tensor.training.weights.in_backward import StepsInBackward
from nvfp4_tensor.training.weights.step_tensors import StepTensors
from nvfp4_tensor.training.weights.write_back import check_writable

CODES = ("ratio_codes", "ratio_scale", "second_moment_codes", "second_moment_exponent")
"""State of a parameter with coded moments, beside "step": uint8, because pickle has no float8."""
DENSE = ("exp_avg", "exp_avg_sq")
"""State of a parameter that is too small for codes."""


class NVFP4AdamW(WeightOptimizer):
    """AdamW whose two moments take 1.125 bytes per element instead of 8.

    The first moment is stored as its ratio to the root of the second, in NVFP4, and the second as a power of two per
    element (contract, section 12). Both are rounded stochastically and without bias, so small changes accumulate, and
    an update is bounded by some 30 learning rates, whatever the finite gradients; a NaN or an infinity makes the 16
    elements of its block NaN. (A huge gradient makes later updates of these small, until the second moment has decayed,
    as it does with any AdamW: v is at least 2^-15 of the block's largest.) A step reads and writes each byte once and
    needs no other memory. Dense parameters are bfloat16, which is rounded stochastically, or float32. NVFP4 parameters
    (``to_nvfp4_parameters``) are written back as :func:`write_back` does, except that their per-tensor scale stays: the
    first step makes room for weights to grow eightfold.

    Three things differ from torch.optim.AdamW: ``eps`` is a floor, max(sqrt(v), eps), whose square is rounded up to a
    power of two (1 to 1.41 times eps; 1e-8 acts as 1.054e-8); parameters with fewer than two dimensions or 16 columns
    keep float32 moments; and the first updates of the others are shorter, by 9 to 13 % at step 1, 5 % at step 20 and
    2 % at step 100, because steps are scaled by 0.87 for a noise of v that builds up.

    Random bits depend on ``seed``, the index of the parameter, its number of steps and the position of the element, and
    on nothing else: equal gradients give equal bits on every device and, sharded by rows (FSDP2), on any number of
    ranks. A run resumes from its state_dict bit for bit.

    Args:
        params: parameters, (name, parameter) pairs or groups.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. Groups may have their own.
        seed: the seed of the random bits.

    Raises:
        ValueError: if a parameter or an option is not supported.

    >>> optimizer = NVFP4AdamW(model.parameters(), lr=1e-4)
    """

    _in_backward: StepsInBackward | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {**defaults, "late_norm": None})

    def __getstate__(self) -> dict[str, Any]:
        self._store_norm()
        if self._in_backward is not None:
            warn_user("the copy of an optimizer does not step in the backward: call its step_in_backward")
        return super().__getstate__()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; if the group is not valid, raise an error and do not add it."""
        if self._in_backward is not None:
            raise RuntimeError("a group cannot be added after step_in_backward: add it before")
        super().add_param_group(param_group)

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and return the result of the closure.

        After :meth:`step_in_backward`, the backward has updated them, and this ends the step.

        Raises:
            RuntimeError: in a CUDA graph's capture, whose replays would repeat the random bits and the step size.
        """
        loss = self._loss_of(closure)
        if self._in_backward is not None:
            self._in_backward.end_step()
            return loss
        for parameter in self._parameters():
            check_dense(parameter.grad)
        tensors = StepTensors(self)
        for index, parameter in enumerate(self._parameters()):
            if parameter.grad is not None:
                self._update(parameter, index, tensors)
        return loss

    def _update(self, parameter: Tensor, index: int, tensors: StepTensors, grad_scale: Tensor | None = None) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state.update(_new_state(parameter))
        numbers, rng_state = tensors.of(index, local_of(parameter).device)
        if grad_scale is not None:
            numbers[0] = grad_scale
        state["step"] += 1
        weight, row0, grad = local_of(parameter.detach()), _first_row(parameter), local_of(grad.detach())
        grad = grad.float() if grad.dtype == torch.float16 else grad
        columns = math.prod(weight.shape[1:])
        if not is_coded(parameter):
            m, v = (local_of(state[name]).view(-1) for name in DENSE)
            grad, element0 = grad.reshape(-1), row0 * columns
            torch.ops.nvfp4.adamw_step_vector(weight.view(-1), grad, m, v, numbers, rng_state, element0)
        else:
            moments = [local_of(state[name]) for name in CODES]
            moments[1] = moments[1].view(torch.float8_e4m3fn)
            grad = grad.reshape(weight.shape[0], columns)
            if isinstance(weight, NVFP4Tensor):
                parts = [weight.qdata, weight.scale, weight.per_tensor_scale]
                if tensors.moves[index]:
                    keep_headroom(parameter, state)
                else:
                    state.setdefault(SCALE, 0.0)  # of no weight: the first step that moves it makes headroom
                    parts = [part.clone() for part in parts]
                torch.ops.nvfp4.adamw_step_codes(*parts, grad, *moments, numbers, rng_state, row0)
            else:
                torch.ops.nvfp4.adamw_step(weight.view(grad.shape), grad, *moments, numbers, rng_state, row0)
        torch.autograd.graph.increment_version(parameter)  # a graph that needs the old values then says so

    def step_in_backward(self, clip_norm: float | None = None, clip: str = "late") -> None:
        """Step each parameter inside the backward as soon as its gradient is there, and free the gradient.

        Only a few gradients exist at a time. Call :meth:`step` after each backward as before: it ends the step, and
        learning rate schedulers follow it.

        Args:
            clip_norm: the largest norm of gradients; None does not clip. The norm of all gradients is known only when
                the last one is, so ``clip`` chooses another one.
            clip: "late" scales by the norm of the step before (the first step is not clipped); "parameter" clips each
                parameter's gradient by its own norm.

        Raises:
            ValueError: if an argument does not fit.
            RuntimeError: if it was called before. In a second backward before :meth:`step`: gradients cannot accumulate
                if each backward is a step; use a larger batch, or optimizer.step() without this. In the first backward
                of a model in DistributedDataParallel, which averages gradients only afterwards.
        """
        if clip not in ("late", "parameter"):
            raise ValueError(f"clip is 'late' or 'parameter', not {clip!r}")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, not {clip_norm}")
        if self._in_backward is not None:
            raise RuntimeError("step_in_backward was called before")
        self._in_backward = StepsInBackward(self, clip_norm, clip)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every optimizer does, with the norm that "late" clipping uses next."""
        self._store_norm()
        return super().state_dict()

    def _store_norm(self) -> None:
        """Make the norm of late clipping a number: a distributed checkpoint needs no tensor to load it into."""
        for group in self.param_groups:
            if isinstance(group["late_norm"], Tensor):
                group["late_norm"] = group["late_norm"].item()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as every optimizer does; codes and float32 moments keep their dtypes.

        Raises:
            ValueError: if it is that of another kind of optimizer, torch.optim.AdamW for instance.
        """
        self._check_state_dict(state_dict)
        self._load(state_dict, casts_dense=False)
        for parameter in self._parameters():
            forget_writes(parameter)

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise a ValueError if a state dict has no coded moments of the parameters."""
        if any("late_norm" not in group for group in state_dict["param_groups"]):
            raise ValueError("the state dict is of another optimizer, without coded moments: start with new moments")
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, parameter in zip(saved, self._parameters(), strict=False):  # torch compares their numbers
            state = state_dict["state"].get(i, {})
            names = {"step", *(CODES if is_coded(parameter) else DENSE)}
            if state and set(state) - {SCALE} != names:
                raise ValueError(
                    f"the state dict has {', '.join(sorted(map(str, state)))} of parameter {i}, whose moments in codes "
                    f"are {', '.join(sorted(names))}: start with new moments"
                )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        beta1, beta2 = group["betas"]
        if float(group["lr"]) < 0 or float(group["eps"]) < 0 or float(group["weight_decay"]) < 0:
            raise ValueError("lr, eps and weight_decay must not be negative")
        if not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
            raise ValueError(f"betas must be at least 0 and below 1, not {group['betas']}")
        for option in ("amsgrad", "maximize", "capturable", "differentiable"):
            if group.get(option):
                raise ValueError(f"moments in codes do not support {option}=True: use torch.optim.AdamW")
        for name, parameter in named(group):
            _check_parameter(parameter, name)


# --- one parameter ---------------------------------------------------------------------------------------------------


def is_coded(parameter: Tensor) -> bool:
    """Return whether the moments of the parameter are codes, which for smaller ones would not be smaller."""
    if isinstance(local_of(parameter), NVFP4Tensor):
        return True
    return parameter.dim() >= 2 and math.prod(parameter.shape[1:]) >= BLOCK


def _check_parameter(parameter: Tensor, name: str) -> None:
    """Raise a ValueError if a step does not support the parameter."""
    if isinstance(parameter, DTensor) and any(not p.is_replicate() and p != Shard(0) for p in parameter.placements):
        raise ValueError(f"{name} is sharded as {parameter.placements}, and moments in codes need whole rows: Shard(0)")
    weight = local_of(parameter)
    if isinstance(weight, NVFP4Tensor):
        if isinstance(parameter, DTensor):
            _check_shards(parameter, name)
        check_writable(weight, name)
        if weight.spec.block_rows != 1 or weight.dim() != 2 or weight.per_tensor_scale.dim():
            raise ValueError(
                f"{name} is not one matrix in 1x16 blocks with one per-tensor scale, which moments in codes need: "
                "quantize it with block_rows=1"
            )
        if not parameter.requires_grad:
            raise ValueError(f"{name} does not require a gradient: set requires_grad, or leave it out")
    elif weight.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} is {weight.dtype}, and moments in codes need bfloat16, float32 or NVFP4 weights")
    elif type(weight) not in (Tensor, nn.Parameter):
        raise ValueError(f"{name} is a {type(weight).__name__}, and moments in codes need plain or NVFP4 weights")
    elif not weight.is_contiguous():
        raise ValueError(f"{name} is not contiguous, so it cannot be updated in place: use contiguous()")


def _check_shards(parameter: DTensor, name: str) -> None:
    """Raise a ValueError, the same on all ranks, if some hold fewer rows of codes, which FSDP2 would not gather."""
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    ranks = math.prod(size for size, placement in sizes if placement == Shard(0))
    if parameter.shape[0] % ranks:
        raise ValueError(
            f"{name} has {parameter.shape[0]} rows, which {ranks} ranks cannot share evenly: pad them to "
            f"{ceil_to(parameter.shape[0], ranks)}, or choose another world size"
        )


def _new_state(parameter: Tensor) -> dict[str, Any]:
    """Return zero moments of a parameter; for a DTensor, they are sharded like it."""
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32, device="cpu")}
    if not is_coded(parameter):
        for name in DENSE:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
        return state
    local = local_of(parameter)
    blocks = -(-math.prod(local.shape[1:]) // BLOCK)
    for name in CODES:
        width = 8 * blocks if name.endswith("codes") else blocks
        state[name] = torch.zeros(local.shape[0], width, dtype=torch.uint8, device=local.device)
        if isinstance(parameter, DTensor):
            mesh, shape = parameter.device_mesh, torch.Size((parameter.shape[0], width))
            state[name] = DTensor.from_local(
                state[name], mesh, parameter.placements, run_check=False, shape=shape, stride=(width, 1)
            )
    return state


def _first_row(parameter: Tensor) -> int:
    """Return where this rank's rows begin in the full parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] if offset else 0
