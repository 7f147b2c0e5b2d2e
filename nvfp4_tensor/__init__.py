"""NVFP4 for PyTorch on the hardware people have: one tensor, the same bits on a CPU, on Hopper and on Blackwell."""

from nvfp4_tensor import native, ops, views  # registers the operators, and what aten means on the tensor
from nvfp4_tensor.calibration import calibrate
from nvfp4_tensor.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.format import FourOverSix, ProductBackend, RoundingMode, ScaleRounding
from nvfp4_tensor.native import info
from nvfp4_tensor.spec import QuantizeSpec
from nvfp4_tensor.tensor import NVFP4Tensor, fake_quantize, quantize, quantize_experts

native.load()

__all__ = [
    "FourOverSix",
    "NVFP4Config",
    "NVFP4Tensor",
    "NVFP4WeightOnlyConfig",
    "ProductBackend",
    "QuantizeSpec",
    "RoundingMode",
    "ScaleRounding",
    "calibrate",
    "fake_quantize",
    "info",
    "native",
    "ops",
    "quantize",
    "quantize_experts",
    "views",
]
