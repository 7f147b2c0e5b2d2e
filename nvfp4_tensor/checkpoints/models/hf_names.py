"""Map tensor names of transformers models to names in their files, which differ for GPT-NeoX and models with vision.

transformers renames tensors when it loads and when it saves. These functions use its tables.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any


def names_in_model(model: object, names: Collection[str]) -> dict[str, str]:
    """Return a mapping from names in the model to ``names`` in files, for those that differ.

    Parameters that join several tensors (experts; q, k and v) are mapped to the name that they would have in files.
    """
    conversions = _conversions(model)
    if conversions is None:
        return {}
    from transformers.core_model_loading import rename_source_key

    known: Any = model
    prefix, state = known.base_model_prefix, known.state_dict(keep_vars=True)
    own = {_holder(name) for name in state}

    def renamed(name: str) -> str:
        new: str = rename_source_key(name, conversions, [], prefix, state)[0]
        if new in state or _holder(new) in own:
            return new
        # transformers adds or removes the prefix of names that the model has, but not of parts that it joins.
        other = new.removeprefix(f"{prefix}.") if new.startswith(f"{prefix}.") else f"{prefix}.{new}"
        return other if _holder(other) in own else new

    found = {ours: name for name in names if (ours := renamed(name)) != name}
    holders = {_holder(ours): _holder(theirs) for ours, theirs in found.items()}
    others = ((name, _holder(name)) for name in state if name not in found and name not in names)
    return found | {name: holders[h] + name.removeprefix(h) for name, h in others if h in holders}


def _holder(name: str) -> str:
    """Return the module that has the joined parameter, or the linears, that a tensor of this name belongs to."""
    before, experts, _ = name.partition(".experts.")
    return f"{before}.experts" if experts else ".".join(name.split(".")[:-2])


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
