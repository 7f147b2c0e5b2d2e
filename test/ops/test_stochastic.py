"""The statistics of stochastic rounding, each at a stated sample size.

A check yields what it looks at and z, the measured deviation in standard deviations, in a form whose tail has a proven
bound: for counts, the signed root of twice the log-likelihood ratio (Chernoff), and for means, Bernstein's
t / sqrt(V + M t / 3). For independent samples, both satisfy P(|z| > t) <= 2 exp(-t^2 / 2). The 16-bit windows of
neighbours share a byte, which changes the variance of a sum by less than 2/256. So |z| > 7 = Z_BOUND has a probability
below 2 exp(-6.97^2 / 2) = 6e-11. One run of this file makes fewer than 2,000 checks on a device: a false alarm in less
than 2e-7 of all runs.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, CODE_VALUES, E2M1_MAX, code_values, unpack

pytestmark = pytest.mark.slow
N = torch.ops.nvfp4
Z_BOUND = 7.0
ONE = 1 << 16
"""The probability 1 in units of 1/65536, the resolution of 16 random bits."""
STOCHASTIC = QuantizeSpec(round_mode="stochastic")
SPECS = {
    "16 bits": STOCHASTIC,
    "8 bits": STOCHASTIC.replace(random_bits=8),
    "16 bits, 16x16": STOCHASTIC.replace(block_rows=16),
    "16 bits, scales up": STOCHASTIC.replace(scale_rounding="up"),
}


def count_z(count, n, p):
    """Return the signed root of 2 n KL(count/n || p), which is exact for every p; infinite for an impossible count."""
    share, divergence = count / n, 0.0
    for observed, probability in ((share, p), (1 - share, 1 - p)):
        if observed > 0:
            divergence += observed * math.log(observed / probability) if probability > 0 else math.inf
    return math.copysign(math.sqrt(max(2 * n * divergence, 0.0)), share - p)


def mean_z(deviation, variance):
    """Return z of a sum's deviation from its expectation, given its variance; no summand is larger than 1."""
    spread = variance + abs(deviation) / 3
    return deviation / math.sqrt(spread) if spread else 0.0


def rng_state(seed, offset, device="cpu"):
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


# --- what rounds, and its inputs --------------------------------------------------------------------------------------


def rounded(v, state, spec, **origin):
    """Return the codes of v, float32 (rows, K) in [-6, 6] with a 6 in every block: x * enc = x = v."""
    amax = v.new_tensor(E2M1_MAX * spec.scale_ceiling)  # S_enc is 1, and so is the scale of such a block
    return unpack(N.quantize(v, amax, state, spec.pack(), **origin)[0])[..., : v.shape[-1]]


def chance(fraction, spec):
    """Return the probability of rounding up: the fraction, rounded down to the resolution of the random bits."""
    unit = 1 << 16 - spec.random_bits
    return fraction // unit * unit / ONE


@dataclasses.dataclass
class Probe:
    """Values (rows, K) with known positions on the grid, and an anchor of 6 in every block of 16 in a row or column.

    Anchors are code 6 with fraction 65536, which always rounds up, and are not part of the samples. code: the lower
    neighbour, 0..6, int32; fraction: the distance to it in 1/65536 of the step, 0..65536, int32; negative: bool.
    """

    code: Tensor
    fraction: Tensor
    negative: Tensor

    def __post_init__(self):
        rows, columns = (torch.arange(size, device=self.code.device) for size in self.code.shape)
        self.anchor = (rows.unsqueeze(1) + columns) % BLOCK == 0
        self.code = torch.where(self.anchor, 6, self.code)
        self.fraction = torch.where(self.anchor, ONE, self.fraction)

    @classmethod
    def uniform(cls, rows, columns, device):
        """Sample cells, fractions and signs uniformly."""
        how = {"generator": torch.Generator(device).manual_seed(1), "device": device, "dtype": torch.int32}
        code, fraction, negative = (torch.randint(high, (rows, columns), **how) for high in (7, ONE, 2))
        return cls(code, fraction, negative.bool())

    @property
    def values(self):
        """Return v, exact in float32."""
        steps = [upper - lower for lower, upper in itertools.pairwise(CODE_VALUES)]
        step = torch.tensor(steps, device=self.code.device)[self.code.long()]
        magnitude = code_values(self.code) + self.fraction * (step / ONE)
        return torch.where(self.negative, -magnitude, magnitude)

    def ups(self, codes):
        """Return 1 for each element that was rounded up, 0 for down, -1 if it left its cell or changed sign; int32."""
        up = (codes & 7).int() - self.code
        return torch.where(((codes >> 3).bool() == self.negative) & ((up == 0) | (up == 1)), up, -1)

    def residuals(self, codes, spec):
        """Return ups minus their probability: mean zero, variance p (1 - p), float32."""
        return self.ups(codes) - chance(self.fraction, spec)


# --- the checks ------------------------------------------------------------------------------------------------------

FRACTIONS = (0, 1, 255, 1572, 21845, 32768, 65281, 65535)
"""In 1/65536: a grid point, the smallest fraction, the largest that 8 random bits round to 0, 1/500 of a block's
largest element (1572/65536 of the lowest step: 6/500.25), a third, a half, and 1 minus the small ones."""


def cells(spec, device):
    """Shares rounded up, for 7 cells, 2 signs and 8 fractions of 15,360 samples each; a grid point never moves."""
    rows, width = 4, 4096
    grid = torch.tensor([*itertools.product(range(7), range(2), FRACTIONS)], dtype=torch.int32, device=device)
    code, negative, fraction = (column.repeat_interleave(rows).unsqueeze(1) for column in grid.unbind(1))
    probe = Probe(*(t.expand(-1, width).contiguous() for t in (code, fraction, negative.bool())))
    ups, samples = probe.ups(rounded(probe.values, rng_state(11, 5, device), spec)), rows * 3840
    yield "left its cell", math.inf if (ups < 0).any() else 0.0
    counts = ((ups > 0) & ~probe.anchor).unflatten(0, (-1, rows)).sum((1, 2)).tolist()
    for (cell, negative, fraction), count in zip(grid.tolist(), counts, strict=True):
        name = f"{'-' if negative else '+'}({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g}) at {fraction}/65536"
        yield name, count_z(count, samples, chance(fraction, spec))


def bias(spec, device):
    """The mean of 3,932,160 uniform samples, within 0.0015 step (7 sigma) of zero, or for 8 bits of the contract's."""
    probe = Probe.uniform(1024, 4096, device)
    ups, p = probe.ups(rounded(probe.values, rng_state(3, 1, device), spec)), chance(probe.fraction, spec)
    everywhere = ~probe.anchor
    of_contract = (p - probe.fraction / ONE)[everywhere].double().mean().item()
    assert of_contract == pytest.approx(0 if spec.random_bits == 16 else -127.5 / 65536, abs=2e-5)
    masks = {"all cells": everywhere, "+": everywhere & ~probe.negative, "-": everywhere & probe.negative}
    masks |= {f"cell {cell}": everywhere & (probe.code == cell) for cell in range(7)}
    for name, mask in masks.items():
        up, share = ups[mask].double(), p[mask].double()
        yield name, mean_z((up - share).sum().item(), (share * (1 - share)).sum().item())


def shared_byte_covariance(first, second):
    """Return the covariance of the ups of two neighbours with 16-bit fractions (int32), which share one byte.

    The window of the first is bytes (low a, high b), and of the second (low b, high c). An element is rounded up if its
    window is at least its threshold. So P(both) = P(first) P(c > high) + P(first and b >= low) / 256, where low and
    high are the bytes of the second's threshold.
    """
    low1, high1 = (ONE - first) & 0xFF, (ONE - first) >> 8
    low2, high2 = (ONE - second) & 0xFF, (ONE - second) >> 8
    above = 256 - torch.maximum(high1 + 1, low2)  # bytes b >= low2 that round the first up for every a
    joint = above.clamp(min=0) + (high1 >= low2) * (high1 < 256) * (256 - low1) / 256.0
    both = (first / ONE) * (255 - high2).clamp(min=0) / 256 + (high2 < 256) * joint / 256 / 256
    return both - (first / ONE) * (second / ONE)


def correlation(a, b, pa, pb, covariance=None):
    """z of the correlation of residuals a and b, with probabilities pa and pb of rounding up, both exact.

    For independent rounding, the sum of products has expectation 0, or ``covariance``, and variance sum pa qa pb qb.
    """
    expected = 0.0 if covariance is None else covariance.double().sum().item()
    variance = (pa * (1 - pa) * pb * (1 - pb)).double().sum().item()
    return mean_z((a * b).double().sum().item() - expected, variance)


def correlations(spec, device):
    """Errors within a block, between blocks and between rows: 122,880 to 245,760 pairs each, so that 0.02 shows."""
    columns = 256
    probe = Probe.uniform(1024, columns, device)
    p = chance(probe.fraction, spec)
    u = probe.residuals(rounded(probe.values, rng_state(-7, 2, device), spec), spec)
    block_u, block_p, block_f = (t.unflatten(1, (-1, BLOCK)) for t in (u, p, probe.fraction))
    for lag in range(1, BLOCK):
        near, far = slice(0, BLOCK - lag), slice(lag, BLOCK)
        shared = None
        if spec.random_bits == 16 and lag == 1:
            shared = shared_byte_covariance(block_f[..., near], block_f[..., far])
        elif spec.random_bits == 16 and lag == BLOCK - 1:  # windows are cyclic: 15 shares a byte with 0
            shared = shared_byte_covariance(block_f[..., far], block_f[..., near])
        a, b, pa, pb = (t[..., elements] for t in (block_u, block_p) for elements in (near, far))
        yield f"in a block, {lag} apart", correlation(a, b, pa, pb, shared)
    for lag in (1, 2, 4, columns // 32):
        near, far = slice(0, columns - BLOCK * lag), slice(BLOCK * lag, columns)
        yield f"{lag} blocks apart in a row", correlation(u[:, near], u[:, far], p[:, near], p[:, far])
    for lag in (1, 2, 3, 8, 16, 32, 64, 128, 256, 512, 768):
        yield f"{lag} rows apart", correlation(u[:-lag], u[lag:], p[:-lag], p[lag:])
        above, below = (slice(-lag), slice(BLOCK, None)), (slice(lag, None), slice(-BLOCK))
        yield f"{lag} rows and a block apart", correlation(u[above], u[below], p[above], p[below])


def draws(spec, device):
    """Errors of 122,880 elements and of the same with another offset, seed, stream, or shard."""
    probe = Probe.uniform(256, 512, device)
    p, v = chance(probe.fraction, spec), probe.values

    def residuals(seed, offset, **origin):
        return probe.residuals(rounded(v, rng_state(seed, offset, device), spec, **origin), spec)

    u = residuals(17, 40)
    for name, other in {
        "the next offset": residuals(17, 41),
        "the next seed": residuals(18, 40),
        "a seed that differs in its high word": residuals(17 + (1 << 32), 40),
        "seed and offset exchanged": residuals(40, 17),
        "stream 1": residuals(17, 40, stream=1),
        "the shard below": residuals(17, 40, row0=256),
        "the shard to the right": residuals(17, 40, col0=512, full_width=1024),
    }.items():
        yield name, correlation(u, other, p, p)


def transposed(spec, device):
    """Errors of a square tensor and its transpose, by element and by place in memory."""
    probe = Probe.uniform(256, 256, device)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    amax, packed = torch.tensor(E2M1_MAX * spec.scale_ceiling, device=device), spec.pack()
    codes = N.quantize_pair(probe.values, amax, amax, rng_state(23, 9, device), packed, packed)
    p, p_t = chance(probe.fraction, spec), chance(flipped.fraction, spec)
    u, u_t = probe.residuals(unpack(codes[0]), spec), flipped.residuals(unpack(codes[3]), spec)
    yield "row and transposed draw of an element", correlation(u, u_t.t(), p, p_t.t())
    yield "row and transposed draw at one place", correlation(u, u_t, p, p_t)


CHECKS = {check.__name__: check for check in (cells, bias, correlations, draws, transposed)}
OF_OPS = [("cells", how) for how in SPECS] + [*itertools.product(list(CHECKS)[1:], ("16 bits", "8 bits"))]


@pytest.mark.parametrize(("name", "how"), OF_OPS)
def test_the_ops_are_sound(name, how, device):
    found = dict(CHECKS[name](SPECS[how], device))
    assert found and not {line: z for line, z in found.items() if abs(z) > Z_BOUND}


# --- values, not codes -----------------------------------------------------------------------------------------------


def test_the_mean_of_n_converges_without_a_floor(device):
    """8,192 Gaussian elements, UP scales, which clip nothing: the RMSE of the mean of N is exact theory's / sqrt(N).

    An element at a share p of its step h has the variance p (1 - p) h^2 / N. The mean of 8,192 squares (kurtosis below
    4) has a standard deviation of 2 %, the RMSE of 1 %: 6 % are six. The seeds are fixed.
    """
    x = torch.randn(1, 8192, generator=torch.Generator().manual_seed(1)).to(device)
    spec, amax = STOCHASTIC.replace(scale_rounding="up").pack(), N.amax(x, -1)
    _, scale, factor = N.quantize(x, amax, rng_state(99, 0, device), spec)
    unit = layout.scale_values(layout.unswizzle(scale, 1, 512)).double().repeat_interleave(16, 1) * factor
    v = x.double().abs() / unit
    step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0)).double()
    share = v / step % 1
    expected = (share * (1 - share) * (step * unit).square()).mean().sqrt().item()
    total, n, together = torch.zeros_like(v), 1, 64  # copies of the row in one call, which have the same scales
    for call in range(4096 // together):
        packed = N.quantize(x.expand(together, -1).contiguous(), amax, rng_state(99, call, device), spec)
        sums = N.dequantize(*packed, 8192, torch.float32).double().cumsum(0)
        while n <= (call + 1) * together:
            error = (total + sums[n - 1 - call * together]) / n - x
            assert error.square().mean().sqrt().item() * math.sqrt(n) == pytest.approx(expected, rel=0.06)
            n *= 4
        total += sums[-1]
    assert n == 4**7
