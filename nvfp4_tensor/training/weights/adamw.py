"""NVFP4AdamW: AdamW with moments in four bits, for dense and NVFP4 parameters, in one pass over memory per step."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nvfp4_tensor.numerics.random_state import rng_state_of, rng_state_row
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights import coded_moments

CLIPS = ("late", "parameter")


class NVFP4AdamW(torch.optim.Optimizer):
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
        self._in_backward: _InBackward | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {**defaults, "late_norm": None})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(coded_moments.from_bytes(state))
        for group in self.param_groups:
            group.setdefault("late_norm", None)

    def __getstate__(self) -> dict[str, Any]:
        if self._in_backward is not None:
            self._in_backward.save_norm()
            warnings.warn(
                "the copy of an optimizer does not step in the backward: call its step_in_backward", stacklevel=3
            )
        return {**coded_moments.as_bytes(super().__getstate__()), "_in_backward": None}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; if the group is not valid, raise an error and do not add it."""
        if self._in_backward is not None:
            raise RuntimeError("a group cannot be added after step_in_backward: add it before")
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and return the result of the closure.

        After :meth:`step_in_backward`, the backward has updated them, and this ends the step.

        Raises:
            RuntimeError: in a CUDA graph's capture, whose replays would repeat the random bits and the step size.
        """
        _refuse_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.end_step()
            return loss
        tensors = _StepTensors(self)
        for index, (group, parameter) in enumerate(self._indexed()):
            if parameter.grad is not None:
                self._update(parameter, parameter.grad, group, index, tensors, None)
        return loss

    def _update(
        self,
        parameter: Tensor,
        grad: Tensor,
        group: dict[str, Any],
        index: int,
        tensors: _StepTensors,
        grad_scale: Tensor | None,
    ) -> None:
        state = self.state[parameter]
        if not state:
            state.update(coded_moments.new_state(parameter))
        count, device = int(state["step"].item()) + 1, coded_moments.local_of(parameter).device
        numbers = tensors.numbers(coded_moments.numbers_of(group, count), device, grad_scale)
        rng_state = tensors.rng_state(group["seed"], index, count, device)
        state["step"] += 1
        coded_moments.step_parameter(parameter, grad, state, numbers, rng_state)

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
        if clip not in CLIPS:
            raise ValueError(f"clip is 'late' or 'parameter', not {clip!r}")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0, not {clip_norm}")
        if self._in_backward is not None:
            raise RuntimeError("step_in_backward was called before")
        self._in_backward = _InBackward(self, clip_norm, clip)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every optimizer does, with the norm that "late" clipping uses next."""
        if self._in_backward is not None:
            self._in_backward.save_norm()
        return coded_moments.as_bytes(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as every optimizer does; codes and float32 moments keep their dtypes.

        Raises:
            ValueError: if it is that of another kind of optimizer, torch.optim.AdamW for instance.
        """
        state_dict = coded_moments.from_bytes(state_dict)
        coded_moments.check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)
        coded_moments.load_exactly(self, state_dict)
        if self._in_backward is not None:
            self._in_backward.load_norm()

    def _indexed(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        return ((group, parameter) for group in self.param_groups for parameter in group["params"])


class _StepTensors:
    """What the parameters of one step need on their devices: a copy for all of them, which the host does not await."""

    def __init__(self, optimizer: NVFP4AdamW) -> None:
        self._optimizer = weakref.proxy(optimizer)
        self._numbers: dict[tuple[Any, ...], tuple[Tensor | None, Tensor]] = {}
        self._states: dict[tuple[torch.device, int], tuple[list[tuple[int, int]], tuple[Tensor, ...]]] = {}

    def numbers(self, numbers: list[float], device: torch.device, grad_scale: Tensor | None) -> Tensor:
        """Return the numbers of a step (HYPER), the first one replaced by grad_scale, 0-d, unless that is None.

        Parameters with the same ones share them.
        """
        key = (*numbers, *_place_of(device), id(grad_scale))  # which is held, so that no other tensor has its id
        if key not in self._numbers:
            copied = _copied(numbers, torch.float32, device)
            if grad_scale is not None:
                copied[0].copy_(grad_scale)
            self._numbers[key] = grad_scale, copied
        return self._numbers[key][1]

    def rng_state(self, seed: int, index: int, count: int, device: torch.device) -> Tensor:
        """Return the random state of a parameter's step. The first call of a step copies those of all parameters."""
        place = _place_of(device)
        if place not in self._states:
            planned = [self._next_of(group, parameter) for group, parameter in self._optimizer._indexed()]
            rows = [rng_state_row("adamw", seed, str(i), count) for i, (seed, count) in enumerate(planned)]
            self._states[place] = planned, _copied(rows, torch.int64, device).unbind()
        planned, states = self._states[place]
        if planned[index] == (seed, count):
            return states[index]
        return rng_state_of("adamw", seed, str(index), count, device)

    def _next_of(self, group: dict[str, Any], parameter: nn.Parameter) -> tuple[int, int]:
        """Return the seed and the number of a parameter's next step."""
        state = self._optimizer.state.get(parameter)
        return group["seed"], (int(state["step"].item()) if state else 0) + 1


def _place_of(device: torch.device) -> tuple[torch.device, int]:
    """Return the device and its current stream, on which what is copied there can be read without waiting."""
    return device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _copied(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class _InBackward:
    """The hooks of an optimizer that steps inside the backward, and the norms that it clips by."""

    def __init__(self, optimizer: NVFP4AdamW, clip_norm: float | None, clip: str) -> None:
        self._optimizer, self._clip_norm, self._clip = optimizer, clip_norm, clip
        self._tensors = _StepTensors(optimizer)
        self._stepped: set[int] = set()
        self._norms: list[Tensor] = []
        self._late_norm: Tensor | None = None
        self._late_scales: dict[tuple[torch.device, int], Tensor] = {}
        self._group: Any = None
        self._hooked: set[int] = set()
        self._is_checked = False
        self.load_norm()
        self._add_hooks()

    def _parameters(self) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield each parameter, the number of its group, and its index."""
        groups = enumerate(self._optimizer.param_groups)
        pairs = [(parameter, number) for number, group in groups for parameter in group["params"]]
        return ((parameter, number, index) for index, (parameter, number) in enumerate(pairs))

    def _add_hooks(self) -> None:
        for parameter, number, index in self._parameters():
            if parameter.requires_grad and index not in self._hooked:
                parameter.register_post_accumulate_grad_hook(self._hook(number, index))
                self._hooked.add(index)

    def _hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        # The parameter holds the hook where the garbage collector does not look, so a hook that held the optimizer
        # would keep both forever.
        reference = weakref.ref(self)

        def step(parameter: Tensor) -> None:
            if (steps := reference()) is not None:
                steps._step(parameter, number, index)

        return step

    def _step(self, parameter: Tensor, number: int, index: int) -> None:
        _refuse_capture()
        self._refuse_ddp()
        if index in self._stepped:
            raise RuntimeError(
                "a second backward before optimizer.step(): gradients cannot accumulate with step_in_backward, "
                "which steps in each backward. Use one larger batch, or an optimizer without step_in_backward. (If an "
                "error ended the last backward, optimizer.step() ends its step.)"
            )
        assert parameter.grad is not None
        self._stepped.add(index)
        grad, group = parameter.grad, self._optimizer.param_groups[number]  # loading a state replaces groups
        with torch.no_grad():
            self._optimizer._update(parameter, grad, group, index, self._tensors, self._scale(grad))
        parameter.grad = None

    def _refuse_ddp(self) -> None:
        """Raise a RuntimeError if DistributedDataParallel has a parameter: looked for once, with several ranks."""
        if self._is_checked or not (dist.is_available() and dist.is_initialized()):
            return
        self._is_checked = True
        mine = {id(parameter) for parameter, _, _ in self._parameters()}
        models = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel)]
        if dist.get_world_size() > 1 and any(id(p) in mine for model in models for p in model.parameters()):
            self._is_checked = False
            raise RuntimeError(
                "step_in_backward steps by each rank's own gradients, before DistributedDataParallel averages them: "
                "use fully_shard, or an optimizer without step_in_backward"
            )

    def _scale(self, grad: Tensor) -> Tensor | None:
        if self._clip_norm is None:
            return None
        local = coded_moments.local_of(grad)
        norm = torch.linalg.vector_norm(local, dtype=torch.float32)
        if isinstance(grad, DTensor):
            self._group = grad.device_mesh.get_group() if grad.device_mesh.ndim == 1 else dist.group.WORLD
        if self._clip == "parameter":
            if isinstance(grad, DTensor):
                norm = _over_ranks(norm, self._group)
            return self._coefficient(norm)
        self._norms.append(norm)
        if self._late_norm is None:
            return None
        place = _place_of(local.device)
        if place not in self._late_scales:
            self._late_scales[place] = self._coefficient(self._late_norm.to(local.device))
        return self._late_scales[place]

    def _coefficient(self, norm: Tensor) -> Tensor:
        assert self._clip_norm is not None
        return (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def end_step(self) -> None:
        for parameter, number, index in self._parameters():  # without a hook: unfrozen later, or its gradient was set
            if parameter.grad is not None:
                self._step(parameter, number, index)
        self._add_hooks()
        if self._norms:
            first = self._norms[0].device
            norm = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in self._norms]))
            self._late_norm = norm if self._group is None else _over_ranks(norm, self._group)
        self._norms, self._late_scales, self._tensors = [], {}, _StepTensors(self._optimizer)
        self._stepped.clear()

    def save_norm(self) -> None:
        for group in self._optimizer.param_groups:
            group["late_norm"] = None if self._late_norm is None else self._late_norm.item()

    def load_norm(self) -> None:
        saved = self._optimizer.param_groups[0]["late_norm"] if self._optimizer.param_groups else None
        self._late_norm, self._late_scales = None if saved is None else torch.tensor(saved, dtype=torch.float32), {}


def _over_ranks(norm: Tensor, group: Any) -> Tensor:
    square = norm * norm
    dist.all_reduce(square, group=group)
    return square.sqrt()


def _refuse_capture() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "NVFP4AdamW.step computes its step size and its random bits' number on the host, so every replay of a CUDA "
            "graph would repeat them: capture only forward and backward, and call step() after each replay"
        )


def _check_group(group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    if float(group["lr"]) < 0 or float(group["eps"]) < 0 or float(group["weight_decay"]) < 0:
        raise ValueError("lr, eps and weight_decay must not be negative")
    if not 0 <= beta1 < 1 or not 0 <= beta2 < 1:
        raise ValueError(f"betas must be at least 0 and below 1, not {group['betas']}")
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise TypeError(f"seed is an integer, not {group['seed']!r}")
    coded_moments.check_group(group)
    names = group.get("param_names") or [f"parameter {i} of its group" for i in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        coded_moments.check_parameter(parameter, name)
        if isinstance(parameter, NVFP4Tensor) and not parameter.requires_grad:
            raise ValueError(f"{name} does not require a gradient: set requires_grad, or leave it out")
