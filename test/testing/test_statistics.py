"""The statistics of stochastic rounding, each at a stated sample size, and the planted faults that they must catch.

A check fails where |z| > 7, which has a probability below 6e-11 for a sound rounder
(``nvfp4_tensor.testing.statistics``). One run of this file makes fewer than 2,000 such checks on a device: a false
alarm in less than 2e-7 of all runs.
"""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks import planted_faults
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
of_each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
of_each_width = pytest.mark.parametrize("spec", [STOCHASTIC, SPECS["8 bits"]], ids=["16 bits", "8 bits"])


def sow(device: str = "cpu", seed: int = 1) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def assert_sound(findings) -> None:
    failed = [finding for finding in findings if not finding.ok]
    assert not failed, "\n".join(map(str, failed))


# --- the ops ---------------------------------------------------------------------------------------------------------


@of_each_spec
def test_probability_in_every_cell(spec: QuantizeSpec, device: str) -> None:
    """7 cells, 2 signs, 8 fractions: 15,360 samples each against the exact probability; a grid point never moves."""
    assert_sound(statistics.cells(op_rounder(spec), spec.random_bits, 4, device))


@of_each_width
def test_bias(spec: QuantizeSpec, device: str) -> None:
    """983,040 samples: bias of 16 bits zero to within 0.003 step (7 sigma), of 8 bits the contract's -0.00195."""
    findings = list(statistics.bias(op_rounder(spec), spec.random_bits, 1024, 1024, sow(device)))
    assert_sound(findings)
    assert findings[0].expected == pytest.approx(0 if spec.random_bits == 16 else -127.5 / 65536, abs=2e-5)


@of_each_width
def test_errors_within_a_tensor_are_uncorrelated(spec: QuantizeSpec, device: str) -> None:
    """About 9e5 pairs a lag, so that a correlation of 0.008 shows: blocks, rows, columns, 256-row periods."""
    assert_sound(statistics.correlations(op_rounder(spec), spec.random_bits, 1024, 1024, sow(device)))


@of_each_width
def test_errors_of_two_roundings_are_uncorrelated(spec: QuantizeSpec, device: str) -> None:
    """491,520 pairs each: successive calls, other seeds, the other stream, other shards."""
    assert_sound(statistics.draws(op_rounder(spec), spec.random_bits, 1024, 512, sow(device)))


@of_each_width
def test_errors_of_a_tensor_and_its_transpose_are_uncorrelated(spec: QuantizeSpec, device: str) -> None:
    """589,824 elements, by element and by place in memory."""
    assert_sound(statistics.transposed(op_pair(spec), spec.random_bits, 768, sow(device)))


def test_bits_are_the_contracts_and_uniform(device: str) -> None:
    """491,520 windows recovered from the codes alone: equal to the contract's; bytes and 16-bit windows uniform."""
    assert_sound(statistics.bits(op_rounder(STOCHASTIC), 512, 1024, device))


def test_sampled_states_are_independent(device: str) -> None:
    """What the generator hands to successive calls: 61,440 pairs, and the same again under the same seed."""
    like = torch.empty((), device=device)
    torch.manual_seed(5)
    first, second = (torch.ops.nvfp4.draw_rng_state(like) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(first, torch.ops.nvfp4.draw_rng_state(like))
    probe = statistics.Probe.uniform(64, 1024, sow(device))
    u, other = (probe.residuals(op_rounder(STOCHASTIC)(probe.values, state), 16) for state in (first, second))
    p = probe.probability(16)
    assert_sound([statistics.correlation("successive calls", u, other, p, p)])


@given(rows=st.integers(1, 70), columns=st.integers(1, 150), wide=st.booleans(), seed=st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_of_any_shape_equal_the_full_tensor(device: str, rows: int, columns: int, wide: bool, seed: int) -> None:
    """Each shard, from any row and any multiple of 16 columns on, has the codes of the full tensor."""
    spec = STOCHASTIC if wide else SPECS["8 bits"]
    v = statistics.Probe.uniform(rows, columns, sow(device, seed & 0xFFFF)).values
    state = rng_state(seed, -seed - 1, device)
    rounder = op_rounder(spec)
    whole = rounder(v, state)
    row, column = rows // 2, columns // 32 * 16
    for (row0, row1), (col0, col1) in itertools.product([(0, row), (row, rows)], [(0, column), (column, columns)]):
        if row1 > row0 and col1 > col0:
            # A column cut at a multiple of 16 keeps whole blocks, so that every block still has its anchor of 6,
            # except a last one too short to have had one, whose scale is the same on both sides.
            piece = rounder(v[row0:row1, col0:col1], state, row0=row0, col0=col0, full_width=columns)
            assert torch.equal(piece, whole[row0:row1, col0:col1])


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


@given(
    largest=st.floats(2**-10, 2**10, width=32),
    ratio=st.floats(1, 500),
    room=st.floats(1, 64),
    sign=st.sampled_from([1, -1]),
    seed=st.integers(0, 2**63 - 1),
    tile=st.booleans(),
)
@example(largest=89.1875, ratio=1.0, room=1.0, sign=1, seed=0, tile=False)  # scaled to the last float32 below 6
@example(largest=1.0, ratio=1.0, room=1.05, sign=-1, seed=0, tile=True)  # NEAREST scales would clip it: 426.7 to 416
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_mean_is_the_value(
    device: str, largest: float, ratio: float, room: float, sign: int, seed: int, tile: bool
) -> None:
    """Any value at most 500 times smaller than its block's largest, UP scales: 15,360 samples, mean against exact.

    The samples are of one value, the last 15 elements of each of 1,024 blocks; the tensor's largest is ``room`` times
    the block's, so that scales need rounding. Chernoff's bound, with the exact moment generating function of those 15,
    shared bytes and all, at the first counts beyond |z| = 7 is below 5.5e-11 for each of the 65,536 probabilities, so
    for any example: a false alarm in less than 2e-9 of all runs of 22 examples. The last line draws nothing.
    """
    x = torch.full((16, 1024), sign * largest / ratio, device=device)
    x[:, ::16] = largest
    spec = STOCHASTIC.replace(scale_rounding="up", block_rows=16 if tile else 1)
    amax = torch.ops.nvfp4.amax(x, -1) * room
    packed = torch.ops.nvfp4.quantize(x, amax, rng_state(seed, 3, device), spec.pack())
    neighbours = statistics.Neighbours.of(x, amax, spec)
    lower, upper, p = (t[:, 1].unique() for t in (neighbours.lower, neighbours.upper, neighbours.probability))
    assert lower.numel() == upper.numel() == p.numel() == 1
    decoded = torch.ops.nvfp4.dequantize(*packed, 1024, torch.float32)
    rest = decoded[:, torch.arange(1024, device=device) % 16 != 0]
    assert bool(((rest == lower) | (rest == upper)).all())
    assert abs(statistics.count_z(int((rest != lower).sum()), rest.numel(), p.item())) <= statistics.Z_BOUND
    assert is_expectation(x[0, 1].item(), lower.item(), upper.item(), p.item())


def is_expectation(x: float, lower: float, upper: float, p: float) -> bool:
    """Whether x is lower + p (upper - lower), but for p's resolution of 1/65536 and 7 float32 roundings, which add up.

    S_enc, S_dec, s_b * S_dec, enc, x * enc, then per_tensor_scale and the decoded product: at most 2^-24 of x each.
    Over 1.3e7 values they came to 3 * 2^-24 of x together at most.
    """
    return abs(lower + p * (upper - lower) - x) <= abs(upper - lower) / 65536 + 7 * 2**-24 * abs(x)


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


@pytest.mark.parametrize("x", [4.5, -5.9999995])
def test_a_wrong_expectation_is_detected(x: float) -> None:
    """Two resolutions too low or three too high are seen, so are 8 bits in place of 16, and a scale 1e-4 off."""
    lower, upper = math.copysign(4, x), math.copysign(6, x)
    p = math.floor((abs(x) - 4) / 2 * 65536) / 65536
    assert is_expectation(x, lower, upper, p)
    assert not any(is_expectation(x, lower, upper, p + off / 65536) for off in (-256, -2, 3, 256))
    assert not is_expectation(x * (1 + 1e-4), lower, upper, p)


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


# --- the planted faults, at the sample sizes of the tests above ------------------------------------------------------


def check(name: str, rounder) -> list[Finding]:
    """A check above by name, on any 16-bit rounder."""
    return list(
        {
            "cells": lambda: statistics.cells(rounder, 16, 4),
            "bias": lambda: statistics.bias(rounder, 16, 1024, 4096, sow()),
            "correlations": lambda: statistics.correlations(rounder, 16, 1024, 256, sow()),
            "draws": lambda: statistics.draws(rounder, 16, 256, 512, sow()),
            "transposed": lambda: statistics.transposed(pair_of(rounder), 16, 256, sow()),
            "shards": lambda: statistics.shards(rounder, 256, 256, sow()),
            "bits": lambda: statistics.bits(rounder, 288, 256),
        }[name]()
    )


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
    found = {finding.check: finding for finding in check(name, planted_faults.FAULTS[fault])}
    assert not found[line].ok, found[line]


def test_every_planted_fault_is_listed() -> None:
    assert {fault for fault, _, _ in CAUGHT_BY} == set(planted_faults.FAULTS)


@pytest.mark.parametrize("name", ["cells", "bias", "correlations", "draws", "transposed", "shards", "bits"])
def test_the_control_passes(name: str) -> None:
    """The same lines, the same samples, the contract's own rounding."""
    findings = check(name, planted_faults.sound)
    assert worst(findings).ok, worst(findings)
