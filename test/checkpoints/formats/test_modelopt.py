"""ModelOpt: its exports, all forms of its configuration, and errors."""

import json
import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, dense_tensors, edit_json, write_dense
from helpers.checkpoints import InMemory, same_parts
from safetensors.torch import load_file

from nvfp4_tensor import checkpoints, quantize, quantize_experts
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.modelopt import format_for

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["modelopt_nvfp4", "modelopt_w4a16"])
def golden(request, tmp_path):
    """A copy of one of ModelOpt's exports."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / request.param)


def decoded(tensors, module):
    """As ModelOpt's NVFP4QTensor.dequantize computes it: bytes by a table, times the product of both scales."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    data = tensors[f"{module}.weight"].long()
    values = torch.stack((table[data & 15], table[data >> 4]), -1).flatten(-2)
    scale = tensors[f"{module}.weight_scale"].float() * tensors[f"{module}.weight_scale_2"]
    return values * scale.repeat_interleave(16, -1)


def test_what_modelopt_wrote_is_read_and_written_again(golden, tmp_path):
    tensors = load_file(golden / "model.safetensors")
    assert checkpoints.detect(golden) == "modelopt"
    with checkpoints.read(golden) as read:
        linears = {name for name, entry in read.entries.items() if entry.quantized}
        assert linears == {f"{name.removesuffix('_scale')}" for name in tensors if name.endswith("weight_scale")}
        for name in linears:
            weight = tensor_of(read.linear(name), torch.float32)
            assert torch.allclose(weight.dequantize(), decoded(tensors, name.removesuffix(".weight")), rtol=2**-22)
            static = tensors.get(f"{name.removesuffix('weight')}input_scale")
            assert (weight.activation_amax is None) == (static is None) == (weight.activation_spec is None)
            assert static is None or weight.activation_amax == static * 2688
        assert torch.equal(read.dense("model.norm.weight"), tensors["model.norm.weight"])
    checkpoints.convert(golden, tmp_path / "again", to="modelopt", progress=False)
    assert (golden / "model.safetensors").read_bytes() == (tmp_path / "again/model.safetensors").read_bytes()


def test_modelopts_codes_are_ours(w4a4):
    """Its rule with our arithmetic: quantizing what it decodes to gives its codes and scales again."""
    with checkpoints.read(w4a4) as read:
        parts = read.linear("model.layers.0.mlp.down_proj.weight")
    again = quantize(tensor_of(parts, torch.float32).dequantize(), amax=parts.per_tensor_scale * 2688)
    changed = (again.qdata != parts.qdata).sum() + (again.unswizzled_scale().float() != parts.scale.float()).sum()
    assert changed <= parts.qdata.numel() // 50  # a block whose largest element was rounded down chooses anew


FORMS = {
    "config.json alone": lambda folder, ours, file: None,
    "hf_quant_config.json alone, as of older releases": lambda folder, ours, file: (
        ours.pop("quantization_config"), (folder / "hf_quant_config.json").write_text(json.dumps(file))),
    "the form of the file in config.json": lambda folder, ours, file: (
        ours.update(quantization_config={"quant_method": "modelopt", **file})),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_configuration(golden, form):
    before, file = checkpoints.read(golden).entries, json.loads((golden / "hf_quant_config.json").read_text())
    (golden / "hf_quant_config.json").unlink()
    edit_json(golden / "config.json", lambda config: FORMS[form](golden, config, file))
    assert checkpoints.detect(golden) == "modelopt"
    assert checkpoints.read(golden).entries == before


def test_nvfp4_without_activations_in_any_group_is_weight_only(w4a4):
    def change(config):
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None

    edit_json(w4a4 / "config.json", change)
    entries = checkpoints.read(w4a4).entries
    assert entries[f"{Q_PROJ}.weight"].quantized and not any(entry.quantizes_activations for entry in entries.values())


def test_mixed_precision(w4a4, tmp_path):
    kinds = {name.removesuffix(".weight"): "NVFP4" for name, e in checkpoints.read(w4a4).entries.items() if e.quantized}
    layers = {name: {"quant_algo": kind, "group_size": 16} for name, kind in (kinds | {Q_PROJ: "W4A16_NVFP4"}).items()}
    changes = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "config_groups": {}}
    edit_json(w4a4 / "config.json", lambda config: config["quantization_config"].update(changes))
    entries = checkpoints.read(w4a4).entries
    weight_only = [name for name, entry in entries.items() if entry.quantized and not entry.quantizes_activations]
    assert weight_only == [f"{Q_PROJ}.weight"] and not entries["lm_head.weight"].quantized
    checkpoints.convert(w4a4, tmp_path / "dst", to="modelopt", progress=False)
    config = json.loads((tmp_path / "dst/hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == "MIXED_PRECISION" and config["quantized_layers"] == layers
    assert checkpoints.read(tmp_path / "dst").entries == entries


def test_what_servers_ask_for_is_there(tmp_path):
    """vLLM: three keys, and a list of what is dense with the output layer in it."""
    tensors = dense_tensors()
    del tensors["lm_head.weight"]  # the embedding's
    write_dense(tmp_path / "src", {**tensors, "model.layers.0.mlp.gate.weight": torch.randn(4, 64)})
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    written = json.loads((tmp_path / "dst/hf_quant_config.json").read_text())
    assert written["producer"]["name"] == "modelopt"
    assert written["quantization"] == {
        "quant_algo": "W4A16_NVFP4", "group_size": 16, "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.0.mlp.gate"],
    }  # fmt: skip
    flat = json.loads((tmp_path / "dst/config.json").read_text())["quantization_config"]
    assert flat["quant_method"] == "modelopt" and flat["ignore"] == ["lm_head", "model.layers.0.mlp.gate"]
    assert flat["config_groups"]["group_0"]["weights"]["num_bits"] == 4


@pytest.mark.parametrize("kind, shape", [("mixtral", (3, 48, 32)), ("llama4", (3, 32, 48))])
def test_experts_of_either_layout(tmp_path, kind, shape):
    experts = quantize_experts(torch.randn(3, 48, 64) * torch.tensor([1.0, 9.0, 2.0])[:, None, None])
    checkpoint = InMemory({"experts.gate_up_proj": experts}, {"model_type": kind})
    format_for(checkpoint.config).write(checkpoint, tmp_path / "a", progress=False)
    stored = load_file(tmp_path / "a/model.safetensors")
    scale = (3, 48, 4) if kind == "mixtral" else (3, 4, 48)
    assert {name.removeprefix("experts.gate_up_proj"): tuple(t.shape) for name, t in stored.items()} == {
        "": shape, "_weight_scale": scale, "_weight_scale_2": (3,),
    }  # fmt: skip
    with checkpoints.read(tmp_path / "a") as read:
        assert same_parts(read.linear("experts.gate_up_proj"), parts_of(experts))
