"""gpt-oss folders are read as NVFP4 with the same values."""

import json

import pytest
import torch
from safetensors.torch import save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.mxfp4 import values as mxfp4

EXPERTS = "model.layers.0.mlp.experts.down_proj"


def a_folder(path, blocks, scales, **config):
    path.mkdir()
    tensors = {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": scales, f"{EXPERTS}_bias": torch.ones(3, 8)}
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}, **config}))


def test_a_folder_of_gpt_oss(tmp_path):
    blocks = torch.randint(256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(115, 125, (3, 8, 2), dtype=torch.uint8)
    a_folder(tmp_path / "a", blocks, scales)
    assert checkpoints.detect(tmp_path / "a") == "mxfp4"
    checkpoints.convert(tmp_path / "a", tmp_path / "b", to="modelopt", progress=False)
    want = mxfp4.to_nvfp4(blocks, scales)
    with checkpoints.read(tmp_path / "b") as checkpoint:
        assert torch.equal(checkpoints.tensor_of(checkpoint.linear(EXPERTS)).dequantize(), want.dequantize())
        assert torch.equal(checkpoint.dense(f"{EXPERTS}_bias"), torch.ones(3, 8))
    with pytest.raises(ValueError, match="MXFP4 cannot be written"):
        checkpoints.convert(tmp_path / "b", tmp_path / "c", to="mxfp4", progress=False)
    assert not (tmp_path / "c").exists()


def test_wrong_folders_raise_an_error(tmp_path):
    blocks = torch.zeros(3, 8, 2, 16, dtype=torch.uint8)
    scales = torch.full((3, 8, 2), 120, dtype=torch.uint8)
    a_folder(tmp_path / "a", blocks, None)
    with pytest.raises(ValueError, match=r"down_proj_scales .*is missing"):
        checkpoints.read(tmp_path / "a")
    a_folder(tmp_path / "b", blocks[..., :8].contiguous(), scales)
    with pytest.raises(ValueError, match=r"down_proj_blocks: expected uint8 \(N, K/32, 16\)"):
        checkpoints.read(tmp_path / "b")
    scales[0, 0, 0], blocks[:] = 3, 0x77
    a_folder(tmp_path / "c", blocks, scales)
    with checkpoints.read(tmp_path / "c") as checkpoint, pytest.raises(ValueError, match=f"{EXPERTS}: MXFP4 scales"):
        checkpoint.linear(EXPERTS)
