"""NVFP4 for PyTorch on the hardware people have."""

from nvfp4_tensor import ops, views  # registers the operators and what aten means on the tensor
from nvfp4_tensor.config import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.format import FourOverSix, RoundingMode, ScaleRounding
from nvfp4_tensor.spec import QuantizeSpec
from nvfp4_tensor.tensor import NVFP4Tensor, fake_quantize, quantize

__all__ = [
    "FourOverSix",
    "NVFP4Config",
    "NVFP4Tensor",
    "NVFP4WeightOnlyConfig",
    "QuantizeSpec",
    "RoundingMode",
    "ScaleRounding",
    "fake_quantize",
    "ops",
    "quantize",
    "views",
]
