"""Hooks of accelerate call the forward that they replaced: a conversion has to replace that one in its turn."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, quantize_model, training
from nvfp4_tensor.quantization import gptq
from nvfp4_tensor.quantization.linear import set_pre_scale, set_weight
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48))


def hooked(model):
    hooks = pytest.importorskip("accelerate").hooks
    for module in model:
        hooks.add_hook_to_module(module, hooks.ModelHook())
    return model


def trained(model):
    quantize_(model, training.NVFP4TrainingConfig("nvidia"))
    torch.manual_seed(2)
    return model(X)


def calibrated(model):
    calibrate(model, [X], NVFP4Config(), progress=False)
    return model(X)


def scaled(model):
    set_weight(model[0], NVFP4Tensor.to_nvfp4(model[0].weight.detach()))
    set_pre_scale(model[0], torch.linspace(0.5, 2, 64))
    return model(X)


def dense_again(model):
    trained(model)
    return training.to_dense(model)(X)


@pytest.mark.parametrize("convert", [trained, calibrated, scaled, dense_again])
def test_a_hook_calls_the_new_forward(convert):
    model = linear()
    expected, dense, found = convert(model), linear()(X), convert(hooked(linear()))
    assert torch.equal(found, expected)
    assert torch.equal(found, dense) == (convert is dense_again)


def test_a_copy_calls_its_own_weight():
    model = hooked(linear())
    expected = scaled(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        set_pre_scale(model[0], torch.ones(64))
    assert torch.equal(other(X), expected) and not torch.equal(model(X), expected)


def test_without_the_hook_it_is_the_new_class():
    model = hooked(linear())
    expected = scaled(model)
    pytest.importorskip("accelerate").hooks.remove_hook_from_module(model[0])
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("convert", [trained, calibrated, scaled])
def test_a_forward_of_ones_own_is_refused(convert):
    model = linear()
    own = model[0].forward
    model[0].forward = lambda x: 2 * own(x)
    with pytest.raises(TypeError, match="has a forward of its own"):
        convert(model)


def prepared(model):
    quantize_(model, NVFP4Config(step="prepare"))


def by_gptq(model):
    gptq(model, [X], NVFP4WeightOnlyConfig(), progress=False)


def quantized(model):
    quantize_(model, NVFP4WeightOnlyConfig())


@pytest.mark.parametrize("convert", [quantize_model, quantized, prepared, by_gptq, trained, calibrated])
@pytest.mark.parametrize("way", ["leaf", "sequence", "parent"])
def test_offloaded_weights_are_refused(convert, way):
    """Before any change, whichever hook keeps the weights."""
    hooks = pytest.importorskip("accelerate").hooks
    model = nn.Sequential(linear()[0], nn.Sequential(nn.Linear(48, 64)))
    if way == "sequence":
        hooks.add_hook_to_module(model[1][0], hooks.ModelHook())
    parents = ["Sequential"] if way == "parent" else None
    hooks.attach_align_device_hook(model[1], "cpu", offload=True, preload_module_classes=parents)
    expected = model(X)
    before = dict(model.named_parameters())
    assert before["1.0.weight"].is_meta and hasattr(model[1], "_hf_hook") == (way == "parent")
    with pytest.raises(ValueError, match=r"1\.0\.weight is offloaded by accelerate.*quantize first, then offload"):
        convert(model)
    assert all(each is before[name] for name, each in model.named_parameters())
    assert torch.equal(model(X), expected)


def test_what_the_error_says_works():
    """Codes that are offloaded multiply as before, and weights come back with the removal of the hooks."""
    accelerate = pytest.importorskip("accelerate")
    model, other = linear(), accelerate.cpu_offload(linear(), "cpu")
    quantized(model)
    expected = model(X)
    assert torch.equal(accelerate.cpu_offload(model, "cpu")(X), expected) and model[0].weight.is_meta
    accelerate.hooks.remove_hook_from_submodules(other)
    quantized(other)
    assert torch.equal(other(X), expected)
