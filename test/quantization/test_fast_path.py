"""Linears in torch's transformer layers are called, not bypassed by the fast path; dense attention is named."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, training
from nvfp4_tensor.quantization.observer import ObservedLinear

CONFIGS = {
    "training": training.NVFP4TrainingConfig(),
    "weight only": NVFP4WeightOnlyConfig(),
    "w4a4": NVFP4Config(),
    "prepared": NVFP4Config(step="prepare"),
}
quiet = pytest.mark.filterwarnings(
    "ignore:left dense, because nn.MultiheadAttention", "ignore:The PyTorch API of nested"
)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 64, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2).eval()


def padding():
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[1, 6:] = True
    return mask


@quiet
@torch.no_grad()
@pytest.mark.parametrize(("config", "first", "mask"), [
    ("training", "", None), ("w4a4", "", None), ("prepared", "", None), ("weight only", "", padding()),
    *((config, "layers.1", padding()) for config in [*CONFIGS, "calibrated"]),
])  # fmt: skip
def test_an_encoder_calls_its_linears_in_evaluation(config, first, mask):
    model, x = encoder(), torch.randn(3, 10, 64)
    filter_fn = lambda module, name: type(module) is nn.Linear and name.startswith(first)  # noqa: E731
    dense = model(x, src_key_padding_mask=mask)
    if config == "calibrated":
        batch = {"src": x, "src_key_padding_mask": mask}
        calibrate(model, [batch], NVFP4Config(), filter_fn=filter_fn, progress=False)
    else:
        quantize_(model, copy.deepcopy(CONFIGS[config]), filter_fn=filter_fn)
    y = model(x, src_key_padding_mask=mask)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected = model(x, src_key_padding_mask=mask)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    if mask is not None:  # rows of padding are zero, or computed; and an amax is of those that there are
        y, expected, dense = (t[~mask] for t in (y, expected, dense))
    error = (y - dense).norm() / dense.norm()
    if config == "prepared":
        assert error < 1e-5 and all(m.activation_amax > 0 for m in model.modules() if isinstance(m, ObservedLinear))
    else:
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-5 if mask is None else 0.15)
        assert 0.02 < error < 0.1


@quiet
def test_the_hook_lives_as_long_as_the_linear_trains():
    model, x = encoder(), torch.randn(3, 10, 64)
    with torch.no_grad():
        dense = model(x)
        quantize_(model, training.NVFP4TrainingConfig())
        y, loaded = model(x), pickle.loads(pickle.dumps(model))
        for other in (copy.deepcopy(model), loaded, torch.compile(model, backend="aot_eager")):
            torch.testing.assert_close(other(x), y, rtol=0, atol=1e-5)
        assert torch.equal(training.to_dense(loaded)(x), dense)
    assert not loaded.layers[0].linear1._forward_pre_hooks


@pytest.mark.parametrize("config", CONFIGS)
def test_attention_that_stays_dense_is_named(config):
    with pytest.warns(
        UserWarning, match=r"nn.MultiheadAttention.*: all weights of layers.0.self_attn, layers.1.self_attn\."
    ):
        quantize_(encoder(), copy.deepcopy(CONFIGS[config]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(encoder(), copy.deepcopy(CONFIGS[config]), filter_fn=training.keep_dense("*self_attn*"))
        quantize_(nn.Sequential(nn.Linear(32, 32)), copy.deepcopy(CONFIGS[config]))
    assert not [each for each in caught if "MultiheadAttention" in str(each.message)]
