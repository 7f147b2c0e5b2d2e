"""GPTQ for NVFP4."""

from nvfp4_tensor.quantization.gptq.config import GPTQConfig
from nvfp4_tensor.quantization.gptq.run import gptq

__all__ = ["GPTQConfig", "gptq"]
