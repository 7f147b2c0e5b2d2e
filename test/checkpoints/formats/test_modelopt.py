"""ModelOpt: its exports, all forms of its configuration, and errors."""

import json
import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, assert_refused, content, dense_tensors, edit, edit_json, write_dense
from helpers.checkpoints import InMemory, same_parts
from safetensors.torch import load_file, save_file

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, checkpoints, quantize, quantize_experts
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.modelopt import format_for

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(params=["modelopt_nvfp4", "modelopt_w4a16"])
def golden(request, tmp_path):
    """A copy of one of ModelOpt's exports."""
    return shutil.copytree(GOLDEN / request.param, tmp_path / request.param)


@pytest.fixture
def w4a4(tmp_path):
    return shutil.copytree(GOLDEN / "modelopt_nvfp4", tmp_path / "src")


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


def flat(folder):
    """config.json alone."""
    (folder / "hf_quant_config.json").unlink()


def legacy(folder):
    """hf_quant_config.json alone, as older releases wrote it."""
    edit_json(folder / "config.json", lambda config: config.pop("quantization_config"))


def nested(folder):
    """config.json with the other file's form in it."""
    flat = json.loads((folder / "hf_quant_config.json").read_text())
    edit_json(
        folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "modelopt", **flat})
    )
    (folder / "hf_quant_config.json").unlink()


@pytest.mark.parametrize("form", [flat, legacy, nested])
def test_forms_of_the_configuration(golden, tmp_path, form):
    before = checkpoints.read(golden).entries
    form(golden)
    assert checkpoints.detect(golden) == "modelopt"
    assert checkpoints.read(golden).entries == before


def test_nvfp4_without_activations_in_any_group_is_weight_only(w4a4):
    def change(config):
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None

    edit_json(w4a4 / "config.json", change)
    entries = checkpoints.read(w4a4).entries
    assert entries[f"{Q_PROJ}.weight"].quantized and not any(entry.quantizes_activations for entry in entries.values())


def mixed(folder, **layers):
    """MIXED_PRECISION in config.json, with those layers in place of what they are."""
    names = [
        name.removesuffix(".weight") for name, entry in checkpoints.read(folder).entries.items() if entry.quantized
    ]
    quantized = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names} | layers

    def change(config):
        config["quantization_config"].update(quant_algo="MIXED_PRECISION", quantized_layers=quantized, config_groups={})

    edit_json(folder / "config.json", change)
    return names


def test_mixed_precision(w4a4, tmp_path):
    mixed(w4a4, **{Q_PROJ: {"quant_algo": "W4A16_NVFP4", "group_size": 16}})
    entries = checkpoints.read(w4a4).entries
    weight_only = [name for name, entry in entries.items() if entry.quantized and not entry.quantizes_activations]
    assert weight_only == [f"{Q_PROJ}.weight"] and not entries["lm_head.weight"].quantized
    checkpoints.convert(w4a4, tmp_path / "dst", to="modelopt", progress=False)
    config = json.loads((tmp_path / "dst/hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert config["quantized_layers"][Q_PROJ] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert checkpoints.read(tmp_path / "dst").entries == entries


def test_mixed_precision_names_every_layer_and_is_nvfp4(w4a4):
    mixed(w4a4, **{Q_PROJ: {"quant_algo": "FP8"}})
    with pytest.raises(ValueError, match=r"q_proj \(FP8\)"):
        checkpoints.read(w4a4)
    edit_json(w4a4 / "config.json", lambda config: config["quantization_config"]["quantized_layers"].pop(Q_PROJ))
    with pytest.raises(ValueError, match=rf"tensor {Q_PROJ}\.weight is NVFP4 .* not in quantized_layers"):
        checkpoints.read(w4a4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "FP8"}, "expected ModelOpt's quant_algo NVFP4.* found FP8"),
        ({"quant_algo": "NVFP4_AWQ"}, "expected ModelOpt's quant_algo NVFP4.* found NVFP4_AWQ"),
        ({"quant_algo": None}, "expected ModelOpt's quant_algo NVFP4.* found None"),
        ({"group_size": 32}, r"expected group_size 16, found \[32\]"),
    ],
)
def test_other_algorithms_raise_an_error(w4a4, changes, message):
    edit_json(w4a4 / "config.json", lambda config: config["quantization_config"].update(changes))
    with pytest.raises(ValueError, match=message):
        checkpoints.read(w4a4)


DAMAGES = {
    "shape": (
        lambda t: t.update({f"{Q_PROJ}.weight_scale": t[f"{Q_PROJ}.weight_scale"][:, :3].clone()}),
        rf"safetensors: tensor {Q_PROJ}\.weight_scale: expected float8_e4m3fn \[64, 4\], found F8_E4M3 \[64, 3\]",
    ),
    "input": (
        lambda t: t.update({f"{Q_PROJ}.input_scale": torch.ones(3)}),
        r"input_scale: expected float32 \[\], found F32 \[3\]",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors_are_named(w4a4, damage):
    assert_refused(w4a4, *DAMAGES[damage])


def test_one_number_may_have_a_dimension(w4a4):
    edit(w4a4, lambda t: t.update({f"{Q_PROJ}.weight_scale_2": t[f"{Q_PROJ}.weight_scale_2"][None].clone()}))
    with checkpoints.read(w4a4) as read:
        assert read.linear(f"{Q_PROJ}.weight").per_tensor_scale.shape == ()


def test_what_servers_ask_for_is_there(tmp_path):
    """vLLM: three keys, a list of what is dense with the output layer in it, one scale a joined group, no NaN."""
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
    assert (tmp_path / "dst/tokenizer.json").exists()
    stored = load_file(tmp_path / "dst/model.safetensors")
    scales = [stored[f"model.layers.0.self_attn.{name}_proj.weight_scale_2"] for name in "qkv"]
    assert scales[0] == scales[1] == scales[2] and scales[0].shape == ()
    assert not any(tensor.float().isnan().any() for name, tensor in stored.items() if name.endswith("weight_scale"))


def test_experts_in_one_parameter(tmp_path):
    experts = quantize_experts(torch.randn(3, 32, 64) * torch.tensor([1.0, 9.0, 2.0])[:, None, None])
    checkpoints.save({"experts.gate_up_proj": experts}, tmp_path / "dst", progress=False)
    stored = load_file(tmp_path / "dst/model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        "experts.gate_up_proj": (3, 32, 32), "experts.gate_up_proj_weight_scale": (3, 32, 4),
        "experts.gate_up_proj_weight_scale_2": (3,),
    }  # fmt: skip
    with checkpoints.read(tmp_path / "dst") as read:
        again = tensor_of(read.linear("experts.gate_up_proj"), torch.float32)
    assert torch.equal(again.dequantize(), experts.dequantize())


def state(**changes):
    weight = quantize(torch.randn(32, 64).bfloat16())
    return {"a.weight": weight._replace(**changes)}


def test_what_it_cannot_hold_raises_an_error_and_writes_nothing(tmp_path):
    joined = torch.cat([quantize(torch.randn(16, 64)), quantize(torch.randn(16, 64) * 9)])
    cases = {
        "one per-tensor scale per weight, but a.weight have one per row": {"a.weight": joined},
        r"columns in multiples of 16: leave a.weight \[8, 40\] dense": {"a.weight": quantize(torch.randn(8, 40))},
        "a.weight quantize activations by the amax of each call": state(activation_spec=QuantizeSpec()),
        "a.weight: a transposed": {"a.weight": quantize(torch.randn(32, 64)).t()},
    }
    for message, tensors in cases.items():
        with pytest.raises(ValueError, match=message):
            checkpoints.save(tensors, tmp_path / "dst", progress=False)
    assert not list(tmp_path.iterdir())
    checkpoints.save(state(activation_spec=QuantizeSpec()), tmp_path / "dst", weight_only=True, progress=False)
    assert isinstance(tensor_of(checkpoints.read(tmp_path / "dst").linear("a.weight")), NVFP4Tensor)


def test_a_folder_of_others_is_not_detected_as_it(tmp_path):
    write_dense(tmp_path / "src")
    assert checkpoints.detect(tmp_path / "src") == "dense"
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    assert checkpoints.detect(tmp_path / "x.safetensors") == "dense"
    with pytest.raises(ValueError, match=r"modelopt in hf_quant_config\.json or config\.json, found none"):
        checkpoints.read(tmp_path / "src", "modelopt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoints.detect(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no checkpoint format .awq.: expected one of .*modelopt"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", to="awq")
    assert content(tmp_path / "src")


@pytest.mark.parametrize("kind, stored", [("mixtral", (3, 48, 32)), ("llama4", (3, 32, 48))])
def test_experts_of_either_layout(tmp_path, kind, stored):
    name, experts = "experts.gate_up_proj", quantize_experts(torch.randn(3, 48, 64, dtype=torch.bfloat16))
    format_for({"model_type": kind}).write(
        InMemory({name: experts}, {"model_type": kind}), tmp_path / "a", progress=False
    )
    assert load_file(tmp_path / "a/model.safetensors")[name].shape == stored
    with checkpoints.read(tmp_path / "a") as read:
        assert same_parts(read.linear(name), parts_of(experts))


def test_input_scales_of_some_weights_alone(w4a4):
    missing = f"{Q_PROJ}.input_scale"
    assert_refused(w4a4, lambda tensors: tensors.pop(missing), rf"{missing} is missing: .*but other weights do")
