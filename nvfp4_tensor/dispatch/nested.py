"""Nested tensors of layout strided, which nn.TransformerEncoder makes of a padded batch: they have no sizes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_nested(x: Tensor) -> bool:
    """Whether x is one; those of layout jagged are a class of their own."""
    return x.is_nested and x.layout == torch.strided


def over_nested(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A linear over (tokens, features), of all rows of a nested tensor (batch, tokens, features)."""
    parts = x.unbind()
    y = linear(torch.cat(parts))
    return torch.nested.as_nested_tensor(list(y.split([len(part) for part in parts])), layout=torch.strided)
