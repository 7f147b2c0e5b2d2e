"""The statistics of stochastic rounding, each at a stated sample size, and the planted faults that they must catch.

A check fails where |z| > 7, which has a probability below 6e-11 for a sound rounder (``helpers.rounding_statistics``).
One run of this file makes fewer than 2,000 such checks on a device: a false alarm in less than 2e-7 of all runs.
"""

import math

import pytest
import torch
from helpers import planted_faults, rounding_statistics
from helpers.rounding_statistics import op_pair, op_rounder, pair_of, rng_state

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout

pytestmark = pytest.mark.slow
N = torch.ops.nvfp4
STOCHASTIC = QuantizeSpec(round_mode="stochastic")
SPECS = {
    "16 bits": STOCHASTIC,
    "8 bits": STOCHASTIC.replace(random_bits=8),
    "16 bits, 16x16": STOCHASTIC.replace(block_rows=16),
    "16 bits, scales up": STOCHASTIC.replace(scale_rounding="up"),
}


def check(name, rounder, pair, bits=16, device="cpu"):
    """Findings of a check, of a rounder and what rounds a tensor and its transpose, always at the same sample size.

    cells: 7 cells, 2 signs, 8 fractions of 15,360 samples each against the exact probability; a grid point never moves.
    bias: 3,932,160 samples, within 0.0015 step (7 sigma) of zero, or for 8 bits of the contract's -0.00195.
    correlations, draws, transposed: 122,880 to 245,760 pairs a line, so that a correlation of 0.02 shows: blocks, rows,
    columns, 256-row periods; successive calls, other seeds, streams and shards; by element and by place in memory.
    bits: 69,120 windows recovered from the codes alone are the contract's; bytes and 16-bit windows uniform.
    """
    generator = torch.Generator(device).manual_seed(1)
    function, rounds, *sizes = {
        "cells": (rounding_statistics.cells, rounder, bits, 4, device),
        "bias": (rounding_statistics.bias, rounder, bits, 1024, 4096, generator),
        "correlations": (rounding_statistics.correlations, rounder, bits, 1024, 256, generator),
        "draws": (rounding_statistics.draws, rounder, bits, 256, 512, generator),
        "transposed": (rounding_statistics.transposed, pair, bits, 256, generator),
        "bits": (rounding_statistics.bits, rounder, 288, 256, device),
    }[name]
    return list(function(rounds, *sizes))


OF_OPS = [("cells", how) for how in SPECS] + [("bits", "16 bits")]
OF_OPS += [(name, how) for name in ("bias", "correlations", "draws", "transposed") for how in ("16 bits", "8 bits")]


@pytest.mark.parametrize(("name", "how"), OF_OPS)
def test_the_ops_are_sound(name, how, device):
    spec = SPECS[how]
    findings = check(name, op_rounder(spec), op_pair(spec), spec.random_bits, device)
    assert not [finding for finding in findings if not finding.ok]
    if name == "bias":
        assert findings[0].expected == pytest.approx(0 if spec.random_bits == 16 else -127.5 / 65536, abs=2e-5)


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
    assert abs(rounding_statistics.count_z(int((rest > 0).sum()), n, 2 * small)) <= rounding_statistics.Z_BOUND
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
        p_one_given_b = one.double().mean(1)
        two = ((byte.view(256, 1) << 8 | byte.view(1, 256)) + g >= 65536).double()  # (high c, low b)
        both = (two.mean(0) * p_one_given_b).mean().item()
        exact = both - one.double().mean().item() * two.mean().item()
        covariance = rounding_statistics.shared_byte_covariance(torch.tensor(f), torch.tensor(g)).item()
        assert covariance == pytest.approx(exact, abs=1e-7), (f, g)


def test_z_of_counts_is_exact_at_the_ends():
    z = rounding_statistics.count_z
    assert [z(0, 1000, 0.0), z(1, 1000, 0.0), z(999, 1000, 1.0), z(500, 1000, 0.5)] == [0, math.inf, -math.inf, 0]
    # 2 exp(-z^2 / 2) bounds the exact binomial tail: P(X >= 20) for n = 1000, p = 0.005
    tail = sum(math.comb(1000, k) * 0.005**k * 0.995 ** (1000 - k) for k in range(20, 1001))
    assert tail <= math.exp(-(z(20, 1000, 0.005) ** 2) / 2)


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
]


@pytest.mark.parametrize("name", ["cells", "bias", "correlations", "draws", "transposed", "bits"])
def test_planted_faults_are_caught(name):
    """By the very line that is there to see it; and none is where the rounding is the contract's."""
    assert all(finding.ok for finding in check(name, planted_faults.sound, pair_of(planted_faults.sound)))
    assert {fault for fault, _, _ in CAUGHT_BY} == set(planted_faults.FAULTS)
    for fault, rounder in planted_faults.FAULTS.items():
        lines = [line for planted, of, line in CAUGHT_BY if (planted, of) == (fault, name)]
        found = {each.check: each for each in (check(name, rounder, pair_of(rounder)) if lines else ())}
        assert all(not found[line].ok for line in lines), (fault, lines)
