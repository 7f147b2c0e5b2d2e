"""Random states derived from a seed, a name and a count, independent of run, device and order."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def rng_state_of(seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """Return int64 (seed, offset) on the device: the seed depends on ``seed`` and ``name``, the offset is ``count``."""
    return torch.tensor(rng_state_row(seed, name, count), dtype=torch.int64, device=device)


def rng_state_row(seed: int, name: str, count: int) -> tuple[int, int]:
    """Return what :func:`rng_state_of` puts into its tensor."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "little", signed=True), count
