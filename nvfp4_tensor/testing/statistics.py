"""What stochastic rounding promises, measured: probabilities, bias, correlations, the bits themselves, convergence.

A *rounder* is any function ``codes(v, rng_state, **place)`` from values on the grid's own scale, v: float32 (rows, K)
in [-6, 6], to E2M1 codes, uint8 (rows, K); ``place`` is row0, col0, full_width and stream, as in the ops. The checks
see nothing but codes, so they judge the ops on every device, and planted faults, alike (:func:`op_rounder`).

How sure. z is the measured deviation in standard deviations, in a form whose tail has a proven bound: for counts the
signed root of twice the log-likelihood ratio (Chernoff), for means Bernstein's t / sqrt(V + M t / 3), both with
P(|z| > t) <= 2 exp(-t^2 / 2) for independent draws; for chi-square and convergence it is their normal approximation.
Neighbours' 16-bit windows share a byte, which moves the variance of a sum by under 2/256, so that |z| > 7 = Z_BOUND
has a probability below 2 exp(-6.97^2 / 2) = 6e-11 each time: a thousand checks together raise a false alarm less than
once in 1e7 runs.
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
"""Probabilities are counted in 1/65536, the resolution of 16 random bits."""
Rounder = Callable[..., Tensor]
PairRounder = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Findings = Iterator["Finding"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report: what was checked over n samples, and how far from its exact expectation it came out."""

    check: str
    n: int
    measured: float
    expected: float
    z: float

    @property
    def ok(self) -> bool:
        """Whether chance alone may have done it."""
        return abs(self.z) <= Z_BOUND


def worst(findings: Iterable[Finding]) -> Finding:
    """The finding that deviates most."""
    return max(findings, key=lambda finding: abs(finding.z))


# --- how far is far --------------------------------------------------------------------------------------------------


def count_z(count: int, n: int, p: float) -> float:
    """Signed root of 2 n KL(count/n || p): exact at every p, infinite where what cannot happen has happened."""
    share = count / n
    divergence = 0.0
    for observed, probability in ((share, p), (1 - share, 1 - p)):
        if observed > 0:
            divergence += observed * math.log(observed / probability) if probability > 0 else math.inf
    return math.copysign(math.sqrt(max(2 * n * divergence, 0.0)), share - p)


def mean_z(deviation: float, variance: float, largest: float) -> float:
    """z of a sum's deviation from its expectation, with the sum's variance and the largest single summand."""
    spread = variance + largest * abs(deviation) / 3
    if spread == 0:
        return 0.0 if deviation == 0 else math.copysign(math.inf, deviation)
    return deviation / math.sqrt(spread)


def chi_square(check: str, samples: Tensor, bins: int) -> Finding:
    """Chi-square of samples (integers 0..bins-1) against equal probability; Wilson and Hilferty's normal form of it."""
    n = samples.numel()
    counts = torch.bincount(samples.flatten().long(), minlength=bins).double()
    statistic = ((counts - n / bins).square().sum() / (n / bins)).item()
    freedom = bins - 1
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return Finding(check, n, statistic / freedom, 1.0, z)


def equal(check: str, a: Tensor, b: Tensor) -> Finding:
    """Share of elements that differ, where none may."""
    differing = int((a != b).sum())
    return Finding(check, a.numel(), differing / a.numel(), 0.0, math.inf if differing else 0.0)


# --- rounders and what they are given --------------------------------------------------------------------------------


def unit_amax(like: Tensor, spec: QuantizeSpec) -> Tensor:
    """The amax that makes S_enc exactly 1, so that a block whose largest element is 6 has a scale of exactly 1."""
    assert spec.scale_ceiling is not None
    return like.new_tensor(E2M1_MAX * spec.scale_ceiling)


def op_rounder(spec: QuantizeSpec) -> Rounder:
    """``torch.ops.nvfp4.quantize`` as a rounder of tensors with a 6 in every block: x * enc = x = v."""

    def codes(v: Tensor, rng_state: Tensor, **place: int) -> Tensor:
        amax = unit_amax(v, spec)
        return unpack(torch.ops.nvfp4.quantize(v, amax, rng_state, spec.pack(), **place)[0])[..., : v.shape[-1]]

    return codes


def op_pair(spec: QuantizeSpec) -> PairRounder:
    """``torch.ops.nvfp4.quantize_pair`` as (v, rng_state) to the codes of v (M, K) and of its transpose (K, M)."""

    def codes(v: Tensor, rng_state: Tensor) -> tuple[Tensor, Tensor]:
        amax = unit_amax(v, spec)
        packed = torch.ops.nvfp4.quantize_pair(v, amax, amax, rng_state, spec.pack(), spec.pack())
        return unpack(packed[0])[:, : v.shape[1]], unpack(packed[3])[:, : v.shape[0]]

    return codes


def pair_of(rounder: Rounder) -> PairRounder:
    """The same from two calls of a rounder."""
    return lambda v, rng_state: (rounder(v, rng_state), rounder(v.t().contiguous(), rng_state, stream=1))


@dataclasses.dataclass
class Probe:
    """Values with a known place on the grid, (rows, K) each, an anchor of 6 in every block of 16 of a row or column.

    code: lower neighbour 0..6, int32. fraction: how far above it, in 1/65536 of the step, 0..65536, int32.
    negative: bool. The anchors are code 6 with fraction 65536, which always rounds up: they tell nothing and vary not.
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
        """Cells, fractions and signs all uniform."""

        def draw(high: int, dtype: torch.dtype) -> Tensor:
            return torch.randint(high, (rows, columns), generator=generator, device=generator.device, dtype=dtype)

        return cls(draw(7, torch.int32), draw(ONE, torch.int32), draw(2, torch.uint8).bool())

    @property
    def step(self) -> Tensor:
        """Distance between the two neighbours: float32."""
        steps = [upper - lower for lower, upper in itertools.pairwise(CODE_VALUES)]
        return torch.tensor(steps, device=self.code.device)[self.code.long()]

    @property
    def values(self) -> Tensor:
        """v itself, exact in float32."""
        magnitude = code_values(self.code) + self.fraction * (self.step / ONE)
        return torch.where(self.negative, -magnitude, magnitude)

    def probability(self, random_bits: int) -> Tensor:
        """Of rounding away from zero, exact in float32: the fraction, cut to the resolution of the random bits."""
        unit = 1 << 16 - random_bits
        return (self.fraction // unit * unit) / ONE

    def ups(self, codes: Tensor) -> Tensor:
        """0 or 1 as each element went down or up, and -1 where it left its cell or changed its sign: int32."""
        up = (codes & 7).int() - self.code
        return torch.where(((codes >> 3).bool() == self.negative) & ((up == 0) | (up == 1)), up, -1)

    def residuals(self, codes: Tensor, random_bits: int) -> Tensor:
        """ups less their probability: zero mean, variance p (1 - p), float32."""
        return self.ups(codes) - self.probability(random_bits)


def rng_state(seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """(seed, offset) as the ops take it: int64 (2,)."""
    return torch.tensor([seed, offset], dtype=torch.int64, device=device)


# --- the checks ------------------------------------------------------------------------------------------------------

FRACTIONS = (0, 1, 255, 1572, 21845, 32768, 65281, 65535)
"""In 1/65536: a grid point, the smallest fraction, the largest that 8 bits cannot see, 1/500 of a block's largest
element (1572/65536 of the lowest step: 6/500.25), a third, a half, and the mirror images of the small ones."""


def cells(rounder: Rounder, random_bits: int, rows: int, device: torch.device | str = "cpu") -> Findings:
    """Every cell of the grid, both signs, each of FRACTIONS: share rounded up against the exact probability.

    ``rows`` rows of 4096 a combination (3840 samples each, 256 anchors), all of them in one tensor.
    """
    grid = torch.cartesian_prod(torch.arange(7), torch.arange(2), torch.tensor(FRACTIONS)).int().to(device)
    code, negative, fraction = (column.repeat_interleave(rows).unsqueeze(1) for column in grid.unbind(1))
    width = 4096
    probe = Probe(*(part.expand(-1, width).contiguous() for part in (code, fraction, negative.bool())))
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
    """Mean error away from zero, in steps, of fractions uniform in 1/65536: zero with 16 bits, over all and by cell.

    With 8 random bits the contract's own bias of -(255/2)/65536 step on the average is what is expected.
    """
    probe = Probe.uniform(rows, columns, generator)
    ups = probe.ups(rounder(probe.values, rng_state(3, 1, generator.device)))
    p = probe.probability(random_bits)
    truth = probe.fraction / ONE
    everywhere = ~probe.anchor
    parts = {"all cells": everywhere, "all cells, +": everywhere & ~probe.negative}
    parts["all cells, -"] = everywhere & probe.negative
    for cell in range(7):
        parts[f"({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g})"] = everywhere & (probe.code == cell)
    for name, part in parts.items():
        up, chance, exact = ups[part].double(), p[part].double(), truth[part].double()
        n = up.numel()
        z = mean_z((up - chance).sum().item(), (chance * (1 - chance)).sum().item(), 1.0)
        yield Finding(name, n, (up - exact).mean().item(), (chance - exact).mean().item(), z)


def shared_byte_covariance(first: Tensor, second: Tensor) -> Tensor:
    """Covariance of the ups of two neighbours with 16-bit fractions (int32): they share one of their two bytes.

    The first's window is bytes (low a, high b), the second's (low b, high c), and each goes up where its window is at
    least its threshold. So P(both) = P(first) P(c > high) + P(first and b >= low) / 256, low and high the second's.
    """
    low1, high1 = (ONE - first) & 0xFF, (ONE - first) >> 8
    low2, high2 = (ONE - second) & 0xFF, (ONE - second) >> 8
    above = 256 - torch.maximum(high1 + 1, low2)  # bytes b that take the first up whatever a is, and are >= low2
    joint = above.clamp(min=0) + (high1 >= low2) * (high1 < 256) * (256 - low1) / 256.0
    both = (first / ONE) * (255 - high2).clamp(min=0) / 256 + (high2 < 256) * joint / 256 / 256
    return both - (first / ONE) * (second / ONE)


def correlation(check: str, a: Tensor, b: Tensor, pa: Tensor, pb: Tensor, covariance: Tensor | None = None) -> Finding:
    """Correlation of residuals a and b, of the same shape, with probabilities pa and pb of going up.

    Independent rounding gives a sum of products with expectation zero and variance sum pa qa pb qb, nothing estimated.
    """
    va, vb = pa * (1 - pa), pb * (1 - pb)
    expected = 0.0 if covariance is None else covariance.double().sum().item()
    total = (a * b).double().sum().item()
    scale = math.sqrt(va.double().sum().item() * vb.double().sum().item())
    z = mean_z(total - expected, (va * vb).double().sum().item(), 1.0)
    return Finding(check, int(((va > 0) & (vb > 0)).sum()), total / scale, expected / scale, z)


def correlations(rounder: Rounder, random_bits: int, rows: int, columns: int, generator: torch.Generator) -> Findings:
    """Errors of neighbours in a block, across blocks, rows, columns and 256-row periods of one draw."""
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
        a, b, pa, pb = (t[..., part] for t in (block_u, block_p) for part in (near, far))
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
    """Errors of two draws of one tensor: successive offsets, other seeds, the other stream, other shards."""
    probe = Probe.uniform(rows, columns, generator)
    device = generator.device
    p = probe.probability(random_bits)
    v = probe.values
    state = rng_state(17, 40, device)

    def residuals(state: Tensor, **place: int) -> Tensor:
        return probe.residuals(rounder(v, state, **place), random_bits)

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
    """Errors of the row-wise and of the transposed draw of one square tensor, by element and by place in memory."""
    probe = Probe.uniform(size, size, generator)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    codes, codes_t = pair(probe.values, rng_state(23, 9, generator.device))
    p, p_t = probe.probability(random_bits), flipped.probability(random_bits)
    u, u_t = probe.residuals(codes, random_bits), flipped.residuals(codes_t, random_bits)
    yield correlation("row and transposed draw of an element", u, u_t.t(), p, p_t.t())
    yield correlation("row and transposed draw at one place", u, u_t, p, p_t)


def shards(rounder: Rounder, rows: int, columns: int, generator: torch.Generator) -> Findings:
    """Pieces rounded each with its origin against the same places of the whole: not one code may differ."""
    v = Probe.uniform(rows, columns, generator).values
    state = rng_state(31, 12, generator.device)
    whole = rounder(v, state)
    yield equal("again, the same state", whole, rounder(v, state))
    row, column = BLOCK * (rows // 3 // BLOCK), BLOCK * (columns // 3 // BLOCK)
    for row0, row1 in ((0, row), (row, rows)):
        for col0, col1 in ((0, column), (column, columns)):
            piece = v[row0:row1, col0:col1].contiguous()
            codes = rounder(piece, state, row0=row0, col0=col0, full_width=columns)
            yield equal(f"shard at ({row0}, {col0})", whole[row0:row1, col0:col1], codes)


def recover_random16(rounder: Rounder, rows: int, columns: int, state: Tensor, **place: int) -> tuple[Tensor, Tensor]:
    """The 16 random bits of every element but the anchors, int32, and which those are, by bisection of each element.

    An element at fraction f goes up exactly where its bits are at least 65536 - f: sixteen roundings with the same
    state, each element's fraction chosen by what it did before, give its bits away.
    """
    bits = torch.zeros(rows, columns, dtype=torch.int32, device=state.device)
    positive = torch.zeros_like(bits, dtype=torch.bool)
    for bit in reversed(range(16)):
        trial = bits + (1 << bit)
        probe = Probe(torch.zeros_like(bits), ONE - trial, positive)
        bits = torch.where(probe.ups(rounder(probe.values, state, **place)) > 0, trial, bits)
    return bits, ~probe.anchor


def bits(rounder: Rounder, rows: int, columns: int, device: torch.device | str = "cpu") -> Findings:
    """The bits that a 16-bit rounder used, against the contract's and against uniformity (bytes, windows)."""
    state = rng_state(0x0123456789ABCDEF, 77, device)
    recovered, known = recover_random16(rounder, rows, columns, state)
    contract = reference.random16(rows, columns, state)
    yield equal("the contract's bits", recovered[known], contract[known])
    yield chi_square("bytes", (recovered & 0xFF)[known], 256)  # each element's low byte is its own
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
    """What each element of x (rows, K) may decode to: lower and upper neighbour and the chance of the upper, float32.

    "Lower" is toward zero. Where the scaled value is beyond 6 both are the clipped value.
    """

    x: Tensor
    lower: Tensor
    upper: Tensor
    probability: Tensor

    @classmethod
    def of(cls, x: Tensor, amax: Tensor, spec: QuantizeSpec) -> Neighbours:
        """From the actual scales; x: what is rounded (Hadamard-transformed already), rows and K multiples of 16."""
        x = x.float()
        blocks = x.unflatten(-1, (-1, BLOCK))
        s_b = reference.block_scales(blocks, amax, spec).view(torch.float8_e4m3fn).float()
        v = blocks * reference.block_encode(s_b, reference.encode_scale(amax, spec)).unsqueeze(-1)
        a = v.abs().clamp(max=E2M1_MAX)
        code = reference.round_e2m1(v, RoundingMode.STOCHASTIC, torch.zeros_like(v, dtype=torch.int32))
        table = torch.tensor(CODE_VALUES, device=x.device)
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
        """Of the nearer neighbour: float64."""
        return torch.minimum((self.lower.double() - self.x).square(), (self.upper.double() - self.x).square())

    def mean_square_error(self, n: int) -> tuple[Tensor, Tensor]:
        """Expectation and variance of the squared error of the mean of n stochastic roundings, exact: float64.

        The mean is b off on the average and Binomial(n, p) * h / n about that, whose central moments are known.
        """
        p, h = self.probability.double(), self.upper.double() - self.lower
        b = self.lower + p * h - self.x.double()
        pq = p * (1 - p)
        unit = h / n
        m2, m3 = n * pq * unit**2, n * pq * (1 - 2 * p) * unit**3
        m4 = n * pq * (1 + 3 * (n - 2) * pq) * unit**4
        return b * b + m2, 4 * b * b * m2 + 4 * b * m3 + m4 - m2 * m2


def convergence(x: Tensor, spec: QuantizeSpec, draws: int = 4096, together: int = 64) -> Findings:
    """RMSE of the mean of N = 1, 4, 16, ... quantizations of one row x (1, K) against the exact expectation.

    ``together`` draws are rows of one call, so that 1x16 blocks keep their scales; spec is a stochastic 1x16 one.
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
