"""Random states that a seed, a name and a count decide: the same in each run, on each device, in any order."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def rng_state_of(seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """int64 (seed, offset) on the device: a seed of its own for each name, and the count as the offset."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(mixed, "little", signed=True), count], dtype=torch.int64, device=device)
