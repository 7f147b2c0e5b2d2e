"""What is learned from the Hessian of a linear's output, X^T X of its inputs: GPTQ."""

from nvfp4_tensor.quantization.accuracy.gptq.config import GPTQConfig
from nvfp4_tensor.quantization.accuracy.gptq.run import gptq

__all__ = ["GPTQConfig", "gptq"]
