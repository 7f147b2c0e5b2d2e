"""Types of the arguments ``(func, types, args, kwargs)`` with which torch calls an operator's implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Op: TypeAlias = Any
"""An OpOverload, or a function of torch."""
Types: TypeAlias = Sequence[type]
"""The types of the tensors among the arguments."""
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
