"""NVFP4Tensor, and the functions that make one."""

from nvfp4_tensor._compat.pickles import _rebuild  # files of 0.1.0 name it here
from nvfp4_tensor.tensor import methods  # noqa: F401  registers its own
from nvfp4_tensor.tensor.fake_quantize import fake_quantize
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor, quantize, quantize_experts

__all__ = ["NVFP4Tensor", "_rebuild", "fake_quantize", "quantize", "quantize_experts"]
