"""What ``kernelize`` puts in the place of the forward of a linear: a module with ``weight`` (N, K) and ``bias``.

The dense weight stays where it is, is quantized when it is used first, and again after each change.
"""

from torch import Tensor, nn

from .linear import linear_of_dense


class NVFP4Linear(nn.Module):
    """Products with the weight in NVFP4 (W4A16). Gradients of the weight are straight-through."""

    can_torch_compile: bool = False
    has_backward: bool = True

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return linear_of_dense(input, self.weight, self.bias, quantize_activations=False)


class NVFP4DynamicLinear(nn.Module):
    """Products with weight and input in NVFP4 (W4A4), the input by the amax of each call."""

    can_torch_compile: bool = False
    has_backward: bool = True

    weight: Tensor
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        return linear_of_dense(input, self.weight, self.bias, quantize_activations=True)
