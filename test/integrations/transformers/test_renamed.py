"""Models whose tensors have other names than in their files, and models with another structure than Llama."""

import json

import pytest
import torch
import transformers
from helpers.hub_models import assert_kept, from_pretrained, quantized, same_file

from nvfp4_tensor import NVFP4Tensor, checkpoints
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig, attach_quantizer

pytestmark = pytest.mark.slow

TEXT = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
IMAGE |= {"image_size": 32, "patch_size": 8}


def llava():
    text = transformers.LlamaConfig(**TEXT, num_key_value_heads=2).to_dict()
    image = transformers.CLIPVisionConfig(**IMAGE).to_dict()
    return transformers.LlavaConfig(text_config=text, vision_config=image, image_token_id=95)


KINDS = {
    "neox": (lambda: transformers.GPTNeoXConfig(**TEXT), "AutoModelForCausalLM", {"lm_head"}),
    "llava": (llava, "AutoModelForImageTextToText", {"lm_head", "vision_tower", "multi_modal_projector"}),
    "vit": (lambda: transformers.ViTConfig(**IMAGE), "AutoModelForImageClassification", {"classifier"}),
    "bert": (lambda: transformers.BertConfig(**TEXT), "AutoModelForMaskedLM", {"decoder"}),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_models_of_another_structure(kind, tmp_path):
    """Only what should is dense; configurations speak of the files' names; folders are loaded and written again."""
    config, auto, dense = KINDS[kind]
    auto, folder = getattr(transformers, auto), tmp_path / "nvfp4"
    torch.manual_seed(0)
    auto.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = auto.from_pretrained(tmp_path / "dense", quantization_config=NVFP4TensorConfig())
    model.save_pretrained(folder)
    linears = {name: each.weight for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    left = {name for name, weight in linears.items() if not isinstance(weight, NVFP4Tensor)}
    assert left and left < set(linears) and all(dense & set(name.split(".")) for name in left)
    ignored = set(json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"])
    with checkpoints.read(folder) as checkpoint:
        names = {name.removesuffix(".weight") for name, entry in checkpoint.entries.items() if not entry.quantized}
    assert ignored - {"lm_head"} <= names  # an output layer that is the embedding's weight is named, and in no file
    again = checkpoints.load(auto.from_pretrained(tmp_path / "dense"), folder, progress=False)
    for (name, weight), (other, expected) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and isinstance(weight, NVFP4Tensor) == isinstance(expected, NVFP4Tensor)
        both = [each.dequantize() if isinstance(each, NVFP4Tensor) else each for each in (weight, expected)]
        assert torch.equal(*both), name
    checkpoints.save(again, tmp_path / "again", progress=False)
    assert same_file(folder, tmp_path / "again")


@pytest.mark.skipif(not hasattr(transformers, "HrmTextConfig"), reason="transformers 5.21 does not have it")
@pytest.mark.parametrize("dense", [None, ["lm_head", "model.L_module.layers.0.self_attn.k_proj"]], ids=str)
def test_linears_that_are_one_tensor_in_dense_files(tmp_path, dense):
    """q, k, v and a gate, and gate and up, of one tensor each: quantized apart, saved apart, and loaded again."""
    config = transformers.HrmTextConfig(**TEXT)
    torch.manual_seed(0)
    auto, ids = transformers.AutoModelForCausalLM, torch.arange(24)[None]
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    assert any("gqkv_proj" in name for name in checkpoints.read(tmp_path / "dense").entries)
    model = from_pretrained(tmp_path / "dense", None, {"modules_to_not_convert": dense})
    exact = auto.from_pretrained(tmp_path / "dense")
    names = quantized(model).keys()
    assert len(names) == 32 - bool(dense)  # two stacks of two layers of eight linears
    for name, weight in exact.named_parameters():
        assert (model.get_parameter(name) - weight).norm() <= (0.15 * weight.norm() if name in names else 0.0)
    assert_kept(model, ids, tmp_path / "nvfp4", decoded=True)
    made = checkpoints.load(auto.from_config(config, dtype=torch.bfloat16).eval(), tmp_path / "nvfp4", progress=False)
    attach_quantizer(made).save_pretrained(tmp_path / "made")
    assert same_file(tmp_path / "nvfp4", tmp_path / "made")


def test_experts_whose_files_have_other_names(tmp_path):
    """Aria's experts (E, K, N) are fc1 and fc2 in dense files: codes were saved under these names, scales not."""
    config = transformers.AriaTextConfig(**TEXT, num_key_value_heads=2, moe_num_experts=4, moe_topk=2)
    torch.manual_seed(0)
    auto, ids = transformers.AutoModelForCausalLM, torch.arange(24)[None]
    auto.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = from_pretrained(tmp_path / "dense", None)
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, NVFP4Tensor)
    assert_kept(model, ids, tmp_path / "nvfp4")


def test_a_model_of_which_nothing_is_quantized_is_refused(tmp_path):
    config = transformers.GPT2Config(vocab_size=96, n_embd=40, n_inner=72, n_layer=1, n_head=4)  # no multiples of 16
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="nothing to quantize in GPT2LMHeadModel"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", quantization_config=NVFP4TensorConfig())
