"""torchao's own configs over modules of ours: refused by name, and the module stays as it is."""

import pytest
import torch
from torch import nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig as TorchAOConfig
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
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

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, training
from nvfp4_tensor.integrations import torchao_qat  # noqa: F401  wraps the handler of QATConfig

CONFIGS = {
    "int8": Int8WeightOnlyConfig,
    "int8 activations": Int8DynamicActivationInt8WeightConfig,
    "fp8": Float8WeightOnlyConfig,
    "torchao's NVFP4": TorchAOConfig,
    "mx": MXDynamicActivationMXWeightConfig,
    "int8 training": int8_weight_only_quantized_training,
    "by name": lambda: FqnToConfig({"0": Int8WeightOnlyConfig()}),
    "qat": lambda: QATConfig(
        Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)), step="prepare"
    ),
}
OURS = {
    "inference": NVFP4WeightOnlyConfig,
    "training": training.NVFP4TrainingConfig,
    "trainable codes": None,
}


def model_of(ours):
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    if OURS[ours] is None:
        return training.to_nvfp4_parameters(model)
    quantize_(model, OURS[ours]())
    return model


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ours", OURS)
def test_a_second_quantizer_is_refused(ours, config):
    model = model_of(ours)
    module, weight = model[0], model[0].weight
    with pytest.raises(TypeError, match=r"(?s)NVFP4.*filter_fn"):
        quantize_(model, CONFIGS[config](), **({"filter_fn": None} if config == "by name" else {}))
    assert model[0] is module and module.weight is weight


def test_other_layers_beside_ours_are_quantized():
    """By a filter, as the message says; and a layer that is dense again by its default."""
    model = nn.Sequential(model_of("inference")[0], nn.Linear(32, 32).bfloat16())
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: name == "1")
    assert isinstance(model[0].weight, NVFP4Tensor) and type(model[1].weight).__name__ == "Int8Tensor"
    model = model_of("inference")
    model[0].weight = nn.Parameter(model[0].weight.dequantize(), requires_grad=False)
    quantize_(model, Int8WeightOnlyConfig())
    assert type(model[0].weight).__name__ == "Int8Tensor"
