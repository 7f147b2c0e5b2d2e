"""gpt-oss: experts are parameters (E, K, N) with interleaved gate and up, and MXFP4 in files."""

import filecmp
import json

import pytest
import torch
import transformers
from helpers.random_models import random_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize_experts
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig

pytestmark = pytest.mark.slow

EXPERTS = "model.layers.1.mlp.experts."


def small():
    """A square down_proj, whose shape does not show whether it is transposed."""
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
        dtype="bfloat16", architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    return random_model(config)


@pytest.fixture
def mxfp4(tmp_path):
    """Return (folder, transformers' own decoded model of it)."""
    model, folder = small(), tmp_path / "mxfp4"
    tensors = {}
    for name, t in model.state_dict().items():
        if t.dim() == 3:
            experts, columns, rows = t.shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = t.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (folder / "config.json").write_text(json.dumps(config))
    decode = transformers.Mxfp4Config(dequantize=True)
    return folder, AutoModelForCausalLM.from_pretrained(folder, quantization_config=decode, dtype=torch.bfloat16)


def test_a_folder_of_mxfp4_loads_as_nvfp4(mxfp4, ids):
    folder, theirs = mxfp4
    model = checkpoints.load(small(), folder, progress=False)
    for name in ("gate_up_proj", "down_proj"):
        weight = model.get_parameter(EXPERTS + name)
        assert isinstance(weight, NVFP4Tensor) and weight.transposed
        assert torch.equal(weight.dequantize(), theirs.get_parameter(EXPERTS + name))
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        theirs.set_experts_implementation(implementation)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0.02, atol=0.02)


def test_converted_it_loads_in_transformers_and_is_saved_again(mxfp4, tmp_path, ids):
    folder, theirs = mxfp4
    checkpoints.convert(folder, tmp_path / "nvfp4", to="modelopt", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    weight = model.get_parameter(EXPERTS + "gate_up_proj")
    assert weight.transposed and torch.equal(weight.dequantize(), theirs.get_parameter(EXPERTS + "gate_up_proj"))
    assert torch.equal(
        model.get_parameter(EXPERTS + "gate_up_proj_bias"), theirs.get_parameter(EXPERTS + "gate_up_proj_bias")
    )
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=0.02, atol=0.02)
    model.save_pretrained(tmp_path / "saved")
    checkpoints.save(model, tmp_path / "by us", progress=False)
    for again in ("saved", "by us"):
        file = "model.safetensors"
        assert filecmp.cmp(tmp_path / "nvfp4" / file, tmp_path / again / file, shallow=False)


def test_a_dense_one_is_quantized_while_it_loads(tmp_path, ids):
    dense = small()
    dense.save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=NVFP4TensorConfig())
    for name in ("gate_up_proj", "down_proj"):
        weight, exact = model.get_parameter(EXPERTS + name), dense.get_parameter(EXPERTS + name)
        expected = quantize_experts(exact.detach().transpose(-2, -1).contiguous())
        assert torch.equal(weight.transpose(-2, -1).qdata, expected.qdata) and weight.shape == exact.shape
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(logits, model.dequantize()(ids).logits, rtol=0.05, atol=0.05)
