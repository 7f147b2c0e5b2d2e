"""Dense parameters whose names end like an NVFP4 weight's tensors are saved and loaded bit for bit."""

import pytest
import torch
from helpers.bits import stored_bits
from torch import nn
from torchao.quantization import quantize_
from transformers import PretrainedConfig, PreTrainedModel

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, checkpoints
from nvfp4_tensor.integrations import transformers as nvfp4

pytestmark = pytest.mark.usefixtures("natively")
NAMES = (
    "in_proj_weight", "logit_scale", "head_weight_scale", "head_weight_scale_2", "gate_input_scale", "input_scale",
    "my_weight_packed", "weight_global_scale_x", "global_scale", "scales", "weights",
)  # fmt: skip


class OddConfig(PretrainedConfig):
    model_type = "odd_names"

    def __init__(self, names=NAMES, **kwargs):
        self.names = list(names)
        super().__init__(**kwargs)


class Odd(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight_norm = nn.Linear(32, 32, bias=False)
        self.inner = nn.Module()
        for name in config.names:
            self.inner.register_parameter(name, nn.Parameter(torch.randn(3)))
        self.post_init()

    def forward(self, x):
        return self.weight_norm(x)


def assert_same(model, again):
    expected, got = model.state_dict(), again.state_dict()
    assert expected.keys() == got.keys()
    assert sum(isinstance(tensor, NVFP4Tensor) for tensor in expected.values()) > 0
    for name, tensor in expected.items():
        assert type(got[name]) is type(tensor) and got[name].dtype == tensor.dtype, name
        assert torch.equal(stored_bits(got[name]), stored_bits(tensor)), name


def odd(*names):
    torch.manual_seed(0)
    model = Odd(OddConfig(names)).bfloat16()
    quantize_(model, NVFP4WeightOnlyConfig())
    return nvfp4.attach_quantizer(model)


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
def test_odd_names(tmp_path, form):
    names = [name for name in NAMES if form == "modelopt" or name != "input_scale"]
    model = odd(*names)
    model.save_pretrained(tmp_path / "saved")
    if form != "modelopt":
        checkpoints.convert(tmp_path / "saved", tmp_path / "other", to=form, progress=False)
    assert_same(model, Odd.from_pretrained(tmp_path / ("saved" if form == "modelopt" else "other")))


def test_a_name_that_the_layout_has_is_refused_when_saved(tmp_path):
    for name in ("weight_scale", "weight_scale_2"):
        with pytest.raises(ValueError, match=rf"inner\.{name} are dense: rename them"):
            odd(name).save_pretrained(tmp_path)
    model = odd()
    model.weight_norm.input_scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"weight_norm\.input_scale are dense"):
        model.save_pretrained(tmp_path)
