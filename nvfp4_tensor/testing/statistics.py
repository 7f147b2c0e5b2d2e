"""Statistical tests of stochastic rounding: probabilities, bias, correlations, the random bits, convergence.

A *rounder* is a function ``codes(v, rng_state, **origin)`` from values on the grid's scale, v: float32 (rows, K) in
[-6, 6], to E2M1 codes, uint8 (rows, K). ``origin`` is row0, col0, full_width and stream, as in the ops. The checks use
only codes, so the same checks test the ops on every device (:func:`op_rounder`) and rounders with planted faults.

**Confidence.** z is the measured deviation in standard deviations, in a form whose tail has a proven bound: for counts,
the signed root of twice the log-likelihood ratio (Chernoff), and for means, Bernstein's t / sqrt(V + M t / 3). For
independent samples, both satisfy P(|z| > t) <= 2 exp(-t^2 / 2). For chi-square and convergence, z is their normal
approximation. The 16-bit windows of neighbours share a byte, which changes the variance of a sum by less than 2/256. So
|z| > 7 = Z_BOUND has a probability below 2 exp(-6.97^2 / 2) = 6e-11 per check: a thousand checks raise a false alarm
less than once in 1e7 runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.choices import RoundingMode
from nvfp4_tensor.numerics.layout import BLOCK, CODE_VALUES, E2M1_MAX, code_values, unpack
from nvfp4_tensor.numerics.spec import QuantizeSpec

Z_BOUND = 7.0
ONE = 1 << 16
"""The probability 1 in units of 1/65536, the resolution of 16 random bits."""
Rounder = Callable[..., Tensor]
PairRounder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Findings = Iterator["Finding"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report: a quantity measured over n samples, its exact expectation, and the deviation z."""

    check: str
    n: int
    measured: float
    expected: float
    z: float

    @property
    def ok(self) -> bool:
        """Whether the deviation is consistent with chance."""
        return abs(self.z) <= Z_BOUND


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding with the largest deviation."""
    return max(findings, key=lambda finding: abs(finding.z))


# --- deviations ------------------------------------------------------------------------------------------------------


def count_z(count: int, n: int, p: float) -> float:
    """Return the signed root of 2 n KL(count/n || p), which is exact for every p; infinite for an impossible count."""
    share = count / n
    divergence = 0.0
    for observed, probability in ((share, p), (1 - share, 1 - p)):
        if observed > 0:
            divergence += observed * math.log(observed / probability) if probability > 0 else math.inf
    return math.copysign(math.sqrt(max(2 * n * divergence, 0.0)), share - p)


def mean_z(deviation: float, variance: float, largest: float) -> float:
    """Return z of a sum's deviation from its expectation, given the sum's variance and its largest summand."""
    spread = variance + largest * abs(deviation) / 3
    if spread == 0:
        return 0.0 if deviation == 0 else math.copysign(math.inf, deviation)
    return deviation / math.sqrt(spread)


def chi_square(check: str, samples: Tensor, bins: int) -> Finding:
    """Test samples (integers 0..bins-1) for equal probabilities by chi-square (Wilson and Hilferty's approximation)."""
    n = samples.numel()
    counts = torch.bincount(samples.flatten().long(), minlength=bins).double()
    statistic = ((counts - n / bins).square().sum() / (n / bins)).item()
    freedom = bins - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return Finding(check, n, statistic / freedom, 1.0, z)


def equal(check: str, a: Tensor, b: Tensor) -> Finding:
    """Return the share of elements that differ; any difference fails."""
    differing = int((a != b).sum())
    return Finding(check, a.numel(), differing / a.numel(), 0.0, math.inf if differing else 0.0)


# --- rounders and their inputs ---------------------------------------------------------------------------------------


def unit_amax(like: Tensor, spec: QuantizeSpec) -> Tensor:
    """Return the amax that makes S_enc exactly 1: a block whose largest element is 6 then has a scale of exactly 1."""
    assert spec.scale_ceiling is not None
    return like.new_tensor(E2M1_MAX * spec.scale_ceiling)


def op_rounder(spec: QuantizeSpec) -> Rounder:
    """Return ``torch.ops.nvfp4.quantize`` as a rounder of tensors with a 6 in every block: x * enc = x = v."""

    def codes(v: Tensor, rng_state: Tensor, **origin: int) -> Tensor:
        amax = unit_amax(v, spec)
        return unpack(torch.ops.nvfp4.quantize(v, amax, rng_state, spec.pack(), **origin)[0])[..., : v.shape[-1]]

    return codes


def op_pair(spec: QuantizeSpec) -> PairRounder:
    """Return ``torch.ops.nvfp4.quantize_pair`` as a function to the codes of v (M, K) and of its transpose (K, M)."""

    def codes(v: Tensor, rng_state: Tensor) -> tuple[Tensor, Tensor]:
        amax = unit_amax(v, spec)
        packed = torch.ops.nvfp4.quantize_pair(v, amax, amax, rng_state, spec.pack(), spec.pack())
        return unpack(packed[0])[:, : v.shape[1]], unpack(packed[3])[:, : v.shape[0]]

    return codes


def pair_of(rounder: Rounder) -> PairRounder:
    """Return a function to the codes of v and of its transpose, by two calls of a rounder."""
    return lambda v, rng_state: (rounder(v, rng_state), rounder(v.t().contiguous(), rng_state, stream=1))


@dataclasses.dataclass
class Probe:
    """Values (rows, K) with known positions on the grid, and an anchor of 6 in every block of 16 in a row or column.

    Anchors are code 6 with fraction 65536, which always rounds up, and are not part of the samples.

    Attributes:
        code: the lower neighbour, 0..6, int32.
        fraction: the distance to it in 1/65536 of the step, 0..65536, int32.
        negative: bool.
    """

    code: Tensor
    fraction: Tensor
    negative: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.code.shape
        row = torch.arange(rows, device=self.code.device).unsqueeze(1)
        self.anchor = (row + torch.arange(columns, device=self.code.device)) % BLOCK == 0
        self.code = torch.where(self.anchor, 6, self.code)
        self.fraction = torch.where(self.anchor, ONE, self.fraction)

    @classmethod
    def uniform(cls, rows: int, columns: int, generator: torch.Generator) -> Probe:
        """Sample cells, fractions and signs uniformly."""

        def sample(high: int, dtype: torch.dtype) -> Tensor:
            return torch.randint(high, (rows, columns), generator=generator, device=generator.device, dtype=dtype)

        return cls(sample(7, torch.int32), sample(ONE, torch.int32), sample(2, torch.uint8).bool())

    @property
    def step(self) -> Tensor:
        """Return the distance between the two neighbours, float32."""
        steps = [upper - lower for lower, upper in itertools.pairwise(CODE_VALUES)]
        return torch.tensor(steps, dtype=torch.float32, device=self.code.device)[self.code.long()]

    @property
    def values(self) -> Tensor:
        """Return v, exact in float32."""
        magnitude = code_values(self.code) + self.fraction * (self.step / ONE)
        return torch.where(self.negative, -magnitude, magnitude)

    def probability(self, random_bits: int) -> Tensor:
        """Return the probability of rounding up (away from zero), exact in float32.

        It is the fraction, rounded down to the resolution of the random bits.
        """
        unit = 1 << 16 - random_bits
        return (self.fraction // unit * unit) / ONE

    def ups(self, codes: Tensor) -> Tensor:
        """Return 1 for each element that was rounded up, 0 for down, -1 if it left its cell or changed sign; int32."""
        up = (codes & 7).int() - self.code
        return torch.where(((codes >> 3).bool() == self.negative) & ((up == 0) | (up == 1)), up, -1)

    def residuals(self, codes: Tensor, random_bits: int) -> Tensor:
        """Return ups minus their probability: mean zero, variance p (1 - p), float32."""
        return self.ups(codes) - self.probability(random_bits)


def rng_state(seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (seed, offset) as an int64 tensor (2,), the rng_state of ops."""
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


# --- the checks ------------------------------------------------------------------------------------------------------

FRACTIONS = (0, 1, 255, 1572, 21845, 32768, 65281, 65535)
"""In 1/65536: a grid point, the smallest fraction, the largest that 8 random bits round to 0, 1/500 of a block's
largest element (1572/65536 of the lowest step: 6/500.25), a third, a half, and 1 minus the small ones."""


def cells(rounder: Rounder, random_bits: int, rows: int, device: torch.device | str = "cpu") -> Findings:
    """Check the share rounded up against the probability, for every cell of the grid, sign, and one of FRACTIONS.

    Each combination has ``rows`` rows of 4096 elements (3840 samples and 256 anchors each); all are in one tensor.
    """
    grid = (
        torch.cartesian_prod(torch.arange(7), torch.arange(2), torch.tensor(FRACTIONS, dtype=torch.int64))
        .int()
        .to(device)
    )
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
        sign = "-" if negative else "+"
        name = f"{sign}({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g}) at {fraction}/65536"
        yield Finding(name, samples, count / samples, p, count_z(count, samples, p))


def bias(rounder: Rounder, random_bits: int, rows: int, columns: int, generator: torch.Generator) -> Findings:
    """Check the mean error away from zero, in steps, of uniform fractions in 1/65536, over all cells and per cell.

    The expectation is 0 with 16 random bits. With 8, it is the contract's bias, on average -(255/2)/65536 step.
    """
    probe = Probe.uniform(rows, columns, generator)
    ups = probe.ups(rounder(probe.values, rng_state(3, 1, generator.device)))
    p = probe.probability(random_bits)
    truth = probe.fraction / ONE
    everywhere = ~probe.anchor
    masks = {"all cells": everywhere, "all cells, +": everywhere & ~probe.negative}
    masks["all cells, -"] = everywhere & probe.negative
    for cell in range(7):
        masks[f"({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g})"] = everywhere & (probe.code == cell)
    for name, mask in masks.items():
        up, chance, exact = ups[mask].double(), p[mask].double(), truth[mask].double()
        n = up.numel()
        z = mean_z((up - chance).sum().item(), (chance * (1 - chance)).sum().item(), 1.0)
        yield Finding(name, n, (up - exact).mean().item(), (chance - exact).mean().item(), z)


def shared_byte_covariance(first: Tensor, second: Tensor) -> Tensor:
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


def correlation(check: str, a: Tensor, b: Tensor, pa: Tensor, pb: Tensor, covariance: Tensor | None = None) -> Finding:
    """Check the correlation of residuals a and b, of the same shape, with probabilities pa and pb of rounding up.

    For independent rounding, the sum of products has expectation 0 and variance sum pa qa pb qb, both exact. The
    expectation is ``covariance`` if it is given.
    """
    va, vb = pa * (1 - pa), pb * (1 - pb)
    expected = 0.0 if covariance is None else covariance.double().sum().item()
    total = (a * b).double().sum().item()
    scale = math.sqrt(va.double().sum().item() * vb.double().sum().item())
    z = mean_z(total - expected, (va * vb).double().sum().item(), 1.0)
    return Finding(check, int(((va > 0) & (vb > 0)).sum()), total / scale, expected / scale, z)


def correlations(rounder: Rounder, random_bits: int, rows: int, columns: int, generator: torch.Generator) -> Findings:
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
        if lag < rows:
            yield correlation(f"{lag} rows apart", u[:-lag], u[lag:], p[:-lag], p[lag:])
            yield correlation(
                f"{lag} rows and a block apart", u[:-lag, BLOCK:], u[lag:, :-BLOCK], p[:-lag, BLOCK:], p[lag:, :-BLOCK]
            )


def draws(rounder: Rounder, random_bits: int, rows: int, columns: int, generator: torch.Generator) -> Findings:
    """Check the correlations of errors when a tensor is rounded with another offset, seed, stream, or shard."""
    probe = Probe.uniform(rows, columns, generator)
    device = generator.device
    p = probe.probability(random_bits)
    v = probe.values
    state = rng_state(17, 40, device)

    def residuals(state: Tensor, **origin: int) -> Tensor:
        return probe.residuals(rounder(v, state, **origin), random_bits)

    u = residuals(state)
    for name, other in {
        "the next offset": residuals(rng_state(17, 41, device)),
        "the next seed": residuals(rng_state(18, 40, device)),
        "a seed that differs in its high word": residuals(rng_state(17 + (1 << 32), 40, device)),
        "seed and offset exchanged": residuals(rng_state(40, 17, device)),
        "stream 1": residuals(state, stream=1),
        "the shard below": residuals(state, row0=rows),
        "the shard to the right": residuals(state, col0=columns, full_width=2 * columns),
    }.items():
        yield correlation(name, u, other, p, p)


def transposed(pair: PairRounder, random_bits: int, size: int, generator: torch.Generator) -> Findings:
    """Check the correlations of errors of a square tensor and its transpose, by element and by memory position."""
    probe = Probe.uniform(size, size, generator)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    codes, codes_t = pair(probe.values, rng_state(23, 9, generator.device))
    p, p_t = probe.probability(random_bits), flipped.probability(random_bits)
    u, u_t = probe.residuals(codes, random_bits), flipped.residuals(codes_t, random_bits)
    yield correlation("row and transposed draw of an element", u, u_t.t(), p, p_t.t())
    yield correlation("row and transposed draw at one place", u, u_t, p, p_t)


def shards(rounder: Rounder, rows: int, columns: int, generator: torch.Generator) -> Findings:
    """Check that shards, rounded with their origins, have the same codes as in the full tensor."""
    v = Probe.uniform(rows, columns, generator).values
    state = rng_state(31, 12, generator.device)
    full = rounder(v, state)
    yield equal("again, the same state", full, rounder(v, state))
    row, column = BLOCK * (rows // 3 // BLOCK), BLOCK * (columns // 3 // BLOCK)
    for row0, row1 in ((0, row), (row, rows)):
        for col0, col1 in ((0, column), (column, columns)):
            shard = v[row0:row1, col0:col1].contiguous()
            codes = rounder(shard, state, row0=row0, col0=col0, full_width=columns)
            yield equal(f"shard at ({row0}, {col0})", full[row0:row1, col0:col1], codes)


def recover_random16(rounder: Rounder, rows: int, columns: int, state: Tensor, **origin: int) -> tuple[Tensor, Tensor]:
    """Recover the 16 random bits of every element, int32, and a mask that excludes anchors, by bisection.

    An element with fraction f is rounded up if its bits are at least 65536 - f. Sixteen roundings with the same state,
    with fractions that depend on the results so far, determine the bits.
    """
    bits = torch.zeros(rows, columns, dtype=torch.int32, device=state.device)
    positive = torch.zeros_like(bits, dtype=torch.bool)
    for bit in reversed(range(16)):
        trial = bits + (1 << bit)
        probe = Probe(torch.zeros_like(bits), ONE - trial, positive)
        bits = torch.where(probe.ups(rounder(probe.values, state, **origin)) > 0, trial, bits)
    return bits, ~probe.anchor


def bits(rounder: Rounder, rows: int, columns: int, device: torch.device | str = "cpu") -> Findings:
    """Compare the bits that a 16-bit rounder used with the contract's, and test them for uniformity."""
    state = rng_state(0x0123456789ABCDEF, 77, device)
    recovered, known = recover_random16(rounder, rows, columns, state)
    contract = reference.random16(rows, columns, state)
    yield equal("the contract's bits", recovered[known], contract[known])
    yield chi_square("bytes", (recovered & 0xFF)[known], 256)  # no two elements share a low byte
    position = torch.arange(columns, device=device) % BLOCK * 256
    yield chi_square("bytes by position in the block", ((recovered & 0xFF) + position)[known], 16 * 256)
    disjoint = known[:, ::2]  # windows of every second element share no byte
    yield chi_square("16-bit windows", recovered[:, ::2][disjoint], ONE)
    yield chi_square("16-bit windows, the odd ones", recovered[:, 1::2][known[:, 1::2]], ONE)
    low = (recovered & 0xFF).unflatten(1, (-1, BLOCK))
    both = (known.unflatten(1, (-1, BLOCK))[..., :-1:2]) & (known.unflatten(1, (-1, BLOCK))[..., 1::2])
    yield chi_square("pairs of bytes", (low[..., :-1:2] | low[..., 1::2] << 8)[both], ONE)


# --- any tensor, any spec --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Neighbours:
    """The lower and upper neighbour of each element of x (rows, K) and the probability of the upper one, float32.

    "Lower" means toward zero. If the scaled value is larger than 6, both are the clipped value.
    """

    x: Tensor
    lower: Tensor
    upper: Tensor
    probability: Tensor

    @classmethod
    def of(cls, x: Tensor, amax: Tensor, spec: QuantizeSpec) -> Neighbours:
        """Compute them from the spec's scales; x is the transformed tensor, with rows and K multiples of 16."""
        x = x.float()
        blocks = x.unflatten(-1, (-1, BLOCK))
        s_b = reference.block_scales(blocks, amax, spec).view(torch.float8_e4m3fn).float()
        v = blocks * reference.block_encode(s_b, reference.encode_scale(amax, spec)).unsqueeze(-1)
        a = v.abs().clamp(max=E2M1_MAX)
        code = reference.round_e2m1(v, RoundingMode.STOCHASTIC, torch.zeros_like(v, dtype=torch.int32))
        table = torch.tensor(CODE_VALUES, dtype=torch.float32, device=x.device)
        index = (code & 7).long()
        step = torch.where(index == 7, 1.0, table[(index + 1).clamp(max=7)] - table[index])
        chance = ((a - table[index]) / step * (1 << spec.random_bits)).floor() / (1 << spec.random_bits)
        factor = reference.per_tensor_scale(amax, spec)
        lower, upper = (
            (code_values(c) * s_b.unsqueeze(-1) * factor).flatten(-2)
            for c in (code, torch.where(index == 7, code, code + 1))
        )
        return cls(x, lower, upper, chance.flatten(-2))

    @property
    def nearest_square_error(self) -> Tensor:
        """Return the squared error of the nearer neighbour, float64."""
        return torch.minimum((self.lower.double() - self.x).square(), (self.upper.double() - self.x).square())

    def mean_square_error(self, n: int) -> tuple[Tensor, Tensor]:
        """Return expectation and variance of the squared error of the mean of n stochastic roundings, exact in float64.

        The error of the mean is b plus a centered Binomial(n, p) times h / n, whose central moments are known.
        """
        p, h = self.probability.double(), self.upper.double() - self.lower
        b = self.lower + p * h - self.x.double()
        pq = p * (1 - p)
        unit = h / n
        m2, m3 = n * pq * unit**2, n * pq * (1 - 2 * p) * unit**3
        m4 = n * pq * (1 + 3 * (n - 2) * pq) * unit**4
        return b * b + m2, 4 * b * b * m2 + 4 * b * m3 + m4 - m2 * m2


def convergence(x: Tensor, spec: QuantizeSpec, draws: int = 4096, together: int = 64) -> Findings:
    """Check the RMSE of the mean of N = 1, 4, 16, ... quantizations of one row x (1, K) against its expectation.

    The spec is stochastic with 1x16 blocks, so ``together`` copies of the row in one call have the same scales.
    """
    amax = torch.ops.nvfp4.amax(x, -1)
    neighbours = Neighbours.of(x, amax, spec)
    rows = x.expand(together, -1).contiguous()
    total = torch.zeros_like(x, dtype=torch.float64)
    n = 1
    for call in range(-(-draws // together)):
        state = rng_state(99, call, x.device)
        packed = torch.ops.nvfp4.quantize(rows, amax, state, spec.pack())
        sums = torch.ops.nvfp4.dequantize(*packed, x.shape[1], torch.float32).double().cumsum(0)
        while n <= min((call + 1) * together, draws):
            error = (total + sums[n - 1 - call * together]) / n - x
            expected, variance = (t.sum().item() for t in neighbours.mean_square_error(n))
            measured = error.square().sum().item()
            rmse, exact = math.sqrt(measured / x.numel()), math.sqrt(expected / x.numel())
            z = (measured - expected) / math.sqrt(variance)
            yield Finding(f"RMSE of the mean of {n}", x.numel(), rmse, exact, z)
            n *= 4
        total += sums[-1]
