"""Plain-torch implementation of a dense output layer for one token."""

from __future__ import annotations

from torch import Tensor

from nvfp4_tensor.ops.schemas import op


@op()
def linear_row(x: Tensor, w: Tensor) -> Tensor:
    """Return x (1, K) @ w (N, K)^T, both dense bfloat16: (1, N). K is a multiple of 32."""
    return (x.float() @ w.mT.float()).to(x.dtype)
