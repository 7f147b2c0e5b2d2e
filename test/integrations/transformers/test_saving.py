"""save_pretrained writes ModelOpt's layout, byte for byte what checkpoints.save writes; it and others read it back."""

import json
import re

import huggingface_hub
import pytest
import torch
import transformers
from helpers.hub_models import assert_kept, from_pretrained, quantized, same_codes, same_file
from safetensors.torch import load_file
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM, TorchAoConfig

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    calibrate,
    checkpoints,
)
from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.quantization.model_families import JOINED

pytestmark = pytest.mark.slow


def vllm_takes(folder):
    """Check the requirements of vLLM 0.33's reader (quantization/modelopt.py) for every linear of a folder.

    A linear that it fuses of several has a weight_scale_2 and an input_scale for each, of which it takes the largest.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt" and config["quant_algo"] in ("NVFP4", "W4A16_NVFP4")
    assert {"group_size", "kv_cache_quant_algo", "exclude_modules"} <= legacy.keys()
    assert legacy["quant_algo"] == config["quant_algo"] and legacy["group_size"] == config["group_size"] == 16
    assert isinstance(config["ignore"], list) and config["ignore"] == legacy["exclude_modules"]
    quantized = {group["input_activations"] is not None for group in config["config_groups"].values()} if (
        config["quant_algo"] == "NVFP4"
    ) else {False}  # fmt: skip
    assert quantized == {config["quant_algo"] == "NVFP4"}  # else it is taken for W4A16
    tensors = load_file(folder / "model.safetensors")
    linears = [name.removesuffix("_scale_2") for name in tensors if name.endswith(".weight_scale_2")]
    for name in linears:
        (rows, half), scale, factor = tensors[name].shape, tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
        assert tensors[name].dtype == torch.uint8 and half % 8 == 0
        assert scale.dtype == torch.float8_e4m3fn and scale.shape == (rows, half // 8)
        assert not scale.float().isnan().any()
        assert factor.dtype == torch.float32 and factor.numel() == 1
        module = name.removesuffix(".weight")
        assert (f"{module}.input_scale" in tensors) == (config["quant_algo"] == "NVFP4")
        assert not any(ignored in module for ignored in config["ignore"])  # it looks for parts of names
        path, _, last = module.rpartition(".")
        for group in (group for group in JOINED if last in group):  # it takes one scale for all
            others = [f"{path}.{each}.weight" for each in group if f"{path}.{each}.weight" in linears]
            assert all(torch.equal(factor, tensors[f"{each}_scale_2"]) for each in others)
    return len(linears)


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_checkpoints_save(llama, tmp_path, ids, tied):
    model = from_pretrained(llama(tie_word_embeddings=tied)[1])
    nvfp4.save(model, tmp_path / "a")
    checkpoints.save(model, tmp_path / "b", progress=False)
    assert all(
        same_file(tmp_path / "a", tmp_path / "b", each) for each in ("model.safetensors", "hf_quant_config.json")
    )
    assert json.loads((tmp_path / "a/config.json").read_text()) == json.loads((tmp_path / "b/config.json").read_text())
    assert vllm_takes(tmp_path / "a") == 14
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(again(ids).logits, model(ids).logits)
    again.save_pretrained(tmp_path / "c")
    assert all(same_file(tmp_path / "a", tmp_path / "c", each) for each in ("model.safetensors", "config.json"))
    again.save_pretrained(tmp_path / "shards", max_shard_size="30KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "shards")(ids).logits, model(ids).logits)


def test_a_calibrated_model_comes_back_to_the_bit(llama, tmp_path, ids):
    """By save_pretrained alone; by save, also with an amax that was set by hand, which the file beside it keeps."""
    model = calibrate(llama()[0], [ids], NVFP4Config(), progress=False)
    nvfp4.attach_quantizer(model).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain/nvfp4_tensor.json").exists()
    for folder in ("plain", "w4a4"):
        if folder == "w4a4":
            for weight in quantized(model).values():
                weight.activation_amax.fill_(3.65625)  # by 2688 and back it has another last bit
            nvfp4.save(model, tmp_path / "w4a4")
            assert vllm_takes(tmp_path / "w4a4") == 14
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for name, weight in quantized(again).items():
            expected = model.get_parameter(name)
            assert weight.activation_amax == expected.activation_amax and same_codes(weight, expected)
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_scales_of_each_call_are_refused_or_left_out(llama, tmp_path):
    model = from_pretrained(llama()[1], NVFP4Config())
    with pytest.raises(ValueError, match=r"use calibrate\(model, batches\), .* or .* weight_only=True"):
        model.save_pretrained(tmp_path / "w4a4")
    nvfp4.save(model, tmp_path / "w4a16", weight_only=True)
    again = quantized(AutoModelForCausalLM.from_pretrained(tmp_path / "w4a16"))
    assert len(again) == 14
    for name, weight in again.items():
        assert weight.activation_spec is None and torch.equal(weight.qdata, model.get_parameter(name).qdata)
    assert model.model.layers[0].mlp.up_proj.weight.activation_spec == QuantizeSpec()


def test_scales_of_each_linear_are_requantized(llama, tmp_path, ids):
    """Those that servers fuse; test_one_choice.py saves models whose linears share them."""
    model, _ = llama()
    for module in filter(lambda each: type(each) is torch.nn.Linear, model.model.modules()):
        quantize_(module, NVFP4WeightOnlyConfig())
    with pytest.raises(ValueError, match="attach_quantizer"):
        nvfp4.save(model, tmp_path / "a")
    nvfp4.attach_quantizer(model)
    with pytest.warns(UserWarning, match="requantizing 4 groups"):
        model.save_pretrained(tmp_path / "b")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    exact, got = model(ids).logits.float(), again(ids).logits.float()
    assert 0 < (got - exact).norm() < 0.15 * exact.norm()
    with pytest.raises(ValueError, match="no NVFP4 weights"):
        nvfp4.attach_quantizer(llama()[0])


def test_codes_of_an_embedding_are_refused(llama, tmp_path):
    """from_pretrained would not read them."""
    model, _ = llama()
    table = model.model.embed_tokens
    table.weight = torch.nn.Parameter(NVFP4Tensor.to_nvfp4(table.weight.detach()), requires_grad=False)
    nvfp4.attach_quantizer(model)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is the NVFP4Tensor of an embedding"):
        model.save_pretrained(tmp_path / "a")
    assert not [*tmp_path.glob("a/*")]


def test_a_configuration_speaks_of_the_names_in_files(tmp_path):
    """Those of LLaVA differ from the model's."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = transformers.LlamaConfig(vocab_size=96, num_key_value_heads=2, **sizes).to_dict()
    image = transformers.CLIPVisionConfig(image_size=32, patch_size=8, **sizes).to_dict()
    config = transformers.LlavaConfig(text_config=text, vision_config=image, image_token_id=95)
    auto = transformers.AutoModelForImageTextToText
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = auto.from_pretrained(tmp_path / "dense", quantization_config=nvfp4.NVFP4TensorConfig())
    model.save_pretrained(tmp_path / "nvfp4")
    ignored = json.loads((tmp_path / "nvfp4/config.json").read_text())["quantization_config"]["ignore"]
    with checkpoints.read(tmp_path / "nvfp4") as checkpoint:
        dense = {name.removesuffix(".weight") for name, entry in checkpoint.entries.items() if not entry.quantized}
    assert {*ignored} - {"lm_head"} <= dense  # a head that is the embedding's weight is in no file
    assert any("vision_tower" in each for each in ignored)


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="transformers 5.21 does not have it")
def test_linears_that_are_one_tensor_in_dense_files(tmp_path, ids):
    """q, k, v and a gate are quantized apart, with a dense k beside them, saved apart, and loaded again."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = transformers.HrmTextConfig(**sizes, num_attention_heads=4)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    assert any("gqkv_proj" in name for name in checkpoints.read(tmp_path / "dense").entries)
    dense = ["lm_head", "model.L_module.layers.0.self_attn.k_proj"]
    model = from_pretrained(tmp_path / "dense", None, {"modules_to_not_convert": dense})
    names = quantized(model).keys()
    assert len(names) == 31  # of two stacks of two layers of eight linears
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "dense").named_parameters():
        assert (model.get_parameter(name) - weight).norm() <= (0.15 * weight.norm() if name in names else 0.0)
    assert_kept(model, ids, tmp_path / "nvfp4", decoded=True)


@pytest.mark.filterwarnings("ignore:requantizing")
def test_torchaos_own_config(llama, tmp_path, ids):
    """Another quantizer with our configs would write files that nothing can load: an error names the way that works."""
    config = TorchAoConfig(NVFP4WeightOnlyConfig(), modules_to_not_convert=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(llama()[1], quantization_config=config)
    assert len(quantized(model)) == 14 and model.generate(ids, max_new_tokens=2).shape == (2, 26)
    with pytest.raises(TypeError, match=r"attach_quantizer\(model\) before save_pretrained"):
        model.save_pretrained(tmp_path / "a")
    nvfp4.attach_quantizer(model).save_pretrained(tmp_path / "a")
    assert len(quantized(AutoModelForCausalLM.from_pretrained(tmp_path / "a"))) == 14


def test_a_model_in_two_places(llama, tmp_path, ids):
    """Some weights are on the meta device, and accelerate moves their values to the device at each call."""
    accelerate = pytest.importorskip("accelerate")
    model = from_pretrained(llama()[1])
    model.save_pretrained(tmp_path / "a")
    expected = model(ids).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    assert model.model.layers[0].mlp.up_proj.weight.is_meta and torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "b")
    assert all(same_file(tmp_path / "a", tmp_path / "b", each) for each in ("model.safetensors", "config.json"))


def test_dequantized_is_dense(llama, tmp_path):
    model = from_pretrained(llama()[1])
    nvfp4.save(model, tmp_path / "a")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    dense.save_pretrained(tmp_path / "b")  # from then on its config has the dtype as a string
    dense = dense.dequantize()
    assert type(dense.model.layers[0].mlp.up_proj) is torch.nn.Linear
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not quantized(again) and type(again.model.layers[0].mlp.up_proj) is torch.nn.Linear
    for name, weight in quantized(model).items():
        assert torch.equal(again.get_parameter(name), weight.dequantize())
        assert not dense.get_parameter(name).requires_grad


class Tokenizer:
    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def test_the_card_tells_what_was_done(llama, tmp_path):
    model = from_pretrained(llama()[1])
    with pytest.raises(ValueError, match="upload_folder"):  # the card comes before the hub
        nvfp4.save(model, tmp_path / "tiny", push_to_hub=True)
    assert not (tmp_path / "tiny").exists()
    options = {"perplexity": {"NVFP4": 15.754, "bfloat16": 13.128}, "text": "Python's help", "base_model": "org/tiny"}
    nvfp4.save(model, tmp_path / "tiny", tokenizer=Tokenizer(), metadata={"license": "apache-2.0"}, **options)
    card = huggingface_hub.ModelCard.load(tmp_path / "tiny/README.md")
    assert card.data.base_model == "org/tiny" and card.data.license == "apache-2.0"
    assert card.data.eval_results[0].metric_value == 15.754
    stored = sum(t.nbytes for n, t in load_file(tmp_path / "tiny/model.safetensors").items() if "layers" in n)
    numbers = sum(weight.numel() for weight in quantized(model).values())
    norms = sum(p.nbytes for n, p in model.named_parameters() if "layernorm" in n)
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.content.splitlines() if line.startswith("| w"))
    assert rows["weights"] == f"W4A16_NVFP4: 14 matrices, {8 * (stored - norms) / numbers:.2f} bits per weight"
    assert "| rounding (nvfp4_tensor.QuantizeSpec) | rne, 1x16, 4/6 mse |" in card.content
    assert "| left dense | lm_head |" in card.content and "| bfloat16 | 13.128 |" in card.content
    assert (tmp_path / "tiny/tokenizer.json").exists()
    nvfp4.save(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny"), tmp_path / "again")
    content = (tmp_path / "again/README.md").read_text()
    assert "as in the checkpoint that it was loaded from" in content and "Not measured." in content


def test_what_vllm_cannot_load_is_warned_of(llama, tmp_path):
    dense, folder = llama()
    dense.model.layers[0].mlp.down_proj.weight.data[3, 17] = float("nan")
    dense.save_pretrained(folder)
    model = from_pretrained(folder, settings={"modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"]})
    with pytest.warns(UserWarning) as caught:
        model.save_pretrained(tmp_path / "nvfp4")
    said = "\n".join(str(each.message) for each in caught)
    assert "layers.0.mlp.down_proj.weight have NaN blocks: vLLM cannot load" in said
    assert re.search(r"0.self_attn.q_proj.weight are dense, .* vLLM raises an error", said)
