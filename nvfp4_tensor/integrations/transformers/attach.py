"""Models that were quantized in memory, by quantize_ or calibrate, made known to transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.models.saving import ModelCheckpoint
from nvfp4_tensor.integrations.transformers.config import ModelOptConfig
from nvfp4_tensor.integrations.transformers.from_checkpoint import CheckpointQuantizer
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def attach_quantizer(model: PreTrainedModel) -> PreTrainedModel:
    """Let transformers know of the NVFP4 weights of a model that ``quantize_``, ``calibrate`` or ``load`` put there.

    From then on ``save_pretrained``, ``dequantize``, peft and Trainer take it like one from ``from_pretrained``.
    Returns the model.

    Raises:
        ValueError: it has no NVFP4 weights.
    """
    names = {name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}
    if not names:
        raise ValueError("the model has no NVFP4 weights: quantize_(model, NVFP4WeightOnlyConfig()) first")
    config = ModelOptConfig(**modelopt.flat_config(ModelCheckpoint(model, {})))
    quantizer = CheckpointQuantizer(config, pre_quantized=True)
    quantizer.weights, quantizer.knows_specs = names, True
    known: Any = model
    known.hf_quantizer = quantizer
    known.quantization_method = config.quant_method
    known.is_quantized = True
    known.config.quantization_config = config
    known.config._is_quantized = True
    return model
