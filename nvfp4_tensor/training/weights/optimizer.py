"""NVFP4Optimizer: any torch optimizer over parameters that live in NVFP4, without a master copy of them."""

from __future__ import annotations

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
from nvfp4_tensor.training.weights.write_back import check_writable, write_back

_MOMENTUM = ("momentum_buffer", "exp_avg")
"""The state that is the momentum: SGD's, and that of optimizers with betas."""
_FED_AT = "error_feedback_lr"
"""The state that is the learning rate of the last error in the momentum, 0-d as "step" is."""
_SMALLEST_LR = 1e-24

_OWN = ("round_mode", "seed", "error_feedback", "writes")
"""Options of a parameter group that are this optimizer's, and not the inner one's."""


class NVFP4Optimizer(torch.optim.Optimizer):
    """Steps of an inner optimizer on NVFP4 parameters: each is decoded, updated, and written back by rounding.

    No dense copy of a parameter outlives its turn in :meth:`step`, whose peak is some float32 copies of one parameter.
    Gradients and the inner optimizer's state are dense, the state in float32. A write keeps the grid of the parameter's
    block scales, whose exponents follow the values (see :func:`write_back`): its expectation is the updated value, and
    what has no update does not move. Random bits are a function of the seed, the number of the write and the
    parameter's place among all, so that equal gradients write equal bits on every device, and a run goes on bit for
    bit from a state_dict.

    Dense parameters may stand among them, and are the inner optimizer's as usual. Learning rate schedulers, parameter
    groups, hooks and closures work as with any torch.optim.Optimizer. Parameters are updated one at a time, so the
    inner optimizer has to be one whose update of a parameter depends on that parameter alone: not LBFGS. Muon updates
    matrices alone, so biases and norms need another optimizer.

    **Error feedback** (``error_feedback="momentum"``; ECO, arXiv 2601.22101) keeps what a write lost. With the error
    e = updated value - what was written, and the step size h of the momentum m (update = -h m; for SGD the learning
    rate, for Adam lr / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), element by element),

        m += (1 - 1 / beta) / h * e

    so that the next steps carry e out, beta (1/beta - 1) of it at first and all of it in the end. It takes the error
    of one step for that of the one before, which needs no memory of its own. Where the learning rate rises, the
    momentum is first multiplied by old / new, since its errors would come out as much larger: after a warm restart the
    momentum builds up anew.

    Args:
        params: an iterable of parameters, of (name, parameter), or of groups, as every optimizer takes them. NVFP4
            parameters have requires_grad=True, no Hadamard transform and the default layout.
        inner: the class of a torch optimizer, torch.optim.AdamW for instance.
        round_mode: "stochastic", or "rne" to compare: to nearest, updates of less than half a step vanish.
        error_feedback: False, or "momentum": with SGD (momentum above 0, no nesterov), Adam and AdamW (no amsgrad).
        seed: of the random bits; round_mode, error_feedback and seed may be said by group.
        **options: of the inner optimizer, lr for one.

    Raises:
        TypeError: inner is not an optimizer class.
        ValueError: a parameter that cannot be written to, an option that does not fit; what the inner one raises.

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
            raise ValueError(f"{inner.__name__} does not update parameters one at a time: use AdamW or SGD, say")
        if issubclass(inner, torch.optim.SparseAdam):
            raise ValueError("SparseAdam needs sparse gradients, and those of NVFP4 weights are dense: use Adam")
        like = nn.Parameter(torch.zeros(1, 1))
        self._engine = inner([like], **options)
        self._first_state = dict(self._engine.state[like])
        own = {"round_mode": round_mode, "error_feedback": error_feedback, "seed": seed, "writes": 0}
        super().__init__(params, {**self._engine.defaults, **own})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_engine": self._engine, "_first_state": self._first_state}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's; checks what is new in it, and leaves nothing half-added."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], type(self._engine))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient; returns what the closure does.

        Not to be captured in a CUDA graph: how often it has written, which its random bits follow from, is counted on
        the host, and each replay would draw those of the capture. Capture forward and backward, and call it after the
        replay.

        Raises:
            RuntimeError: a gradient is not dense, or the current stream is capturing a CUDA graph.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "NVFP4Optimizer.step counts its writes on the host, and a CUDA graph would replay the random bits of "
                "one of them: capture forward and backward alone, and call step() after each replay"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in self._parameters():
            if isinstance(parameter, NVFP4Tensor) and parameter.grad is not None:
                _check_dense(parameter.grad)
        place = 0
        for group in self.param_groups:
            group["writes"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group, place)
                place += 1
        return loss

    def _step_of(self, parameter: nn.Parameter, group: dict[str, Any], place: int) -> None:
        if not isinstance(parameter, NVFP4Tensor):
            self._inner_step(parameter, parameter, group)
            return
        before = parameter.dequantize(torch.float32)
        after = nn.Parameter(before.clone())
        assert parameter.grad is not None
        after.grad = parameter.grad.float()
        if group["error_feedback"]:
            _shrink_momentum(self.state[parameter], group)
        self._inner_step(parameter, after, group)
        written = write_back(
            parameter,
            after.detach() - before,
            round_mode=group["round_mode"],
            rng_state=rng_state_of(group["seed"], str(place), group["writes"], parameter.device),
        )
        parameter.copy_(written)
        if group["error_feedback"]:
            _feed_back(self.state[parameter], after.detach() - written.dequantize(torch.float32), group)

    def _first_state_of(self, values: Tensor) -> dict[str, Any]:
        """What the inner optimizer's constructor gives a parameter: Adagrad's does so in torch 2.11, most give none."""
        return {
            name: torch.full_like(values, first.item()) if first.dim() else first.clone()
            for name, first in self._first_state.items()
        }

    def _inner_step(self, parameter: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """One step of the inner optimizer on ``values``, with the state of ``parameter``."""
        engine = self._engine
        options = {name: value for name, value in group.items() if name not in (*_OWN, "params", "param_names")}
        engine.param_groups = [{**options, "params": [values]}]
        engine.state = defaultdict(dict, {values: self.state[parameter] or self._first_state_of(values)})
        engine.step()
        self.state[parameter] = engine.state[values]
        engine.param_groups, engine.state = [], defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As every optimizer's; scalars keep their dtype and the state of NVFP4 parameters is float32, where torch
        casts both to the parameter's dtype."""
        super().load_state_dict(state_dict)
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
        raise ValueError(f"updates are written by round_mode 'stochastic' or 'rne', not by {mode.name.lower()!r}")
    group["round_mode"] = mode.name.lower()  # a string, which any torch.load reads
    if isinstance(group["seed"], bool) or not isinstance(group["seed"], int):
        raise TypeError(f"seed is an integer, not {group['seed']!r}")
    names = group.get("param_names") or [f"parameter {i} of its group" for i in range(len(group["params"]))]
    for name, parameter in zip(names, group["params"], strict=True):
        if isinstance(getattr(parameter, "_local_tensor", None), NVFP4Tensor):
            raise ValueError(
                f"{name} is a shard of an NVFP4 weight, and a write changes the scale of the whole: train it in "
                "bfloat16 by NVFP4TrainingConfig, with nvfp4_tensor.distributed.enable_nvfp4_all_gather"
            )
        if isinstance(parameter, NVFP4Tensor):
            check_writable(parameter, name)
        if issubclass(inner, torch.optim.Muon) and parameter.dim() != 2:
            raise ValueError(
                f"{name} has {parameter.dim()} dimensions, and Muon updates matrices: give it to another optimizer"
            )
    if group["error_feedback"] not in (False, "momentum"):
        raise ValueError(f"error_feedback is False or 'momentum', got {group['error_feedback']!r}")
    if group["error_feedback"]:
        _check_momentum(group, inner)


def _check_momentum(group: dict[str, Any], inner: type[torch.optim.Optimizer]) -> None:
    if inner is torch.optim.SGD:
        if not group["momentum"] or group["nesterov"]:
            raise ValueError("error_feedback='momentum' goes into SGD's momentum: momentum above 0, without nesterov")
    elif inner in (torch.optim.Adam, torch.optim.AdamW):
        if group["amsgrad"] or not group["betas"][0]:
            raise ValueError(f"error_feedback='momentum' needs {inner.__name__} with beta1 above 0, without amsgrad")
    else:
        raise ValueError(f"error_feedback='momentum' knows the momentum of SGD, Adam and AdamW, not {inner.__name__}'s")


def _shrink_momentum(state: dict[str, Any], group: dict[str, Any]) -> None:
    """Multiplies the momentum by old / new learning rate where it has risen, so that no error comes out larger."""
    if _FED_AT not in state:
        return
    fed_at, lr = float(state[_FED_AT]), torch.tensor(float(group["lr"])).item()  # both rounded to float32
    if fed_at < lr:
        state[_MOMENTUM["betas" in group]].mul_(fed_at / lr)


def _feed_back(state: dict[str, Any], error: Tensor, group: dict[str, Any]) -> None:
    """m += (1 - 1 / beta) / h * error; nothing where the learning rate is 0, or so small that this would overflow."""
    lr = float(group["lr"])
    if lr < _SMALLEST_LR:
        return
    state[_FED_AT] = torch.tensor(lr)
    if "betas" not in group:
        state["momentum_buffer"] += error * ((1 - 1 / group["momentum"]) / lr)
        return
    beta1, beta2 = map(float, group["betas"])
    step = float(state["step"])
    per_update = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"]) * ((1 - beta1**step) / lr)
    state["exp_avg"] += error * per_update * (1 - 1 / beta1)


def _check_dense(grad: Tensor) -> None:
    if isinstance(grad, NVFP4Tensor) or grad.layout != torch.strided:
        raise RuntimeError("the gradient of an NVFP4 parameter is a dense tensor: what F.linear's backward leaves")


def to_nvfp4_parameters(
    model: nn.Module,
    spec: QuantizeSpec | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """The same model with the weights of its linears NVFP4 parameters that train: for :class:`NVFP4Optimizer`.

    Activations stay as they come, and products are with decoded weights. Gradients of the weights are dense.

    Args:
        model: of nn.Linear in bfloat16, float16 or float32.
        spec: how they are quantized at first, to nearest even in 1x16 blocks by default; without a Hadamard transform.
        filter_fn: a function of (module, name) as quantize_ takes it, :func:`keep_dense` for one. All linears whose
            weight trains by default.

    Raises:
        TypeError, ValueError: as ``quantize_(model, NVFP4WeightOnlyConfig())`` does; a filter that selects nothing.

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
        raise ValueError(f"no linear of {type(model).__name__} was selected: see filter_fn")
    quantize_(model, config, filter_fn=trains)
    for module in model.modules():
        if any(module is one for one in selected):
            module.weight.requires_grad_()  # type: ignore[union-attr,operator]
    return model
