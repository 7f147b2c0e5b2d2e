"""AWQ's scaling (arXiv:2306.00978), folded into the preceding norm: columns with large inputs get finer steps.

The output of a linear does not change if column j of its weight is multiplied by s_j and column j of its input is
divided by s_j. If the input is the output of a norm with a weight, and only linears read it, the division can be folded
into the norm's weight. The model then computes the same function without extra work at run time. What changes is which
columns are large in their blocks of 16, and thus how finely each column is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.accuracy.gptq.inputs import product_of
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, in_eval_mode, list_of
from nvfp4_tensor.quantization.callers import Filter
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.linear import shared_parameters
from nvfp4_tensor.tensor.description import CodedTensor
from nvfp4_tensor.tensor.fake_quantize import fake_quantize

EXPONENTS = tuple(i / 10 for i in range(11))
"""Exponents to try: the scale of a column is the root mean square of its input, to this power; 0 changes nothing."""


@dataclasses.dataclass
class Fold:
    """A norm and the linears that read its output.

    Attributes:
        norm: the name and the module.
        linears: the linears, by name.
        exponent: the exponent with the smallest loss.
        loss, before: the sum of squared errors of the linears' outputs, with that exponent and with exponent 0.
    """

    norm: tuple[str, nn.Module]
    linears: dict[str, nn.Linear]
    exponent: float = 0.0
    loss: float = 0.0
    before: float = 0.0


@torch.no_grad()
def fold_scales(
    model: nn.Module,
    batches: Iterable[Any],
    config: NVFP4WeightOnlyConfig | None = None,
    *,
    filter_fn: Filter | None = None,
    progress: bool = True,
) -> list[Fold]:
    """Scale the columns of dense linears for NVFP4, and the preceding norms inversely, in place.

    The model computes the same function, except that the changed weights are rounded to their dtype. Afterwards,
    quantize it with ``quantize_``, :func:`calibrate` or :func:`gptq`. The function keeps one K x K matrix per norm in
    memory.

    Args:
        model: a dense model. A norm that a linear in NVFP4 or FP8 reads is skipped.
        batches: the inputs of the model, as in :func:`calibrate`.
        config: how the weights will be quantized; NVFP4WeightOnlyConfig() by default.
        filter_fn: selects the linears that will be quantized, as in ``quantize_``. Other linears that read the same
            norm are scaled too, but their errors are not counted.
        progress: show a progress bar over the batches.

    Returns:
        One :class:`Fold` per norm, including those with exponent 0, which are unchanged. A norm is skipped if anything
        other than linears reads its output, if one of these linears has another input too, or if it does not compute
        ``weight * x`` or ``(1 + weight) * x`` (+ bias).

    Raises:
        ValueError: no batches.
    """
    spec = (NVFP4WeightOnlyConfig() if config is None else config).weight
    batches = list_of(batches, "fold_scales weighs columns by their inputs")
    names = {module: name for name, module in model.named_modules()}
    with in_eval_mode(model), _Readers.watching(model) as readers:
        for batch in tqdm(batches, desc="folding", unit="batch", disable=not progress):
            call_model(model, batch)
    folds = []
    for norm, hessian in readers.hessians.items():
        linears = {names[linear]: linear for linear in readers.linears[norm]}
        counted = [linear for name, linear in linears.items() if filter_fn is None or filter_fn(linear, name)]
        if counted:
            fold = Fold((names[norm], norm), linears)
            with torch.autocast(hessian.device.type, enabled=False):  # autocast would round the products
                if _fold(fold, counted, hessian, spec):
                    folds.append(fold)
    return folds


class _Readers(TorchFunctionMode):
    """Record which linears read the output of each norm, and the Hessians of these inputs.

    Attributes:
        outputs: the outputs of norms in the current call, by id. A reference is kept so that the id stays unique.
        excluded: norms whose output is also read by something else.
        fed_by: the norms that feed each linear; None if something else does, or reads its weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        dense = [m for m in model.modules() if type(m) is nn.Linear and not isinstance(m.weight, CodedTensor)]
        self.by_weight = {id(m.weight): m for m in dense}
        self.outputs: dict[int, tuple[nn.Module, Tensor]] = {}
        self.linears: dict[nn.Module, list[nn.Linear]] = {}
        self.hessians: dict[nn.Module, Tensor] = {}
        self.excluded: set[nn.Module] = set()
        self.fed_by: dict[nn.Linear, set[nn.Module | None]] = {}

    @classmethod
    @contextmanager
    def watching(cls, model: nn.Module) -> Iterator[_Readers]:
        self = cls(model)
        shared = shared_parameters(model)
        norms = [m for m in model.modules() if _is_norm(m) and id(m.weight) not in shared]
        with ExitStack() as hooks, self:
            for norm in norms:
                hooks.enter_context(norm.register_forward_hook(self._on_norm))
            hooks.enter_context(model.register_forward_hook(self._on_model))
            yield self
        for norm, linears in self.linears.items():
            if any(id(linear.weight) in shared or self.fed_by[linear] != {norm} for linear in linears):
                self.excluded.add(norm)
        for norm in self.excluded:
            self.hessians.pop(norm, None)

    def _on_model(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Exclude norms whose output the model returns."""
        self.excluded |= {self.outputs[id(each)][0] for each in _tensors((output,)) if id(each) in self.outputs}
        self.outputs.clear()

    def _on_norm(self, norm: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[-1] == norm.weight.numel():  # type: ignore[operator,union-attr]
            self.outputs[id(output)] = norm, output

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # reading a shape or a dtype does not count
            read = list(_tensors((*args, *kwargs.values())))
            norms = [self.outputs[id(each)] for each in read if id(each) in self.outputs]
            weights = [self.by_weight[id(each)] for each in read if id(each) in self.by_weight]
            product = func is nn.functional.linear and len(weights) == 1 and len(norms) == 1 and norms[0][1] is read[0]
            for linear in weights:
                self.fed_by.setdefault(linear, set()).add(norms[0][0] if product else None)
            if product:
                self._add(*norms[0], weights[0])
            else:
                self.excluded |= {norm for norm, _ in norms}
        return func(*args, **kwargs)

    def _add(self, norm: nn.Module, x: Tensor, linear: nn.Linear) -> None:
        linears = self.linears.setdefault(norm, [])
        if not linears or linear is linears[0]:  # once per norm output
            rows = x.reshape(-1, x.shape[-1])
            square = product_of(rows, rows)
            self.hessians[norm] = self.hessians[norm] + square if norm in self.hessians else square
        if linear not in linears:
            linears.append(linear)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "Norm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


def _fold(fold: Fold, counted: Sequence[nn.Linear], hessian: Tensor, spec: QuantizeSpec) -> bool:
    """Find the best exponent and apply it. Return whether scales can be folded into the norm."""
    norm = fold.norm[1]
    root_mean_square = hessian.diagonal()[: norm.weight.numel()].sqrt()  # type: ignore[operator,union-attr]
    largest = root_mean_square.amax()
    if not largest > 0:
        return False
    size = root_mean_square.clamp(min=1e-4 * largest)
    losses = {}
    for exponent in EXPONENTS:
        scale = _normalized(size**exponent)
        losses[exponent] = sum(_loss(linear.weight.detach().float(), scale, hessian, spec) for linear in counted)
    fold.exponent = min(losses, key=lambda exponent: losses[exponent])
    fold.loss, fold.before = losses[fold.exponent], losses[0.0]
    return fold.exponent == 0 or _apply(norm, list(fold.linears.values()), _normalized(size**fold.exponent))


def _normalized(scale: Tensor) -> Tensor:
    return scale / (scale.amax() * scale.amin()).sqrt()


def _loss(weight: Tensor, scale: Tensor, hessian: Tensor, spec: QuantizeSpec) -> float:
    difference = fake_quantize(weight * scale, spec) / scale - weight
    difference = pad(difference, (0, len(hessian) - difference.shape[1]))
    return float(((difference @ hessian) * difference).sum())


def _apply(norm: nn.Module, linears: Sequence[nn.Linear], scale: Tensor) -> bool:
    """Divide the norm's factor and bias by the scale, and multiply the linears' columns by it.

    Return False, and change nothing, if this does not divide the norm's output by the scale.
    """
    parts = {name: p for name in ("weight", "bias") if isinstance(p := getattr(norm, name, None), nn.Parameter)}
    before = {name: p.detach().clone() for name, p in parts.items()}
    probe = torch.linspace(-2, 3, 4 * len(scale), dtype=torch.float32, device=scale.device).view(4, -1)
    probe = probe.to(parts["weight"].dtype)
    try:
        expected = norm(probe).float()
    except TypeError:  # the norm needs more than one input
        return False
    tolerance = max(2 * torch.finfo(probe.dtype).eps, 1e-5)
    undo = [(each, each.detach().clone()) for each in (*parts.values(), *(linear.weight for linear in linears))]
    try:
        for offset in (0.0, 1.0):  # Gemma's norms multiply by 1 + weight
            exact = _divide(parts, before, scale, offset)
            if torch.allclose(
                norm(probe).float() * exact, expected, rtol=tolerance, atol=tolerance * float(expected.abs().amax())
            ):
                for linear in linears:
                    linear.weight.copy_(linear.weight.float() * exact)
                undo.clear()
                return True
        return False
    finally:  # also after an error or an interrupt
        for each, value in undo:
            each.copy_(value)


def _divide(parts: dict[str, nn.Parameter], before: dict[str, Tensor], scale: Tensor, offset: float) -> Tensor:
    """Divide offset + weight and bias by the scale. Return the exact divisor: weights are rounded to their dtype."""
    factor = before["weight"].float() + offset
    parts["weight"].copy_(factor / scale - offset)
    # If the factor is zero, the output is zero with any scale.
    ratio = factor / (parts["weight"].float() + offset)
    exact = torch.where(ratio.isfinite() & (ratio > 0), ratio, scale)
    if "bias" in parts:
        parts["bias"].copy_(before["bias"].float() / exact)
    return exact
