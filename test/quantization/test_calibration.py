import copy
import functools
import weakref

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, calibrate, quantize
from nvfp4_tensor.numerics.reference import nearest_value
from nvfp4_tensor.quantization.accuracy.weighted import quantize_weighted
from nvfp4_tensor.quantization.observer import ObservedLinear


def every(module, name):
    """Select linears of sizes that files do not have, too."""
    return isinstance(module, nn.Linear)


def calibrated(m, data, config=None, filter_fn=every):
    return calibrate(m, data, config, filter_fn=filter_fn, progress=False)


def model():
    return nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 32, bias=False)).bfloat16()


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 48, generator=generator).bfloat16() for _ in range(count)]


def test_the_amax_is_that_of_all_batches(device):
    m = model().to(device)
    dense = copy.deepcopy(m)
    data = [batch.to(device) for batch in batches()]
    halves = calibrated(copy.deepcopy(m), data, NVFP4Config(percentile=50))
    assert calibrated(m, data) is m
    inputs = data, [torch.relu(dense[0](batch)) for batch in data]
    for layer, seen in zip((m[0], m[2]), inputs, strict=True):
        assert layer.weight.activation_amax == torch.stack([x.float().abs().amax() for x in seen]).amax()
    x = data[0] * 0.1  # an amax of its own would give other scales
    expected = torch.nn.functional.linear(
        quantize(x, amax=m[0].weight.activation_amax), m[0].weight._replace(activation_spec=None), m[0].bias
    )
    assert torch.equal(m[0](x), expected)
    assert "static" in repr(m[0])
    median = torch.cat(data).float().abs().median()
    torch.testing.assert_close(halves[0].weight.activation_amax, median, rtol=0.04, atol=0)


def test_two_steps_with_a_state_dict_between():
    m, other = model(), model()
    other.load_state_dict(m.state_dict())
    for each in (m, other):
        quantize_(each, NVFP4Config(step="prepare"))
    for batch in batches():
        m(batch)
    assert "activation_amax" in dict(m[0].named_buffers())
    other.load_state_dict(m.state_dict())
    for each in (m, other):
        quantize_(each, NVFP4Config(step="convert"))
        assert not dict(each.named_buffers())
    x = batches(1)[0]
    for each in (other, copy.deepcopy(m), torch.compile(m, fullgraph=True, backend="aot_eager")):
        assert torch.equal(each(x), m(x))
    assert m.to("meta")[0].weight.activation_amax.device.type == "meta"


def test_forms_of_a_batch(capsys):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, a, b):
            return self.linear(a + b)

    a, b = torch.ones(2, 16), torch.full((2, 16), 2.0)
    m = Two()
    for batch in (a, {"a": a, "b": b}):
        with pytest.raises(TypeError, match=rf"not one {type(batch).__name__}: pass \[batch\]"):
            calibrate(m, batch)
        assert type(m.linear) is nn.Linear
    with pytest.raises(TypeError, match="with weighted=True"):
        calibrate(m, [(a, b)], NVFP4WeightOnlyConfig())
    calibrate(m, [(a, b), [b, b], {"a": a, "b": 4 * b}])
    assert m.linear.weight.activation_amax == 9 and "calibrating" in capsys.readouterr().err


def test_a_nan_beside_others_is_left_out_by_name():
    m, other, (first, *rest) = model(), model(), batches()
    other.load_state_dict(m.state_dict())
    with pytest.warns(UserWarning, match="some inputs of 0.* were NaN or infinite and were ignored"):
        calibrate(m, [torch.full_like(first, float("nan")), *rest], progress=False)
    calibrate(other, rest, progress=False)
    assert torch.equal(m[0].weight.activation_amax, other[0].weight.activation_amax)


def test_one_dense_weight_is_kept_and_out_of_memory_leaves_whole_linears(monkeypatch):
    m = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
    weights, alive = [weakref.ref(linear.weight) for linear in m], []

    def counting(weight, spec, **amax):
        alive.append(sum(each() is not None for each in weights))
        if len(alive) == 4:
            raise MemoryError
        return quantize(weight, spec, **amax)

    monkeypatch.setattr("nvfp4_tensor.quantization.weights.quantize", counting)
    x = torch.randn(8, 64).bfloat16()
    with pytest.raises(MemoryError):
        calibrated(m, [x])
    assert alive == [4, 3, 2, 1]
    assert isinstance(m[2].weight, NVFP4Tensor) and type(m[3]) is nn.Linear and not dict(m.named_buffers())
    assert m(x).isfinite().all()


def test_what_was_observed_before_is_kept(monkeypatch):
    """Also if a missing backend is found, before the batches."""

    def missing(backend):
        raise ImportError(backend.name)

    m = model()
    quantize_(m, NVFP4Config(step="prepare"), filter_fn=lambda module, name: name == "0")
    calibrated(m, batches(1), filter_fn=lambda module, name: name == "2")
    assert m[0].activation_amax > 0 and isinstance(m[2].weight, NVFP4Tensor)
    monkeypatch.setattr("nvfp4_tensor.quantization.conversion.check_installed", missing)
    with pytest.raises(ImportError, match="FBGEMM"):
        calibrated(
            model(), iter(lambda: pytest.fail("a batch was asked for"), 0), NVFP4Config(product_backend="fbgemm")
        )
    with pytest.raises(ImportError, match="FBGEMM"):
        quantize_(m, NVFP4Config(step="convert", product_backend="fbgemm"))
    assert isinstance(m[0], ObservedLinear) and m[0].activation_amax > 0


# --- what a linear observes ------------------------------------------------------------------------------------------


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


def test_a_static_amax_is_one_that_files_keep():
    """They store amax / 2688, from which it comes back to the bit: the observed amax, or the float next to it."""
    observed, largest = ObservedLinear.observe(nn.Linear(16, 4), QuantizeSpec()), torch.tensor(2688.0)
    observed.activation_histogram[4000] = 1
    seen = torch.cat([torch.rand(200) * 8, torch.logspace(-34, 38, 80), torch.tensor([3.65625, 1e-43, 3.4028235e38])])
    for amax in seen:
        observed.activation_amax.fill_(amax)
        kept = observed.amax_for(NVFP4Config())
        assert kept.isfinite() and kept > 0 and abs(kept.double() / amax - 1) < 2**-23
        assert amax < 1e-40 or kept / largest * largest == kept


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


# --- a scale search weighted by the inputs ---------------------------------------------------------------------------

SEARCH = QuantizeSpec(scale_search="mse")


def loud(columns=48, rows=64):
    """Inputs with some columns twenty times as large as others."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-1, 1, columns)


def test_equal_weights_change_nothing_and_columns_that_met_nothing_are_rounded_all_the_same():
    w, zeros = torch.randn(70, 112), torch.ones(112)
    zeros[96:] = 0
    for spec in (SEARCH, SEARCH.replace(block_rows=16)):
        own, plain = quantize_weighted(w, spec, torch.full((112,), 7.0)), quantize(w, spec)
        same = own.unswizzled_scale().view(torch.uint8) == plain.unswizzled_scale().view(torch.uint8)
        assert same.float().mean() > 0.995  # the sums of errors are rounded otherwise
        assert (own.dequantize() == plain.dequantize()).float().mean() > 0.995
    expected = quantize_weighted(w, SEARCH, torch.ones(112)).dequantize()
    for squares in (zeros, 0 * zeros):
        assert torch.equal(quantize_weighted(w, SEARCH, squares).dequantize(), expected)
    with pytest.raises(ValueError, match="not finite"):
        quantize_weighted(w, SEARCH, zeros / 0)


def test_weighted_with_row_scales_is_that_of_each_row():
    w, squares = torch.randn(5, 100) * torch.logspace(-6, 6, 5).unsqueeze(1), torch.rand(100)
    own = quantize_weighted(w, SEARCH.replace(row_scaled=True), squares).dequantize()
    for i, row in enumerate(w):
        assert torch.equal(own[i], quantize_weighted(row[None], SEARCH, squares).dequantize()[0])


def test_each_block_has_the_candidate_of_least_weighted_error():
    w, squares, spec = torch.randn(20, 64), torch.rand(64) + 0.01, SEARCH
    own = quantize_weighted(w, spec, squares)
    usual = quantize(w, spec.replace(scale_search=None, scale_ceiling=256)).unswizzled_scale().view(torch.uint8).int()
    errors = []
    for step in range(-1, 6):
        s = (usual + step).to(torch.uint8).view(torch.float8_e4m3fn).double() * own.per_tensor_scale.double()
        blocks = w.double().unflatten(1, (-1, 16))
        codes = nearest_value((blocks / s.unsqueeze(-1)).float()).double()
        errors.append(((codes * s.unsqueeze(-1) - blocks).square() * squares.view(-1, 16)).sum(-1))
    best = torch.stack(errors).argmin(0) - 1
    chosen = own.unswizzled_scale().view(torch.uint8).int() - usual
    assert (chosen == best).float().mean() > 0.99
    assert len(chosen.unique()) > 4


@pytest.mark.parametrize(
    ("make", "activation", "has_amax"),
    [
        (NVFP4WeightOnlyConfig, None, False),
        (NVFP4Config, QuantizeSpec(), True),
        (functools.partial(NVFP4Config, row_scaled=True), QuantizeSpec(row_scaled=True), False),
    ],
)
def test_weighted_by_what_is_fed(make, activation, has_amax):
    x, layer = loud(), nn.Linear(48, 64, bias=False)
    plain, own = nn.Sequential(copy.deepcopy(layer)), nn.Sequential(copy.deepcopy(layer))
    quantize_(plain, NVFP4WeightOnlyConfig(weight_spec=SEARCH))
    calibrate(own, [x[:40], x[40:]], make(weight_spec=SEARCH, weighted=True), progress=False)
    expected = quantize_weighted(layer.weight.detach(), SEARCH, x.square().sum(0))
    assert torch.equal(own[0].weight.qdata, expected.qdata)
    errors = [((m[0].weight.dequantize() - layer.weight) @ x.T).square().sum() for m in (own, plain)]
    assert errors[0] < 0.9 * errors[1]
    assert own[0].weight.activation_spec == activation and (own[0].weight.activation_amax is not None) == has_amax


def test_weighted_in_two_steps_and_for_linears_of_one_weight():
    m = nn.ModuleList([nn.Linear(48, 32, bias=False), nn.Linear(48, 32, bias=False)])
    m[1].weight = m[0].weight
    dense, x = m[0].weight.detach(), loud()
    quantize_(m, NVFP4WeightOnlyConfig(weight_spec=SEARCH, weighted=True, step="prepare"))
    m[0](x[:30]), m[1](x[30:])
    quantize_(m, NVFP4WeightOnlyConfig(weight_spec=SEARCH, weighted=True, step="convert"))
    assert m[0].weight is m[1].weight
    assert torch.equal(m[0].weight.qdata, quantize_weighted(dense, SEARCH, x.square().sum(0)).qdata)


# --- headroom --------------------------------------------------------------------------------------------------------


def blocks_of(amaxes):
    """One block per number, with that number as its largest magnitude."""
    return torch.linspace(0, 1, 16) * torch.tensor(amaxes).unsqueeze(1)


@pytest.mark.parametrize(
    ("amaxes", "expected"),
    [
        ([1.0] * 1000, 16384.0),  # all alike: as much room as keeps their scales in full precision
        ([0.0] * 500 + [1.0] * 500, 16384.0),  # zeros have no scale to keep
        ([1e-4] * 20 + [1.0] * 980, 16384e-4),  # the first percentile has 1e-4
        ([1e-5] * 20 + [3.0] * 980, 3.0),  # more would saturate what was seen
        ([1e-6] * 500 + [1.0] * 20_000 + [900.0], 1.0),  # a lone outlier does not count
    ],
)
def test_headroom(amaxes, expected):
    x = blocks_of(amaxes)
    m = calibrated(nn.Sequential(nn.Linear(16, 16)), [x], NVFP4Config(headroom=True))
    assert expected / 1.04 <= m[0].weight.activation_amax <= expected * 1.04
