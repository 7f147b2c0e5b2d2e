"""NVFP4Optimizer: a torch optimizer for parameters that are stored in NVFP4, without master copies."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights import coded_moments
from nvfp4_tensor.training.weights.error_feedback import add_error, check_error_feedback, shrink_momentum
from nvfp4_tensor.training.weights.write_back import check_writable, write_back

_OWN = ("round_mode", "seed", "error_feedback", "writes", "states")
"""The options of a parameter group that belong to NVFP4Optimizer and not to the inner optimizer."""


class NVFP4Optimizer(torch.optim.Optimizer):
    """Apply an inner optimizer to NVFP4 parameters: decode each, update it, and round the result to NVFP4.

    The memory peak of :meth:`step` is a few float32 copies of one parameter; there are no master copies. Gradients and
    the inner optimizer's state are dense, and the state is float32. A write keeps the grid of the parameter's block
    scales, whose exponents follow the values (see :func:`write_back`): its expectation is the updated value, and
    elements without an update do not change unless their block outgrows its scale. Random bits depend on the seed, the
    number of the write and the index of the parameter. So equal updates write equal bits on every device (torch's
    optimizers compute updates whose last bits depend on it), and on one device a run resumes from a state_dict bit for
    bit.

    The inner optimizer updates dense parameters as usual. Learning rate schedulers, parameter groups, hooks and
    closures work as with any torch.optim.Optimizer. Parameters are updated one at a time, so the update of a parameter
    must not depend on other parameters, as it does with LBFGS. Muon updates only matrices, so biases and norms need
    another optimizer.

    **Error feedback** (``error_feedback="momentum"``; ECO, arXiv 2601.22101) adds the rounding error of each write to
    the momentum, so that later steps correct it. It needs no memory. When the learning rate rises, the momentum is
    multiplied by old / new, so that the errors in it do not grow: after a warm restart the momentum builds up again.

    **States in four bits** (``states="nvfp4"``, with AdamW): the moments take 1.125 bytes per element instead of 8, and
    a step is one pass, as in :class:`NVFP4AdamW`, which needs less around it.

    Args:
        params: an iterable of parameters, of (name, parameter) pairs, or of groups. NVFP4 parameters need
            requires_grad=True, no Hadamard transform, and the default layout.
        inner: the class of a torch optimizer, torch.optim.AdamW for instance.
        round_mode: "stochastic"; or "rne" for comparison, which loses updates of less than half a step.
        error_feedback: False; or "momentum" with SGD (momentum above 0, no nesterov), Adam and AdamW (no amsgrad).
        states: "float32"; or "nvfp4" with AdamW, without error feedback, for weights in 1x16 blocks.
        seed: the seed of the random bits. round_mode, error_feedback, states and seed can be set per group.
        **options: options of the inner optimizer, such as lr.

    Raises:
        TypeError: if inner is not an optimizer class.
        ValueError: if a parameter cannot be written to or an option does not fit; also errors of the inner optimizer.

    >>> to_nvfp4_parameters(model)
    >>> optimizer = NVFP4Optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, seed=0)
    """

    def __init__(
        self,
        params: Any,
        inner: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        round_mode: RoundingMode | str = "stochastic",
        error_feedback: bool | str = False,
        states: str = "float32",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(inner, type) or not issubclass(inner, torch.optim.Optimizer):
            raise TypeError(f"inner is a class of optimizer, torch.optim.AdamW for instance, not {inner!r}")
        if issubclass(inner, torch.optim.LBFGS | NVFP4Optimizer):
            raise ValueError(f"{inner.__name__} does not update parameters one at a time: use AdamW or SGD")
        if issubclass(inner, torch.optim.SparseAdam):
            raise ValueError("SparseAdam needs sparse gradients, but gradients of NVFP4 weights are dense: use Adam")
        sample = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32))
        self._inner = inner([sample], **options)
        self._initial_state = dict(self._inner.state[sample])
        own = {"round_mode": round_mode, "error_feedback": error_feedback, "states": states, "seed": seed, "writes": 0}
        super().__init__(params, {**self._inner.defaults, **own})

    def __getstate__(self) -> dict[str, Any]:
        kept = coded_moments.as_bytes(super().__getstate__())
        return {**kept, "_inner": self._inner, "_initial_state": self._initial_state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(coded_moments.from_bytes(state))
        for group in self.param_groups:
            group.setdefault("states", "float32")  # state dicts of earlier versions have none

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every optimizer does; if the group is not valid, raise an error and do not add it."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], type(self._inner))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.compiler.disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient, and return the result of the closure.

        A CUDA graph cannot capture a step: random bits depend on the number of writes, which is counted on the host,
        so every replay would reuse the random bits of the capture. Capture the forward and the backward, and call step
        after each replay.

        Raises:
            RuntimeError: if a gradient is not dense, or the current stream is capturing a CUDA graph.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "NVFP4Optimizer.step counts its writes on the host, so every replay of a CUDA graph would reuse the "
                "same random bits: capture only forward and backward, and call step() after each replay"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._parameters():
            if isinstance(parameter, NVFP4Tensor) and parameter.grad is not None:
                _check_dense(parameter.grad)
        index = 0
        for group in self.param_groups:
            group["writes"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, index)
                index += 1
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
        if group["states"] == "nvfp4":
            coded_moments.step_with_state(parameter, self.state[parameter], group, str(index))
            return
        if not isinstance(parameter, NVFP4Tensor):
            self._inner_step(parameter, parameter, group)
            return
        before = parameter.dequantize(torch.float32)
        after = nn.Parameter(before.clone())
        assert parameter.grad is not None
        after.grad = parameter.grad.float()
        if group["error_feedback"]:
            shrink_momentum(self.state[parameter], group)
        self._inner_step(parameter, after, group)
        written = write_back(
            parameter,
            after.detach() - before,
            round_mode=group["round_mode"],
            rng_state=rng_state_of("write back", group["seed"], str(index), group["writes"], parameter.device),
        )
        parameter.copy_(written)
        if group["error_feedback"]:
            error = after.detach() - written.dequantize(torch.float32)
            add_error(self.state[parameter], error, group)

    def _initial_state_for(self, values: Tensor) -> dict[str, Any]:
        """Return the state that the inner optimizer's constructor creates: Adagrad does in torch 2.11, most do not."""
        return {
            name: torch.full_like(values, initial.item()) if initial.dim() else initial.clone()
            for name, initial in self._initial_state.items()
        }

    def _inner_step(self, parameter: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """Run a step of the inner optimizer on ``values``, with the state of ``parameter``."""
        inner = self._inner
        options = {name: value for name, value in group.items() if name not in (*_OWN, "params", "param_names")}
        inner.param_groups = [{**options, "params": [values]}]
        inner.state = defaultdict(dict, {values: self.state[parameter] or self._initial_state_for(values)})
        inner.step()
        self.state[parameter] = inner.state[values]
        inner.param_groups, inner.state = [], defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as every optimizer does."""
        return coded_moments.as_bytes(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as every optimizer does, with float32 state for NVFP4 parameters.

        0-d state keeps its dtype. torch would cast both to the parameter's dtype.

        Raises:
            ValueError: if it is that of another class of optimizer; nothing is loaded.
        """
        if any("writes" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "the state dict is not an NVFP4Optimizer's: it counts no writes, by which random bits are chosen. "
                "Load what NVFP4Optimizer.state_dict() returned, or start with new state"
            )
        state_dict = coded_moments.from_bytes(state_dict)
        super().load_state_dict(state_dict)
        if any(group["states"] == "nvfp4" for group in self.param_groups):
            coded_moments.load_exactly(self, state_dict)
            return
        saved = (i for group in state_dict["param_groups"] for i in group["params"])
        for i, parameter in zip(saved, self._parameters(), strict=True):
            state = self.state[parameter] if i in state_dict["state"] else {}
            for name, value in state_dict["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    cast = state[name]
                    dense_dtype = torch.float32 if isinstance(parameter, NVFP4Tensor) else cast.dtype
                    dtype = dense_dtype if value.dim() else value.dtype
                    state[name] = value.detach().clone().to(cast.device, dtype)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def _check_group(group: dict[str, Any], inner: type[torch.optim.Optimizer]) -> None:
    mode = RoundingMode.of(group["round_mode"])
    if mode not in (RoundingMode.STOCHASTIC, RoundingMode.RNE):
        raise ValueError(f"round_mode of updates is 'stochastic' or 'rne', not {mode.name.lower()!r}")
    group["round_mode"] = mode.name.lower()  # a string, so that torch.load(weights_only=True) reads it
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise TypeError(f"seed is an integer, not {group['seed']!r}")
    if group["states"] not in ("float32", "nvfp4"):
        raise ValueError(f"states is 'float32' or 'nvfp4', not {group['states']!r}")
    names = group.get("param_names") or [f"parameter {i} of its group" for i in range(len(group["params"]))]
    if group["states"] == "nvfp4":
        if inner is not torch.optim.AdamW:
            raise ValueError(f"states='nvfp4' supports AdamW, not {inner.__name__}")
        coded_moments.check_group(group)
        for name, parameter in zip(names, group["params"], strict=True):
            coded_moments.check_parameter(parameter, name)
        return
    for name, parameter in zip(names, group["params"], strict=True):
        if isinstance(getattr(parameter, "_local_tensor", None), NVFP4Tensor):
            raise ValueError(
                f"{name} is a shard of an NVFP4 weight, and a write would change the scale of all shards: train it in "
                "bfloat16 with NVFP4TrainingConfig and nvfp4_tensor.distributed.enable_nvfp4_all_gather, or with "
                "states='nvfp4', which keeps that scale"
            )
        if isinstance(parameter, NVFP4Tensor):
            check_writable(parameter, name)
        if issubclass(inner, torch.optim.Muon) and parameter.dim() != 2:
            raise ValueError(
                f"{name} has {parameter.dim()} dimensions, and Muon updates matrices: give it to another optimizer"
            )
    check_error_feedback(group, inner)


def _check_dense(grad: Tensor) -> None:
    if isinstance(grad, NVFP4Tensor) or grad.layout != torch.strided:
        raise RuntimeError(
            "an NVFP4 parameter needs a gradient that is a dense tensor, as F.linear's backward makes it"
        )


def to_nvfp4_parameters(
    model: nn.Module,
    spec: QuantizeSpec | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Convert the weights of a model's linears in place to trainable NVFP4 parameters, for :class:`NVFP4Optimizer`.

    Activations are not quantized, products use decoded weights, and gradients of the weights are dense.

    Args:
        model: a model with nn.Linear in bfloat16, float16 or float32.
        spec: how the weights are quantized: by default, to nearest even in 1x16 blocks. A Hadamard transform is not
            supported.
        filter_fn: a function of (module, name), such as :func:`keep_dense`. By default, all linears with a trainable
            weight.

    Raises:
        TypeError, ValueError: see ``quantize_(model, NVFP4WeightOnlyConfig())``; also if no linear is selected.

    >>> model = to_nvfp4_parameters(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    """

    def trains(module: nn.Module, name: str) -> bool:
        if filter_fn is not None:
            return filter_fn(module, name)
        return (
            isinstance(module, nn.Linear)
            and not isinstance(module.weight, NVFP4Tensor)
            and (module.weight.requires_grad)
        )

    config = NVFP4WeightOnlyConfig(weight_spec=spec if spec is not None else QuantizeSpec())
    selected = [module for name, module in model.named_modules() if trains(module, name)]
    if not selected:
        is_done = any(isinstance(getattr(module, "weight", None), NVFP4Tensor) for module in model.modules())
        why = "its linears are NVFP4 already, or filter_fn leaves them out" if is_done else "pass another filter_fn"
        raise ValueError(f"no linear of {type(model).__name__} was selected: {why}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*still train in NVFP4")  # the others may train on by a recipe
        quantize_(model, config, filter_fn=trains)
    for module in model.modules():
        if any(module is one for one in selected):
            module.weight.requires_grad_()  # type: ignore[union-attr,operator]
    return model
