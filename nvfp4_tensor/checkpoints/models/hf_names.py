"""What models of transformers call their tensors, where their files have other names: GPT-NeoX, models with vision.

transformers renames while it loads and again while it saves; its own tables of that are asked, where it is in use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def names_in_model(model: object, names: Iterable[str]) -> dict[str, str]:
    """By the model's name of a tensor: the file's, of those ``names`` in files that differ."""
    conversions = _conversions(model)
    if conversions is None:
        return {}
    from transformers.core_model_loading import rename_source_key

    known: Any = model
    prefix, state = known.base_model_prefix, known.state_dict(keep_vars=True)
    renamed = ((rename_source_key(name, conversions, [], prefix, state)[0], name) for name in names)
    return {ours: theirs for ours, theirs in renamed if ours != theirs}


def names_in_files(model: object, names: Iterable[str]) -> dict[str, str]:
    """By the model's name of a tensor: what ``save_pretrained`` calls it, for all of ``names``."""
    conversions = _conversions(model, loaded=True)
    if conversions is None:
        return {name: name for name in names}
    from transformers.core_model_loading import rename_source_key

    back = [each.reverse_transform() for each in reversed(conversions)]
    return {name: rename_source_key(name, back, [])[0] for name in names}


def _conversions(model: object, loaded: bool = False) -> list[Any] | None:
    """transformers' renamings of a model, ``loaded`` those that it was loaded by; None where there are none."""
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # older ones rename elsewhere
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    found = getattr(model, "_weight_conversions", None) if loaded else None
    if found is None:
        found = get_model_conversion_mapping(model, add_legacy=not loaded)
    return [each for each in found if isinstance(each, WeightRenaming)] or None
