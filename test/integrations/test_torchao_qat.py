"""QATConfig with our configs: the trained model computes what the converted model computes."""

import pytest
import torch
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, quantize_
from torchao.quantization.qat import FakeQuantizedLinear, QATConfig

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, fake_quantize
from nvfp4_tensor.training import NVFP4TrainingConfig, NVFP4TrainingLinear

pytestmark = pytest.mark.slow


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))


BASES = [
    NVFP4Config(),
    NVFP4Config(block_rows=16, four_over_six=True),
    NVFP4WeightOnlyConfig(),
    NVFP4WeightOnlyConfig(scale_ceiling=256),
]


@pytest.mark.parametrize("base", BASES, ids=str)
def test_prepare_computes_what_convert_will(base):
    """Gradients are straight through."""
    model, x, dy = model_of(), torch.randn(5, 64, requires_grad=True), torch.randn(5, 48)
    quantize_(model, QATConfig(base, step="prepare"))
    assert all(isinstance(model[i], NVFP4TrainingLinear) for i in (0, 2))
    prepared = model(x)
    model[0](x).backward(dy)
    w = model[0].weight.detach()
    torch.testing.assert_close(x.grad, dy @ fake_quantize(w, base.weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model[0].weight.grad, dy.t() @ x.detach(), rtol=1e-5, atol=1e-5)
    quantize_(model, QATConfig(base, step="convert"))
    assert all(isinstance(model[i].weight, NVFP4Tensor) for i in (0, 2))
    torch.testing.assert_close(model(x), prepared, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config", [NVFP4TrainingConfig("weight_only"), QATConfig(NVFP4WeightOnlyConfig(), step="prepare")], ids=["", "qat"]
)
def test_a_linear_of_two_paths_and_a_conv1d(config):
    """quantize_ passes a module once for each of its parents: models that repeat a layer have several."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    linear, x = nn.Linear(64, 64), torch.randn(5, 64)
    model = nn.Sequential(nn.Sequential(linear), nn.Sequential(linear), conv1d(32, 64))
    first, last = fake_quantize(linear.weight.detach()), fake_quantize(model[2].weight.detach().t().contiguous())
    quantize_(model, config, filter_fn=lambda module, name: not isinstance(module, nn.Sequential))
    assert all(isinstance(each, NVFP4TrainingLinear) for each in (linear, model[2]))
    once = nn.functional.linear(x, first, linear.bias)
    expected = nn.functional.linear(nn.functional.linear(once, first, linear.bias), last, model[2].bias)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


def test_training_between_the_two_steps_lowers_the_quantized_loss():
    model, x, target = model_of(), torch.randn(64, 64), torch.randn(64, 32)
    quantize_(model, QATConfig(NVFP4Config(), step="prepare"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = (model(x) - target).square().mean().item()
    for _ in range(40):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    quantize_(model, QATConfig(NVFP4Config(), step="convert"))
    assert (model(x) - target).square().mean().item() < 0.7 * before


def test_only_what_was_prepared_is_converted():
    model = model_of()
    quantize_(model, QATConfig(NVFP4Config(), step="prepare"), filter_fn=lambda module, name: name == "0")
    quantize_(model, QATConfig(NVFP4Config(), step="convert"), filter_fn=lambda module, name: name in ("0", "2"))
    assert isinstance(model[0].weight, NVFP4Tensor) and type(model[2]) is nn.Linear


OTHER = [
    (NVFP4WeightOnlyConfig(four_over_six=True), NVFP4WeightOnlyConfig()),
    (NVFP4WeightOnlyConfig(), NVFP4Config()),
    (NVFP4Config(), NVFP4WeightOnlyConfig()),
    (NVFP4Config(), NVFP4Config(row_scaled=True)),
]


@pytest.mark.parametrize("prepared, other", OTHER, ids=str)
def test_another_config_than_the_prepared_one_is_refused_before_anything_changes(prepared, other):
    model, first = model_of(), lambda module, name: name == "0"
    quantize_(model, QATConfig(other, step="prepare"), filter_fn=first)  # what convert visits first would fit
    quantize_(model, QATConfig(prepared, step="prepare"), filter_fn=lambda module, name: name == "2")
    with pytest.raises(ValueError, match="convert with the config of the prepare step"):
        quantize_(model, QATConfig(other, step="convert"))
    assert all(isinstance(model[i], NVFP4TrainingLinear) for i in (0, 2))
    quantize_(model, QATConfig(other, step="convert"), filter_fn=first)
    quantize_(model, QATConfig(prepared, step="convert"))
    assert all(isinstance(model[i].weight, NVFP4Tensor) for i in (0, 2))


def test_torchaos_own_configs_go_on_to_torchao():
    model = nn.Sequential(nn.Linear(128, 32).bfloat16())
    quantize_(model, QATConfig(Int4WeightOnlyConfig(group_size=32), step="prepare"))
    assert isinstance(model[0], FakeQuantizedLinear)


def test_refused():
    with pytest.raises(ValueError, match="QATConfig has steps of its own"):
        quantize_(model_of(), QATConfig(NVFP4Config(step="prepare"), step="prepare"))
    frozen = model_of().requires_grad_(False)
    with pytest.raises(ValueError, match="is frozen"):
        quantize_(frozen, QATConfig(NVFP4Config(), step="prepare"))
