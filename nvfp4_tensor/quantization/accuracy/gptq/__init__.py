"""GPTQ: round weights using the Hessian of the linear's output, X^T X of its inputs."""

from nvfp4_tensor.quantization.accuracy.gptq.config import GPTQConfig
from nvfp4_tensor.quantization.accuracy.gptq.run import gptq

__all__ = ["GPTQConfig", "gptq"]
