"""Statistical tests of stochastic rounding: probabilities, bias, correlations, the random bits.

A *rounder* is a function ``codes(v, rng_state, **origin)`` from values on the grid's scale, v: float32 (rows, K) in
[-6, 6], to E2M1 codes, uint8 (rows, K). ``origin`` is row0, col0, full_width and stream, as in the ops. The checks use
only codes, so the same checks test the ops on every device (:func:`op_rounder`) and rounders with planted faults.

**Confidence.** z is the measured deviation in standard deviations, in a form whose tail has a proven bound: for counts,
the signed root of twice the log-likelihood ratio (Chernoff), and for means, Bernstein's t / sqrt(V + M t / 3). For
independent samples, both satisfy P(|z| > t) <= 2 exp(-t^2 / 2). For chi-square, z is its normal approximation. The
16-bit windows of neighbours share a byte, which changes the variance of a sum by less than 2/256. So |z| > 7 = Z_BOUND
has a probability below 2 exp(-6.97^2 / 2) = 6e-11 per check.
"""

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import BLOCK, CODE_VALUES, E2M1_MAX, code_values, unpack

Z_BOUND = 7.0
ONE = 1 << 16
"""The probability 1 in units of 1/65536, the resolution of 16 random bits."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A quantity measured over n samples, its exact expectation, and the deviation z."""

    check: str
    n: int
    measured: float
    expected: float
    z: float

    @property
    def ok(self):
        return abs(self.z) <= Z_BOUND


def count_z(count, n, p):
    """Return the signed root of 2 n KL(count/n || p), which is exact for every p; infinite for an impossible count."""
    share = count / n
    divergence = 0.0
    for observed, probability in ((share, p), (1 - share, 1 - p)):
        if observed > 0:
            divergence += observed * math.log(observed / probability) if probability > 0 else math.inf
    return math.copysign(math.sqrt(max(2 * n * divergence, 0.0)), share - p)


def mean_z(deviation, variance):
    """Return z of a sum's deviation from its expectation, given its variance; no summand is larger than 1."""
    spread = variance + abs(deviation) / 3
    return deviation / math.sqrt(spread) if spread else 0.0


def chi_square(check, samples, bins):
    """Test samples (integers 0..bins-1) for equal probabilities by chi-square (Wilson and Hilferty's approximation)."""
    n = samples.numel()
    counts = torch.bincount(samples.flatten().long(), minlength=bins).double()
    statistic = ((counts - n / bins).square().sum() / (n / bins)).item()
    freedom = bins - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return Finding(check, n, statistic / freedom, 1.0, z)


# --- rounders and their inputs ---------------------------------------------------------------------------------------


def op_rounder(spec):
    """Return ``torch.ops.nvfp4.quantize`` as a rounder of tensors with a 6 in every block: x * enc = x = v."""

    def codes(v, rng_state, **origin):
        amax = v.new_tensor(E2M1_MAX * spec.scale_ceiling)  # S_enc is 1, and so is the scale of such a block
        return unpack(torch.ops.nvfp4.quantize(v, amax, rng_state, spec.pack(), **origin)[0])[..., : v.shape[-1]]

    return codes


def op_pair(spec):
    """Return ``torch.ops.nvfp4.quantize_pair`` as a function to the codes of v (M, K) and of its transpose (K, M)."""

    def codes(v, rng_state):
        amax = v.new_tensor(E2M1_MAX * spec.scale_ceiling)
        packed = torch.ops.nvfp4.quantize_pair(v, amax, amax, rng_state, spec.pack(), spec.pack())
        return unpack(packed[0])[:, : v.shape[1]], unpack(packed[3])[:, : v.shape[0]]

    return codes


def pair_of(rounder):
    """Return a function to the codes of v and of its transpose, by two calls of a rounder."""
    return lambda v, rng_state: (rounder(v, rng_state), rounder(v.t().contiguous(), rng_state, stream=1))


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
        rows, columns = self.code.shape
        row = torch.arange(rows, device=self.code.device).unsqueeze(1)
        self.anchor = (row + torch.arange(columns, device=self.code.device)) % BLOCK == 0
        self.code = torch.where(self.anchor, 6, self.code)
        self.fraction = torch.where(self.anchor, ONE, self.fraction)

    @classmethod
    def uniform(cls, rows, columns, generator):
        """Sample cells, fractions and signs uniformly."""
        code, fraction, negative = (
            torch.randint(high, (rows, columns), generator=generator, device=generator.device, dtype=torch.int32)
            for high in (7, ONE, 2)
        )
        return cls(code, fraction, negative.bool())

    @property
    def values(self):
        """Return v, exact in float32."""
        steps = [upper - lower for lower, upper in itertools.pairwise(CODE_VALUES)]
        step = torch.tensor(steps, device=self.code.device)[self.code.long()]
        magnitude = code_values(self.code) + self.fraction * (step / ONE)
        return torch.where(self.negative, -magnitude, magnitude)

    def probability(self, random_bits):
        """Return the probability of rounding up: the fraction, rounded down to the resolution of the random bits."""
        unit = 1 << 16 - random_bits
        return (self.fraction // unit * unit) / ONE

    def ups(self, codes):
        """Return 1 for each element that was rounded up, 0 for down, -1 if it left its cell or changed sign; int32."""
        up = (codes & 7).int() - self.code
        return torch.where(((codes >> 3).bool() == self.negative) & ((up == 0) | (up == 1)), up, -1)

    def residuals(self, codes, random_bits):
        """Return ups minus their probability: mean zero, variance p (1 - p), float32."""
        return self.ups(codes) - self.probability(random_bits)


def rng_state(seed, offset, device="cpu"):
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


# --- the checks ------------------------------------------------------------------------------------------------------

FRACTIONS = (0, 1, 255, 1572, 21845, 32768, 65281, 65535)
"""In 1/65536: a grid point, the smallest fraction, the largest that 8 random bits round to 0, 1/500 of a block's
largest element (1572/65536 of the lowest step: 6/500.25), a third, a half, and 1 minus the small ones."""


def cells(rounder, random_bits, rows, device="cpu"):
    """Check the share rounded up against the probability, for every cell of the grid, sign, and one of FRACTIONS.

    Each combination has ``rows`` rows of 4096 elements (3840 samples and 256 anchors each); all are in one tensor.
    """
    grid = torch.tensor([*itertools.product(range(7), range(2), FRACTIONS)], dtype=torch.int32, device=device)
    code, negative, fraction = (column.repeat_interleave(rows).unsqueeze(1) for column in grid.unbind(1))
    width = 4096
    probe = Probe(*(t.expand(-1, width).contiguous() for t in (code, fraction, negative.bool())))
    ups = probe.ups(rounder(probe.values, rng_state(11, 5, device)))
    yield Finding("left its cell", ups.numel(), n := int((ups < 0).sum()), 0, math.inf if n else 0.0)
    samples = rows * (width - width // BLOCK)
    counts = ((ups > 0) & ~probe.anchor).unflatten(0, (-1, rows)).sum((1, 2)).tolist()
    unit = 1 << 16 - random_bits
    for (cell, negative, fraction), count in zip(grid.tolist(), counts, strict=True):
        p = fraction // unit * unit / ONE
        name = f"{'-' if negative else '+'}({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g}) at {fraction}/65536"
        yield Finding(name, samples, count / samples, p, count_z(count, samples, p))


def bias(rounder, random_bits, rows, columns, generator):
    """Check the mean error away from zero, in steps, of uniform fractions in 1/65536, over all cells and per cell.

    The expectation is 0 with 16 random bits. With 8, it is the contract's bias, on average -(255/2)/65536 step.
    """
    probe = Probe.uniform(rows, columns, generator)
    ups = probe.ups(rounder(probe.values, rng_state(3, 1, generator.device)))
    p, truth, everywhere = probe.probability(random_bits), probe.fraction / ONE, ~probe.anchor
    masks = {"all cells": everywhere, "all cells, +": everywhere & ~probe.negative}
    masks["all cells, -"] = everywhere & probe.negative
    for cell in range(7):
        masks[f"({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g})"] = everywhere & (probe.code == cell)
    for name, mask in masks.items():
        up, chance, exact = ups[mask].double(), p[mask].double(), truth[mask].double()
        z = mean_z((up - chance).sum().item(), (chance * (1 - chance)).sum().item())
        yield Finding(name, up.numel(), (up - exact).mean().item(), (chance - exact).mean().item(), z)


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


def correlation(check, a, b, pa, pb, covariance=None):
    """Check the correlation of residuals a and b, of the same shape, with probabilities pa and pb of rounding up.

    For independent rounding, the sum of products has expectation 0 and variance sum pa qa pb qb, both exact. The
    expectation is ``covariance`` if it is given.
    """
    va, vb = pa * (1 - pa), pb * (1 - pb)
    expected = 0.0 if covariance is None else covariance.double().sum().item()
    total = (a * b).double().sum().item()
    scale = math.sqrt(va.double().sum().item() * vb.double().sum().item())
    z = mean_z(total - expected, (va * vb).double().sum().item())
    return Finding(check, int(((va > 0) & (vb > 0)).sum()), total / scale, expected / scale, z)


def correlations(rounder, random_bits, rows, columns, generator):
    """Check the correlations of errors within a block, between blocks and between rows, in one rounded tensor."""
    probe = Probe.uniform(rows, columns, generator)
    p = probe.probability(random_bits)
    u = probe.residuals(rounder(probe.values, rng_state(-7, 2, generator.device)), random_bits)
    block_u, block_p, block_f = (t.unflatten(1, (-1, BLOCK)) for t in (u, p, probe.fraction))
    for lag in range(1, BLOCK):
        near, far = slice(0, BLOCK - lag), slice(lag, BLOCK)
        shared = None
        if random_bits == 16 and lag == 1:
            shared = shared_byte_covariance(block_f[..., near], block_f[..., far])
        elif random_bits == 16 and lag == BLOCK - 1:  # the windows are cyclic: element 15 shares a byte with element 0
            shared = shared_byte_covariance(block_f[..., far], block_f[..., near])
        a, b, pa, pb = (t[..., elements] for t in (block_u, block_p) for elements in (near, far))
        yield correlation(f"in a block, {lag} apart", a, b, pa, pb, shared)
    for lag in (1, 2, 4, columns // 32):
        near, far = slice(0, columns - BLOCK * lag), slice(BLOCK * lag, columns)
        yield correlation(f"{lag} blocks apart in a row", u[:, near], u[:, far], p[:, near], p[:, far])
    for lag in (1, 2, 3, 8, 16, 32, 64, 128, 256, 512, 768):
        yield correlation(f"{lag} rows apart", u[:-lag], u[lag:], p[:-lag], p[lag:])
        above, below = (slice(-lag), slice(BLOCK, None)), (slice(lag, None), slice(-BLOCK))
        yield correlation(f"{lag} rows and a block apart", u[above], u[below], p[above], p[below])


def draws(rounder, random_bits, rows, columns, generator):
    """Check the correlations of errors when a tensor is rounded with another offset, seed, stream, or shard."""
    probe, device = Probe.uniform(rows, columns, generator), generator.device
    p, v = probe.probability(random_bits), probe.values

    def residuals(seed, offset, **origin):
        return probe.residuals(rounder(v, rng_state(seed, offset, device), **origin), random_bits)

    u = residuals(17, 40)
    for name, other in {
        "the next offset": residuals(17, 41),
        "the next seed": residuals(18, 40),
        "a seed that differs in its high word": residuals(17 + (1 << 32), 40),
        "seed and offset exchanged": residuals(40, 17),
        "stream 1": residuals(17, 40, stream=1),
        "the shard below": residuals(17, 40, row0=rows),
        "the shard to the right": residuals(17, 40, col0=columns, full_width=2 * columns),
    }.items():
        yield correlation(name, u, other, p, p)


def transposed(pair, random_bits, size, generator):
    """Check the correlations of errors of a square tensor and its transpose, by element and by memory position."""
    probe = Probe.uniform(size, size, generator)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    codes, codes_t = pair(probe.values, rng_state(23, 9, generator.device))
    p, p_t = probe.probability(random_bits), flipped.probability(random_bits)
    u, u_t = probe.residuals(codes, random_bits), flipped.residuals(codes_t, random_bits)
    yield correlation("row and transposed draw of an element", u, u_t.t(), p, p_t.t())
    yield correlation("row and transposed draw at one place", u, u_t, p, p_t)


def recover_random16(rounder, rows, columns, state):
    """Recover the 16 random bits of every element, int32, and a mask that excludes anchors, by bisection.

    An element with fraction f is rounded up if its bits are at least 65536 - f. Sixteen roundings with the same state,
    with fractions that depend on the results so far, determine the bits.
    """
    bits = torch.zeros(rows, columns, dtype=torch.int32, device=state.device)
    positive = torch.zeros_like(bits, dtype=torch.bool)
    for bit in reversed(range(16)):
        trial = bits + (1 << bit)
        probe = Probe(torch.zeros_like(bits), ONE - trial, positive)
        bits = torch.where(probe.ups(rounder(probe.values, state)) > 0, trial, bits)
    return bits, ~probe.anchor


def bits(rounder, rows, columns, device="cpu"):
    """Compare the bits that a 16-bit rounder used with the contract's, and test them for uniformity."""
    state = rng_state(0x0123456789ABCDEF, 77, device)
    recovered, known = recover_random16(rounder, rows, columns, state)
    wrong = int((recovered != reference.random16(rows, columns, state))[known].sum())
    yield Finding("the contract's bits", int(known.sum()), wrong, 0, math.inf if wrong else 0.0)
    yield chi_square("bytes", (recovered & 0xFF)[known], 256)  # no two elements share a low byte
    position = torch.arange(columns, device=device) % BLOCK * 256
    yield chi_square("bytes by position in the block", ((recovered & 0xFF) + position)[known], 16 * 256)
    for first in (0, 1):  # windows of every second element share no byte
        yield chi_square(f"16-bit windows from element {first}", recovered[:, first::2][known[:, first::2]], ONE)
    low = (recovered & 0xFF).unflatten(1, (-1, BLOCK))
    both = (known.unflatten(1, (-1, BLOCK))[..., :-1:2]) & (known.unflatten(1, (-1, BLOCK))[..., 1::2])
    yield chi_square("pairs of bytes", (low[..., :-1:2] | low[..., 1::2] << 8)[both], ONE)
