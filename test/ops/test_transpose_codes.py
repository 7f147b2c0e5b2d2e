"""transpose_codes: codes in 16x16 tiles as those of the transpose, by whatever serves the CPU and by CUDA."""

import pytest
import torch
from torch.library import opcheck

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import layout, reference

N = torch.ops.nvfp4
TILES = QuantizeSpec(block_rows=16)
SHAPES = [(16, 16), (128, 64), (48, 32), (100, 80), (1, 17), (257, 272), (272, 528), (512, 4096), (33, 1040)]
EMPTY = [(0, 32), (32, 0)]


def coded(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, columns) * torch.logspace(-2, 2, columns)
    return reference.quantize(x, x.abs().amax() if x.numel() else torch.tensor(1.0), None, TILES)


def padded(n: int) -> int:
    return layout.ceil_to(n, layout.BLOCK)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_transpose_decodes_to_the_transposed_values(shape):
    rows, columns = shape
    qdata, scale, factor = coded(rows, columns)
    of_w = reference.dequantize(qdata, scale, factor, padded(columns), torch.float32)
    of_t = reference.dequantize(*N.transpose_codes(qdata, scale), factor, padded(rows), torch.float32)
    assert torch.equal(of_t[:, :rows], of_w.t())
    assert not of_t[:, rows:].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twice_is_the_same_again(shape):
    """But for rows, which stay padded to 16, with the scale of the tile that they fill."""
    rows, columns = shape
    qdata, scale, _ = coded(rows, columns)
    again, scale_again = N.transpose_codes(*N.transpose_codes(qdata, scale))
    assert torch.equal(again[:rows], qdata) and not again[rows:].any()
    linear, linear_again = (
        layout.unswizzle(s.view(torch.uint8), rows, qdata.shape[1] // 8) for s in (scale, scale_again)
    )
    assert torch.equal(linear_again, linear)


@pytest.mark.parametrize("shape", [(100, 80), (1, 17), *EMPTY], ids=str)
def test_the_op_is_one(shape):
    qdata, scale, _ = coded(*shape)
    opcheck(N.transpose_codes.default, (qdata, scale.view(torch.uint8)))  # it multiplies what is passed


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY, (4096, 1024), (2064, 4112)], ids=str)
def test_cuda_has_the_same_bits(cuda_library, shape):
    """Random bytes too: what a tile's other rows have as their scale is not read, and codes mean nothing here."""
    qdata, scale, _ = coded(*shape)
    for codes in (qdata, torch.randint(256, qdata.shape, dtype=torch.uint8)):
        expected = N.transpose_codes(codes, scale)
        actual = N.transpose_codes(codes.cuda(), scale.cuda())
        assert torch.equal(actual[0].cpu(), expected[0])
        assert torch.equal(actual[1].cpu().view(torch.uint8), expected[1].view(torch.uint8))


@pytest.mark.gpu
def test_cuda_takes_views_that_are_not_aligned(cuda_library):
    qdata, scale, _ = coded(64, 256)
    shifted = torch.zeros(qdata.numel() + 4, dtype=torch.uint8, device="cuda")[4:].view_as(qdata).copy_(qdata)
    assert torch.equal(N.transpose_codes(shifted, scale.cuda())[0].cpu(), N.transpose_codes(qdata, scale)[0])
