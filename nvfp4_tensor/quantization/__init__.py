"""What torchao's quantize_ takes, and calibration."""

import nvfp4_tensor.tensor  # noqa: F401  first, for it imports torchao without the lines that torchao prints
from nvfp4_tensor.quantization import linear  # registers what quantize_ does by our configs
from nvfp4_tensor.quantization.budget import Sensitivity, sensitivity
from nvfp4_tensor.quantization.calibration import calibrate
from nvfp4_tensor.quantization.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.quantization.folding import fold_scales
from nvfp4_tensor.quantization.hessian import GPTQConfig, gptq
from nvfp4_tensor.quantization.linear import NVFP4Linear
from nvfp4_tensor.quantization.observer import ObservedLinear
from nvfp4_tensor.quantization.own_text import own_text

__all__ = [
    "GPTQConfig",
    "NVFP4Config",
    "NVFP4Linear",
    "NVFP4WeightOnlyConfig",
    "ObservedLinear",
    "Sensitivity",
    "calibrate",
    "fold_scales",
    "gptq",
    "linear",
    "own_text",
    "sensitivity",
]
