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
_EXPERTS = 0x9E3779B97F4A7C15
"""Odd numbers, so that no two calls of a layer, and no two experts of a call, have one seed."""


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
    return _stepped(rng_state, call * _CALLS)


def rng_state_of_expert(rng_state: Tensor | None, expert: int) -> Tensor | None:
    """Return the state of an expert. Seeds differ by multiples of an odd number, so that no two are equal."""
    return None if rng_state is None else _stepped(rng_state, expert * _EXPERTS)


def _stepped(rng_state: Tensor, step: int) -> Tensor:
    """Return the state with ``step`` added to the seed, modulo 2^64."""
    step %= 2**64
    if step == 0:
        return rng_state
    seed, offset = rng_state.unbind()
    return torch.stack([seed + (step - 2**64 if step >= 2**63 else step), offset])
