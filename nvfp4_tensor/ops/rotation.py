"""The ops of EDEN's rotation (numerics contract, section 9), their schemas in ``definitions.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import eden
from nvfp4_tensor.numerics.layout import ROTATION, ceil_to
from nvfp4_tensor.ops.definitions import _fake, _implement


@_implement("rotate")
def rotate(x: Tensor, rng_state: Tensor, inverse: bool = False, col0: int = 0) -> Tensor:
    """EDEN's rotation of each 128 columns (contract, section 9): float32 (..., K rounded up to 128); or its inverse.

    x: (..., K), a multiple of 128 for the inverse. col0: where x begins in the tensor that it is a shard of.
    """
    _check_rotation(x, col0)
    if inverse and x.shape[-1] % ROTATION:
        raise ValueError(f"a rotated tensor has a multiple of {ROTATION} columns, not {x.shape[-1]}")
    return eden.rotate(x, rng_state, inverse, col0)


def _check_rotation(x: Tensor, col0: int) -> None:
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension: x.reshape(1) has")
    if col0 < 0 or col0 % ROTATION:
        raise ValueError(f"col0 must be a multiple of {ROTATION}, where a rotation begins, not {col0}")


@_fake("rotate")
def _(x: Tensor, rng_state: Tensor, inverse: bool = False, col0: int = 0) -> Tensor:
    return x.new_empty((*x.shape[:-1], ceil_to(x.shape[-1], ROTATION)), dtype=torch.float32)


@_implement("amax_rotated")
def amax_rotated(x: Tensor, rng_state: Tensor, col0: int = 0) -> Tensor:
    """The largest magnitude of ``rotate(x)``, float32 0-d; groups that hold a NaN or an Inf are left out."""
    _check_rotation(x, col0)
    return eden.amax(x, rng_state, col0)


@_fake("amax_rotated")
def _(x: Tensor, rng_state: Tensor, col0: int = 0) -> Tensor:
    return x.new_empty((), dtype=torch.float32)
