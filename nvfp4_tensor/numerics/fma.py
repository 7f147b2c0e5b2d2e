"""An exact fused multiply-add in plain torch: the contract's ``fma`` on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return float32 a * b + c, rounded once to nearest even.

    In float64 the product is exact. Its sum with c is rounded to odd, so that the second rounding, to float32, cannot
    mistake it for a tie. This needs two bits more than float32 has, and float64 has more (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Knuth's TwoSum: the exact rounding error of the sum, or NaN if an input is not finite, which needs no correction.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    toward_lost = torch.where((lost > 0) == (total > 0), 1, -1)
    even_and_inexact = ((lost < 0) | (lost > 0)) & (bits & 1 == 0)
    return torch.where(even_and_inexact, bits + toward_lost, bits).view(torch.float64).float()
