"""The fused multiply-add in plain torch, exactly: what the contract's ``fma`` is on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 a * b + c, rounded once to nearest even.

    In float64 the product is exact. Its sum with c is rounded to odd, which a second rounding, to float32, cannot
    mistake for a tie: float64 has more than the two bits beyond float32's that this takes (Boldo and Melquiond, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    # Knuth's TwoSum: what the sum has lost, exactly; NaN where something is not finite, which needs no repair.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    toward_lost = torch.where((lost > 0) == (total > 0), 1, -1)
    even_and_inexact = ((lost < 0) | (lost > 0)) & (bits & 1 == 0)
    return torch.where(even_and_inexact, bits + toward_lost, bits).view(torch.float64).float()
