"""Run two models on one text: perplexity, divergence of their logits, and the error of each linear's output."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from tqdm import tqdm

from nvfp4_tensor.checkpoints.models.opening import windows_of
from nvfp4_tensor.quantization.names import joined_with
from nvfp4_tensor.sizes import stored_bytes
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


@dataclasses.dataclass(frozen=True)
class Output:
    """The error of a linear's output in b compared with a, both computed from the inputs of a's linear.

    Attributes:
        relative: ``norm(y_b - y_a) / norm(y_a)`` over all tokens.
        bits, dense_bits: the number of bits that store the weight in b and in a.
    """

    name: str
    relative: float
    bits: int
    dense_bits: int


@dataclasses.dataclass(frozen=True)
class Point:
    """Bits per element, averaged over the quantized linears, and perplexity of b with ``dense_layers`` linears of a."""

    dense_layers: int
    bits: float
    perplexity: float


@dataclasses.dataclass(frozen=True)
class Quality:
    """The comparison of two models on the same tokens.

    Attributes:
        perplexity: the perplexities of a and of b.
        windows: the number of windows of tokens that see each other.
        divergence: the mean of KL(a || b) over the tokens, in nats.
        agreement: the share of tokens after which both models predict the same token.
        outputs: the linears that are NVFP4 in b, in the order in which to keep them dense. Linears that inference
            servers fuse are adjacent, because either all or none of them are dense.
        sweep: perplexity by bits per element.
    """

    tokens: int
    windows: int
    perplexity: tuple[float, float]
    divergence: float
    agreement: float
    outputs: tuple[Output, ...]
    sweep: tuple[Point, ...]


def compare_models(
    a: nn.Module, b: nn.Module, tokens: Tensor, *, window: int = 512, batch: int = 1, sweep: int = 0,
    progress: bool = True,
) -> Quality:  # fmt: skip
    """Compare two models of one architecture on tokens (count,), which are split into independent windows.

    Args:
        batch: windows that run at a time. In W4A4 without static scales, they share the scales of activations.
        sweep: the number of points at which to measure perplexity with the most sensitive linears of b replaced by
            those of a. If it is not 0, all quantized linears of b are replaced afterwards.
    """
    windows = windows_of(tokens, window, batch)
    with tqdm(total=len(windows) * (1 + sweep), desc="running", unit="batch", disable=not progress) as bar:
        totals, outputs = _run(a, b, windows, bar.update)
        measure = functools.partial(perplexity, b, tokens, window, bar.update, batch)
        points = _sweep(a, b, outputs, sweep, totals.perplexities()[1], measure)
    return Quality(
        sum(each.numel() for each in windows), sum(map(len, windows)), totals.perplexities(),
        totals.divergence / totals.predicted, totals.agreeing / totals.predicted, tuple(outputs), tuple(points),
    )  # fmt: skip


@torch.no_grad()
def perplexity(
    model: nn.Module, tokens: Tensor, window: int, tick: Callable[[], object] = lambda: None, batch: int = 1
) -> float:
    """Return exp of the mean negative log likelihood of tokens (count,), which are split into independent windows.

    The first token of each window is not predicted. ``tick`` is called after each batch of windows.
    """
    total, predicted = 0.0, 0
    for ids in windows_of(tokens, window, batch):
        total += cross_entropy(_logits(model, ids), ids[:, 1:].flatten(), reduction="sum").item()
        predicted += ids[:, 1:].numel()
        tick()
    return math.exp(total / predicted)


@dataclasses.dataclass
class _Totals:
    """Sums over all predicted tokens."""

    loss_a: float = 0.0
    loss_b: float = 0.0
    divergence: float = 0.0
    agreeing: int = 0
    predicted: int = 0

    def add(self, logits_a: Tensor, logits_b: Tensor, next_: Tensor) -> None:
        """Add logits (tokens, vocabulary), float32, and the token that follows each."""
        self.loss_a += cross_entropy(logits_a, next_, reduction="sum").item()
        self.loss_b += cross_entropy(logits_b, next_, reduction="sum").item()
        log_a, log_b = log_softmax(logits_a, -1), log_softmax(logits_b, -1)
        self.divergence += kl_div(log_b, log_a, reduction="sum", log_target=True).item()
        self.agreeing += int((logits_a.argmax(-1) == logits_b.argmax(-1)).sum())
        self.predicted += len(next_)

    def perplexities(self) -> tuple[float, float]:
        return math.exp(self.loss_a / self.predicted), math.exp(self.loss_b / self.predicted)


@torch.no_grad()
def _run(
    a: nn.Module, b: nn.Module, windows: Sequence[Tensor], tick: Callable[[], object]
) -> tuple[_Totals, list[Output]]:
    totals = _Totals()
    with _watch_outputs(a, b) as outputs:
        for ids in windows:
            logits_a = _logits(a, ids)
            totals.add(logits_a, _logits(b, ids), ids[:, 1:].flatten())
            tick()
    found = []
    for name, (error, signal) in outputs.items():
        weights = [_module(model, name).weight for model in (b, a)]
        relative = math.sqrt(error / signal) if signal else math.nan
        found.append(Output(name, relative, *(8 * stored_bytes(weight) for weight in weights)))
    return totals, [output for group in by_gain(found) for output in group]


def by_gain(outputs: Sequence[Output]) -> list[list[Output]]:
    """Group the linears that servers fuse, and sort the groups by the squared error that an additional bit removes."""
    by_name = {f"{output.name}.weight": output for output in outputs}
    groups = dict.fromkeys(joined_with(name, by_name) for name in by_name)
    together = [[by_name[name] for name in group] for group in groups]
    return sorted(together, key=_gain, reverse=True)


def _gain(group: Sequence[Output]) -> float:
    more = sum(output.dense_bits - output.bits for output in group)
    return sum(output.relative**2 for output in group) / max(more, 1)


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits that predict the tokens after the first of each window: (tokens, vocabulary), float32."""
    logits: Tensor = model(ids, use_cache=False).logits
    return logits[:, :-1].flatten(0, 1).float()


@contextmanager
def _watch_outputs(a: nn.Module, b: nn.Module) -> Iterator[dict[str, list[float]]]:
    """Sum the squared norms of the error and of a's output while a runs, for each linear that is NVFP4 in b."""
    sums: dict[str, list[float]] = {}
    with ExitStack() as hooks:
        for name, linear in a.named_modules():
            if isinstance(linear, nn.Linear) and isinstance((other := _module(b, name)).weight, NVFP4Tensor):
                sums[name] = [0.0, 0.0]
                hooks.enter_context(linear.register_forward_hook(_watcher(other, sums[name])))
        yield sums


def _watcher(other: nn.Module, sums: list[float]) -> Callable[..., None]:
    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        error = (other(*inputs).float() - output.float()).norm().item()
        sums[0] += error**2
        sums[1] += output.float().norm().item() ** 2

    return watch


def _module(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


@torch.no_grad()
def _sweep(
    a: nn.Module, b: nn.Module, outputs: Sequence[Output], points: int, quantized: float, measure: Callable[[], float]
) -> list[Point]:
    """Measure b with none, some and all of its quantized linears replaced by those of a."""
    if not points or not outputs:
        return []
    elements = sum(_module(a, output.name).weight.numel() for output in outputs)
    groups = by_gain(outputs)
    done, found = 0, [Point(0, sum(output.bits for output in outputs) / elements, quantized)]
    for point in range(1, points + 1):
        count = sum(map(len, groups[: round(len(groups) * point / points)]))
        for output in outputs[done:count]:
            parent, _, last = output.name.rpartition(".")
            setattr(b.get_submodule(parent), last, _module(a, output.name))
        done = count
        bits = sum(o.dense_bits if i < done else o.bits for i, o in enumerate(outputs)) / elements
        found.append(Point(done, bits, measure()))
    return found
