"""NVFP4Tensor and the functions that create one."""

from nvfp4_tensor.tensor import methods  # noqa: F401  registers torch functions
from nvfp4_tensor.tensor.fake_quantize import fake_quantize
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts

__all__ = ["NVFP4Tensor", "fake_quantize", "quantize", "quantize_experts"]
