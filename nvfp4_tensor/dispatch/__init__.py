"""Implementations of torch's operators on an NVFP4Tensor; importing this package registers them."""

import torch

from nvfp4_tensor.tensor import NVFP4Tensor, fake_quantize, quantize, quantize_experts  # first: it silences torchao

# isort: split
from nvfp4_tensor.dispatch import joins, linears, optimizers, products, second_quantizer, storage, table, views  # noqa: F401

if torch.distributed.is_available():
    from nvfp4_tensor.dispatch import collectives  # noqa: F401

__all__ = ["NVFP4Tensor", "fake_quantize", "quantize", "quantize_experts"]
