"""The statistics of stochastic rounding, each at a stated sample size, and the planted faults that they must catch.

A *rounder* is a function ``codes(v, rng_state, **origin)`` from values on the grid's scale, v: float32 (rows, K) in
[-6, 6], to E2M1 codes, uint8 (rows, K); ``origin`` is row0, col0, full_width and stream, as in the ops. A *check*
yields what it looks at and z, the measured deviation in standard deviations, in a form whose tail has a proven bound:
for counts, the signed root of twice the log-likelihood ratio (Chernoff), and for means, Bernstein's
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

from nvfp4_tensor import QuantizeSpec, RoundingMode
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.numerics.layout import BLOCK, CODE_VALUES, E2M1_MAX, code_values, unpack
from nvfp4_tensor.numerics.reference import random16, round_e2m1

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


# --- rounders and their inputs ---------------------------------------------------------------------------------------


def op_rounder(spec):
    """Return ``torch.ops.nvfp4.quantize`` as a rounder of tensors with a 6 in every block: x * enc = x = v."""

    def codes(v, state, **origin):
        amax = v.new_tensor(E2M1_MAX * spec.scale_ceiling)  # S_enc is 1, and so is the scale of such a block
        return unpack(N.quantize(v, amax, state, spec.pack(), **origin)[0])[..., : v.shape[-1]]

    return codes


def op_pair(spec):
    """Return ``torch.ops.nvfp4.quantize_pair`` as a function to the codes of v (M, K) and of its transpose (K, M)."""

    def codes(v, state):
        amax = v.new_tensor(E2M1_MAX * spec.scale_ceiling)
        packed = N.quantize_pair(v, amax, amax, state, spec.pack(), spec.pack())
        return unpack(packed[0])[:, : v.shape[1]], unpack(packed[3])[:, : v.shape[0]]

    return codes


def pair_of(rounder):
    """Return a function to the codes of v and of its transpose, by two calls of a rounder."""
    return lambda v, state: (rounder(v, state), rounder(v.t().contiguous(), state, stream=1))


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


# --- the checks ------------------------------------------------------------------------------------------------------

FRACTIONS = (0, 1, 255, 1572, 21845, 32768, 65281, 65535)
"""In 1/65536: a grid point, the smallest fraction, the largest that 8 random bits round to 0, 1/500 of a block's
largest element (1572/65536 of the lowest step: 6/500.25), a third, a half, and 1 minus the small ones."""


def cells(rounder, pair, random_bits, device):
    """Shares rounded up, for 7 cells, 2 signs and 8 fractions of 15,360 samples each; a grid point never moves."""
    rows, width = 4, 4096
    grid = torch.tensor([*itertools.product(range(7), range(2), FRACTIONS)], dtype=torch.int32, device=device)
    code, negative, fraction = (column.repeat_interleave(rows).unsqueeze(1) for column in grid.unbind(1))
    probe = Probe(*(t.expand(-1, width).contiguous() for t in (code, fraction, negative.bool())))
    ups, samples, unit = probe.ups(rounder(probe.values, rng_state(11, 5, device))), rows * 3840, 1 << 16 - random_bits
    yield "left its cell", math.inf if (ups < 0).any() else 0.0
    counts = ((ups > 0) & ~probe.anchor).unflatten(0, (-1, rows)).sum((1, 2)).tolist()
    for (cell, negative, fraction), count in zip(grid.tolist(), counts, strict=True):
        name = f"{'-' if negative else '+'}({CODE_VALUES[cell]:g}, {CODE_VALUES[cell + 1]:g}) at {fraction}/65536"
        yield name, count_z(count, samples, fraction // unit * unit / ONE)


def bias(rounder, pair, random_bits, device):
    """The mean of 3,932,160 uniform samples, within 0.0015 step (7 sigma) of zero, or for 8 bits of the contract's."""
    probe = Probe.uniform(1024, 4096, device)
    ups, p, everywhere = (
        probe.ups(rounder(probe.values, rng_state(3, 1, device))),
        probe.probability(random_bits),
        ~probe.anchor,
    )
    of_contract = (p - probe.fraction / ONE)[everywhere].double().mean().item()
    assert of_contract == pytest.approx(0 if random_bits == 16 else -127.5 / 65536, abs=2e-5)
    masks = {"all cells": everywhere, "+": everywhere & ~probe.negative, "-": everywhere & probe.negative}
    masks |= {f"cell {cell}": everywhere & (probe.code == cell) for cell in range(7)}
    for name, mask in masks.items():
        up, chance = ups[mask].double(), p[mask].double()
        yield name, mean_z((up - chance).sum().item(), (chance * (1 - chance)).sum().item())


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


def correlations(rounder, pair, random_bits, device):
    """Errors within a block, between blocks and between rows: 122,880 to 245,760 pairs each, so that 0.02 shows."""
    columns = 256
    probe = Probe.uniform(1024, columns, device)
    p = probe.probability(random_bits)
    u = probe.residuals(rounder(probe.values, rng_state(-7, 2, device)), random_bits)
    block_u, block_p, block_f = (t.unflatten(1, (-1, BLOCK)) for t in (u, p, probe.fraction))
    for lag in range(1, BLOCK):
        near, far = slice(0, BLOCK - lag), slice(lag, BLOCK)
        shared = None
        if random_bits == 16 and lag == 1:
            shared = shared_byte_covariance(block_f[..., near], block_f[..., far])
        elif random_bits == 16 and lag == BLOCK - 1:  # the windows are cyclic: element 15 shares a byte with element 0
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


def draws(rounder, pair, random_bits, device):
    """Errors of 122,880 elements and of the same with another offset, seed, stream, or shard."""
    probe = Probe.uniform(256, 512, device)
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
        "the shard below": residuals(17, 40, row0=256),
        "the shard to the right": residuals(17, 40, col0=512, full_width=1024),
    }.items():
        yield name, correlation(u, other, p, p)


def transposed(rounder, pair, random_bits, device):
    """Errors of a square tensor and its transpose, by element and by place in memory."""
    probe = Probe.uniform(256, 256, device)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    codes, codes_t = pair(probe.values, rng_state(23, 9, device))
    p, p_t = probe.probability(random_bits), flipped.probability(random_bits)
    u, u_t = probe.residuals(codes, random_bits), flipped.residuals(codes_t, random_bits)
    yield "row and transposed draw of an element", correlation(u, u_t.t(), p, p_t.t())
    yield "row and transposed draw at one place", correlation(u, u_t, p, p_t)


CHECKS = {check.__name__: check for check in (cells, bias, correlations, draws, transposed)}
OF_OPS = [("cells", how) for how in SPECS] + [*itertools.product(list(CHECKS)[1:], ("16 bits", "8 bits"))]


@pytest.mark.parametrize(("name", "how"), OF_OPS)
def test_the_ops_are_sound(name, how, device):
    spec = SPECS[how]
    found = dict(CHECKS[name](op_rounder(spec), op_pair(spec), spec.random_bits, device))
    assert found and not {line: z for line, z in found.items() if abs(z) > Z_BOUND}


# --- values, not codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_500_times_smaller_survives_exactly(dtype, device):
    """The largest of each block is 6, the rest 1536/131072, 512 times less; 983,040 samples, mean exact to 7 sigma."""
    small, n = 1536 / 131072, 1024 * 960
    x = torch.full((1024, 1024), small, dtype=dtype, device=device)
    x[:, ::16] = 6
    packed = N.quantize(x, torch.tensor(2688.0, device=device), rng_state(8, 8, device), STOCHASTIC.pack())
    decoded = N.dequantize(*packed, 1024, torch.float32)
    assert torch.equal(decoded[:, ::16], x[:, ::16].float())
    rest = decoded[:, torch.arange(1024, device=device) % 16 != 0]
    assert set(rest.unique().tolist()) == {0.0, 0.5}
    assert abs(count_z(int((rest > 0).sum()), n, 2 * small)) <= Z_BOUND
    assert rest.double().mean().item() == pytest.approx(small, rel=0.05)


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


# --- the statistics themselves ---------------------------------------------------------------------------------------


def test_shared_byte_covariance_by_enumeration():
    """All 2^24 values of the three bytes of two neighbouring windows, at fractions that hit every branch."""
    byte = torch.arange(256, dtype=torch.int32)
    first = (byte.view(256, 1) << 8 | byte.view(1, 256)).flatten()  # (high b, low a), b major
    for f, g in [(0, 5), (65536, 65536), (32768, 32768), (21845, 43690), (65535, 1), (255, 65281), (40000, 40001)]:
        one = (first + f >= 65536).view(256, 256)
        two = ((byte.view(256, 1) << 8 | byte.view(1, 256)) + g >= 65536).double()  # (high c, low b)
        both = (two.mean(0) * one.double().mean(1)).mean().item()
        exact = both - one.double().mean().item() * two.mean().item()
        covariance = shared_byte_covariance(torch.tensor(f), torch.tensor(g)).item()
        assert covariance == pytest.approx(exact, abs=1e-7), (f, g)


def test_z_of_counts_is_exact_at_the_ends():
    ends = [count_z(0, 1000, 0.0), count_z(1, 1000, 0.0), count_z(999, 1000, 1.0), count_z(500, 1000, 0.5)]
    assert ends == [0, math.inf, -math.inf, 0]
    # 2 exp(-z^2 / 2) bounds the exact binomial tail: P(X >= 20) for n = 1000, p = 0.005
    tail = sum(math.comb(1000, k) * 0.005**k * 0.995 ** (1000 - k) for k in range(20, 1001))
    assert tail <= math.exp(-(count_z(20, 1000, 0.005) ** 2) / 2)


def rounded(v, r16, random_bits=16):
    return round_e2m1(v, RoundingMode.STOCHASTIC, r16[:, : v.shape[1]], random_bits)


def sound(v, state, **origin):
    """The control: the contract's 16-bit rounding."""
    return rounded(v, random16(*v.shape, state, **origin))


def repeating_every_256_rows(v, state, **origin):
    """The counter has 8 bits of the row: rows r and r + 256 get the same bits."""
    r16 = random16(min(len(v), 256), v.shape[1], state, **origin)
    return rounded(v, r16.repeat(-(-len(v) // 256), 1)[: len(v)])


def nearest_below_half(v, state, **origin):
    """The interval below the smallest value is rounded to nearest: small gradients vanish."""
    return torch.where(v.abs() < 0.5, round_e2m1(v, RoundingMode.RNE), sound(v, state, **origin))


FAULTS = {  # rounders seen in other libraries or easy to make; by check, the lines that are there to see them
    "8-bit truncation": (
        lambda v, state, **origin: rounded(v, random16(*v.shape, state, **origin), 8),
        {"cells": ["+(0, 0.5) at 255/65536", "-(4, 6) at 255/65536"], "bias": ["all cells"]},
    ),
    "a stream repeated every 256 rows": (
        repeating_every_256_rows,
        {"correlations": ["256 rows apart", "768 rows apart"]},
    ),
    "one generator for rows and columns": (
        lambda v, state, stream=0, **origin: sound(v, state, **origin),
        {"draws": ["stream 1"], "transposed": ["row and transposed draw at one place"]},
    ),
    "nearest below 0.5": (
        nearest_below_half,
        {"cells": ["+(0, 0.5) at 1572/65536", "-(0, 0.5) at 21845/65536"]},
    ),
    "the same bits at each call": (
        lambda v, state, **origin: sound(v, state * torch.tensor([1, 0]), **origin),
        {"draws": ["the next offset"]},
    ),
    "shards that count from their own corner": (
        lambda v, state, stream=0, **origin: sound(v, state, stream=stream),
        {"draws": ["the shard below"]},
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_planted_faults_are_caught(name):
    """By the very line that is there to see it; and none is where the rounding is the contract's."""
    assert all(abs(z) <= Z_BOUND for _, z in CHECKS[name](sound, pair_of(sound), 16, "cpu"))
    for fault, (rounder, lines) in FAULTS.items():
        if name in lines:
            found = dict(CHECKS[name](rounder, pair_of(rounder), 16, "cpu"))
            assert all(abs(found[line]) > Z_BOUND for line in lines[name]), fault
