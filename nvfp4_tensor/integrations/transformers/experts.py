"""Which weights of a checkpoint make up a parameter of transformers: experts (E, N, K), or q, k and v, stored apart."""

from __future__ import annotations

import dataclasses

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.models.loading import ORIGINS, check_slot, slot_of
from nvfp4_tensor.checkpoints.models.origins import Origin, origins_in_model


def origins_to_read(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[dict[str, Origin], dict[str, str]]:
    """Return the origins of the parameters with NVFP4 or FP8 weights, and of those that only we join, after checks; and
    by the names of all such weights their parameters, some of which the model may not have.

    The files of GraniteMoE, JetMoE and others have one dense tensor for all experts, so transformers joins none.
    ModelOpt's layout, which ``save_pretrained`` writes, has one NVFP4 weight per expert. Likewise Phi-3's files have
    ``qkv_proj`` and ``gate_up_proj``, and others of the same model ``q_proj``, ``k_proj`` and so on.

    Raises:
        ValueError: transformers makes a parameter of NVFP4 weights other than by joining experts and rows; some of them
            are missing, or dense; or they have another shape than the parameter.
    """
    known, entries = model.state_dict(), checkpoint.entries
    conversions, prefix = get_model_conversion_mapping(model), model.base_model_prefix
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    origins = origins_in_model(model, known, entries)
    found = {name: target for target, origin in origins.items() for name in origin.names}
    targets: dict[str, str] = {}
    for name, entry in entries.items():
        if not entry.is_coded and (name not in found or origins[found[name]].is_whole):
            continue
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if entry.is_coded and target in known:
            converter = by_pattern.get(pattern or "")
            if converter is not None and not _is_join(converter):
                kinds = ", ".join(type(operation).__name__ for operation in converter.operations)
                raise ValueError(
                    f"{target} is made of {name} by {kinds}, which NVFP4 weights do not support: pass "
                    "quantization_config=NVFP4TensorConfig() to from_pretrained of the dense model, which quantizes "
                    "after it"
                )
            if name not in found:
                raise ValueError(f"{checkpoint.path}: weights of {target} are missing, which {name} is one of")
        if entry.is_coded or pattern is None:
            targets[name] = found.get(name, target)
    chosen = {target: origins[target] for target in targets.values() if target in origins}
    for target, origin in chosen.items():
        check_slot(slot_of(model, target), origin, checkpoint)
    return chosen, targets


def _is_join(converter: WeightConverter) -> bool:
    """Return whether a converter joins rows, or stacks experts and joins theirs, as an :class:`Origin` describes."""
    kinds = [type(operation) for operation in converter.operations]
    joins_rows = kinds == [Concatenate] and converter.operations[0].dim == 0  # type: ignore[attr-defined]
    return joins_rows or kinds in ([MergeModulelist], [MergeModulelist, Concatenate])


def keep_origin(model: PreTrainedModel, parameter: str, origin: Origin) -> None:
    """Store the names in files of a parameter's weights, which are used when the model is saved."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, ORIGINS, {**getattr(module, ORIGINS, {}), name: dataclasses.asdict(origin)})
