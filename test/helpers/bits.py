"""Inputs that exercise kernels, and comparisons of their results with an oracle, bit for bit; all NaNs are equal."""

import torch

MODES = [
    {"round_mode": "rne"},
    {"round_mode": "away"},
    {"round_mode": "zero"},
    {"round_mode": "stochastic"},
    {"round_mode": "stochastic", "random_bits": 8},
]
SHAPES = [(128, 256), (1, 16), (33, 50), (7, 1), (129, 272), (3, 5, 48), (40,), (100, 1040)]
EMPTY_SHAPES = [(0, 64), (32, 0), (2, 0, 16), (0,)]
MAGNITUDES = {torch.bfloat16: (1e-38, 1e-30, 1.0, 3e38), torch.float32: (1e-38, 1e-6, 1e4, 3e38)}
MAGNITUDES[torch.float16] = (1e-6, 1.0, 100.0, 6e4)


def inputs(shape, dtype, magnitude, poison=True):
    """Return Gaussian values of a magnitude, including zeros, -0.0 and (poison) a NaN and an infinity."""
    x = torch.randn(shape).clamp(-1, 1).mul(magnitude).to(dtype)
    flat = x.view(-1)
    if flat.numel() > 40:
        flat[3], flat[17], flat[20:24] = -0.0, 0.0, -magnitude
        if poison:
            flat[flat.numel() // 2], flat[flat.numel() // 3] = float("nan"), float("-inf")
    return x


def rng_state():
    return torch.randint(-(2**63), 2**63 - 1, (2,))


def assert_same_bits(actual, expected, what=""):
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        a = a.cpu()
        assert a.shape == b.shape and a.dtype == b.dtype, (what, i, a.shape, b.shape, a.dtype, b.dtype)
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        same = a.view(integer) == b.view(integer)
        if a.element_size() > 1 and a.dtype.is_floating_point:
            same |= a.isnan() & b.isnan()
        assert same.all(), f"{what}: result {i} differs in {int((~same).sum())} of {same.numel()} elements"


def equal_bits(actual, expected):
    """Whether tensors have the same bits, compared on their device."""
    pairs = zip(actual, expected, strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)
