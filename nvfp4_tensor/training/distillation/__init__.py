"""Distillation: train a quantized model, in the arithmetic that it is deployed in, towards the dense model's logits."""

from nvfp4_tensor.training.distillation.config import DistillConfig, Trains
from nvfp4_tensor.training.distillation.run import Progress, distill

__all__ = ["DistillConfig", "Progress", "Trains", "distill"]
