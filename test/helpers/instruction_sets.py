"""The CPU kernels held to each instruction set in turn, and what their results are compared by."""

import pytest
import torch

from nvfp4_tensor.numerics import eden, reference
from nvfp4_tensor.ops import native

native.load()
needs_library = pytest.mark.skipif(native.instruction_set() == "torch", reason="the CPU library is not built")


def available_instruction_sets():
    names = []
    for name in ("avx512", "avx2", "portable"):
        try:
            native.set_instruction_set(name)
            names.append(name)
        except ValueError:
            pass
    if native.instruction_set() != "torch":
        native.set_instruction_set("")
    return names


INSTRUCTION_SETS = available_instruction_sets()


def each_instruction_set():
    """Holds the kernels to each instruction set in turn: the reference, which is slow, then runs once for all."""
    try:
        for name in INSTRUCTION_SETS:
            native.set_instruction_set(name)
            yield name
    finally:
        if INSTRUCTION_SETS:
            native.set_instruction_set("")


def assert_op(op, args, expected):
    """An op's results on each instruction set, against those of the reference."""
    for name in each_instruction_set():
        results = op(*args)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for i, (result, right) in enumerate(zip(results, expected, strict=True)):
            assert_same_bits(result, right, f"output {i} of {op} on {name}")


def assert_same_bits(actual, expected, what=""):
    """Equal shapes, dtypes and bits; any NaN equals any NaN."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, what
    if actual.dtype == torch.float8_e4m3fn:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    if actual.is_floating_point():
        differ = (actual != expected) | (actual.signbit() != expected.signbit())
        differ &= ~(actual.isnan() & expected.isnan())
    else:
        differ = actual != expected
    assert not differ.any(), f"{differ.sum()} of {actual.numel()} differ, {what}"


def sample(shape, dtype, seed=0):
    """Values over several binades, on and near the grid's midpoints too, signed zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    grid = torch.randint(-28, 29, shape, generator=generator) * 0.25
    return torch.where(torch.rand(shape, generator=generator) < 0.3, grid, x).to(dtype)


def reference_amax(x, spec, rng_state=None, col0=0):
    if spec.is_eden:
        return eden.amax(x, rng_state, col0)
    return reference.amax(x if spec.hadamard_sign is None else reference.hadamard(x, spec.hadamard_sign))


def at_byte(x, offset):
    """A copy of x, contiguous, that begins so many bytes behind where an allocation does."""
    memory = torch.empty(x.numel() * x.element_size() + offset, dtype=torch.uint8).numpy()
    if not x.numel():
        return x.contiguous()
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)
