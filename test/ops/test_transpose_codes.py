"""transpose_codes: codes in 16x16 tiles as those of the transpose."""

import pytest
import torch

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout, reference
from nvfp4_tensor.ops.schemas import plain

N = torch.ops.nvfp4
SHAPES = [(16, 16), (128, 64), (48, 32), (100, 80), (1, 17), (257, 272), (272, 528), (33, 1040), (0, 32), (32, 0)]
LARGE = [(512, 4096), (4096, 1024), (2064, 4112)]


def coded(rows, columns):
    x = torch.randn(rows, columns) * torch.logspace(-2, 2, columns)
    return reference.quantize(x, x.abs().amax() if x.numel() else torch.tensor(1.0), None, QuantizeSpec(block_rows=16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_transpose_decodes_to_the_transposed_values(device, shape):
    """And back to the codes, but for rows, which stay padded to 16, with the scale of the tile that they fill."""
    (rows, columns), (qdata, scale, factor) = shape, coded(*shape)
    transposed = [t.cpu() for t in N.transpose_codes(qdata.to(device), scale.to(device))]
    width, height = (layout.ceil_to(n, 16) for n in (columns, rows))
    of_w = reference.dequantize(qdata, scale, factor, width, torch.float32)
    of_t = reference.dequantize(*transposed, factor, height, torch.float32)
    assert torch.equal(of_t[:, :rows], of_w.t()) and not of_t[:, rows:].any()
    again, scale_again = (t.cpu() for t in N.transpose_codes(*(t.to(device) for t in transposed)))
    assert torch.equal(again[:rows], qdata) and not again[rows:].any()
    scales = [layout.unswizzle(s.view(torch.uint8), rows, qdata.shape[1] // 8) for s in (scale, scale_again)]
    assert torch.equal(*scales)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
def test_cuda_has_the_same_bits(cuda_library, shape):
    """Random bytes too: what a tile's other rows have as their scale is not read, and codes mean nothing here."""
    qdata, scale, _ = coded(*shape)
    for codes in (qdata, torch.randint(256, qdata.shape, dtype=torch.uint8)):
        expected = plain.transpose_codes(codes, scale)
        shifted = torch.zeros(codes.numel() + 4, dtype=torch.uint8, device="cuda")[4:].view_as(codes).copy_(codes)
        for given in (codes.cuda(), shifted):
            actual = N.transpose_codes(given, scale.cuda())
            assert torch.equal(actual[0].cpu(), expected[0])
            assert torch.equal(actual[1].cpu().view(torch.uint8), expected[1].view(torch.uint8))
