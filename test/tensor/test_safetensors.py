"""Writers of plain storages raise an error with the fix for an NVFP4Tensor, and write nothing."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)).bfloat16()
    quantize_(model, NVFP4WeightOnlyConfig())
    return model


def test_writers_of_plain_storages_name_the_way_that_works(model, tmp_path):
    path, state = tmp_path / "model.safetensors", model.state_dict()
    for write in (
        lambda: save_file(state, path), lambda: save_model(model, str(path)), lambda: flatten_tensor_state_dict(state),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"torch\.save\(model\.state_dict\(\), path\).*assign=True"):
            write()
    assert not path.exists()


def test_the_way_that_works(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)).bfloat16()
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), assign=True)
    x = torch.randn(3, 32).bfloat16()
    assert torch.equal(again(x), model(x))
