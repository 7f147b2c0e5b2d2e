"""GPTQ: round weights using the Hessian of the linear's output, X^T X of its inputs."""

from nvfp4_tensor.quantization.accuracy.gptq.run import GPTQConfig, gptq

__all__ = ["GPTQConfig", "gptq"]
