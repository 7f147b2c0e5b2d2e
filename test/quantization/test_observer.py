import pytest
import torch
from torch import nn

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.quantization.observer import ObservedLinear


def test_it_counts_every_finite_magnitude_and_changes_no_output():
    linear = nn.Linear(40, 8)
    x = torch.randn(5, 40) / 100
    expected = linear(x)
    observed = ObservedLinear.observe(linear, QuantizeSpec())
    assert observed is linear and torch.equal(observed(x), expected)
    y = x.clone()
    y[0, 0], y[1, 1], y[2, :16] = float("nan"), float("inf"), float("-inf")
    observed(y)
    assert observed.activation_histogram.shape == (8192,)
    assert observed.activation_histogram.sum() == 2 * 200 - 18 and observed.activation_nonfinite == 18
    assert observed.activation_block_histogram.sum() == 2 * 15 - 1  # without the block that has no finite value
    assert observed.activation_block_histogram.nonzero().max() == observed.activation_histogram.nonzero().max()
    assert observed.activation_amax == x.abs().max()
    squares = x.square().sum(0) + torch.where(y.isfinite(), y, 0).square().sum(0)
    torch.testing.assert_close(observed.activation_squares, squares)


def test_it_observes_what_the_hadamard_transform_gives_until_it_stops():
    x = torch.zeros(1, 16)
    x[0, 0] = 8.0
    observed = ObservedLinear.observe(nn.Linear(16, 4), QuantizeSpec(hadamard_sign=True))
    observed(x)
    assert observed.activation_amax == 2.0
    linear = observed.stop_observing()
    assert type(linear) is nn.Linear and set(linear.state_dict()) == {"weight", "bias"}


def test_percentiles_are_within_a_bin():
    x, observed = torch.rand(100, 64) + 0.01, ObservedLinear.observe(nn.Linear(64, 4), QuantizeSpec())
    for part in x.split(10):
        observed(part)
    for percentile in (10.0, 50.0, 90.0, 99.0):
        exact = x.flatten().quantile(percentile / 100)
        assert exact <= observed.amax_at(percentile) * 1.001 and observed.amax_at(percentile) <= exact * 1.035


def test_the_amax_stays_float32():
    """An amax rounded down, with the model or by the default dtype, would clip the largest input."""
    x = torch.tensor([[3.97077] * 32])
    torch.set_default_dtype(torch.bfloat16)
    try:
        linear = ObservedLinear.observe(nn.Linear(32, 8, dtype=torch.float32), QuantizeSpec())
    finally:
        torch.set_default_dtype(torch.float32)
    linear(x)
    assert linear.amax_at(None) == x.max()
    linear.half().to("cpu")
    assert linear.amax_at(None) == x.max() and linear.weight.dtype == torch.float16
    linear(x.half() * 2)
    assert linear.amax_at(None) == 2 * x.half().max()
    linear = ObservedLinear.observe(nn.Linear(32, 8, device="meta"), QuantizeSpec()).to_empty(device="cpu")
    assert linear.activation_amax.dtype == torch.float32 and linear.activation_amax.device.type == "cpu"
    linear = ObservedLinear.observe(nn.Linear(32, 8), QuantizeSpec())
    with pytest.raises(RuntimeError, match="has observed no finite input: run"):
        linear.amax_at(None)


def test_percentiles_do_not_know_the_default_dtype(other_defaults):
    """bfloat16 would keep eight bits of 100,003 counts."""
    observed = other_defaults(lambda: ObservedLinear.observe(nn.Linear(4, 4), QuantizeSpec()))
    observed.activation_amax.fill_(1e9)
    observed.activation_histogram[4000:4100] = 1000
    observed.activation_histogram[4100] = 3
    reached = [
        int((observed.amax_at(100 * share / 100_003).view(torch.int32) >> 18).item()) for share in (1000, 1001, 50_000)
    ]
    assert reached == [4000, 4001, 4049]
