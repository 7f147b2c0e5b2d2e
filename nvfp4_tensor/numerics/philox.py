"""Random bits in plain torch: Philox-4x32 with 7 rounds (numerics contract, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def philox4x32_7(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Compute Philox-4x32 with 7 rounds (Salmon et al., SC11). Inputs and outputs are 32-bit words in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(7):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps, but the low 64 bits are right
        c0, c1, c2, c3 = (
            (product1 >> 32 & _MASK) ^ c1 ^ k0,
            product1 & _MASK,
            (product0 >> 32 & _MASK) ^ c3 ^ k1,
            product0 & _MASK,
        )
        k0, k1 = k0 + 0x9E3779B9 & _MASK, k1 + 0xBB67AE85 & _MASK
    return [c0, c1, c2, c3]


def words(number: Tensor, rng_state: Tensor, stream: int) -> Tensor:
    """Return the four 32-bit words of blocks or rotations of these numbers (...): int64 (..., 4)."""
    seed, offset = rng_state.unbind()
    counter = number & _MASK, number >> 32 & _MASK, (offset & _MASK).expand_as(number), torch.full_like(number, stream)
    return torch.stack(philox4x32_7(counter, (seed & _MASK, seed >> 32 & _MASK)), dim=-1)
