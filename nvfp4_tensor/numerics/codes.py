"""The plain tensors of an NVFP4 matrix, as kernels and autograd use them, without logical shape and dtype."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Codes(NamedTuple):
    """A matrix (R, C) in NVFP4, with C padded to the block size."""

    qdata: Tensor  # uint8 (R, C/2), or (E, R, C/2) for experts
    scale: Tensor  # e4m3, swizzled
    per_tensor_scale: Tensor  # float32 0-d, or one per row

    @property
    def columns(self) -> int:
        """C padded to 16, because a Hadamard transform fills the padding and a product sums over it."""
        return self.qdata.shape[-1] * 2


class Decoded(NamedTuple):
    """A decoded NVFP4 matrix (R, C) for dense products; C is padded if it is transformed. Autograd never saves it."""

    values: Tensor  # bfloat16: code x block scale, exact
    per_tensor_scale: Tensor  # float32 0-d, or one per row
