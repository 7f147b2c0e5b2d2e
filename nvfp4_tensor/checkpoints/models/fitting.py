"""Run a model over sample text to fit its weights to it, or to find the largest inputs of its linears."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.checkpoints.quantizing import plan_folder
from nvfp4_tensor.checkpoints.wrappers import untied
from nvfp4_tensor.numerics.choices import ScaleSearch
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.quantization import GPTQConfig, NVFP4Config, NVFP4WeightOnlyConfig, ObservedLinear, gptq
from nvfp4_tensor.quantization.accuracy.sensitivity import Budget, sensitivity
from nvfp4_tensor.quantization.calibration import quantize_by_inputs
from nvfp4_tensor.quantization.conversion import Conversion
from nvfp4_tensor.quantization.model_plan import Kind
from nvfp4_tensor.quantization.names import joined_with, some
from nvfp4_tensor.quantization.observed_experts import finish, observed_weights, routed_tokens, summary_of
from nvfp4_tensor.quantization.observer import InputStatistics
from nvfp4_tensor.quantization.whole_model import PlannedFilter, matrices_of, plan_model
from nvfp4_tensor.training import DistillConfig, distill


class Chosen(PlannedFilter):
    """A filter for the linears and experts of a model that :func:`checkpoints.quantize` quantizes with these patterns.

    Attributes:
        files: the names in files of each chosen weight, by its name in the model.
    """

    def __init__(self, model: nn.Module, exclude: Sequence[str], include: Sequence[str], to: str) -> None:
        checkpoint, matrices = ModelCheckpoint(model), matrices_of(model)
        names = checkpoint.names_by_parameter()
        quantized = set(plan_folder(checkpoint, exclude, include, format_named(to).holds_experts).quantized)
        known = {each.name for each in matrices if each.kind is not Kind.OTHER}
        some_of = {name: files for name, files in names.items() if name in known and not quantized.isdisjoint(files)}
        self.files = {name: files for name, files in some_of.items() if quantized.issuperset(files)}
        if left := [name for name in some_of if name not in self.files]:
            warn_user(
                f"experts stay dense, because NVFP4 in the format {to} does not have all of a layer: {some(left)}"
            )
        first = {other: each.name for each in matrices for other in (each.name, *each.tied)}
        super().__init__(model, plan_model(model, matrices=matrices, selected=lambda name: first[name] in self.files))

    def patterns(self, weights: Iterable[str]) -> list[str]:
        """Return patterns that match weights of the model in files; one for all experts of a layer."""
        names = [name for weight in weights for name in self.files[weight][:1]]
        return list(dict.fromkeys(re.sub(r"\.experts\..*", ".experts.*", name) for name in names))


@torch.no_grad()
def find_input_amax(
    model: nn.Module, batches: Sequence[Tensor], chosen: Chosen, *, progress: bool = True
) -> dict[str, float]:
    """Return the largest input magnitude of each weight over ``batches``, each (1, tokens), by its name in files."""
    config = NVFP4Config(step="prepare", experts=True)
    Conversion(model, chosen.linears, config, experts=chosen.experts).run(model)
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=not progress):
        model(batch, use_cache=False)
    of_experts = observed_weights(model)
    observed: dict[str, InputStatistics] = {name: of_experts[name] for name in chosen.experts}
    modules = ((name, model.get_submodule(name.rpartition(".")[0])) for name in chosen.files)
    observed |= {name: each for name, each in modules if isinstance(each, ObservedLinear)}
    finish(model)
    if progress and (routed := routed_tokens(model)):
        tqdm.write(summary_of(routed), file=sys.stderr)
    if idle := [name.removesuffix(".weight") for name, each in observed.items() if not each.activation_amax]:
        raise ValueError(f"{', '.join(idle[:4])} had no input above zero: use more text, or exclude them")
    return {name: each.amax_for(config).item() for weight, each in observed.items() for name in chosen.files[weight]}


def _inputs(batches: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"input_ids": batch, "use_cache": False} for batch in batches]


def spend_bits(
    model: nn.Module, batches: Sequence[Tensor], bits: float, config: NVFP4WeightOnlyConfig, chosen: Chosen, *,
    progress: bool = True,
) -> Budget:  # fmt: skip
    """Choose which weights stay dense within ``bits`` per element, by their costs on the first batch; linears that
    servers join, and all experts of a layer, stay together."""

    def group_of(name: str) -> str:
        return joined_with(name, chosen.files)[0] if name.endswith(".weight") else name.rpartition(".")[0]

    if not chosen.files:
        raise ValueError("no linear is quantized, so there is no budget to distribute: check exclude and include")
    return sensitivity(
        model, _inputs(batches[:1]), config, filter_fn=chosen, group_of=group_of, progress=progress
    ).within(bits)


def fit_to_inputs(
    model: nn.Module, batches: Sequence[Tensor], config: NVFP4WeightOnlyConfig, chosen: Chosen, *, by_gptq: bool,
    progress: bool = True,
) -> None:  # fmt: skip
    """Quantize linears and experts in place by GPTQ, which searches scales unless the config has settings of its own;
    or by a scale search that weights the error of each column by its inputs."""
    if by_gptq:
        own = None if config.weight == QuantizeSpec() else GPTQConfig(base_config=config)
        gptq(model, _inputs(batches), own, filter_fn=chosen, progress=progress)
        return
    spec = config.weight.replace(scale_search=ScaleSearch.MSE)
    config = NVFP4WeightOnlyConfig(weight_spec=spec, seed=config.seed, weighted=True, experts=True)
    quantize_by_inputs(model, _inputs(batches), config, chosen.linears, chosen.experts, progress=progress)


def fit_by_distillation(
    model: nn.Module, batches: Sequence[Tensor], spec: QuantizeSpec, chosen: Chosen, *, w4a16: bool, compile: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Quantize a model in place, to W4A16 or to W4A4 with static scales, and train it to give the dense logits."""
    base = (NVFP4WeightOnlyConfig if w4a16 else NVFP4Config)(weight_spec=spec)
    config = DistillConfig(base_config=base, static=not w4a16, compile=compile)
    distill(model, _inputs(batches), config, filter_fn=chosen, **options)


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
        fitted = Fitted(source, model, untied(source.config) if head else source.config)
        said = source.report({name for name, e in fitted.entries.items() if e.quantized})
        if progress and said:
            tqdm.write(said, file=sys.stderr)
        format_named(to).write(fitted, dst, progress=progress, **options)


class Fitted(ModelCheckpoint):
    """A model that was made from a checkpoint, with the other files of that checkpoint."""

    def __init__(self, source: Checkpoint, model: nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__(model, config, "requantize")
        self.path, self.files, self._source = source.path, source.files, source

    def write_auxiliary_files(self, folder: Path) -> None:
        self._source.write_auxiliary_files(folder)

    def identity(self) -> None:
        """None: an interrupted write starts again, because another run may fit other weights."""
