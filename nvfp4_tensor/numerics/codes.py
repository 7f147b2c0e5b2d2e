"""What a kernel takes of a matrix in NVFP4: plain tensors, without a shape or a dtype of their own."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Codes(NamedTuple):
    """A matrix (R, C) in NVFP4, C padded to the block size: what an NVFP4Tensor stores, and what autograd saves."""

    qdata: Tensor  # uint8 (R, C/2), or (E, R, C/2) of experts
    scale: Tensor  # e4m3, swizzled
    per_tensor_scale: Tensor  # float32 0-d, or one per row

    @property
    def columns(self) -> int:
        """C, padded to 16: a Hadamard transform fills the padding, and a product sums it."""
        return self.qdata.shape[-1] * 2


class Decoded(NamedTuple):
    """A matrix (R, C) in NVFP4 as a dense product reads it; C is padded where it was transformed. Never saved."""

    values: Tensor  # bfloat16: code x block scale, exact
    per_tensor_scale: Tensor  # float32 0-d, or one per row
