"""Run the CPU kernels with each instruction set, and compare their results."""

import pytest
import torch

from nvfp4_tensor.numerics import eden, reference
from nvfp4_tensor.ops import native
from nvfp4_tensor.testing.selftest import differing_bits

native.load()
needs_library = pytest.mark.skipif(native.instruction_set() == "torch", reason="the CPU library is not built")


ALL = ("amx", "avx512_bf16", "avx512", "avx2", "neon_bf16", "neon", "portable")
ONLY_PRODUCTS = ("amx", "avx512_bf16", "neon_bf16")
"""Those that differ from another in their products alone."""


def available_instruction_sets():
    """Return those of ALL that this machine and this build have."""
    names = []
    for name in ALL:
        try:
            native.set_instruction_set(name)
            names.append(name)
        except ValueError:
            pass
    if native.instruction_set() != "torch":
        native.set_instruction_set("")
    return names


OF_PRODUCTS = available_instruction_sets()
INSTRUCTION_SETS = [name for name in OF_PRODUCTS if name not in ONLY_PRODUCTS]


def summary():
    """Return the line of the tests' summary: which instruction sets ran, and which could not."""
    missing = [name for name in ALL if name not in OF_PRODUCTS]
    return f"CPU instruction sets: {', '.join(OF_PRODUCTS) or 'none'}; not here, so not tested: {', '.join(missing)}"


def each_instruction_set(names=tuple(INSTRUCTION_SETS)):
    """Select each instruction set and yield its name, so that the slow reference runs only once for all of them."""
    try:
        for name in names:
            native.set_instruction_set(name)
            yield name
    finally:
        if INSTRUCTION_SETS:
            native.set_instruction_set("")


def assert_op(op, args, expected, device="cpu"):
    """Check an op's results with each instruction set, or on a GPU, against those of the reference."""
    args = [t.to(device) if isinstance(t, torch.Tensor) else t for t in args]
    for name in each_instruction_set() if device == "cpu" else (device,):
        results = op(*args)
        results = results if isinstance(results, (tuple, list)) else (results,)
        for i, (result, right) in enumerate(zip(results, expected, strict=True)):
            assert_same_bits(result.cpu(), right, f"output {i} of {op} on {name}")


def assert_same_bits(actual, expected, what=""):
    """Assert equal shapes, dtypes and bits; all NaNs are equal."""
    differing = differing_bits(expected, actual)
    assert not differing, f"{differing} of {actual.numel()} differ, {what}"


def sample(shape, dtype, seed=0):
    """Return values over several binades, including some on and near the grid's midpoints, and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
    grid = torch.randint(-28, 29, shape, generator=generator) * 0.25
    return torch.where(torch.rand(shape, generator=generator) < 0.3, grid, x).to(dtype)


def reference_amax(x, spec, rng_state=None, col0=0):
    if spec.row_scaled:
        return reference.row_amax(x, spec.hadamard_sign)
    if spec.is_eden:
        return eden.amax(x, rng_state, col0)
    return reference.amax(x if spec.hadamard_sign is None else reference.hadamard(x, spec.hadamard_sign))


def displaced(x, offset, device="cpu"):
    """Return a contiguous copy of x that begins ``offset`` bytes, or on a GPU elements, after its allocation."""
    if device != "cpu":
        return torch.empty(offset + x.numel(), dtype=x.dtype, device=device)[offset:].view(x.shape).copy_(x)
    memory = torch.empty(x.numel() * x.element_size() + offset, dtype=torch.uint8).numpy()
    if not x.numel():
        return x.contiguous()
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=offset).view(x.shape).copy_(x)
