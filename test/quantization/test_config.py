import copy
import dataclasses

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    RoundingMode,
    ScaleRounding,
    quantize,
)

HADAMARD = QuantizeSpec(hadamard_sign=True)


def model(dtype=torch.bfloat16, device=None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(72, 40), nn.ReLU(), nn.Sequential(nn.Linear(40, 33, bias=False), nn.LayerNorm(33))
    ).to(dtype=dtype, device=device)


def weights(m):
    return [module.weight for module in m.modules() if isinstance(module, nn.Linear)]


def test_specs_from_arguments():
    arguments = {"four_over_six": True, "block_rows": 16, "scale_rounding": "up"}
    config = NVFP4WeightOnlyConfig(round_mode="stochastic", **arguments)
    both = {"four_over_six": "mse", "scale_rounding": ScaleRounding.UP}
    assert config.weight == QuantizeSpec(round_mode=RoundingMode.STOCHASTIC, block_rows=16, **both)
    assert config.weight is config.weight, "guards of compiled models compare it for each weight"
    config = NVFP4Config(activation_round_mode=RoundingMode.STOCHASTIC, random_bits=8, **arguments)
    assert config.weight == QuantizeSpec(block_rows=16, random_bits=8, **both)
    assert config.activation == QuantizeSpec(round_mode="stochastic", random_bits=8, **both)
    specs = QuantizeSpec(scale_ceiling=256), QuantizeSpec(round_mode="away")
    config = NVFP4Config(weight_spec=specs[0], activation_spec=specs[1])
    assert (config.weight, config.activation) == specs
    config = NVFP4Config(weight_spec=specs[0], round_mode="stochastic")
    assert config.weight == specs[0] and config.activation == QuantizeSpec(round_mode="stochastic")
    config = dataclasses.replace(NVFP4Config(four_over_six=True), four_over_six=None, round_mode="stochastic")
    assert config.weight == config.activation == QuantizeSpec(round_mode="stochastic")


WEIGHTS = NVFP4WeightOnlyConfig
UNFIT = [
    (lambda: NVFP4Config(weight_spec=HADAMARD), "same hadamard_sign"),
    (lambda: WEIGHTS(weight_spec=HADAMARD), "needs the same one of the activation"),
    (lambda: NVFP4Config(round_mode="nearest"), "'rne'"),
    (lambda: WEIGHTS(weight_spec=QuantizeSpec(), random_bits=8), "random_bits would have no effect"),
    (lambda: NVFP4Config(weight_spec=QuantizeSpec(), block_rows=16), "block_rows would have no effect"),
    (lambda: NVFP4Config(seed=1, activation_round_mode="stochastic"), "seed would have no effect"),
    (lambda: WEIGHTS(activations="int8"), "unknown activations 'int8': .* one of 'fp8'"),
    (lambda: NVFP4Config(activations="fp8"), r"use NVFP4WeightOnlyConfig\(activations='fp8'\)"),
    (lambda: NVFP4Config(product_backend="fp8"), r"is for NVFP4WeightOnlyConfig\(activations='fp8'\)"),
    (lambda: NVFP4Config(step="PREPARE"), "step must be None, 'prepare' or 'convert', got 'PREPARE'"),
    (lambda: NVFP4Config(step="prepare_for_loading"), "step must be None, 'prepare' or 'convert'"),
    *(
        (lambda given=given: NVFP4Config(percentile=given), f"percentile must be a number from 50 to 100.*{given}")
        for given in (49.9, 100.1, float("nan"), True)
    ),
    (lambda: NVFP4Config(step="prepare", row_scaled=True), "step would have no effect: with row_scaled"),
    (lambda: NVFP4Config(row_scaled=True, percentile=99), "percentile would have no effect"),
    (lambda: NVFP4Config(step="prepare", percentile=99), "percentile would have no effect"),
    (lambda: quantize_(model(), NVFP4Config(percentile=99)), 'percentile would have no effect.*step="convert"'),
    (lambda: WEIGHTS(weighted=True), "weighted only affects a scale search"),
    (lambda: WEIGHTS(step="prepare"), "step would have no effect"),
    (
        lambda: quantize_(model(), WEIGHTS(scale_search="mse", weighted=True)),
        'pass the config to calibrate, or.*step="p',
    ),
    (lambda: NVFP4Config(percentile=99, headroom=True), "both choose the amax"),
]


@pytest.mark.parametrize(("make", "message"), UNFIT)
def test_arguments_that_do_not_fit(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, NVFP4WeightOnlyConfig(four_over_six=True, block_rows=16)),
        (torch.float16, NVFP4Config()),
        (torch.float32, NVFP4WeightOnlyConfig()),
    ],
    ids=["bfloat16", "float16", "float32"],
)
def test_quantize_(device, dtype, config):
    m = model(dtype, device)
    dense = copy.deepcopy(m)
    quantize_(m, config)
    for w, original in zip(weights(m), weights(dense), strict=True):
        assert isinstance(w, NVFP4Tensor) and isinstance(w, nn.Parameter) and not w.requires_grad
        assert torch.equal(w.dequantize(), quantize(original, config.weight).dequantize())
        assert w.activation_spec == config.activation
        original.data = w.dequantize()
    x = torch.randn(2, 3, 72, device=device).to(dtype)
    if config.activation is None:
        expected = dense(x)
    else:
        hidden = torch.relu(dense[0](quantize(x).dequantize()))
        expected = dense[2](quantize(hidden).dequantize())
    torch.testing.assert_close(m(x), expected, rtol=0.05, atol=0.05)
    codes = m[0].weight.qdata.clone()
    m.to("cpu").to(torch.float32)
    assert m[0].weight.dtype == m[0].bias.dtype == m(x.cpu().float()).dtype == torch.float32
    assert torch.equal(m[0].weight.qdata, codes.cpu()) and m.half()(x.cpu().half()).dtype == torch.float16


def test_stochastic_weights_follow_the_seed_and_a_model_without_memory_takes_them():
    m, dense, draws = model(device="meta"), model(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        real = copy.deepcopy(dense)
        quantize_(real, NVFP4Config(round_mode="stochastic"))
        draws.append(real[0].weight.qdata)
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    quantize_(m, NVFP4Config(round_mode="stochastic"))
    assert all(w.device.type == "meta" and isinstance(w, NVFP4Tensor) for w in weights(m))
    assert m(torch.empty(5, 72, dtype=torch.bfloat16, device="meta")).shape == (5, 33)
    m.load_state_dict(real.state_dict(), assign=True)
    x, outputs = torch.randn(4, 72).bfloat16(), []
    for each in (m, real):
        torch.manual_seed(3)
        outputs.append(each(x))
    assert torch.equal(*outputs)
    assert_expected_inline(
        repr(m[0]),
        """NVFP4Linear(in_features=72, out_features=40, bias=True, weight=NVFP4 (stochastic, 1x16, activation (stochastic, 1x16), 7.30 bits/element))""",  # noqa: E501
    )
    m[0].weight = nn.Parameter(m[0].weight.dequantize())
    assert repr(m[0]).endswith("bias=True, weight=dense torch.bfloat16)")


def test_peak_memory_is_the_model_and_one_layer():
    """Quantizing adds less than one float32 layer to the peak memory, measured by torch's allocator."""
    size, layers = 2048, 3
    with torch.profiler.profile(profile_memory=True) as profile:
        m = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(layers)])
        quantize_(m, NVFP4WeightOnlyConfig(round_mode="stochastic"))
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    layer = size * size * 4
    assert layers * layer < peak < (layers + 1) * layer
    assert live == sum(w.stored_bytes for w in weights(m)) < 0.15 * layers * layer
