"""Random states derived from a seed, a name and a count, independent of run, device and order."""

from __future__ import annotations

import hashlib
import zlib
from typing import Literal, TypeAlias

import torch
from torch import Tensor

Domain: TypeAlias = Literal["layer", "adamw", "write back", "refit", "merge", "gradients"]
"""What draws the bits: layer "0" and parameter "0" of one seed have different ones."""

_CALLS = 0xD1342543DE82EF95
"""An odd number, so that no two calls of a layer have one seed. (Experts of a call differ by multiples of another.)"""


def rng_state_of(domain: Domain, seed: int, name: str, count: int, device: torch.device) -> Tensor:
    """Return int64 (seed, offset) on the device.

    The seed depends on ``domain``, ``seed`` and ``name``, and the offset is ``count``.
    """
    return torch.tensor(rng_state_row(domain, seed, name, count), dtype=torch.int64, device=device)


def rng_state_row(domain: Domain, seed: int, name: str, count: int) -> tuple[int, int]:
    """Return what :func:`rng_state_of` puts into its tensor."""
    mixed = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8, person=domain.encode()).digest()
    return int.from_bytes(mixed, "little", signed=True), count


def rng_state_of_weight(seed: int, name: str, device: torch.device) -> Tensor:
    """Return int64 (seed, offset) with which a weight is quantized, whichever way: it depends on its name in files."""
    return torch.tensor([seed, zlib.crc32(name.encode())], dtype=torch.int64, device=device)


def rng_state_of_call(rng_state: Tensor, call: int) -> Tensor:
    """Return the state of a layer's call number ``call`` with one (seed, offset): that of call 0 is rng_state."""
    if call == 0:
        return rng_state
    step = call * _CALLS % 2**64
    seed, offset = rng_state.unbind()
    return torch.stack([seed + (step - 2**64 if step >= 2**63 else step), offset])
