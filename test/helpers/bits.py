"""Inputs that exercise kernels, and comparisons of their results with an oracle, bit for bit; all NaNs are equal."""

import torch

from helpers import instruction_sets
from nvfp4_tensor import NVFP4Tensor

MODES = [
    {"round_mode": "rne"},
    {"round_mode": "away"},
    {"round_mode": "zero"},
    {"round_mode": "stochastic"},
    {"round_mode": "stochastic", "random_bits": 8},
]
SHAPES = [
    (128, 256), (1, 16), (33, 50), (7, 1), (129, 272), (3, 5, 48), (40,), (1, 4112), (300, 37), (64, 512), (9, 1000),
]  # fmt: skip
EMPTY_SHAPES = [(0, 64), (32, 0), (2, 0, 16), (0,)]
MAGNITUDES = {torch.bfloat16: (1e-38, 1e-30, 1.0, 3e38), torch.float32: (1e-38, 1e-6, 1e4, 3e38)}
MAGNITUDES[torch.float16] = (1e-6, 1.0, 100.0, 6e4)


def inputs(shape, dtype, magnitude, poison=True):
    """Return values of a magnitude, some on and near ties, including zeros, -0.0 and (poison) a NaN and an infinity."""
    grid = torch.randint(-24, 25, shape) / 24  # times 6, multiples of 1/4
    x = torch.where(torch.rand(shape) < 0.3, grid, torch.randn(shape).clamp(-1, 1)).mul(magnitude).to(dtype)
    flat = x.view(-1)
    if flat.numel() > 40:
        flat[3], flat[17], flat[20:24] = -0.0, 0.0, -magnitude
        if poison:
            flat[flat.numel() // 2], flat[flat.numel() // 3] = float("nan"), float("-inf")
    return x


def of_all_sizes(dtype):
    """Return blocks of which some saturate and others vanish, whatever the amax; ties, whatever the scale; zeros."""
    x = torch.randn(256, 256) * torch.logspace(-7, 4, 256).unsqueeze(1).clamp(max=6e4)
    x[64:128] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(64, 32)
    x[128:136, :64], x[:, 80] = 0.0, -0.0
    x[140] = x[140].sign() * min(3e38, torch.finfo(dtype).max)  # sums of its rotation overflow
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


def rng_state():
    return torch.randint(-(2**63), 2**63 - 1, (2,))


def assert_same_bits(actual, expected, what=""):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        instruction_sets.assert_same_bits(a.cpu(), b.cpu(), f"{what}: result {i}")


def equal_bits(actual, expected):
    """Whether tensors have the same bits, compared on their device."""
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)


def relative_error(a, b):
    """Return the norm of a - b, relative to that of b."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def stored_bits(*tensors):
    """Return the bytes of tensors, uint8 (n,): of NVFP4 ones, those of codes and scales."""
    parts = []
    for t in tensors:
        parts += [t.qdata, t.scale, t.per_tensor_scale] if isinstance(t, NVFP4Tensor) else [t.detach()]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
