"""Scale search with errors weighted by the inputs of each column, the diagonal of GPTQ's Hessian."""

from __future__ import annotations

import torch
from torch import Tensor

from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.spec import QuantizeSpec
from nvfp4_tensor.tensor.arguments import resolve_rng_state
from nvfp4_tensor.tensor.nvfp4 import NVFP4Tensor


def quantize_weighted(
    weight: Tensor, spec: QuantizeSpec, squares: Tensor, amax: Tensor | None = None, rng_state: Tensor | None = None
) -> NVFP4Tensor:
    """Quantize weight (N, K) by a spec with a scale search whose squared errors are weighted (contract, section 2).

    Args:
        squares: (K,), the sum or mean of squares of each column's inputs, up to a common factor. Columns whose inputs
            were all zero get a millionth of the mean, so that they are still rounded well.
        amax: float32 0-d, or (N,) with row_scaled; by default that of the weight.

    Raises:
        ValueError: squares that are not finite.
    """
    if not squares.isfinite().all():
        raise ValueError("the squares of the inputs are not finite: calibrate on other data, or in another dtype")
    squares = squares.to(device=weight.device, dtype=torch.float32)
    mean = squares.mean()
    # Divided by the mean, so that sums of errors stay within the range of float32.
    weights = (squares / mean).clamp(min=1e-6) if mean > 0 else torch.ones_like(squares)
    if amax is None and spec.row_scaled:
        amax = reference.row_amax(weight, spec.hadamard_sign)
    elif amax is None:
        amax = torch.ops.nvfp4.amax(weight, -1 if spec.hadamard_sign is None else spec.hadamard_sign)
    rng_state = resolve_rng_state(weight, spec, rng_state, None)
    parts = reference.quantize(weight, amax, rng_state, spec, column_weights=weights)
    return NVFP4Tensor(*parts, weight.shape[1], weight.dtype, spec)
