"""Save models in ModelOpt's layout: plain tensors and a quantization_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Chunk, PrefixChange, Split, WeightRenaming, WeightTransform
from transformers.integrations.accelerate import load_offloaded_parameter

from nvfp4_tensor._compat.frames import warn_user
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.safetensors import write_json
from nvfp4_tensor.checkpoints.io.sidecar import SIDECAR, lost_factors, write_factors
from nvfp4_tensor.checkpoints.models.hf_names import names_in_files
from nvfp4_tensor.checkpoints.models.saving import MismatchedScales, ModelCheckpoint, refuse_embeddings
from nvfp4_tensor.checkpoints.names import warn_of_mixed_groups
from nvfp4_tensor.checkpoints.parts import LinearParts, nan_blocks
from nvfp4_tensor.checkpoints.wrappers import View, WeightOnly
from nvfp4_tensor.integrations.transformers.card import model_card
from nvfp4_tensor.integrations.transformers.config import CheckpointConfig
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.linear import PRE_SCALE
from nvfp4_tensor.quantization.names import some
from nvfp4_tensor.tensor.description import CodedTensor


def save(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    weight_only: bool = False,
    base_model: str | None = None,
    perplexity: dict[str, float] | None = None,
    text: str | None = None,
    metadata: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Save a folder for the hub: ``model.save_pretrained(folder)``, hf_quant_config.json, a model card, a tokenizer.

    Publish it with ``huggingface_hub.upload_folder(repo_id=..., folder_path=folder)``.

    Args:
        model: a model from ``from_pretrained``, or one with a quantizer from :func:`attach_quantizer`.
        folder: the folder to write.
        tokenizer: an object with a save_pretrained method, saved in the same folder.
        weight_only: omit the quantization of activations (W4A4 becomes W4A16).
        base_model: the name of the original model on the hub, for the card.
        perplexity: measured perplexities for the card, this model first: {"NVFP4": 15.75, "bfloat16": 13.13}.
        text: the name of the text on which perplexities were measured.
        metadata: additional fields of the card's header: {"license": "apache-2.0", "language": "en"}.
        options: arguments of save_pretrained.

    Raises:
        ValueError: the model has no quantizer, ModelOpt's layout cannot represent one of its weights, or push_to_hub is
            set, which would upload the folder before the card is written.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        raise ValueError("the model has no quantizer: call attach_quantizer(model) first")
    if options.pop("push_to_hub", False):
        raise ValueError(
            "push_to_hub would upload the folder before the card is written: save without it, then call "
            "huggingface_hub.upload_folder(repo_id, folder_path)"
        )
    folder = Path(folder)
    quantizer.weight_only = weight_only
    try:
        model.save_pretrained(folder, **options)
    finally:
        quantizer.weight_only = False
    # save_pretrained has written the values, but not what their scales lose.
    source, _ = checkpoint_of(model, weight_only, mismatched_scales="keep")
    checkpoint = _NamedAsInFiles(model, source)
    write_json(folder / modelopt.HF_QUANT_CONFIG, modelopt.hf_quant_config(checkpoint))
    lost = {
        name: lost_factors(source.linear(own), stores_divisors=False)
        for (own, entry), name in zip(source.entries.items(), checkpoint.entries, strict=True)
        if entry.quantized
    }
    write_factors(folder / SIDECAR, {name: factors for name, factors in lost.items() if factors})
    card = model_card(
        model,
        checkpoint,
        name=folder.name,
        knows_specs=quantizer.knows_specs,
        base_model=base_model,
        perplexity=perplexity,
        text=text,
        metadata=metadata,
    )
    card.save(folder / "README.md")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def checkpoint_of(
    model: PreTrainedModel, weight_only: bool = False, mismatched_scales: MismatchedScales = "requantize"
) -> tuple[Checkpoint, ModelCheckpoint]:
    """Return the model as a checkpoint, with one per-tensor scale for linears that servers fuse, and what it is of."""
    own = ModelCheckpoint(_with_values(model), {}, mismatched_scales)
    return WeightOnly(own) if weight_only else own, own


def _with_values(model: PreTrainedModel) -> Any:
    """Return the model, or its state dict if accelerate has offloaded some of its parameters."""
    state = model.state_dict(keep_vars=True)
    if not any(tensor.is_meta for tensor in state.values()):
        return model
    return {n: load_offloaded_parameter(model, n) if tensor.is_meta else tensor for n, tensor in state.items()}


def plain_state_dict(model: PreTrainedModel, weight_only: bool) -> dict[str, Tensor]:
    """Return the tensors to write, and set the quantization_config of the model accordingly."""
    refuse_embeddings(model)
    checkpoint, own = checkpoint_of(model, weight_only)
    modelopt.FORMAT.check(checkpoint)
    dense = {name: tensor.detach() for name, tensor in own.tensors.items() if not isinstance(tensor, CodedTensor)}
    tensors = {name: tensor for name, tensor in dense.items() if not name.endswith(f".{PRE_SCALE}")}
    tensors |= {name: checkpoint.dense(name).clone() for name in checkpoint.entries if name.endswith(f".{PRE_SCALE}")}
    with_nan = []
    warn_of_mixed_groups(checkpoint)
    layout = modelopt.format_for({"model_type": model.config.model_type})
    for name, entry in checkpoint.entries.items():
        if not entry.is_coded:
            continue  # dense tensors have the model's names, which transformers maps to those in files
        parts: Any = checkpoint.value(name)
        for key, tensor in layout.encode(name, parts, entry).items():
            # Linears with a common scale may share its tensor, which transformers would treat as a tied weight.
            tensors[key] = tensor.clone() if tensor.dim() == 0 else tensor
        if isinstance(parts, LinearParts) and nan_blocks(parts):
            with_nan.append(name)
    if with_nan:
        warn_user(f"{some(with_nan)} have NaN blocks: vLLM cannot load such a checkpoint")
    model.config.quantization_config = CheckpointConfig(**modelopt.FORMAT.config_of(_NamedAsInFiles(model, checkpoint)))
    return tensors


def keep_names(model: PreTrainedModel) -> None:
    """Let NVFP4 weights be saved under the model's names where transformers would change them as if they were dense.

    These are linears that were one tensor in the dense files (q, k and v of some families), whose codes and scales it
    would join, and experts (E, K, N), of which it would rename the codes but not the scales. Files with the model's
    names load, too.
    """
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # what transformers takes for a model that was not loaded
        found = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [each for each in found if not isinstance(each, PrefixChange)]
    names = [name for name, weight in model.named_parameters() if isinstance(weight, CodedTensor)]
    experts = [name for name in names if is_transposed(model.get_submodule(name.rpartition(".")[0]))]
    kept = [each for each in conversions if not _splits(each, names) and not _renames(each, experts)]
    if len(kept) < len(conversions):
        model._weight_conversions = kept  # type: ignore[assignment]


def _splits(conversion: WeightTransform, names: list[str]) -> bool:
    operations = getattr(conversion, "operations", None) or ()
    splits = any(isinstance(operation, Split | Chunk) for operation in operations)
    return splits and any(target in name for target in conversion.target_patterns for name in names)


def _renames(conversion: WeightTransform, names: list[str]) -> bool:
    if not isinstance(conversion, WeightRenaming):
        return False
    return any(name.endswith(target) for target in conversion.target_patterns if target for name in names)


class _NamedAsInFiles(View):
    """A model with the tensor names that save_pretrained writes, to which its configuration refers."""

    def __init__(self, model: PreTrainedModel, source: Checkpoint) -> None:
        super().__init__(source)
        names = names_in_files(model, source.entries)
        self.entries = {names[name]: entry for name, entry in source.entries.items()}
