"""NVFP4 for PyTorch's layers: 4.5 bits per weight, on CPUs and NVIDIA GPUs, the same bits on both.

The functions quantize and multiply; ``layers`` has what ``kernelize`` puts in the place of a linear's forward.
"""

from . import layers
from .linear import NVFP4Weight, dequantize, linear, quantize

__all__ = ["NVFP4Weight", "dequantize", "layers", "linear", "quantize"]
