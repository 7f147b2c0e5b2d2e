"""Random specs and matrices, for hypothesis."""

from hypothesis import strategies as st

from helpers.instruction_sets import displaced, sample
from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics.layout import HIGH_PRECISION_DTYPES

specs = st.builds(
    QuantizeSpec,
    round_mode=st.sampled_from(["rne", "away", "zero", "stochastic"]),
    block_rows=st.sampled_from([1, 16]),
    scale_rounding=st.sampled_from(["nearest", "up"]),
    four_over_six=st.sampled_from([None, "mae", "mse"]),
    scale_ceiling=st.sampled_from([None, 448, 256]),
    hadamard_sign=st.none() | st.integers(0, 0xFFFF),
    random_bits=st.sampled_from([16, 8]),
)
words = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def matrices(draw):
    """Plain, with strided rows or columns, transposed, or at any byte; empty ones, and some that are not finite."""
    rows, columns = draw(st.integers(0, 40)), draw(st.integers(0, 300))
    dtype, seed = draw(st.sampled_from(HIGH_PRECISION_DTYPES)), draw(st.integers(0, 1 << 20))
    way = draw(st.sampled_from(["plain", "rows", "columns", "transposed", "at a byte"]))
    steps = {"rows": (2, 1), "columns": (1, 3)}.get(way, (1, 1))
    size = (rows * steps[0], columns * steps[1] + 5 * (way == "rows"))
    x = sample(size[::-1] if way == "transposed" else size, dtype, seed) * draw(st.sampled_from([1.0, 1e-4, 1e4]))
    if x.numel() and draw(st.booleans()):
        x.view(-1)[draw(st.integers(0, x.numel() - 1))] = draw(st.sampled_from([float("nan"), float("inf")]))
    if way == "transposed":
        return x.t()
    if way == "at a byte":
        return displaced(x, draw(st.integers(1, 7)))
    return x[:: steps[0], : columns * steps[1] : steps[1]]
