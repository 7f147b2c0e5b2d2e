"""The types of what torch calls an operator's implementation with: ``(func, types, args, kwargs)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Op: TypeAlias = Any
"""The operator, an OpOverload; or the function of torch."""
Types: TypeAlias = Sequence[type]
"""The types of the tensors among the arguments."""
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
