"""``nvfp4 quantize``: dense weights to NVFP4, calibrated on text where that is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor import FourOverSix, QuantizeSpec, RoundingMode, ScaleSearch, checkpoints
from nvfp4_tensor.checkpoints.common import Checkpoint, LinearParts, format_named
from nvfp4_tensor.checkpoints.io.resumable_write import check_is_new
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.names import LEFT_DENSE, is_matched, joined_with
from nvfp4_tensor.checkpoints.wrappers import View, WithHead
from nvfp4_tensor.cli.budget import Budget, spend
from nvfp4_tensor.cli.convert import Written
from nvfp4_tensor.cli.models import open_model, open_tokenizer, tokens_of, untie_head, windows_of
from nvfp4_tensor.quantization import GPTQConfig, NVFP4Config, NVFP4WeightOnlyConfig, ObservedLinear, gptq
from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.linear import set_weight

WINDOW = 512
"""Tokens of a calibration that see each other."""


def quantize(
    src: Path,
    dst: Path,
    *,
    to: str,
    round_mode: str,
    four_over_six: str | None,
    scale_search: bool,
    w4a16: bool,
    exclude: Sequence[str],
    include: Sequence[str],
    head: bool,
    calibrate: Path | None,
    gptq: bool,
    weighted: bool,
    bits: float | None,
    tokens: int,
    seed: int,
    progress: bool,
    options: Mapping[str, Any],
) -> Written:
    """As :func:`checkpoints.quantize`; ``calibrate``, a text, makes it W4A4, or W4A16 fitted to it.

    Fitted by GPTQ with ``gptq``, by a scale search weighed by the inputs with ``weighted``.

    With ``bits``, those linears stay dense that cost most on the text, as many as the budget has room for.

    Raises:
        ValueError: what :func:`checkpoints.quantize` raises; no tokenizer or configuration for a calibration.
    """
    spec = QuantizeSpec(
        round_mode=RoundingMode.of(round_mode),
        four_over_six=None if four_over_six is None else FourOverSix[four_over_six.upper()],
        scale_search=ScaleSearch.MSE if scale_search else None,
    )
    start = time.perf_counter()
    amax: dict[str, float] | None = None
    budget: Budget | None = None
    if calibrate is not None:
        check_is_new(dst)  # before minutes of calibration
        model, batches = _model_and_text(src, calibrate, tokens, progress)
        taken = (*include, untie_head(model)) if head else include
        if bits is not None:
            weight_only = gptq or weighted or w4a16
            budget = spend(model, batches, bits, _config(spec, weight_only), _filter(exclude, taken), progress)
            exclude = (*exclude, *budget.left_dense)
        if gptq or weighted:
            (fit if gptq else weigh)(model, batches, spec, exclude, taken, progress)
            with checkpoints.read(src) as source:
                fitted = Fitted(WithHead(source) if head else source, model)
                format_named(to).write(fitted, dst, progress=progress, **options)
            return Written.of(src, dst, time.perf_counter() - start, budget)
        amax = None if w4a16 else input_amax(model, batches, exclude, taken, progress)
        del model
    checkpoints.quantize(
        src, dst, to=to, spec=spec, exclude=exclude, include=include, head=head, input_amax=amax, seed=seed,
        progress=progress, **options,
    )  # fmt: skip
    return Written.of(src, dst, time.perf_counter() - start, budget)


def _config(spec: QuantizeSpec, weight_only: bool) -> NVFP4WeightOnlyConfig:
    return NVFP4WeightOnlyConfig(weight_spec=spec) if weight_only else NVFP4Config(weight_spec=spec)


def _filter(exclude: Sequence[str], include: Sequence[str]) -> Filter:
    return lambda module, name: is_chosen(module, name, exclude, include)


class Fitted(View):
    """The weights of a model that was made of a checkpoint; its configuration and tokenizer are the checkpoint's."""

    def __init__(self, source: Checkpoint, model: nn.Module) -> None:
        super().__init__(source)
        self._model = ModelCheckpoint(model, {}, "requantize")
        self.entries = self._model.entries

    def linear(self, name: str) -> LinearParts:
        return self._model.linear(name)

    def dense(self, name: str) -> Tensor:
        return self._model.dense(name)

    def per_tensor_scale(self, name: str) -> Tensor:
        return self._model.per_tensor_scale(name)

    def chunks(self, name: str) -> Iterator[Tensor]:
        return self._model.chunks(name)

    def identity(self) -> None:
        """None: nobody can tell whether another run fits the same weights."""


def _model_and_text(src: Path, text: Path, tokens: int, progress: bool) -> tuple[nn.Module, list[Tensor]]:
    tokenizer = open_tokenizer(src)
    batches = windows_of(tokens_of(text, tokenizer, tokens), WINDOW)
    return open_model(src, progress=progress), batches


def is_chosen(module: nn.Module, name: str, exclude: Sequence[str], include: Sequence[str]) -> bool:
    """Whether :func:`checkpoints.quantize` would quantize the weight of this module."""
    if not isinstance(module, nn.Linear) or is_matched(f"{name}.weight", exclude):
        return False
    return module.in_features % 16 == 0 and (
        not is_matched(f"{name}.weight", LEFT_DENSE) or is_matched(f"{name}.weight", include)
    )


def input_amax(
    model: nn.Module, batches: Sequence[Tensor], exclude: Sequence[str], include: Sequence[str], progress: bool
) -> dict[str, float]:
    """By parameter's name: the largest magnitude that each linear is fed over ``batches``, each (1, tokens)."""
    observed = _observed(model, batches, NVFP4Config(step="prepare"), _filter(exclude, include), progress)
    return {name: linear.activation_amax.item() for name, linear in observed.items()}


@torch.no_grad()
def _observed(
    model: nn.Module, batches: Sequence[Tensor], config: NVFP4WeightOnlyConfig, chosen: Filter, progress: bool
) -> dict[str, ObservedLinear]:
    """The chosen linears by their weights' names, observed from then on, after the batches have gone through.

    Raises:
        ValueError: a linear was fed nothing.
    """
    from torchao.quantization import quantize_  # after our own import of torchao, which keeps its messages down

    quantize_(model, config, filter_fn=chosen)
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
        model(batch, use_cache=False)
    observed = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, ObservedLinear)
    }
    if idle := [name.removesuffix(".weight") for name, linear in observed.items() if not linear.activation_amax]:
        raise ValueError(f"the text reached no input of {', '.join(idle[:4])}: give more, or --exclude them")
    return observed


@torch.no_grad()
def weigh(
    model: nn.Module, batches: Sequence[Tensor], spec: QuantizeSpec, exclude: Sequence[str], include: Sequence[str],
    progress: bool,
) -> None:  # fmt: skip
    """A scale search by what the text feeds each column, in place. Linears that servers join share a scale."""
    spec = spec.replace(scale_search=ScaleSearch.MSE)
    config = NVFP4WeightOnlyConfig(weight_spec=spec, weighted=True, step="prepare")
    observed = _observed(model, batches, config, _filter(exclude, include), progress)
    amax = {name: torch.ops.nvfp4.amax(linear.weight) for name, linear in observed.items()}
    for name, linear in tqdm(observed.items(), desc="searching scales", unit="weight", disable=not progress):
        largest = torch.stack([amax[each] for each in joined_with(name, observed)]).amax()
        squares = linear.activation_squares
        linear.stop_observing()
        set_weight(linear, quantize_weighted(linear.weight.detach(), spec, squares, largest))


def fit(
    model: nn.Module, batches: Sequence[Tensor], spec: QuantizeSpec, exclude: Sequence[str], include: Sequence[str],
    progress: bool,
) -> None:  # fmt: skip
    """GPTQ, in place; scales are searched unless the spec says how they are chosen."""
    chosen = spec if spec != QuantizeSpec() else QuantizeSpec(scale_search=ScaleSearch.MSE)
    config = GPTQConfig(base_config=NVFP4WeightOnlyConfig(weight_spec=chosen), share_scales=True)
    gptq(
        model,
        [{"input_ids": batch, "use_cache": False} for batch in batches],
        config,
        filter_fn=_filter(exclude, include),
        progress=progress,
    )
