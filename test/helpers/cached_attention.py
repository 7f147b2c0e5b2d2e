"""Problems of attention to codes and of appending to them, and what their results may differ by."""

import math

import torch

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops.schemas import plain

SPEC = QuantizeSpec(scale_search="mse")
LENGTHS = [0, 1, 15, 16, 17, 31, 33, 127, 128, 129, 511, 513, 1100]


def capacity_of(tokens):
    return -(-tokens // 16) * 16


def random_bytes(batch, heads, capacity, size, generator):
    """Return codes, scales and factors of random rows, as a cache holds them, with NaN in what is not in use."""
    blocks = -(-size // 16)
    codes = torch.randint(256, (batch, heads, capacity, blocks * 8), dtype=torch.uint8, generator=generator)
    scale = torch.full((batch, heads, capacity, blocks), 0x7F, dtype=torch.uint8)  # NaN
    factor = torch.full((batch, heads, capacity), 0xFF, dtype=torch.uint8)
    return codes, scale, factor


def problem(batch=2, kv_heads=2, group=3, tokens=1, size=64, value_size=None, lengths=(100, 100), latest=20, front=0,
            dtype=torch.bfloat16, seed=0, first=None, slack=0, spread=3.0):  # fmt: skip
    """Return the arguments of attend_codes, whose codes come from append_codes."""
    generator = torch.Generator().manual_seed(seed)

    def randn(heads, count, columns):
        sizes = torch.exp(spread * torch.rand((batch, heads, count, 1), generator=generator) - spread)
        return (torch.randn((batch, heads, count, columns), generator=generator) * sizes).to(dtype)

    value_size = value_size or size
    capacity = capacity_of(max(lengths) + slack)
    stored = [random_bytes(batch, kv_heads, capacity, n, generator) for n in (size, value_size)]
    keys, values = randn(kv_heads, max(lengths), size), randn(kv_heads, max(lengths), value_size)
    for b, length in enumerate(lengths):
        for x, (codes, scale, factor) in zip((keys, values), stored, strict=True):
            if length:
                rows = (x[b : b + 1, :, :length], x[b : b + 1, :, :length])
                into = tuple(t[b : b + 1] for t in (codes, scale, factor))
                plain.append_codes(*rows, SPEC.pack(), *into, *into, torch.zeros(1, dtype=torch.int64))
    dense = [randn(kv_heads, latest, n) for n in (size, value_size)]
    at_front = [randn(kv_heads, front, n) for n in (size, value_size)] if front else [None, None]
    first = None if first is None else torch.tensor(first)
    q = (randn(kv_heads * group, tokens, size).float() * 3).to(dtype)
    return [q, *stored[0], *stored[1], torch.tensor(lengths), first, *at_front, *dense, 1 / math.sqrt(size)]


def assert_close(got, expected, dtype):
    """Within a bound of float32 sums, and one step of dtype. NaN where the reference has it."""
    assert got.dtype == dtype and got.shape == expected.shape
    got, expected = got.float(), expected.float()
    assert torch.equal(got.isnan(), expected.isnan())
    got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-23}[dtype]
    bound = (step + 2e-5) * expected.abs() + 2e-5 * expected.abs().amax() + (1e-7 if dtype == torch.float16 else 0)
    assert ((got - expected).abs() <= bound).all(), (got - expected).abs().max()


def append_with(append, keys, values, spec, starts, capacity, rotates=False):
    generator = torch.Generator().manual_seed(5)
    batch, heads = keys.shape[:2]
    stored = [*random_bytes(batch, heads, capacity, keys.shape[3], generator)]
    stored += random_bytes(batch, heads, capacity, values.shape[3], generator)
    append(keys, values, spec.pack(), *stored, torch.tensor(starts), rotates)
    return stored
