"""NVFP4 weights under accelerate's hooks, which move them, and safetensors' writers, which name the fix."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, quantize

accelerate = pytest.importorskip("accelerate")
CONFIGS = [NVFP4WeightOnlyConfig(), NVFP4Config()]


def quantized_model(config, dtype=torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)).to(dtype)
    quantize_(model, config)
    return model


@pytest.mark.parametrize("config", CONFIGS, ids=["weight only", "w4a4"])
def test_cpu_offload(config):
    model, x = quantized_model(config), torch.randn(3, 64)
    expected, weight = model(x), model[0].weight.detach().clone()
    accelerate.cpu_offload(model, execution_device="cpu")
    for _ in range(2):
        assert model[0].weight.is_meta and torch.equal(model(x), expected)
    accelerate.hooks.remove_hook_from_submodules(model)
    assert isinstance(model[0].weight, NVFP4Tensor) and torch.equal(model[0].weight.qdata, weight.qdata)
    assert model[0].weight.activation_spec == weight.activation_spec


def test_dispatched_models_keep_their_ties_and_no_others():
    """accelerate knows a tied weight by its data_ptr."""
    model, x = quantized_model(CONFIGS[0]), torch.randn(3, 64)
    model.append(torch.nn.Linear(32, 64, bias=False))
    model.append(torch.nn.Linear(64, 48))
    model[4].weight = model[0].weight
    quantize_(model[3], CONFIGS[0])
    expected = model(x)
    places = {"0": "cpu", "1": "cpu", "2": "cpu", "3": "cpu", "4": "cpu"}
    dispatched = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert torch.equal(dispatched(x), expected)


def test_disk_offload_says_what_to_do(tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="use cpu_offload"):
            accelerate.disk_offload(quantized_model(CONFIGS[0], dtype), tmp_path, execution_device="cpu")


def test_a_parameter_made_of_another_by_its_class():
    t = quantize(torch.randn(4, 32))
    made = NVFP4Tensor(t, requires_grad=False)
    assert isinstance(made, torch.nn.Parameter) and made.qdata.data_ptr() == t.qdata.data_ptr()
    with pytest.raises(TypeError, match="columns must be an integer, the size of the last dimension, got None"):
        NVFP4Tensor(t.qdata)


def test_writers_of_plain_storages_name_the_way_that_works(tmp_path):
    model = quantized_model(CONFIGS[0], torch.bfloat16)
    path, state = tmp_path / "model.safetensors", model.state_dict()
    for write in (
        lambda: save_file(state, path), lambda: save_model(model, str(path)), lambda: flatten_tensor_state_dict(state),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"torch\.save\(model\.state_dict\(\), path\).*assign=True"):
            write()
    assert not path.exists()
    torch.save(state, path := tmp_path / "model.pt")  # as the message says
    again = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)).bfloat16()
    again.load_state_dict(torch.load(path, weights_only=True), assign=True)
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(again(x), model(x))
