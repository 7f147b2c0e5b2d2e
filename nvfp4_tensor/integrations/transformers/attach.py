"""Register models that were quantized in memory, by quantize_ or calibrate, with transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.integrations.transformers.config import ModelOptConfig
from nvfp4_tensor.integrations.transformers.from_checkpoint import CheckpointQuantizer
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def attach_quantizer(model: PreTrainedModel) -> PreTrainedModel:
    """Attach a quantizer to a model whose NVFP4 weights were set by ``quantize_``, ``calibrate`` or ``load``.

    Afterwards, ``save_pretrained``, ``dequantize``, peft and Trainer treat it like a model from ``from_pretrained``.

    Returns:
        The model.

    Raises:
        ValueError: the model has no NVFP4 weights.
    """
    checkpoint = ModelCheckpoint(model, {})
    names = {name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}
    if not names:
        raise ValueError("the model has no NVFP4 weights: call quantize_(model, NVFP4WeightOnlyConfig()) first")
    config = ModelOptConfig(**modelopt.flat_config(checkpoint))
    quantizer = CheckpointQuantizer(config, pre_quantized=True)
    quantizer.weights, quantizer.knows_specs = names, True
    attributes: Any = model
    attributes.hf_quantizer = quantizer
    attributes.quantization_method = config.quant_method
    attributes.is_quantized = True
    attributes.config.quantization_config = config
    attributes.config._is_quantized = True
    return model
