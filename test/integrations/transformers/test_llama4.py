"""Llama 4: experts are parameters (E, K, N), also in ModelOpt's files, with codes and block scales transposed."""

import filecmp

import pytest
import torch
import transformers
from helpers.random_models import random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, checkpoints, quantize
from nvfp4_tensor.checkpoints import parts_of
from nvfp4_tensor.checkpoints.formats import modelopt
from nvfp4_tensor.checkpoints.io.safetensors import write_json
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig

pytestmark = pytest.mark.slow

EXPERTS = "model.layers.1.feed_forward.experts."


def small():
    config = transformers.Llama4TextConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, intermediate_size_mlp=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, pad_token_id=0, dtype="bfloat16", architectures=["Llama4ForCausalLM"],
    )  # fmt: skip
    return random_model(config)


@pytest.fixture
def published(tmp_path):
    """Return (folder in ModelOpt's layout with one scale per parameter, the decoded model)."""
    model, folder, tensors = small(), tmp_path / "published", {}
    for name, t in model.state_dict().items():
        if not name.startswith(EXPERTS):
            tensors[name] = t.clone()
            continue
        weight = quantize(t.transpose(-2, -1).contiguous())
        parts = parts_of(weight)
        tensors[name] = parts.qdata.transpose(-2, -1).contiguous()
        tensors[f"{name}_weight_scale"] = parts.scale.view(torch.uint8).transpose(-2, -1).contiguous().view(
            torch.float8_e4m3fn
        )  # fmt: skip
        tensors[f"{name}_weight_scale_2"] = parts.per_tensor_scale
        model.get_parameter(name).data = weight.dequantize().transpose(-2, -1).contiguous()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16, "ignore": ["lm_head"]}
    write_json(folder / "config.json", {**model.config.to_dict(), "quantization_config": settings})
    return folder, model


def test_published_files_are_read_and_written_again(published, tmp_path, ids):
    folder, decoded = published
    by_them = AutoModelForCausalLM.from_pretrained(folder)
    for model in (by_them, checkpoints.load(small(), folder, progress=False)):
        for name in ("gate_up_proj", "down_proj"):
            weight = model.get_parameter(EXPERTS + name)
            assert isinstance(weight, NVFP4Tensor) and weight.transposed
            assert torch.equal(weight.dequantize(), decoded.get_parameter(EXPERTS + name))
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, decoded(ids).logits, rtol=0.02, atol=0.05)
    by_them.save_pretrained(tmp_path / "saved")
    checkpoints.save(by_them, tmp_path / "by us", progress=False)
    checkpoints.convert(folder, tmp_path / "back", to="modelopt", progress=False)
    for again in ("saved", "by us", "back"):
        assert filecmp.cmp(folder / "model.safetensors", tmp_path / again / "model.safetensors", shallow=False), again


def test_quantized_while_loading_and_saved_as_modelopt_does(tmp_path, ids):
    dense = small()
    dense.save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=NVFP4TensorConfig())
    model.save_pretrained(tmp_path / "nvfp4")
    tensors = load_file(tmp_path / "nvfp4/model.safetensors")
    for name in ("gate_up_proj", "down_proj"):
        keys, (experts, columns, rows) = modelopt.keys_of(EXPERTS + name), dense.get_parameter(EXPERTS + name).shape
        assert tensors[keys["qdata"]].shape == (experts, columns // 2, rows)
        assert tensors[keys["scale"]].shape == (experts, columns // 16, rows)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        exact = dense(ids).logits
        assert (model(ids).logits - exact).norm() < 0.3 * exact.norm()
