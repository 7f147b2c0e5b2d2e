"""torchao's own quantizers over modules of ours: refused by name, and the module stays as it is."""

import functools

import pytest
import torch
from torch import nn
from torch.sparse.semi_structured import SparseSemiStructuredTensorCUTLASS
from torchao.float8 import convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.prototype.quantized_training import (
    int8_weight_only_quantized_training,
)
from torchao.prototype.smoothquant import SmoothQuantConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    FqnToConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import QATConfig
from torchao.sparsity import block_sparse_weight, sparsify_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, quantize, training

INT4 = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
# One of each way to take a weight: its class, a class that trains, a module that observes, and one that trains.
CONFIGS = {
    "int8": Int8WeightOnlyConfig(),
    "fp8": Float8WeightOnlyConfig(),
    "int8 training": int8_weight_only_quantized_training(),
    "fp8 training": Float8TrainingOpConfig(),
    "qat": QATConfig(INT4, step="prepare"),
    "smoothquant": SmoothQuantConfig(Int8DynamicActivationInt8WeightConfig(), step="prepare"),
}


def semi_sparse():
    """What semi_sparse_weight assigns, which it computes on a GPU."""
    parts = dict.fromkeys(("meta", "packed_t", "meta_t", "compressed_swizzled_bitmask"))
    return SparseSemiStructuredTensorCUTLASS(torch.Size([32, 64]), torch.zeros(32, 36, dtype=torch.bfloat16), **parts)


FLOWS = {name: functools.partial(quantize_, config=config) for name, config in CONFIGS.items()} | {
    "by name": lambda model: quantize_(model, FqnToConfig({"0": Int8WeightOnlyConfig()}), filter_fn=None),
    "float8 training": convert_to_float8_training,
    "block sparse": lambda model: sparsify_(model, block_sparse_weight(16)),
    "semi-sparse": lambda model: setattr(model[0], "weight", nn.Parameter(semi_sparse(), requires_grad=False)),
}
OURS = {
    "inference": lambda model: quantize_(model, NVFP4WeightOnlyConfig()),
    "plain": lambda model: setattr(model[0], "weight", nn.Parameter(quantize(model[0].weight.detach()))),
    "training": lambda model: quantize_(model, training.NVFP4TrainingConfig()),
    "trainable codes": training.to_nvfp4_parameters,
    "prepared": lambda model: quantize_(model, NVFP4Config(step="prepare")),
}


def model_of(ours):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    OURS[ours](model)
    return model


ONE_OF_EACH = ("int8", "float8 training")
"""A flow that sets a parameter, and one that sets a module."""


@pytest.mark.parametrize(
    ("ours", "flow"), [(ours, flow) for ours in OURS for flow in FLOWS if ours == "inference" or flow in ONE_OF_EACH]
)
def test_a_second_quantizer_is_refused(ours, flow):
    model = model_of(ours)
    module, weight, kind = model[0], model[0].weight, type(model[0])
    with pytest.raises((TypeError, RuntimeError), match=r"(?s)NVFP4.*(filter_fn|dequantize)"):
        FLOWS[flow](model)
    assert model[0] is module and module.weight is weight and type(module) is kind


EXPERTS = {
    "fp8 training": lambda model: quantize_(model, CONFIGS["fp8 training"], filter_fn=_experts),
    "int8": lambda model: quantize_(model, FqnToConfig({"re:.*gate_up_proj": Int8WeightOnlyConfig()}), filter_fn=None),
}


def _experts(module, name):
    return name.endswith("experts")


@pytest.mark.parametrize("flow", EXPERTS)
@pytest.mark.parametrize("ours", ["inference", "training"])
def test_experts_are_refused_too(ours, flow):
    pytest.importorskip("transformers")
    from quantization.test_experts import mixture

    from nvfp4_tensor.integrations.transformers import train_experts

    model = mixture("Mixtral").bfloat16()
    if ours == "training":
        train_experts(model, "nvidia")
    else:
        quantize_(model, NVFP4WeightOnlyConfig(experts=True))
    before = dict(model.named_parameters())
    with pytest.raises(TypeError, match=rf"(?s){'trains experts in' if ours == 'training' else 'is'} NVFP4.*filter_fn"):
        EXPERTS[flow](model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    if ours == "training":  # other modules of the model are not refused
        attention = model.model.layers[0].self_attn
        quantize_(attention, Int8WeightOnlyConfig())
        attention.own = nn.Parameter(attention.q_proj.weight.detach(), requires_grad=False)
        attention.own = nn.Parameter(attention.q_proj.weight.detach(), requires_grad=False)


def test_other_layers_beside_ours_are_quantized():
    """By a filter, as the message says; and a layer that is dense again by its default."""
    model = nn.Sequential(model_of("inference")[0], nn.Linear(32, 32).bfloat16())
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "1")
    assert isinstance(model[0].weight, NVFP4Tensor) and type(model[1].weight).__name__ == "Int8Tensor"
    model = model_of("inference")
    model[0].weight = nn.Parameter(model[0].weight.dequantize(), requires_grad=False)
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model[0].weight).__name__ == "Int8Tensor"
    model = model_of("training")
    convert_to_float8_training(training.to_dense(model))
    assert type(model[0]).__name__ == "Float8Linear"


@pytest.mark.parametrize("kind", ["Float8Linear", "SmoothQuantObservedLinear", "FakeQuantizedLinear"])
@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig, training.NVFP4TrainingConfig])
def test_linears_of_torchao_are_finished_first(kind, config):
    flow = {"Float8Linear": "float8 training", "SmoothQuantObservedLinear": "smoothquant"}.get(kind, "qat")
    model = nn.Sequential(nn.Linear(64, 32).bfloat16())
    FLOWS[flow](model)
    before = model[0]
    with pytest.raises(TypeError, match=rf"{kind} of torchao would go on.*QATConfig.*nn.Linear of its weight"):
        quantize_(model, config())
    assert model[0] is before and not isinstance(before.weight, NVFP4Tensor)
