"""Create random weights, and check a product against float64."""

import torch

from helpers.instruction_sets import OF_PRODUCTS, each_instruction_set
from helpers.repeats import times
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import BLOCK, ceil_to, scale_tiles

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
SMALLEST = {torch.bfloat16: 1e-38, torch.float16: 2.0**-24, torch.float32: 1e-38}


def random_weight(*shape, low=0x10, high=0x70, device="cuda"):
    """Return random codes (..., N, K/2 padded) and swizzled random scale bytes, which cover the whole format."""
    *leading, rows, columns = shape
    width = ceil_to(columns, BLOCK)
    codes = torch.randint(0, 256, (*leading, rows, width // 2), dtype=torch.uint8, device=device)
    tiles = scale_tiles(torch.Size(leading).numel() * rows, width)
    scale = torch.randint(low, high, (*tiles, 32, 16), dtype=torch.uint8, device=device)
    return zero_padding(codes, columns), scale.view(torch.float8_e4m3fn)


def zero_padding(codes, columns):
    """Set codes beyond the logical columns to zero, as quantize does."""
    keep = torch.arange(codes.shape[-1] * 2, device=codes.device).view(-1, 2) < columns
    return codes & (keep[:, 0] * 0x0F + keep[:, 1] * 0xF0).to(torch.uint8)


def products(x, x_scale, codes, scale, factor, bias, columns, transposed=False):
    """Return the product and the sum of its summands' magnitudes, both in float64."""
    w = reference.dequantize(codes, scale, None, columns, torch.float32).double()
    if factor.dim() and transposed:
        w, alpha = w * factor.double().reshape(*codes.shape[:-1], 1), 1.0
    else:
        alpha = factor.double().reshape(*codes.shape[:-2], 1, -1) if factor.dim() else factor.double()
        alpha = alpha.squeeze(-2) if x.dim() == 1 and factor.dim() else alpha
    if x_scale is not None:
        alpha = alpha * (x_scale.double().reshape(*x.shape[:-1], 1) if x_scale.dim() else x_scale.double())
    w = w if transposed else w.mT
    y, magnitude = (x.double() @ w) * alpha, (x.double().abs() @ w.abs()) * abs(alpha)
    return (y, magnitude) if bias is None else (y + bias.double(), magnitude + bias.double().abs())


def check(
    x, codes, scale, factor, *, x_scale=None, bias=None, columns=None, transposed=False, out_dtype=None, repeats=1
):
    """Check that a product is deterministic and within the error bound, on each instruction set, and return it.

    The bound is one rounding to out_dtype plus float32 additions: on a GPU in any order, on a CPU of short sums.
    """
    columns = (codes.shape[-1] * 2 if transposed else x.shape[-1]) if columns is None else columns
    out_dtype = out_dtype or x.dtype
    arguments = (x, x_scale, codes, scale, factor, bias, columns, transposed, out_dtype)
    expected, magnitude = products(x, x_scale, codes, scale, factor, bias, columns, transposed)
    summands = codes.shape[-2] if transposed else columns
    of_sums = 2.0**-22 * (summands**0.5 + 4) if x.is_cuda else 2.0**-20
    bound = magnitude * of_sums + expected.abs() * ROUNDING[out_dtype] * 1.01 + SMALLEST[out_dtype]
    for name in ("cuda",) if x.is_cuda else each_instruction_set(OF_PRODUCTS):
        y = torch.ops.nvfp4.matmul(*arguments)
        for _ in times(repeats if x.is_cuda else 0):
            again = torch.ops.nvfp4.matmul(*arguments)
            assert torch.equal(y.view(torch.uint8), again.view(torch.uint8)), "not deterministic"
        assert y.shape == expected.shape and y.dtype == out_dtype and (x.is_cuda or y.is_contiguous())
        excess = (y.double() - expected).abs() - bound
        assert not (excess > 0).any(), f"{(excess > 0).sum()} of {y.numel()} beyond, by {excess.max()} on {name}"
    return y


def factor(value=0.0123, device="cuda"):
    return torch.tensor(value, device=device)
