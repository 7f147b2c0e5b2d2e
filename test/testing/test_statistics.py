"""The statistics of stochastic rounding, each at a stated sample size, and the planted faults that they must catch.

A check fails where |z| > 7, which has a probability below 6e-11 for a sound rounder
(``nvfp4_tensor.testing.statistics``). One run of this file makes fewer than 2,000 such checks on a device: a false
alarm in less than 2e-7 of all runs.
"""

import math

import pytest
import torch
from helpers import planted_faults

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.testing import statistics
from nvfp4_tensor.testing.statistics import Finding, op_pair, op_rounder, pair_of, rng_state, worst

pytestmark = pytest.mark.slow

STOCHASTIC = QuantizeSpec(round_mode="stochastic")
SPECS = {
    "16 bits": STOCHASTIC,
    "8 bits": STOCHASTIC.replace(random_bits=8),
    "16 bits, 16x16": STOCHASTIC.replace(block_rows=16),
    "16 bits, scales up": STOCHASTIC.replace(scale_rounding="up"),
}


def sow(device: str = "cpu", seed: int = 1) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def assert_sound(findings) -> None:
    failed = [finding for finding in findings if not finding.ok]
    assert not failed, "\n".join(map(str, failed))


def check(name: str, rounder, pair, bits: int = 16, device: str = "cpu") -> list[Finding]:
    """Findings of a check, of a rounder and what rounds a tensor and its transpose, always at the same sample size.

    cells: 7 cells, 2 signs, 8 fractions of 15,360 samples each against the exact probability; a grid point never moves.
    bias: 3,932,160 samples, within 0.0015 step (7 sigma) of zero, or for 8 bits of the contract's -0.00195.
    correlations, draws, transposed: 122,880 to 245,760 pairs a line, so that a correlation of 0.02 shows: blocks, rows,
    columns, 256-row periods; successive calls, other seeds, streams and shards; by element and by place in memory.
    bits: 69,120 windows recovered from the codes alone are the contract's; bytes and 16-bit windows uniform.
    """
    checks = {
        "cells": lambda: statistics.cells(rounder, bits, 4, device),
        "bias": lambda: statistics.bias(rounder, bits, 1024, 4096, sow(device)),
        "correlations": lambda: statistics.correlations(rounder, bits, 1024, 256, sow(device)),
        "draws": lambda: statistics.draws(rounder, bits, 256, 512, sow(device)),
        "transposed": lambda: statistics.transposed(pair, bits, 256, sow(device)),
        "shards": lambda: statistics.shards(rounder, 256, 256, sow(device)),
        "bits": lambda: statistics.bits(rounder, 288, 256, device),
    }
    return list(checks[name]())


# --- the ops ---------------------------------------------------------------------------------------------------------


OF_OPS = [("cells", how) for how in SPECS] + [("bits", "16 bits")]
OF_OPS += [(name, how) for name in ("bias", "correlations", "draws", "transposed") for how in ("16 bits", "8 bits")]


@pytest.mark.parametrize(("name", "how"), OF_OPS)
def test_the_ops_are_sound(name: str, how: str, device: str) -> None:
    spec = SPECS[how]
    findings = check(name, op_rounder(spec), op_pair(spec), spec.random_bits, device)
    assert_sound(findings)
    if name == "bias":
        assert findings[0].expected == pytest.approx(0 if spec.random_bits == 16 else -127.5 / 65536, abs=2e-5)


# --- values, not codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_500_times_smaller_survives_exactly(dtype: torch.dtype, device: str) -> None:
    """The largest of each block is 6, the rest 1536/131072, 512 times less; 983,040 samples, mean exact to 7 sigma."""
    small, n = 1536 / 131072, 1024 * 960
    x = torch.full((1024, 1024), small, dtype=dtype, device=device)
    x[:, ::16] = 6
    amax = torch.tensor(2688.0, device=device)
    packed = torch.ops.nvfp4.quantize(x, amax, rng_state(8, 8, device), STOCHASTIC.pack())
    decoded = torch.ops.nvfp4.dequantize(*packed, 1024, torch.float32)
    assert torch.equal(decoded[:, ::16], x[:, ::16].float())
    rest = decoded[:, torch.arange(1024, device=device) % 16 != 0]
    assert set(rest.unique().tolist()) == {0.0, 0.5}
    up = int((rest > 0).sum())
    assert abs(statistics.count_z(up, n, 2 * small)) <= statistics.Z_BOUND
    assert rest.double().mean().item() == pytest.approx(small, rel=0.05)


def test_the_mean_of_n_converges_without_a_floor(device: str) -> None:
    """8,192 Gaussian elements, UP scales, N = 1 to 4,096: RMSE is exact theory's, which falls as 1/sqrt(N)."""
    x = torch.randn(1, 8192, generator=sow()).to(device)
    spec = STOCHASTIC.replace(scale_rounding="up")
    findings = list(statistics.convergence(x, spec, draws=4096))
    assert_sound(findings)
    assert [f.check for f in findings][-1] == "RMSE of the mean of 4096"
    for n, finding in zip([4**k for k in range(7)], findings, strict=True):
        assert finding.measured * math.sqrt(n) == pytest.approx(findings[0].expected, rel=0.06)


# --- the statistics themselves ---------------------------------------------------------------------------------------


def test_shared_byte_covariance_by_enumeration() -> None:
    """All 2^24 values of the three bytes of two neighbouring windows, at fractions that hit every branch."""
    byte = torch.arange(256, dtype=torch.int32)
    first = (byte.view(256, 1) << 8 | byte.view(1, 256)).flatten()  # (high b, low a), b major
    for f, g in [(0, 5), (65536, 65536), (32768, 32768), (21845, 43690), (65535, 1), (255, 65281), (40000, 40001)]:
        one = (first + f >= 65536).view(256, 256)
        p_one_given_b = one.double().mean(1)
        two = ((byte.view(256, 1) << 8 | byte.view(1, 256)) + g >= 65536).double()  # (high c, low b)
        both = (two.mean(0) * p_one_given_b).mean().item()
        exact = both - one.double().mean().item() * two.mean().item()
        covariance = statistics.shared_byte_covariance(torch.tensor(f), torch.tensor(g)).item()
        assert covariance == pytest.approx(exact, abs=1e-7), (f, g)


def test_z_of_counts_is_exact_at_the_ends() -> None:
    assert statistics.count_z(0, 1000, 0.0) == 0
    assert statistics.count_z(1, 1000, 0.0) == math.inf
    assert statistics.count_z(999, 1000, 1.0) == -math.inf
    assert statistics.count_z(500, 1000, 0.5) == 0
    # 2 exp(-z^2 / 2) bounds the exact binomial tail: P(X >= 20) for n = 1000, p = 0.005
    tail = sum(math.comb(1000, k) * 0.005**k * 0.995 ** (1000 - k) for k in range(20, 1001))
    assert tail <= math.exp(-(statistics.count_z(20, 1000, 0.005) ** 2) / 2)


def test_mean_square_error_by_enumeration() -> None:
    """Expectation and variance of (mean - x)^2 over all outcomes of five roundings."""
    p, lower, upper, x, n = 0.3, 1.0, 1.5, 1.2, 5
    one = [torch.tensor([[value]]) for value in (x, lower, upper, p)]
    neighbours = statistics.Neighbours(*one)
    x, lower, upper, p = (t.double().item() for t in one)
    chance = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    square = [(lower + k / n * (upper - lower) - x) ** 2 for k in range(n + 1)]
    mean = sum(c * s for c, s in zip(chance, square, strict=True))
    variance = sum(c * (s - mean) ** 2 for c, s in zip(chance, square, strict=True))
    expected, spread = neighbours.mean_square_error(n)
    assert expected.item() == pytest.approx(mean) and spread.item() == pytest.approx(variance)


# --- the planted faults ----------------------------------------------------------------------------------------------

CAUGHT_BY = [
    ("8-bit truncation", "cells", "+(0, 0.5) at 255/65536"),
    ("8-bit truncation", "cells", "-(4, 6) at 255/65536"),
    ("8-bit truncation", "bias", "all cells"),
    ("8-bit truncation", "bits", "bytes"),
    ("a stream repeated every 256 rows", "correlations", "256 rows apart"),
    ("a stream repeated every 256 rows", "correlations", "768 rows apart"),
    ("a stream repeated every 256 rows", "bits", "the contract's bits"),
    ("one generator for rows and columns", "draws", "stream 1"),
    ("one generator for rows and columns", "transposed", "row and transposed draw at one place"),
    ("nearest below 0.5", "cells", "+(0, 0.5) at 1572/65536"),
    ("nearest below 0.5", "cells", "-(0, 0.5) at 21845/65536"),
    ("nearest below 0.5", "bits", "bytes"),
    ("the same bits at each call", "draws", "the next offset"),
    ("shards that count from their own corner", "draws", "the shard below"),
    ("shards that count from their own corner", "shards", "shard at (80, 80)"),
]


@pytest.mark.parametrize(("fault", "name", "line"), CAUGHT_BY)
def test_planted_fault_is_caught(fault: str, name: str, line: str) -> None:
    """By the very line that is there to see it."""
    rounder = planted_faults.FAULTS[fault]
    found = {finding.check: finding for finding in check(name, rounder, pair_of(rounder))}
    assert not found[line].ok, found[line]


@pytest.mark.parametrize("name", ["cells", "bias", "correlations", "draws", "transposed", "shards", "bits"])
def test_the_control_passes(name: str) -> None:
    """The same lines, the same samples, the contract's own rounding; and every planted fault is listed above."""
    findings = check(name, planted_faults.sound, pair_of(planted_faults.sound))
    assert worst(findings).ok, worst(findings)
    assert {fault for fault, _, _ in CAUGHT_BY} == set(planted_faults.FAULTS)
