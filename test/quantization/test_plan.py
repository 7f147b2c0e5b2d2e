"""quantize_ checks all modules of a model before one changes, and keeps tied weights tied."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torchao.quantization import FqnToConfig, quantize_
from torchao.quantization.transform_module import _QUANTIZE_CONFIG_HANDLER

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, calibrate
from nvfp4_tensor.quantization import NVFP4Linear


def every(module, name):
    return isinstance(module, nn.Linear)


class Tied(nn.Module):
    """A model with tied weights: two linears, or an embedding and the output layer."""

    def __init__(self, tied: str):
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.head = nn.Linear(32, 48, bias=False)
        if tied == "linears":
            self.second.weight = self.first.weight
        if tied == "embedding":
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.second(torch.relu(self.first(self.embedding(ids)))))


@pytest.mark.parametrize(
    ("config", "device"), [(NVFP4WeightOnlyConfig(round_mode="stochastic"), None), (NVFP4Config(), "cpu")]
)
def test_linears_that_share_a_weight_share_its_codes(config, device):
    model = Tied("linears")
    dense = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, config, device=device)
    assert isinstance(model.first.weight, NVFP4Tensor) and model.second.weight is model.first.weight
    assert type(model.first) is type(model.second) is type(model.head) is NVFP4Linear
    assert len(list(model.parameters())) == len(list(dense.parameters()))
    assert torch.equal(model(torch.arange(4)), copy.deepcopy(model)(torch.arange(4)))
    with pytest.raises(ValueError, match="NVFP4 already"):
        quantize_(model, config)


def test_a_static_amax_of_two_linears_is_the_larger():
    largest = set()
    for scale in (1.0, 1e-3):  # of the first or of the second
        model = Tied("linears")
        model.embedding.weight.data *= scale
        apart = copy.deepcopy(model)
        apart.second.weight = nn.Parameter(apart.second.weight.detach().clone())
        for each in (model, apart):
            CALLS["calibrate"](each)
        amaxes = [linear.weight.activation_amax.item() for linear in (apart.first, apart.second)]
        assert model.first.weight is model.second.weight and model.first.weight.activation_amax == max(amaxes)
        assert not dict(model.named_buffers()) and model.head.weight.activation_amax is not None
        largest.add(amaxes.index(max(amaxes)))
    assert largest == {0, 1}


CALLS = {
    "weights": lambda model: quantize_(model, NVFP4WeightOnlyConfig()),
    "w4a4": lambda model: quantize_(model, NVFP4Config()),
    "prepare": lambda model: quantize_(model, NVFP4Config(step="prepare")),
    "calibrate": lambda model: calibrate(model, [torch.arange(16)], filter_fn=every, progress=False),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_head_tied_to_an_embedding_stays_dense_and_says_so_once(call):
    model, apart = Tied("embedding"), Tied("embedding")
    apart.head.weight = nn.Parameter(apart.head.weight.detach().clone())
    with pytest.warns(UserWarning, match=r"left dense.*embedding.weight = head.weight\. .*detach\(\)\.clone") as seen:
        CALLS[call](model)
    assert len(seen) == 1
    assert model.head.weight is model.embedding.weight and type(model.head) is nn.Linear
    assert type(model.first) is type(model.second) is not nn.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CALLS[call](apart)
    assert type(apart.head) is type(apart.first)


def test_a_part_of_a_model():
    """One of two that share a weight stays dense; configs by name; a handler called alone; and a linear at two places
    of any depth, which is quantized or observed once."""
    model = Tied("linears")
    with pytest.warns(UserWarning, match=r"first.weight = second.weight"):
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name == "first")
    assert model.first.weight is model.second.weight and not isinstance(model.first.weight, NVFP4Tensor)
    model = Tied("embedding")
    configs = {"first": NVFP4WeightOnlyConfig(), "second": NVFP4Config(), "head": NVFP4WeightOnlyConfig()}
    with pytest.warns(UserWarning, match="embedding.weight = head.weight"):
        quantize_(model, FqnToConfig(configs), filter_fn=None)
    assert isinstance(model.first.weight, NVFP4Tensor) and model.second.weight.activation_spec is not None
    assert model.head.weight is model.embedding.weight
    alone = _QUANTIZE_CONFIG_HANDLER[NVFP4WeightOnlyConfig](nn.Linear(32, 32), NVFP4WeightOnlyConfig())
    assert type(alone) is NVFP4Linear
    for config in (NVFP4Config(step="prepare"), NVFP4WeightOnlyConfig()):
        linear = deep = nn.Linear(32, 32)
        for _ in range(40):
            deep = nn.Sequential(deep)
        model = nn.ModuleDict({"a": nn.Sequential(linear), "b": deep, "c": nn.Linear(32, 32), "d": nn.Linear(32, 32)})
        model["d"].weight = linear.weight
        quantize_(model, config)
        assert type(linear) is type(model["c"]) is type(model["d"]) is not nn.Linear
        assert model["d"].weight is linear.weight


def test_nothing_keeps_a_model_alive():
    """Not even a call that was interrupted, whose plan its frame has."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

    def interrupted(module, name, asked=[0]):  # noqa: B006  counts over all calls
        asked[0] += 1
        if asked[0] > 5:  # behind the check, when torchao asks again
            raise KeyboardInterrupt
        return isinstance(module, nn.Linear)

    with pytest.raises(KeyboardInterrupt):
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=interrupted)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
