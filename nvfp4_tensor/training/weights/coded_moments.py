"""AdamW's moments of one parameter in four bits each: their tensors, and a step (contract, section 12).

A parameter of N elements has 1.125 N bytes of moments, where float32 has 8 N. Parameters with fewer than two dimensions
or fewer than 16 columns (norms, biases) keep float32 moments: their codes would not be smaller.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nvfp4_tensor.dispatch.writes import count_write, writes_of
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.optimizer_step import SMALLEST_LEAST_EXPONENT, UNBIASED
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights.write_back import check_writable

CODES = ("ratio_codes", "ratio_scale", "second_moment_codes", "second_moment_exponent")
"""State of a parameter with coded moments, beside "step"."""
DENSE = ("exp_avg", "exp_avg_sq")
"""State of a parameter that is too small for codes."""
SCALE = "per_tensor_scale"
"""State of an NVFP4 weight beside its moments: its per-tensor scale at the last step, float32 on the CPU."""

_HEADROOM = 8
"""How far the block scales of a weight may grow before they clip: the per-tensor scale does not change with a step."""
_LARGEST_LEAST_EXPONENT = 240
_WRITES = "_nvfp4_writes_at_step"
"""An attribute of the storage of a weight's codes: how often it had been written to after the last step."""


def is_coded(parameter: Tensor) -> bool:
    """Return whether the moments of the parameter are codes."""
    if isinstance(local_of(parameter), NVFP4Tensor):
        return True
    return parameter.dim() >= 2 and math.prod(parameter.shape[1:]) >= BLOCK


def check_parameter(parameter: Tensor, name: str) -> None:
    """Raise a ValueError if a step does not support the parameter."""
    if isinstance(parameter, DTensor):
        if any(not p.is_replicate() and p != Shard(0) for p in parameter.placements):
            raise ValueError(
                f"{name} is sharded as {parameter.placements}, and moments in codes need whole rows: Shard(0)"
            )
        parameter = parameter._local_tensor
    if isinstance(parameter, NVFP4Tensor):
        check_writable(parameter, name)
        if parameter.spec.block_rows != 1 or parameter.dim() != 2 or parameter.per_tensor_scale.dim():
            raise ValueError(
                f"{name} is not one matrix in 1x16 blocks with one per-tensor scale, which moments in codes need: "
                "quantize it with block_rows=1"
            )
    elif parameter.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} is {parameter.dtype}, and moments in codes need bfloat16, float32 or NVFP4 weights")
    elif type(parameter) not in (Tensor, nn.Parameter):
        raise ValueError(f"{name} is a {type(parameter).__name__}, and moments in codes need plain or NVFP4 weights")
    elif not parameter.is_contiguous():
        raise ValueError(f"{name} is not contiguous, so it cannot be updated in place: use contiguous()")


def new_state(parameter: Tensor) -> dict[str, Any]:
    """Return zero moments of a parameter; for a DTensor, they are sharded like it."""
    state: dict[str, Any] = {"step": torch.tensor(0.0, dtype=torch.float32)}
    if not is_coded(parameter):
        zeros = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.preserve_format)
        return {**state, "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
    local = local_of(parameter)
    if isinstance(local, NVFP4Tensor):
        make_headroom(parameter)
        state[SCALE] = _scale_of(local)
    rows, columns = _matrix_shape(local)
    blocks = -(-columns // BLOCK)
    for name in CODES:
        width = 8 * blocks if name.endswith("codes") else blocks
        tensor = torch.zeros(rows, width, dtype=torch.uint8, device=local.device)
        if name == "ratio_scale":
            tensor = tensor.view(torch.float8_e4m3fn)
        state[name] = _distributed_like(parameter, tensor, width)
    return state


def _distributed_like(parameter: Tensor, local: Tensor, width: int) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    shape = torch.Size((parameter.shape[0], width))
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=(width, 1)
    )


def local_of(t: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or the tensor itself."""
    return t._local_tensor if isinstance(t, DTensor) else t


def _matrix_shape(local: Tensor) -> tuple[int, int]:
    if isinstance(local, NVFP4Tensor):
        return local.shape[0], local.shape[1]
    return local.shape[0], math.prod(local.shape[1:])


def first_row(parameter: Tensor) -> int:
    """Return where this rank's rows begin in the full parameter."""
    if not isinstance(parameter, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0] if offset else 0


def make_headroom(parameter: Tensor) -> None:
    """Divide block scales by a power of two, and multiply the per-tensor scale by it, until they can grow eightfold.

    Blocks with scales below 1/3584 of the largest keep fewer bits of their scale. Shards agree on the power.
    """
    w = local_of(parameter)
    assert isinstance(w, NVFP4Tensor)
    largest = (
        w.scale.float().nan_to_num(0.0).max() if w.numel() else torch.zeros((), dtype=torch.float32, device=w.device)
    )
    if isinstance(parameter, DTensor):
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=parameter.device_mesh.get_group(dim))
    top = largest.item()
    if top * _HEADROOM <= 448:
        return
    power = 2.0 ** math.ceil(math.log2(top * _HEADROOM / 448))
    count_write(w)
    nan = w.scale.float().isnan()
    scaled = torch.where(nan, torch.nan, w.scale.float() / power).to(torch.float8_e4m3fn)
    scale = w.scale.view(torch.uint8)
    scale.copy_(scaled.view(torch.uint8))
    w.per_tensor_scale.mul_(power)


def _scale_of(weight: NVFP4Tensor) -> Tensor:
    return weight.per_tensor_scale.detach().to("cpu", torch.float32, copy=True)


def _keep_headroom(parameter: Tensor, weight: NVFP4Tensor, state: dict[str, Any]) -> None:
    """Make headroom again if others wrote to the weight since the last step.

    Writes to the storage of its codes are counted. A storage without a count is a copy's, a loaded model's, or that of
    a weight that replaced another one: it has the weight of the last step if the per-tensor scale is that step's.
    """
    storage = weight.qdata.untyped_storage()
    seen = getattr(storage, _WRITES, None)
    if seen == writes_of(storage):
        return
    if seen is not None or (SCALE in state and not torch.equal(state[SCALE], _scale_of(weight))):
        make_headroom(parameter)
    state[SCALE] = _scale_of(weight)


def _step_codes(
    parameter: Tensor, grad: Tensor, state: dict[str, Any], moments: list[Tensor], rest: tuple[Tensor, Tensor, int]
) -> None:
    weight = local_of(parameter.detach())
    assert isinstance(weight, NVFP4Tensor)
    _keep_headroom(parameter, weight, state)
    torch.ops.nvfp4.adamw_step_codes(weight.qdata, weight.scale, weight.per_tensor_scale, grad, *moments, *rest)
    count_write(weight)
    storage = weight.qdata.untyped_storage()
    setattr(storage, _WRITES, writes_of(storage))


def numbers_of(group: dict[str, Any], step: int) -> list[float]:
    """Return the numbers of a step (HYPER), with a gradient scale of 1."""
    lr, eps, decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
    beta1, beta2 = map(float, group["betas"])
    step_size = UNBIASED * lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return [1.0, beta1, 1 - beta1, beta2, 1 - beta2, step_size, 1 - lr * decay, float(least_exponent(eps))]


def least_exponent(eps: float) -> int:
    """Return the float32 exponent field of the smallest power of two that is at least eps^2, within v's range."""
    if eps <= 0:
        return SMALLEST_LEAST_EXPONENT
    mantissa, exponent = math.frexp(eps * eps)
    field = exponent + 127 - (mantissa == 0.5)
    return min(max(field, SMALLEST_LEAST_EXPONENT), _LARGEST_LEAST_EXPONENT)


def step_parameter(
    parameter: nn.Parameter | Tensor, grad: Tensor, state: dict[str, Any], numbers: Tensor, rng_state: Tensor
) -> None:
    """Update a parameter and its moments in place.

    numbers: float32 (8,); rng_state: int64 (2,); both on the parameter's device.
    """
    if grad.layout != torch.strided:
        raise RuntimeError(f"moments in codes need dense gradients, and this one is {grad.layout}: use sparse=False")
    row0 = first_row(parameter)
    weight, grad = local_of(parameter.detach()), local_of(grad.detach())
    if not is_coded(parameter):
        moments = [local_of(state[name]) for name in DENSE]
        _step_vector(weight, grad, moments, numbers, rng_state, row0)
        torch.autograd.graph.increment_version(parameter)
        return
    moments = [local_of(state[name]) for name in CODES]
    rows, columns = _matrix_shape(weight)
    grad = grad.reshape(rows, columns)
    if grad.dtype == torch.float16:
        grad = grad.float()
    if isinstance(weight, NVFP4Tensor):
        _step_codes(parameter, grad, state, moments, (numbers, rng_state, row0))
    else:
        torch.ops.nvfp4.adamw_step(weight.view(rows, columns), grad, *moments, numbers, rng_state, row0)
    torch.autograd.graph.increment_version(parameter)  # a graph that needs the old values then says so


def _step_vector(
    weight: Tensor, grad: Tensor, moments: list[Tensor], numbers: Tensor, rng_state: Tensor, row0: int
) -> None:
    """Update a small parameter with float32 moments."""
    grad = grad.float() if grad.dtype == torch.float16 else grad
    m, v = (moment.view(-1) for moment in moments)
    element0 = row0 * math.prod(weight.shape[1:])
    torch.ops.nvfp4.adamw_step_vector(weight.view(-1), grad.reshape(-1), m, v, numbers, rng_state, element0)


def step_with_state(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any], name: str) -> None:
    """Update a parameter by its gradient and its state, which is created if it is empty."""
    assert parameter.grad is not None
    if not state:
        state.update(new_state(parameter))
    state["step"] += 1
    count, device = int(state["step"].item()), local_of(parameter).device
    numbers = torch.tensor(numbers_of(group, count), dtype=torch.float32, device=device)
    rng_state = rng_state_of("adamw", group["seed"], name, count, device)
    step_parameter(parameter, parameter.grad, state, numbers, rng_state)


def check_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Raise a ValueError if a state dict has no coded moments of the optimizer's parameters."""
    saved = [i for group in state_dict["param_groups"] for i in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any("seed" not in group for group in state_dict["param_groups"]):
        raise ValueError("the state dict is of another optimizer, without coded moments: start with new moments")
    if len(saved) != len(parameters):
        return  # torch says so
    for i, parameter in zip(saved, parameters, strict=True):
        state = state_dict["state"].get(i, {})
        names = {"step", *(CODES if is_coded(parameter) else DENSE)}
        if state and set(state) - {SCALE} != names:
            raise ValueError(
                f"the state dict has {', '.join(sorted(map(str, state)))} of parameter {i}, whose moments in codes are "
                f"{', '.join(sorted(names))}: start with new moments"
            )


def load_exactly(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace the tensors of a loaded state, which torch casts to the parameter's dtype, by those of the state dict."""
    saved = (i for group in state_dict["param_groups"] for i in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for i, parameter in zip(saved, parameters, strict=True):
        weight = local_of(parameter)
        if isinstance(weight, NVFP4Tensor) and hasattr(storage := weight.qdata.untyped_storage(), _WRITES):
            delattr(storage, _WRITES)  # the weight is loaded too, as it was saved, in either order
        for name, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                device = torch.device("cpu") if name in ("step", SCALE) else local_of(parameter).device
                exact = value.detach().clone(memory_format=torch.contiguous_format)
                optimizer.state[parameter][name] = exact.to(device)


def as_bytes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict, or what __getstate__ returns, with e4m3 as uint8: plain pickle does not support float8."""
    return _with_scales(holder, torch.uint8)


def from_bytes(holder: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`as_bytes` was given."""
    return _with_scales(holder, torch.float8_e4m3fn)


def _with_scales(holder: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    states = holder["state"].copy()
    for key, state in states.items():
        if "ratio_scale" in state:
            scale = local_of(state["ratio_scale"]).view(dtype)
            states[key] = {**state, "ratio_scale": _distributed_like(state["ratio_scale"], scale, scale.shape[1])}
    return {**holder, "state": states}


def check_group(group: dict[str, Any]) -> None:
    """Raise a ValueError if the options of AdamW do not fit moments in codes."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise ValueError(f"moments in codes do not support {option}=True: use states='float32'")
    if group.get("error_feedback"):
        raise ValueError(
            "error_feedback needs a float32 momentum, and writes of 24 random bits need none: leave it out"
        )
    if "round_mode" in group and RoundingMode.of(group["round_mode"]) != RoundingMode.STOCHASTIC:
        raise ValueError("states='nvfp4' rounds stochastically: round_mode='rne' needs states='float32'")
