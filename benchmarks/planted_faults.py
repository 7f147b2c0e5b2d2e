"""Stochastic rounders with one fault each, seen in this field's libraries or easily made: every one has to be caught.

They are rounders as ``nvfp4_tensor.testing.statistics`` means it, made of the reference's own pieces, so that nothing
differs from the contract but the fault.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor import RoundingMode
from nvfp4_tensor.numerics.reference import random16, round_e2m1


def _stochastic(v: Tensor, r16: Tensor, random_bits: int = 16) -> Tensor:
    return round_e2m1(v, RoundingMode.STOCHASTIC, r16[:, : v.shape[1]], random_bits)


def sound(v: Tensor, rng_state: Tensor, **place) -> Tensor:
    """The control: the contract's 16-bit rounding."""
    return _stochastic(v, random16(*v.shape, rng_state, **place))


def truncated_to_8_bits(v: Tensor, rng_state: Tensor, **place) -> Tensor:
    """8 random bits where 16 are promised: rounds toward zero by 1/512 step on the average."""
    return _stochastic(v, random16(*v.shape, rng_state, **place), random_bits=8)


def repeating_every_256_rows(v: Tensor, rng_state: Tensor, **place) -> Tensor:
    """The counter holds 8 bits of the row: row r and row r + 256 see the same bits."""
    r16 = random16(min(len(v), 256), v.shape[1], rng_state, **place)
    return _stochastic(v, r16.repeat(-(-len(v) // 256), 1)[: len(v)])


def one_generator(v: Tensor, rng_state: Tensor, stream: int = 0, **place) -> Tensor:
    """The transposed draw uses the row-wise draw's bits."""
    return sound(v, rng_state, **place)


def nearest_below_half(v: Tensor, rng_state: Tensor, **place) -> Tensor:
    """The interval below the smallest value is rounded to nearest: small gradients vanish."""
    return torch.where(v.abs() < 0.5, round_e2m1(v, RoundingMode.RNE), sound(v, rng_state, **place))


def same_bits_each_call(v: Tensor, rng_state: Tensor, **place) -> Tensor:
    """The offset is left out of the counter, so that a seed fixes the bits of every call."""
    return sound(v, torch.stack((rng_state[0], torch.zeros_like(rng_state[1]))), **place)


def blind_to_its_origin(v: Tensor, rng_state: Tensor, stream: int = 0, **place) -> Tensor:
    """Each shard counts from its own first element: all shards see the same bits."""
    return sound(v, rng_state, stream=stream)


FAULTS = {
    "8-bit truncation": truncated_to_8_bits,
    "a stream repeated every 256 rows": repeating_every_256_rows,
    "one generator for rows and columns": one_generator,
    "nearest below 0.5": nearest_below_half,
    "the same bits at each call": same_bits_each_call,
    "shards that count from their own corner": blind_to_its_origin,
}
