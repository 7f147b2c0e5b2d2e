"""The bytes of GGUF's 4-bit types against the package gguf."""

import pytest
import torch

from nvfp4_tensor import quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.gguf.blocks import pack_blocks, unpack_blocks, unpack_mxfp4
from nvfp4_tensor.checkpoints.formats.mxfp4.values import to_nvfp4

gguf = pytest.importorskip("gguf")


def test_bytes_decode_as_the_package_decodes_them():
    parts = parts_of(quantize(torch.randn(48, 256)))
    data = pack_blocks(parts.qdata, parts.scale)
    assert data.shape == (48, 256 // 64 * 36)
    values = gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType.NVFP4)
    ones = parts.replace(per_tensor_scale=torch.ones(()))
    assert torch.equal(torch.from_numpy(values), tensor_of(ones, torch.float32).dequantize())
    codes, scale = unpack_blocks(data)
    assert torch.equal(codes, parts.qdata)
    assert torch.equal(scale.view(torch.uint8), parts.scale.view(torch.uint8))


def test_every_byte_stands_where_the_format_says():
    codes = torch.randint(256, (3, 64), dtype=torch.uint8)
    scale = torch.randint(0x7F, (3, 8), dtype=torch.uint8)
    data = pack_blocks(codes, scale.view(torch.float8_e4m3fn))
    element = lambda row, k: int(codes[row, k // 2]) >> 4 * (k % 2) & 15  # noqa: E731
    for row in range(3):
        for block in range(8):
            start = block // 4 * 36
            assert data[row, start + block % 4] == scale[row, block]
            for j in range(8):
                low, high = element(row, 16 * block + j), element(row, 16 * block + j + 8)
                assert data[row, start + 4 + block % 4 * 8 + j] == low | high << 4


def test_mxfp4_bytes():
    data = torch.randint(256, (5, 2, 17), dtype=torch.uint8)
    data[..., 0] = torch.randint(110, 120, (5, 2))
    values = gguf.quants.dequantize(data.view(5, -1).numpy(), gguf.GGMLQuantizationType.MXFP4)
    t = to_nvfp4(*unpack_mxfp4(data.view(5, -1)), orig_dtype=torch.float32)
    assert torch.equal(t.dequantize(), torch.from_numpy(values))
