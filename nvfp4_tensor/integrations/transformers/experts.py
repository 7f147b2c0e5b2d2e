"""Join weights that a checkpoint stores apart to parameters of transformers: experts to (E, N, K), and q, k and v."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.models.loading import ORIGINS
from nvfp4_tensor.checkpoints.models.origins import Origin, shape_of
from nvfp4_tensor.quantization.conv1d import is_conv1d
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.model_families import JOINED_AS
from nvfp4_tensor.quantization.names import natural, some


def origins_in_model(
    model: PreTrainedModel, names: Iterable[str], checkpoint: Checkpoint, *, quantized: bool = False
) -> dict[str, Origin]:
    """Return the origin of each parameter of the model: the weights among ``names`` that it is made of.

    quantized: leave out parameters without NVFP4 or FP8 weights.

    Raises:
        ValueError: NVFP4 weights are joined other than by stacking experts and concatenating rows, or with dense ones.
    """
    names = sorted(names, key=natural)  # the order in which transformers collects experts
    conversions = [*get_model_conversion_mapping(model), *missing_joins(model, names)]
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    known = model.state_dict()
    parts: dict[str, dict[str | None, list[str]]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        parts.setdefault(target, {}).setdefault(pattern, []).append(name)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    entries = checkpoint.entries
    origins = {}
    for target, found in parts.items():
        is_coded = any(entries[name].is_coded for group in found.values() for name in group)
        if is_coded or (not quantized and _is_supported(found, by_pattern)):
            origins[target] = _origin(target, found, by_pattern, checkpoint)
    return origins


def quantized_origins(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Origin]:
    """Return the origins of the parameters that the checkpoint has in NVFP4, after a check of their shapes.

    Raises:
        ValueError: a weight is joined with a dense one, or has another shape than the model's parameter.
    """
    origins = origins_in_model(model, checkpoint.entries, checkpoint, quantized=True)
    known = model.state_dict()
    for target, origin in origins.items():
        if target not in known:
            continue
        shape = shape_of(origin, checkpoint.entries)
        module = model.get_submodule(target.rpartition(".")[0])
        if is_conv1d(module) or (len(shape) == 3 and is_transposed(module)):
            shape = (*shape[:-2], shape[-1], shape[-2])
        if shape != tuple(known[target].shape):
            raise ValueError(
                f"{checkpoint.path}: {target} has the shape {list(shape)} in the checkpoint, from "
                f"{some(origin.names)}, and {list(known[target].shape)} in a model of this config: load it with the "
                "config.json of its folder"
            )
    return origins


def missing_joins(model: PreTrainedModel, names: Iterable[str]) -> list[WeightConverter]:
    """Return converters of weights that are stored apart among ``names``, and that transformers does not join.

    The files of GraniteMoE, JetMoE and others have one dense tensor for all experts, so transformers joins none.
    ModelOpt's layout, which ``save_pretrained`` writes, has one NVFP4 weight per expert. Likewise Phi-3's files have
    ``qkv_proj`` and ``gate_up_proj``, and others of the same model ``q_proj``, ``k_proj`` and so on.
    """
    names, known = list(names), list(model.state_dict())
    operations = [o for each in get_model_conversion_mapping(model) for o in getattr(each, "operations", None) or ()]
    merges = any(isinstance(operation, MergeModulelist) for operation in operations)
    joins = []
    for joined, parts in JOINED_AS.items():
        if joined in ("gate_up_proj", "down_proj") and not merges and any(map(_EXPERT.search, names)):
            sources = [f".experts.*.{part}.weight" for part in parts]
            stack: list[ConversionOps] = [MergeModulelist(dim=0), Concatenate(dim=1)]
            joins.append(WeightConverter(sources, f".experts.{joined}", operations=stack[: len(parts)]))
        for kind in ("weight", "bias"):
            sources = [f".{part}.{kind}" for part in parts]
            if len(parts) < 2 or not any(name.endswith(f".{joined}.{kind}") for name in known):
                continue
            stored = [name for name in names if name.endswith(sources[0]) and not _EXPERT.search(name)]
            if not stored or any(name.endswith(tuple(sources)) for name in known):
                continue
            joins.append(WeightConverter(sources, f".{joined}.{kind}", operations=[Concatenate(dim=0)]))
    return joins


def _origin(
    target: str,
    found: Mapping[str | None, list[str]],
    converters: Mapping[str, WeightConverter],
    checkpoint: Checkpoint,
) -> Origin:
    if None in found:
        return Origin((tuple(found[None]),))
    converter = converters[next(pattern for pattern in found if pattern is not None)]
    if not _is_supported(found, converters):
        kinds = ", ".join(kind.__name__ for kind in _kinds(converter))
        raise ValueError(
            f"{target} is made of {found} by {kinds}, which NVFP4 weights do not support: pass "
            "quantization_config=NVFP4TensorConfig() to from_pretrained of the dense model, which quantizes after it"
        )
    counts = {pattern: len(found.get(pattern, ())) for pattern in converter.source_patterns}
    if len(set(counts.values())) > 1:
        raise ValueError(f"{checkpoint.path}: weights of {target} are missing: it is made of {counts}")
    groups = tuple(zip(*(found[pattern] for pattern in converter.source_patterns), strict=True))
    rows = tuple(checkpoint.entries[name].shape[0] for name in groups[0])
    origin = Origin(groups, rows, stacked=_kinds(converter) in _STACKED)
    try:
        shape_of(origin, checkpoint.entries)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {target}: {error}") from None
    return origin


def _kinds(converter: WeightConverter) -> tuple[type, ...]:
    return tuple(type(operation) for operation in converter.operations)


def _is_supported(found: Mapping[str | None, list[str]], converters: Mapping[str, WeightConverter]) -> bool:
    """Return whether a parameter is one tensor of the files, or is made of several as an :class:`Origin` describes."""
    if None in found:
        return True
    converter = converters[next(pattern for pattern in found if pattern is not None)]
    is_joined = _kinds(converter) == (Concatenate,) and converter.operations[0].dim == 0  # type: ignore[attr-defined]
    return is_joined or _kinds(converter) in _STACKED


_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.weight$")
_STACKED = ((MergeModulelist,), (MergeModulelist, Concatenate))


def keep_origin(model: PreTrainedModel, parameter: str, origin: Origin) -> None:
    """Store the names in files of a parameter's weights, which are used when the model is saved."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, ORIGINS, {**getattr(module, ORIGINS, {}), name: dataclasses.asdict(origin)})
