"""Products of block tensors as hardware takes them: element sums a block, times its scales, tensor scales outside."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.emulation.blocks import BlockTensor


def dot(a: BlockTensor, b: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dot products along the last dimension: a, b (..., K) to (...), in dtype.

    ``tensor scales * sum over blocks of (sum of a's elements times b's) * a's scale * b's scale``: no element is scaled
    before it is summed, and the tensor scales are multiplied once.

    dtype: float32 as hardware accumulates, or float64 to compare with.

    Raises:
        ValueError: other shapes or block sizes; another dtype.
        TypeError: a or b is not a BlockTensor.
    """
    _check(a, b, dtype)
    if a.shape != b.shape:
        raise ValueError(f"dot takes tensors of one shape, not {tuple(a.shape)} and {tuple(b.shape)}")
    sums = (a.elements().to(dtype) * b.elements().to(dtype)).sum(dim=-1)
    return _scaled((sums * a.scale.to(dtype) * b.scale.to(dtype)).sum(dim=-1), a, b)


def matmul(a: BlockTensor, b: BlockTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """a (M, K) times b (N, K) transposed: (M, N) in dtype, each entry as :func:`dot` takes it, blocks in order.

    Raises:
        ValueError: not 2-D, other K or block sizes; another dtype.
        TypeError: a or b is not a BlockTensor.
    """
    _check(a, b, dtype)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"matmul takes (M, K) and (N, K), not {tuple(a.shape)} and {tuple(b.shape)}")
    left, right = a.elements().to(dtype), b.elements().to(dtype)
    left_scale, right_scale = a.scale.to(dtype), b.scale.to(dtype)
    total = left.new_zeros(a.shape[0], b.shape[0])
    with torch.autocast(total.device.type, enabled=False):  # which would take the products in 16 bits
        for i in range(a.scale.shape[1]):
            total += left[:, i] @ right[:, i].t() * left_scale[:, i, None] * right_scale[:, i]
    return _scaled(total, a, b)


def _check(a: BlockTensor, b: BlockTensor, dtype: torch.dtype) -> None:
    for t in (a, b):
        if not isinstance(t, BlockTensor):
            raise TypeError(f"products take BlockTensors, not a {type(t).__name__}: cast(x, ..., cast_mode='actual')")
    if a.format.block_size != b.format.block_size:
        raise ValueError(
            f"blocks must match: {a.format.name} has {a.format.block_size} elements a block, {b.format.name} has "
            f"{b.format.block_size}"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"products accumulate in float32 or float64, not {dtype}")


def _scaled(total: Tensor, a: BlockTensor, b: BlockTensor) -> Tensor:
    for t in (a, b):
        if t.tensor_scale is not None:
            total = total * t.tensor_scale.to(total.dtype)
    return total
