"""Stochastic rounders with one fault each, seen in other libraries or easy to make: tests must detect all of them.

They implement the rounder interface of ``helpers.rounding_statistics`` with the reference's functions, so that they
differ from the contract only in the fault.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor import RoundingMode
from nvfp4_tensor.numerics.reference import random16, round_e2m1


def _stochastic(v: Tensor, r16: Tensor, random_bits: int = 16) -> Tensor:
    return round_e2m1(v, RoundingMode.STOCHASTIC, r16[:, : v.shape[1]], random_bits)


def sound(v: Tensor, rng_state: Tensor, **offsets) -> Tensor:
    """The control: the contract's 16-bit rounding."""
    return _stochastic(v, random16(*v.shape, rng_state, **offsets))


def truncated_to_8_bits(v: Tensor, rng_state: Tensor, **offsets) -> Tensor:
    """8 random bits instead of 16: biased toward zero by 1/512 step on average."""
    return _stochastic(v, random16(*v.shape, rng_state, **offsets), random_bits=8)


def repeating_every_256_rows(v: Tensor, rng_state: Tensor, **offsets) -> Tensor:
    """The counter has 8 bits of the row: rows r and r + 256 get the same bits."""
    r16 = random16(min(len(v), 256), v.shape[1], rng_state, **offsets)
    return _stochastic(v, r16.repeat(-(-len(v) // 256), 1)[: len(v)])


def one_generator(v: Tensor, rng_state: Tensor, stream: int = 0, **offsets) -> Tensor:
    """The transpose uses the same random bits as the row-wise tensor."""
    return sound(v, rng_state, **offsets)


def nearest_below_half(v: Tensor, rng_state: Tensor, **offsets) -> Tensor:
    """The interval below the smallest value is rounded to nearest: small gradients vanish."""
    return torch.where(v.abs() < 0.5, round_e2m1(v, RoundingMode.RNE), sound(v, rng_state, **offsets))


def same_bits_each_call(v: Tensor, rng_state: Tensor, **offsets) -> Tensor:
    """The counter lacks the offset, so that every call with a seed gets the same bits."""
    return sound(v, torch.stack((rng_state[0], torch.zeros_like(rng_state[1]))), **offsets)


def blind_to_its_origin(v: Tensor, rng_state: Tensor, stream: int = 0, **offsets) -> Tensor:
    """Each shard counts from its own first element: all shards get the same bits."""
    return sound(v, rng_state, stream=stream)


FAULTS = {
    "8-bit truncation": truncated_to_8_bits,
    "a stream repeated every 256 rows": repeating_every_256_rows,
    "one generator for rows and columns": one_generator,
    "nearest below 0.5": nearest_below_half,
    "the same bits at each call": same_bits_each_call,
    "shards that count from their own corner": blind_to_its_origin,
}
