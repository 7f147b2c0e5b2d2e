"""from_pretrained of ModelOpt's and (opt-in) compressed-tensors' NVFP4 checkpoints keeps the bits of the files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints.quantizing import quantize
from nvfp4_tensor.integrations import transformers as nvfp4

pytestmark = pytest.mark.slow

SPEC = QuantizeSpec(four_over_six=True)


@pytest.fixture(autouse=True)
def natively():
    nvfp4.read_compressed_tensors()
    yield
    nvfp4.read_compressed_tensors(natively=False)


def quantized(model):
    return {name: weight for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)}


@pytest.mark.parametrize("form", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("activations", [False, True], ids=["w4a16", "w4a4"])
def test_bits_are_those_of_the_files(llama, tmp_path, ids, form, activations):
    """The weights also equal those quantized while loading."""
    _, folder = llama()
    amaxes = {f"model.layers.{i}.mlp.down_proj": 2.5 for i in range(2)} if activations else None
    quantize(folder, tmp_path / "nvfp4", to=form, spec=SPEC, input_amax=amaxes, progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(weight_spec=SPEC))
    expected = quantized(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config))
    got = quantized(model)
    assert got.keys() == expected.keys() and len(got) == 14
    for name, weight in got.items():
        assert torch.equal(weight.qdata, expected[name].qdata) and torch.equal(weight.scale, expected[name].scale)
        torch.testing.assert_close(weight.per_tensor_scale, expected[name].per_tensor_scale, rtol=2e-7, atol=0)
        assert (weight.activation_amax is not None) == (activations and "down_proj" in name)
        if weight.activation_amax is not None:
            torch.testing.assert_close(weight.activation_amax, torch.tensor(2.5), rtol=4e-7, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(ids).logits.isfinite().all()


def only_hf_quant_config(folder, **changes):
    """Make the folder one of ModelOpt's older releases, which leave config.json as it was."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    found = json.loads((folder / "hf_quant_config.json").read_text())
    found["quantization"] |= changes
    (folder / "hf_quant_config.json").write_text(json.dumps(found))


def test_hf_quant_config_alone_is_enough(llama, tmp_path, ids):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", spec=SPEC, progress=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    only_hf_quant_config(tmp_path / "nvfp4")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    assert len(quantized(model)) == 14 and torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(ids).logits, expected(ids).logits)
    assert AutoConfig.from_pretrained(folder).to_dict().get("quantization_config") is None


@pytest.mark.parametrize("options", [{}, {"gguf_file": None, "revision": "main"}], ids=str)
def test_hf_quant_config_alone_for_a_class_of_transformers(llama, tmp_path, ids, options):
    """The class of the model passes more arguments on than AutoModelForCausalLM, for instance that there is no GGUF."""
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", spec=SPEC, progress=False)
    only_hf_quant_config(tmp_path / "nvfp4")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    model = type(expected).from_pretrained(tmp_path / "nvfp4", **options)
    assert len(quantized(model)) == 14 and torch.equal(model(ids).logits, expected(ids).logits)


def test_hf_quant_config_of_another_format_is_left_alone(llama, tmp_path):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", spec=SPEC, progress=False)
    only_hf_quant_config(tmp_path / "nvfp4", quant_algo="FP8")
    assert getattr(AutoConfig.from_pretrained(tmp_path / "nvfp4"), "quantization_config", None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_dtype_is_the_callers(llama, tmp_path, dtype):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_weight_only_by_choice(llama, tmp_path):
    _, folder = llama()
    amaxes = {"model.layers.0.mlp.down_proj": 2.5}
    quantize(folder, tmp_path / "nvfp4", input_amax=amaxes, progress=False)
    config = AutoConfig.from_pretrained(tmp_path / "nvfp4")
    config.quantization_config["quantize_activations"] = False
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", config=config)
    assert len(quantized(model)) == 14
    assert all(w.activation_spec is None and w.activation_amax is None for w in quantized(model).values())
    assert "quantize_activations" not in model.config.to_dict()["quantization_config"]


def test_a_configuration_in_a_file_of_its_own(llama, tmp_path, ids):
    """A checkpoint of ModelOpt's 2024 releases, without a quantization in config.json."""
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", progress=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")(ids).logits
    file = tmp_path / "nvfp4" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", config=nvfp4.config_of(tmp_path / "nvfp4"))
    assert len(quantized(model)) == 14 and torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, expected)
    with pytest.raises(ValueError, match="found neither"):
        nvfp4.config_of(folder)


def test_a_file_that_is_wrong_says_so(llama, tmp_path):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", progress=False)
    file = tmp_path / "nvfp4" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model.safetensors: tensor .*down_proj.weight_scale: expected .*\[64, 11\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")


def test_what_is_not_nvfp4_is_refused_by_name(llama, tmp_path):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", progress=False)
    file = tmp_path / "nvfp4" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["quant_algo"] = "FP8"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_algo NVFP4, W4A16_NVFP4 or MIXED_PRECISION, found FP8"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")


def test_the_scales_of_an_fp8_cache_are_left_out_quietly(llama, tmp_path):
    _, folder = llama()
    quantize(folder, tmp_path / "nvfp4", progress=False)
    file = tmp_path / "nvfp4" / "model.safetensors"
    tensors = {**load_file(file), "model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}
    save_file(tensors, file, metadata={"format": "pt"})
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4", output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]


def test_other_compressions_stay_with_transformers():
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils.quantization_config import CompressedTensorsConfig

    pytest.importorskip("compressed_tensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert type(AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"].from_dict(fields)) is CompressedTensorsConfig


def test_detect_knows_what_is_read(llama, tmp_path):
    quantize(llama()[1], tmp_path / "nvfp4", progress=False)
    assert checkpoints.detect(tmp_path / "nvfp4") == "modelopt"
