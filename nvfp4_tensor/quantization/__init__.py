"""Configs and linears for torchao's quantize_, calibration, and methods that improve accuracy."""

import importlib

import nvfp4_tensor.dispatch  # noqa: F401  first: registers the tensor's operators and silences torchao's log lines
from nvfp4_tensor.quantization import conversion  # registers the quantize_ handlers of our configs
from nvfp4_tensor.quantization.accuracy.folding import fold_scales
from nvfp4_tensor.quantization.accuracy.gptq import GPTQConfig, gptq
from nvfp4_tensor.quantization.accuracy.self_generated_text import generate_calibration_text
from nvfp4_tensor.quantization.accuracy.sensitivity import Sensitivity, sensitivity
from nvfp4_tensor.quantization.calibration import calibrate
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.linear import NVFP4Linear
from nvfp4_tensor.quantization.model_plan import ModelPlan
from nvfp4_tensor.quantization.observed_experts import routed_tokens
from nvfp4_tensor.quantization.observer import ObservedLinear
from nvfp4_tensor.quantization.whole_model import quantize_model

__all__ = [
    "DistillConfig",
    "GPTQConfig",
    "ModelPlan",
    "NVFP4Config",
    "NVFP4Linear",
    "NVFP4WeightOnlyConfig",
    "ObservedLinear",
    "Sensitivity",
    "calibrate",
    "conversion",
    "distill",
    "fold_scales",
    "generate_calibration_text",
    "gptq",
    "quantize_model",
    "routed_tokens",
    "sensitivity",
]


def __getattr__(name: str) -> object:
    if name not in ("DistillConfig", "distill"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("nvfp4_tensor.training"), name)  # a room above, where training is
