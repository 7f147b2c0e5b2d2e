"""NVFP4Optimizer: a torch optimizer for parameters that are stored in NVFP4, without master copies."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import quantize_

from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor
from nvfp4_tensor.training.weights.base import WeightOptimizer, check_dense, local_of, named
from nvfp4_tensor.training.weights.error_feedback import add_error, check_error_feedback, shrink_momentum
from nvfp4_tensor.training.weights.write_back import check_writable, mode_of_write, write_back

_OWN = ("round_mode", "seed", "error_feedback", "writes")
"""The options of a parameter group that belong to NVFP4Optimizer and not to the inner optimizer."""


class NVFP4Optimizer(WeightOptimizer):
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

    For AdamW with moments in four bits, see :class:`NVFP4AdamW`.

    Args:
        params: an iterable of parameters, of (name, parameter) pairs, or of groups. NVFP4 parameters need
            requires_grad=True, no Hadamard transform, and the default layout.
        inner: the class of a torch optimizer, torch.optim.AdamW for instance.
        round_mode: "stochastic"; or "rne" for comparison, which loses updates of less than half a step.
        error_feedback: False; or "momentum" with SGD (momentum above 0, no nesterov), Adam and AdamW (no amsgrad).
        seed: the seed of the random bits. round_mode, error_feedback and seed can be set per group.
        **options: options of the inner optimizer, such as lr.

    Raises:
        TypeError: if inner is not an optimizer class, or ``states`` is given, which NVFP4AdamW replaces.
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
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(inner, type) or not issubclass(inner, torch.optim.Optimizer):
            raise TypeError(f"inner is a class of optimizer, torch.optim.AdamW for instance, not {inner!r}")
        if issubclass(inner, torch.optim.LBFGS | NVFP4Optimizer):
            raise ValueError(f"{inner.__name__} does not update parameters one at a time: use AdamW or SGD")
        if issubclass(inner, torch.optim.SparseAdam):
            raise ValueError("SparseAdam needs sparse gradients, but gradients of NVFP4 weights are dense: use Adam")
        _refuse_states(options)
        sample = nn.Parameter(torch.zeros(1, 1, dtype=torch.float32))
        self._inner = inner([sample], **options)
        self._initial_state = dict(self._inner.state[sample])
        own = {"round_mode": round_mode, "error_feedback": error_feedback, "seed": seed, "writes": 0}
        super().__init__(params, {**self._inner.defaults, **own})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner, "_initial_state": self._initial_state}

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
        loss = self._loss_of(closure)
        for parameter in self._parameters():
            if isinstance(parameter, NVFP4Tensor):
                check_dense(parameter.grad)
        index = 0
        for group in self.param_groups:
            group["writes"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, index)
                index += 1
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], index: int) -> None:
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
        if not float(group.get("lr", 1.0)):  # as torch's set_optimizer_state_dict makes states: codes and scales stay
            return
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

    def _inner_step(self, parameter: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """Run a step of the inner optimizer on ``values``, with the state of ``parameter``."""
        inner = self._inner
        options = {name: value for name, value in group.items() if name not in (*_OWN, "params", "param_names")}
        inner.param_groups = [{**options, "params": [values]}]
        state = self.state[parameter] or {  # Adagrad's constructor creates it in torch 2.11, most do not
            name: torch.full_like(values, initial.item()) if initial.dim() else initial.clone()
            for name, initial in self._initial_state.items()
        }
        inner.state = defaultdict(dict, {values: state})
        inner.step()
        self.state[parameter] = inner.state[values]
        inner.param_groups, inner.state = [], defaultdict(dict)

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
        self._load(state_dict, casts_dense=True)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        _refuse_states(group)
        group["round_mode"] = mode_of_write(group["round_mode"]).name.lower()  # a string, for weights_only=True
        inner = type(self._inner)
        for name, parameter in named(group):
            if local_of(parameter) is not parameter and isinstance(local_of(parameter), NVFP4Tensor):
                raise ValueError(
                    f"{name} is a shard of an NVFP4 weight, and a write would change the scale of all shards: use "
                    "NVFP4AdamW, which keeps that scale, or train in bfloat16 with NVFP4TrainingConfig and "
                    "nvfp4_tensor.distributed.enable_nvfp4_all_gather"
                )
            if isinstance(parameter, NVFP4Tensor):
                check_writable(parameter, name)
            if issubclass(inner, torch.optim.Muon) and parameter.dim() != 2:
                raise ValueError(
                    f"{name} has {parameter.dim()} dimensions, and Muon updates matrices: give it to another optimizer"
                )
        check_error_feedback(group, inner)


def _refuse_states(options: dict[str, Any]) -> None:
    if "states" in options:
        raise TypeError(
            "NVFP4Optimizer has no option states: NVFP4AdamW(model.parameters(), lr=...) is AdamW with moments in four "
            "bits, of NVFP4 and of dense weights"
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
        if not isinstance(module, nn.Linear) or isinstance(module.weight, NVFP4Tensor):
            return False
        return module.weight.requires_grad

    chosen = trains if filter_fn is None else filter_fn
    config = NVFP4WeightOnlyConfig(weight_spec=spec if spec is not None else QuantizeSpec())
    selected = [module for name, module in model.named_modules() if chosen(module, name)]
    if not selected:
        is_done = any(isinstance(getattr(module, "weight", None), NVFP4Tensor) for module in model.modules())
        why = "its linears are NVFP4 already, or filter_fn leaves them out" if is_done else "pass another filter_fn"
        raise ValueError(f"no linear of {type(model).__name__} was selected: {why}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*still train in NVFP4")  # the others may train on by a recipe
        quantize_(model, config, filter_fn=chosen)
    for module in selected:
        module.weight.requires_grad_()  # type: ignore[union-attr,operator]
    return model
