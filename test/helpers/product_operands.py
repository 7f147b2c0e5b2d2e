"""The operands that a training linear multiplies, as its ops see them."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.ops.schemas import plain


class ProductOperands(TorchDispatchMode):
    """Run the ops of whole steps as the composite does, op by op, and keep the operands of each NVFP4 product.

    ``found`` has (left, right) of each product left @ right^T in the order of the calls; an operand is its values
    without the per-tensor scale, in float64, and that scale, or 1. Products of two dense operands are not in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.startswith("nvfp4::train_linear"):
            with self:
                return getattr(plain, func._opname)(*args)
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "nvfp4::matmul" and not args[0].is_meta:
            x, factor, qdata, scale, per_tensor_scale, _, _, across_blocks, _ = args
            values = reference.dequantize(qdata, scale, None, qdata.shape[1] * 2, torch.float32).double()
            left = x.double().unsqueeze(0).flatten(0, -2), torch.ones(()) if factor is None else factor
            self.found.append((left, (values.t() if across_blocks else values, per_tensor_scale)))
        return result
