"""AWQ's scaling (arXiv:2306.00978), folded into the norm before: columns that are fed much get finer steps.

A linear gives the same where column j of its weight is multiplied by s_j and its input divided by it. Where the input
is what a norm with a weight gives, and nothing else reads it, that division is one of the norm's weight: the model
computes what it did, and takes nothing at run time. What changes is which columns are large in their blocks of 16, and
so how finely each is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization.accuracy.gptq.stages import call_model, in_eval_mode
from nvfp4_tensor.quantization.accuracy.gptq.statistics import square_of
from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter, is_quantizable
from nvfp4_tensor.quantization.config import NVFP4WeightOnlyConfig
from nvfp4_tensor.tensor.fake_quantize import fake_quantize

EXPONENTS = tuple(i / 10 for i in range(11))
"""What the root mean square of a column's input is raised to; 0 changes nothing."""


@dataclasses.dataclass
class Fold:
    """A norm and the linears that alone read what it gives.

    Attributes:
        norm: the name and the module.
        linears: by name.
        exponent: of those tried the one of least loss.
        loss, before: of the linears' outputs, squared and summed over what was seen, with that exponent and with 0.
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
    """Scale the columns of dense linears for NVFP4, and the norms before them back, in place.

    The model computes what it did, but for the rounding of changed weights to their own dtype. Quantize it then, by
    ``quantize_``, :func:`calibrate` or :func:`gptq`. Memory holds one K x K matrix for each norm.

    Args:
        model: dense.
        batches: what it is called with, as :func:`calibrate` takes them.
        config: how its weights will be quantized; NVFP4WeightOnlyConfig() by default.
        filter_fn: the linears that will be quantized, as for ``quantize_``. Others that read the same norm are scaled
            too, but their errors do not count.
        progress: show a progress bar over the batches.

    Returns:
        What was found, also where the exponent is 0 and nothing was changed. Norms whose output something other than
        linears reads, or linears that read something else too, and norms of another form than ``weight * x`` or
        ``(1 + weight) * x`` (+ bias), are not in it.

    Raises:
        ValueError: no batches.
    """
    spec = (NVFP4WeightOnlyConfig() if config is None else config).weight
    batches = list(batches)
    if not batches:
        raise ValueError("fold_scales weighs columns by what they are fed: give at least one batch")
    chosen = filter_fn or (lambda module, name: is_quantizable(module))
    names = {module: name for name, module in model.named_modules()}
    with in_eval_mode(model), _Readers.watching(model) as readers:
        for batch in tqdm(batches, desc="folding", unit="batch", disable=not progress):
            call_model(model, batch)
    folds = []
    for norm, hessian in readers.hessians.items():
        linears = {names[linear]: linear for linear in readers.linears[norm]}
        counted = [linear for name, linear in linears.items() if chosen(linear, name)]
        if counted:
            fold = Fold((names[norm], norm), linears)
            with torch.autocast(hessian.device.type, enabled=False):  # the model's own, which would round products
                if _fold(fold, counted, hessian, spec):
                    folds.append(fold)
    return folds


class _Readers(TorchFunctionMode):
    """Which linears read what each norm gives, and the Hessians of these inputs; norms that anything else reads not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.by_weight = {id(m.weight): m for m in model.modules() if type(m) is nn.Linear}
        self.given: dict[int, tuple[nn.Module, Tensor]] = {}
        self.linears: dict[nn.Module, list[nn.Linear]] = {}
        self.hessians: dict[nn.Module, Tensor] = {}
        self.refused: set[nn.Module] = set()
        self.fed: dict[nn.Linear, set[nn.Module | None]] = {}
        """The norms that feed each linear; None where something else does, or reads its weight."""

    @classmethod
    @contextmanager
    def watching(cls, model: nn.Module) -> Iterator[_Readers]:
        self = cls(model)
        shared = _held_twice(model)
        norms = [m for m in model.modules() if _is_norm(m) and id(m.weight) not in shared]
        hooks = [norm.register_forward_hook(self._gave) for norm in norms]
        hooks.append(model.register_forward_hook(self._returned))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()
        for norm, linears in self.linears.items():
            if any(id(linear.weight) in shared or self.fed[linear] != {norm} for linear in linears):
                self.refused.add(norm)
        for norm in self.refused:
            self.hessians.pop(norm, None)

    def _returned(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """What the model gives to its caller somebody reads."""
        self.refused |= {self.given[id(each)][0] for each in _tensors((output,)) if id(each) in self.given}
        self.given.clear()

    def _gave(self, norm: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[-1] == _width(norm):
            self.given[id(output)] = norm, output  # held, so that its id stays its own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":  # a shape or a dtype is no reading
            read = list(_tensors((*args, *kwargs.values())))
            norms = [self.given[id(each)] for each in read if id(each) in self.given]
            weights = [self.by_weight[id(each)] for each in read if id(each) in self.by_weight]
            product = func is nn.functional.linear and len(weights) == 1 and len(norms) == 1 and norms[0][1] is read[0]
            for linear in weights:
                self.fed.setdefault(linear, set()).add(norms[0][0] if product else None)
            if product:
                self._feeds(*norms[0], weights[0])
            else:
                self.refused |= {norm for norm, _ in norms}
        return func(*args, **kwargs)

    def _feeds(self, norm: nn.Module, x: Tensor, linear: nn.Linear) -> None:
        linears = self.linears.setdefault(norm, [])
        if not linears or linear is linears[0]:  # once for all that read it
            square = square_of(x.reshape(-1, x.shape[-1]))
            self.hessians[norm] = self.hessians[norm] + square if norm in self.hessians else square
        if linear not in linears:
            linears.append(linear)


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "Norm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _width(norm: nn.Module) -> int:
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    return weight.numel()


def _held_twice(model: nn.Module) -> set[int]:
    """Of parameters that stand at several places: what one changes, the others would see."""
    seen: list[int] = [id(p) for module in model.modules() for p in module._parameters.values() if p is not None]
    return {each for each in seen if seen.count(each) > 1} if len(seen) != len(set(seen)) else set()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())


def _fold(fold: Fold, counted: Sequence[nn.Linear], hessian: Tensor, spec: QuantizeSpec) -> bool:
    """Find the exponent and apply it; whether the norm is one that scales can be folded into."""
    norm = fold.norm[1]
    width = _width(norm)
    root_mean_square = hessian.diagonal()[:width].sqrt()
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
    """Divide what the norm multiplies by, and its bias, by the scale, and multiply the linears' columns; False, and
    nothing done, where the norm does not then give its output divided by it."""
    parts = {name: p for name in ("weight", "bias") if isinstance(p := getattr(norm, name, None), nn.Parameter)}
    before = {name: p.detach().clone() for name, p in parts.items()}
    probe = torch.linspace(-2, 3, 4 * len(scale), dtype=torch.float32, device=scale.device).view(4, -1)
    probe = probe.to(parts["weight"].dtype)
    try:
        expected = norm(probe).float()
    except TypeError:  # it takes more than one input
        return False
    tolerance = max(2 * torch.finfo(probe.dtype).eps, 1e-5)
    for offset in (0.0, 1.0):  # Gemma's norms multiply by 1 + weight
        exact = _divide(parts, before, scale, offset)
        if torch.allclose(
            norm(probe).float() * exact, expected, rtol=tolerance, atol=tolerance * float(expected.abs().amax())
        ):
            for linear in linears:
                linear.weight.copy_(linear.weight.float() * exact)
            return True
    for name, value in before.items():
        parts[name].copy_(value)
    return False


def _divide(parts: dict[str, nn.Parameter], before: dict[str, Tensor], scale: Tensor, offset: float) -> Tensor:
    """Divide offset + weight, and bias; by what it really was, since weights are rounded to their dtype."""
    factor = before["weight"].float() + offset
    parts["weight"].copy_(factor / scale - offset)
    # Where it is zero nothing comes through, whatever the scale.
    ratio = factor / (parts["weight"].float() + offset)
    exact = torch.where(ratio.isfinite() & (ratio > 0), ratio, scale)
    if "bias" in parts:
        parts["bias"].copy_(before["bias"].float() / exact)
    return exact
