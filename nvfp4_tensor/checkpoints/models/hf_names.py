"""Map tensor names of transformers models to names in their files, which differ for GPT-NeoX and models with vision.

transformers renames tensors when it loads and when it saves. These functions use its tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any


def names_in_model(model: object, names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from names in the model to ``names`` in files, for those that differ.

    Parameters that stack experts are mapped to the name that they would have in files.
    """
    conversions = _conversions(model)
    if conversions is None:
        return {}
    from transformers.core_model_loading import rename_source_key

    known: Any = model
    prefix, state = known.base_model_prefix, known.state_dict(keep_vars=True)
    renamed = ((rename_source_key(name, conversions, [], prefix, state)[0], name) for name in names)
    found = {ours: theirs for ours, theirs in renamed if ours != theirs}
    experts = {_EXPERT.sub("", ours): _EXPERT.sub("", theirs) for ours, theirs in found.items()}
    stacked = (name for name in state if (parent := name.rpartition(".")[0]).endswith(".experts") and parent in experts)
    return found | {name: f"{experts[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}" for name in stacked}


_EXPERT = re.compile(r"(?<=\.experts)\.\d+\..*")
"""The end of the name of one of the experts, which models stack to one parameter."""


def names_in_files(model: object, names: Iterable[str]) -> dict[str, str]:
    """Return a mapping from ``names`` in the model to the names that ``save_pretrained`` writes."""
    conversions = _conversions(model, loaded=True)
    if conversions is None:
        return {name: name for name in names}
    from transformers.core_model_loading import rename_source_key

    back = [each.reverse_transform() for each in reversed(conversions)]
    return {name: rename_source_key(name, back, [])[0] for name in names}


def _conversions(model: object, loaded: bool = False) -> list[Any] | None:
    """Return transformers' renamings of a model, or None; with ``loaded``, those that it was loaded with."""
    if "transformers" not in sys.modules:
        return None
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming
    except ImportError:  # older releases rename elsewhere
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    found = getattr(model, "_weight_conversions", None) if loaded else None
    if found is None:
        found = get_model_conversion_mapping(model, add_legacy=not loaded)
    return [each for each in found if isinstance(each, WeightRenaming)] or None
