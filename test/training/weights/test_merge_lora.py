"""Adapters merged into NVFP4 weights: the formula bit for bit, the expectation, and errors."""

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, quantize
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training import merge_lora, merge_low_rank

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.*get_apply_tensor_subclass.*")


def pair(n=40, k=72, r=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = [torch.randn(shape, generator=generator) for shape in ((n, k), (r, k), (n, r))]
    return normal[0], normal[1] / 10, normal[2] / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six=True)])
def test_the_formula(spec, dtype):
    """By the reference alone, from the decoded codes to the new ones."""
    x, a, b = pair()
    w, rng_state = quantize(x.to(dtype), spec), torch.tensor([11, 12])
    merged = merge_low_rank(w, a.to(dtype), b.to(dtype), 0.5, rng_state=rng_state)
    decoded = reference.dequantize(w.qdata, w.scale, w.per_tensor_scale, 72, torch.float32)
    total = decoded + (b.to(dtype).float() @ a.to(dtype).float()) * 0.5
    expected = reference.quantize(total, reference.amax(total), rng_state, spec.with_round_mode("stochastic"))
    for got, wanted in zip((merged.qdata, merged.scale, merged.per_tensor_scale), expected, strict=True):
        assert torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
    assert merged.spec == spec and merged.dtype == dtype and merged.shape == w.shape


def test_small_deltas_survive_stochastic_rounding_only():
    """A delta of 1/200 of the weights: to nearest under a tenth of it is found again, stochastically all."""
    x, a, b = pair()
    w = quantize(x)
    delta = b @ a * 0.2
    draws = [merge_low_rank(w, a, b, 0.2, rng_state=torch.tensor([i, 0])).dequantize() for i in range(400)]

    def found(moved):
        return (moved * delta).sum() / delta.square().sum()

    inner = w.dequantize().abs() < w.dequantize().unflatten(1, (9, 8)).abs().amax(-1).repeat_interleave(8, 1)
    delta = delta * inner  # the largest of a block clip
    assert 0.85 < found(torch.stack(draws).mean(0) - w.dequantize()) < 1.15
    assert found(merge_low_rank(w, a, b, 0.2, round_mode="rne").dequantize() - w.dequantize()).abs() < 0.4


def network(config, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(72, 48), nn.GELU(), nn.Linear(48, 40), nn.GELU(), nn.Linear(40, 24))
    quantize_(model, config, filter_fn=lambda module, name: name in ("0", "2"))
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2", "4"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, lora)


@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig(), NVFP4Config()], ids=["weight only", "w4a4"])
def test_a_model(config):
    model = network(config)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    expected = {}
    for name, layer in layers.items():
        weight, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        if isinstance(weight, NVFP4Tensor):
            rng_state = rng_state_of("merge", 5, name, 0, weight.device)
            expected[name] = merge_low_rank(weight.detach(), a, b, 2.0, rng_state=rng_state)
        else:
            expected[name] = weight.detach() + b @ a * 2.0
    x = torch.randn(6, 72)
    with torch.no_grad():
        apart = model(x)
    addresses = [layer.base_layer.weight.data_ptr() for layer in layers.values()]
    merged = merge_lora(model, seed=5)
    assert type(merged) is nn.Sequential
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in merged.modules())
    linears = [merged[0], merged[2], merged[4]]
    for linear, wanted in zip(linears, expected.values(), strict=True):
        if isinstance(wanted, NVFP4Tensor):
            assert torch.equal(linear.weight.qdata, wanted.qdata)
            assert torch.equal(linear.weight.dequantize(), wanted.dequantize())
            assert linear.weight.activation_spec == getattr(config, "activation", None)
        else:
            torch.testing.assert_close(linear.weight.detach(), wanted.detach())
    assert addresses[:2] == [linear.weight.data_ptr() for linear in linears[:2]]
    with torch.no_grad():
        assert 0 < (merged(x) - apart).norm() < 0.4 * apart.norm()


def test_equal_seeds_give_equal_models():
    codes = [merge_lora(network(NVFP4WeightOnlyConfig()), seed=seed)[0].weight.qdata for seed in (1, 1, 2)]
    assert torch.equal(codes[0], codes[1]) and not torch.equal(codes[0], codes[2])
    torch.manual_seed(3)
    drawn = merge_lora(network(NVFP4WeightOnlyConfig()))[0].weight.qdata
    assert drawn.shape == codes[0].shape


def test_several_adapters_are_rounded_once():
    model = network(NVFP4WeightOnlyConfig())
    torch.manual_seed(2)
    second = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["0", "2", "4"], init_lora_weights=False)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    name, layer = next((n, m) for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer))
    deltas = [layer.get_delta_weight(adapter).detach() for adapter in ("default", "second")]
    total = layer.base_layer.weight.dequantize() + torch.stack(deltas).sum(0)
    rng_state = rng_state_of("merge", 0, name, 0, total.device)
    expected = quantize(total, QuantizeSpec().with_round_mode("stochastic"), rng_state=rng_state)
    assert torch.equal(merge_lora(model, seed=0)[0].weight.qdata, expected.qdata)


def with_nan():
    model = network(NVFP4WeightOnlyConfig())
    layer = model.base_model.model[4]  # the last, a dense one
    layer.lora_A["default"].weight.data[0, 0] = torch.nan
    return model


def merged_by_peft():
    model = network(NVFP4WeightOnlyConfig())
    model.base_model.model[4].merge()
    return model


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: nn.Sequential(nn.Linear(8, 8)), TypeError, "takes a peft.PeftModel"),
        (lambda: network(NVFP4WeightOnlyConfig(), use_dora=True), ValueError, "not plain LoRA"),
        (with_nan, ValueError, "NaN or infinity"),
        (merged_by_peft, ValueError, "was merged already"),
        (
            lambda: network(
                NVFP4Config(
                    weight_spec=QuantizeSpec(hadamard_sign=True), activation_spec=QuantizeSpec(hadamard_sign=True)
                )
            ),
            ValueError,
            "Hadamard",
        ),
    ],
    ids=["no peft model", "dora", "nan", "merged", "hadamard"],
)
def test_errors_leave_the_model_unchanged(make, error, message):
    model = make()
    codes = [p.qdata.clone() for p in model.parameters() if isinstance(p, NVFP4Tensor)]
    with pytest.raises(error, match=message):
        merge_lora(model, seed=0)
    held = [p.qdata for p in model.parameters() if isinstance(p, NVFP4Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(codes, held, strict=True))


@pytest.mark.parametrize(
    "w, error, message",
    [
        (lambda x: x, TypeError, "quantize it first"),
        (lambda x: quantize(x).mT, ValueError, "not transposed"),
        (lambda x: quantize(x[:8]), ValueError, r"\(r, K\) and \(N, r\)"),
    ],
)
def test_errors_of_a_pair(w, error, message):
    x, a, b = pair()
    with pytest.raises(error, match=message):
        merge_low_rank(w(x), a, b)


@pytest.mark.parametrize(
    "spec",
    [QuantizeSpec(), QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six="mse"), QuantizeSpec(scale_search="mse")],
    ids=["1x16", "16x16", "four over six", "search"],
)
def test_a_stochastic_merge_keeps_the_mean(spec):
    """Scales to nearest would clip the largest elements of half the blocks, by 1 % in the mean. The mean over 64 blocks
    and 300 merges of these, and of all others, within 6 standard errors and what 16 bits cut off (false alarms: 1e-8).
    """
    torch.manual_seed(0)
    w, a, b = quantize(torch.randn(16, 64), spec), torch.randn(4, 64), torch.randn(16, 4) * 0.05
    exact = w.dequantize(torch.float32) + b @ a
    merged = torch.stack([merge_low_rank(w, a, b).dequantize(torch.float32) for _ in range(300)])
    errors = ((merged - exact) * exact.sign()).double().unflatten(-1, (4, 16))
    largest = exact.abs().unflatten(-1, (4, 16))
    largest = largest == largest.amax(dim=-1, keepdim=True)
    for chosen in (largest, ~largest):
        means = errors[:, chosen].mean(dim=1)
        assert means.mean().abs() < 6 * means.std() / 300**0.5 + 1e-4
