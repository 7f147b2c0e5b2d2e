"""The product of block tensors in the order of hardware: sums of element products per block, scaled, then summed."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.emulation.blocks import BlockTensor


def matmul(a: BlockTensor, b: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a (M, K) times the transpose of b (N, K): (M, N) in dtype.

    The result is ``tensor scales * sum over blocks of (sum of element products) * scale of a * scale of b``, blocks in
    order: elements are summed before they are scaled, and the tensor scales are applied once.

    dtype: the dtype of accumulation, float32 as in hardware, or float64 as a reference.

    Raises:
        ValueError: tensors that are not 2-D, different K or block sizes, or another dtype.
        TypeError: a or b is not a BlockTensor.
    """
    for t in (a, b):
        if not isinstance(t, BlockTensor):
            raise TypeError(f"products need BlockTensors, not a {type(t).__name__}: cast(x, ..., cast_mode='actual')")
    if a.format.block_size != b.format.block_size:
        raise ValueError(
            f"block sizes must match: {a.format.name} has {a.format.block_size} elements per block, {b.format.name} "
            f"has {b.format.block_size}"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"products accumulate in float32 or float64, not {dtype}")
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul needs shapes (M, K) and (N, K), not {tuple(a.shape)} and {tuple(b.shape)}")
    left, right = a.elements().to(dtype), b.elements().to(dtype)
    left_scale, right_scale = a.scale.to(dtype), b.scale.to(dtype)
    total = left.new_zeros(a.shape[0], b.shape[0])
    with torch.autocast(total.device.type, enabled=False):  # autocast would multiply in 16 bits
        for i in range(a.scale.shape[1]):
            total += left[:, i] @ right[:, i].t() * left_scale[:, i, None] * right_scale[:, i]
    for t in (a, b):
        if t.tensor_scale is not None:
            total = total * t.tensor_scale.to(total.dtype)
    return total
