"""Run a model over sample text to fit its weights to it, or to find the largest inputs of its linears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor.checkpoints.architectures import LEFT_DENSE
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.names import is_matched, joined_with, some
from nvfp4_tensor.checkpoints.parts import LinearParts
from nvfp4_tensor.checkpoints.wrappers import View, WithHead
from nvfp4_tensor.numerics.choices import ScaleSearch
from nvfp4_tensor.numerics.layout import BLOCK
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import GPTQConfig, NVFP4Config, NVFP4WeightOnlyConfig, ObservedLinear, gptq
from nvfp4_tensor.quantization.accuracy.budget import Budget, spend
from nvfp4_tensor.quantization.accuracy.gptq.targets import Filter
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.linear import set_weight


def quantized_linears(exclude: Sequence[str], include: Sequence[str]) -> Filter:
    """A filter for the linears that :func:`checkpoints.quantize` quantizes with these patterns."""

    def is_quantized(module: nn.Module, name: str) -> bool:
        weight = f"{name}.weight"
        if not isinstance(module, nn.Linear) or module.in_features % BLOCK or is_matched(weight, exclude):
            return False
        return not is_matched(weight, LEFT_DENSE) or is_matched(weight, include)

    return is_quantized


def find_input_amax(
    model: nn.Module, batches: Sequence[Tensor], filter_fn: Filter, *, progress: bool = True
) -> dict[str, float]:
    """Return the largest input magnitude of each linear over ``batches``, each (1, tokens), by its weight's name."""
    observed = _observe(model, batches, NVFP4Config(step="prepare"), filter_fn, progress)
    return {name: linear.activation_amax.item() for name, linear in observed.items()}


def spend_bits(
    model: nn.Module, batches: Sequence[Tensor], bits: float, config: NVFP4WeightOnlyConfig, filter_fn: Filter, *,
    progress: bool = True,
) -> Budget:  # fmt: skip
    """Choose which linears stay dense, as :func:`spend` does, by the first batch; linears that servers join stay
    together."""
    names = {f"{name}.weight" for name, module in model.named_modules() if filter_fn(module, name)}
    batch = {"input_ids": batches[0], "use_cache": False}
    return spend(
        model, batch, bits, config, filter_fn, group_of=lambda name: joined_with(name, names)[0], progress=progress
    )


def fit_by_gptq(
    model: nn.Module, batches: Sequence[Tensor], spec: QuantizeSpec, filter_fn: Filter, *, progress: bool = True
) -> None:
    """Quantize linears in place by GPTQ. Scales are searched unless ``spec`` has a setting of its own."""
    spec = spec if spec != QuantizeSpec() else QuantizeSpec(scale_search=ScaleSearch.MSE)
    config = GPTQConfig(base_config=NVFP4WeightOnlyConfig(weight_spec=spec), share_scales=True)
    inputs = [{"input_ids": batch, "use_cache": False} for batch in batches]
    gptq(model, inputs, config, filter_fn=filter_fn, progress=progress)


@torch.no_grad()
def fit_by_scale_search(
    model: nn.Module, batches: Sequence[Tensor], spec: QuantizeSpec, filter_fn: Filter, *, progress: bool = True
) -> None:
    """Quantize linears in place by a scale search that weights the error of each column by its inputs.

    Linears that servers join get one per-tensor scale.
    """
    spec = spec.replace(scale_search=ScaleSearch.MSE)
    config = NVFP4WeightOnlyConfig(weight_spec=spec, weighted=True, step="prepare")
    observed = _observe(model, batches, config, filter_fn, progress)
    amax = {name: torch.ops.nvfp4.amax(linear.weight) for name, linear in observed.items()}
    for name, linear in tqdm(observed.items(), desc="searching scales", unit="weight", disable=not progress):
        largest = torch.stack([amax[each] for each in joined_with(name, observed)]).amax()
        squares = linear.activation_squares
        linear.stop_observing()
        set_weight(linear, quantize_weighted(linear.weight.detach(), spec, squares, largest))


@torch.no_grad()
def _observe(
    model: nn.Module, batches: Sequence[Tensor], config: NVFP4WeightOnlyConfig, filter_fn: Filter, progress: bool
) -> dict[str, ObservedLinear]:
    """Make the chosen linears observe their inputs, and run the model; return them by their weights' names.

    Raises:
        ValueError: a linear had no input above zero.
    """
    from torchao.quantization import quantize_  # after our own import of torchao, which silences its messages

    quantize_(model, config, filter_fn=filter_fn)
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
        model(batch, use_cache=False)
    observed = {
        f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, ObservedLinear)
    }
    if idle := [name.removesuffix(".weight") for name, linear in observed.items() if not linear.activation_amax]:
        raise ValueError(f"{', '.join(idle[:4])} had no input above zero: use more text, or exclude them")
    return observed


def check_scales_fit(source: Checkpoint, to: str, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if the format has no per-tensor scales for weights that are fitted to a text."""
    target, names = format_named(to), [name for name, entry in source.entries.items() if len(entry.shape) == 2]
    without = [name for name in names if not target.has_scale(source, name, dict(options))]
    if without and not options.get("lossy"):
        raise ValueError(
            f"--gptq and --weighted need per-tensor scales, but readers of --to {to} have none for {some(without)}: "
            "add --lossy, which quantizes these weights again, or omit --gptq and --weighted"
        )


def write_fitted(
    source: Checkpoint, model: nn.Module, dst: Path, *, to: str, head: bool, progress: bool = True, **options: Any
) -> None:
    """Write the checkpoint ``source``, and close it, with the weights of the model that was made from it.

    head: whether the model's output layer has its own weight, which the checkpoint's may not have.
    """
    with source:
        fitted = Fitted(WithHead(source) if head else source, model)
        format_named(to).write(fitted, dst, progress=progress, **options)


class Fitted(View):
    """A checkpoint with the weights of a model that was made from it."""

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
        """None: an interrupted write starts again, because another run may fit other weights."""
