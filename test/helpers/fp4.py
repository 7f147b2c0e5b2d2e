"""Decode FP4 operands by the formulas of their layout, and check a product in bfloat16."""

import torch

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decode codes FP4 (R, K/2), with scale the bytes of complete 128x4 tiles, to float64 (R, K)."""
    rows, half = codes.shape
    blocks = half // 8
    tiles = -(-blocks // 4)
    assert scale.dtype == torch.float8_e4m3fn and scale.is_contiguous() and scale.numel() % (512 * tiles) == 0
    r, c = torch.arange(rows).view(-1, 1), torch.arange(blocks)
    at = ((r // 128 * tiles + c // 4) * 32 + r % 32) * 16 + r % 128 // 32 * 4 + c % 4
    packed = codes.contiguous().view(torch.uint8)
    values = VALUES[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
    return values * scale.flatten()[at.flatten()].double().view(rows, blocks).repeat_interleave(16, 1)


def in_bfloat16(y: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    assert y.dtype == torch.bfloat16
    assert ((y.double() - expected).abs() <= expected.abs() * 2.0**-8 + magnitude * 2.0**-20).all()


def wide(t):
    return t.dequantize(torch.float32).double()
