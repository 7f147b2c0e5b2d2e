"""The demo's checkpoint, saved and loaded again."""

import pytest
import torch

from nvfp4_cli.demo import run
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor

pytestmark = pytest.mark.slow


def test_a_model_is_the_same_after_its_round(dense):
    model = open_model(dense)
    tokens = torch.arange(64) % 320
    found = run.round_trip(model, tokens)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, NVFP4Tensor)
    assert found.before == found.after > 1
    assert found.nbytes < 0.7 * sum(file.stat().st_size for file in dense.glob("*.safetensors"))
    assert str(found).endswith("the same") and "NOT" not in str(found)
