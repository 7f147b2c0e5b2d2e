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


def test_mxfp4_bytes():
    data = torch.randint(256, (5, 2, 17), dtype=torch.uint8)
    data[..., 0] = torch.randint(110, 120, (5, 2))
    values = gguf.quants.dequantize(data.view(5, -1).numpy(), gguf.GGMLQuantizationType.MXFP4)
    t = to_nvfp4(*unpack_mxfp4(data.view(5, -1)), orig_dtype=torch.float32)
    assert torch.equal(t.dequantize(), torch.from_numpy(values))
