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


def correlation(a, b, pa, pb):
    """z of the correlation of residuals a and b, with probabilities pa and pb of rounding up.

    For independent rounding, the sum of products has expectation 0, and variance sum pa qa pb qb.
    """
    variance = (pa * (1 - pa) * pb * (1 - pb)).double().sum().item()
    return mean_z((a * b).double().sum().item(), variance)


ALONG = [*range(2, BLOCK - 1), BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK]
"""Distances within a row. Windows of 16 bits that are 1 apart, or 15, which is 1 apart in a circle, share a byte."""
SHIFTS = [(0, columns) for columns in ALONG]
SHIFTS += [(rows, columns) for rows in (1, 2, 3, 8, 16, 32, 64, 128, 256) for columns in (0, BLOCK)]


def correlations(spec, device):
    """Errors within a block, between blocks and between rows: 245,760 pairs each, so that 0.02 shows."""
    probe = Probe.uniform(1024, 256, device)
    p = chance(probe.fraction, spec)
    u = probe.residuals(rounded(probe.values, rng_state(-7, 2, device), spec), spec)
    for shift in SHIFTS if spec.random_bits == 16 else [*SHIFTS, (0, 1), (0, BLOCK - 1)]:
        yield f"rows and columns apart: {shift}", correlation(u, u.roll(shift, (0, 1)), p, p.roll(shift, (0, 1)))


def draws(spec, device):
    """Errors of 61,440 elements and of the same with another offset, seed, stream, or shard, and of the transpose."""
    probe = Probe.uniform(256, 256, device)
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
        "the shard to the right": residuals(17, 40, col0=256, full_width=512),
    }.items():
        yield name, correlation(u, other, p, p)
    flipped = Probe(*(t.t().contiguous() for t in (probe.code, probe.fraction, probe.negative)))
    amax, packed = torch.tensor(E2M1_MAX * spec.scale_ceiling, device=device), spec.pack()
    codes = N.quantize_pair(v, amax, amax, rng_state(17, 40, device), packed, packed)
    u_t, p_t = flipped.residuals(unpack(codes[3]), spec), chance(flipped.fraction, spec)
    yield "the transposed draw of an element", correlation(u, u_t.t(), p, p_t.t())
    yield "the transposed draw at one place", correlation(u, u_t, p, p_t)


CHECKS = {check.__name__: check for check in (cells, bias, correlations, draws)}
OF_OPS = [("cells", how) for how in SPECS] + [*itertools.product(list(CHECKS)[1:], ("16 bits", "8 bits"))]


@pytest.mark.parametrize(("name", "how"), OF_OPS)
def test_the_ops_are_sound(name, how, device):
    found = dict(CHECKS[name](SPECS[how], device))
    assert found and not {line: z for line, z in found.items() if abs(z) > Z_BOUND}
