"""Strided nested tensors, which nn.TransformerEncoder creates from a padded batch. They have no sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_nested(x: Tensor) -> bool:
    """Return whether x is a strided nested tensor; jagged ones are a separate class."""
    return x.is_nested and x.layout == torch.strided


def over_nested(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a linear over (tokens, features) to all rows of a nested tensor (batch, tokens, features)."""
    sequences = x.unbind()
    y = linear(torch.cat(sequences))
    return torch.nested.as_nested_tensor(list(y.split([len(rows) for rows in sequences])), layout=torch.strided)
