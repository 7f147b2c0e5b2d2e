"""What save_pretrained writes: plain tensors and the configuration of ModelOpt's layout."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.accelerate import load_offloaded_parameter

from nvfp4_tensor.checkpoints.checkpoint import Checkpoint
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.safetensors import write_json
from nvfp4_tensor.checkpoints.models.hf_names import names_in_files
from nvfp4_tensor.checkpoints.models.saving import MismatchedScales, ModelCheckpoint
from nvfp4_tensor.checkpoints.names import some, warn_of_mixed_groups
from nvfp4_tensor.checkpoints.parts import nan_blocks
from nvfp4_tensor.checkpoints.wrappers import View, WeightOnly
from nvfp4_tensor.integrations.transformers.card import model_card
from nvfp4_tensor.integrations.transformers.config import ModelOptConfig
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


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
    """A folder ready for the hub: ``model.save_pretrained(folder)``, hf_quant_config.json, a model card, the tokenizer.

    ``huggingface_hub.upload_folder(repo_id=..., folder_path=folder)`` publishes it.

    Args:
        tokenizer: saved too (anything with a save_pretrained).
        weight_only: leave out the quantization of activations (W4A4 becomes W4A16).
        base_model: what was quantized: its name on the hub, for the card.
        perplexity: measured by the caller, for the card: {"NVFP4": 15.75, "bfloat16": 13.13}. The first is this model.
        text: on what text it was measured.
        metadata: more for the card's header: {"license": "apache-2.0", "language": "en"}.
        options: of save_pretrained.

    Raises:
        ValueError: the model has no quantizer (attach_quantizer gives it one), or holds what ModelOpt's layout cannot;
            push_to_hub, which would come before the card.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        raise ValueError("the model is not known to be quantized: attach_quantizer(model) first")
    if options.pop("push_to_hub", False):
        raise ValueError("the card is written last: save, then huggingface_hub.upload_folder(repo_id, folder_path)")
    folder = Path(folder)
    quantizer.weight_only = weight_only
    try:
        model.save_pretrained(folder, **options)
    finally:
        quantizer.weight_only = False
    held = checkpoint_of(model, weight_only, mismatched_scales="keep")  # for what it holds; the values are written
    checkpoint = _AsInFiles(model, held)
    write_json(folder / modelopt.HF_QUANT_CONFIG, modelopt.hf_quant_config(checkpoint))
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
) -> Checkpoint:
    """The model as a checkpoint, one per-tensor scale where servers join linears."""
    held: Any = _brought_back(model) or model
    checkpoint: Checkpoint = ModelCheckpoint(held, {}, mismatched_scales)
    return WeightOnly(checkpoint) if weight_only else checkpoint


def _brought_back(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The state dict of a model of which accelerate keeps a part elsewhere; None where all of it is in place."""
    state = model.state_dict(keep_vars=True)
    if not any(tensor.is_meta for tensor in state.values()):
        return None
    return {n: load_offloaded_parameter(model, n) if tensor.is_meta else tensor for n, tensor in state.items()}


def plain_state_dict(model: PreTrainedModel, weight_only: bool) -> dict[str, Tensor]:
    """The tensors that are written; the model's config says from now on what they are."""
    checkpoint = checkpoint_of(model, weight_only)
    modelopt.FORMAT.check(checkpoint)
    modelopt.FORMAT.check_names(checkpoint)
    tensors = _dense_tensors(model)
    with_nan = []
    warn_of_mixed_groups(checkpoint)
    layout = modelopt.format_for({"model_type": model.config.model_type})
    for name, entry in checkpoint.entries.items():
        if not entry.quantized:
            continue  # under the model's names, from which transformers makes those of files
        parts = checkpoint.linear(name)
        for key, tensor in layout.encode(name, parts, entry).items():
            # Linears of one scale may share its tensor, which transformers would take for a tied weight.
            tensors[key] = tensor.clone() if tensor.dim() == 0 else tensor
        if nan_blocks(parts):
            with_nan.append(name)
    if with_nan:
        warnings.warn(f"{some(with_nan)} hold blocks that are NaN: vLLM refuses such a checkpoint", stacklevel=2)
    model.config.quantization_config = ModelOptConfig(**modelopt.flat_config(_AsInFiles(model, checkpoint)))
    return tensors


class _AsInFiles(View):
    """A model whose tensors have the names that save_pretrained gives them: what its configuration speaks of."""

    def __init__(self, model: PreTrainedModel, source: Checkpoint) -> None:
        super().__init__(source)
        names = names_in_files(model, source.entries)
        self.entries = {names[name]: entry for name, entry in source.entries.items()}


def _dense_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """What is not NVFP4; a tensor of several names under the first, as a checkpoint has it."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in (_brought_back(model) or model.state_dict(keep_vars=True)).items():
        if id(tensor) not in seen and not isinstance(tensor, NVFP4Tensor):
            tensors[name] = tensor.detach()
        seen.add(id(tensor))
    return tensors
