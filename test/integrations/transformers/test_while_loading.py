"""NVFP4TensorConfig: from_pretrained quantizes like quantize_, with one amax per group that servers fuse."""

import json

import pytest
import torch
from helpers.hub_models import (
    FOUR_OVER_SIX,
    SIZES,
    assert_kept,
    from_pretrained,
    quantized,
    random_model,
    same_codes,
    same_file,
)
from torch import nn
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM, GPT2Config, GptOssConfig, MixtralConfig

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    checkpoints,
    model_size,
    quantize,
)
from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig, WhileLoadingQuantizer

pytestmark = pytest.mark.slow

CONFIGS = {
    "weight only": FOUR_OVER_SIX,
    "w4a4": NVFP4Config(weight_spec=QuantizeSpec(scale_search="mse"), activation_spec=QuantizeSpec()),
}


def load(folder, config=None, **kwargs):
    options = {"modules_to_not_convert", "share_scales", "quantize_lm_head"} & kwargs.keys()
    return from_pretrained(folder, config, {name: kwargs.pop(name) for name in options}, **kwargs)


def quantized_names(model):
    return quantized(model).keys()


@pytest.mark.parametrize("config, device_map", zip(CONFIGS.values(), [None, "cpu"], strict=True), ids=CONFIGS)
def test_bits_are_those_of_quantize(llama, ids, config, device_map):
    dense, folder = llama()
    model = load(folder, config, share_scales=False, device_map=device_map)
    for linear in filter(lambda each: isinstance(each, nn.Linear), dense.model.modules()):
        quantize_(linear, config)
    expected = quantized(dense)
    assert quantized_names(model) == expected.keys() and len(expected) == 14
    for name, weight in expected.items():
        got = model.get_parameter(name)
        assert same_codes(got, weight)
        assert (got.spec, got.activation_spec) == (weight.spec, weight.activation_spec)
    assert torch.equal(model(ids).logits, dense(ids).logits)


def test_a_pattern_that_matches_nothing_warns_and_inputs_that_no_server_reads_stay_dense(llama):
    with pytest.warns(UserWarning, match="modules_to_not_convert: 'down_porj' matches no module of LlamaForCausalLM"):
        names = quantized_names(load(llama(intermediate_size=90)[1], modules_to_not_convert=["lm_head", "down_porj"]))
    assert len(names) == 12 and not any("down_proj" in name for name in names)


@pytest.mark.smoke
def test_the_tied_head_stays_the_embedding(llama):
    model = load(llama()[1])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not isinstance(model.lm_head.weight, NVFP4Tensor)
    untied = load(llama(tie_word_embeddings=False)[1], modules_to_not_convert=["model.layers.0", "down_proj"])
    kept = {f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkvo"}
    assert quantized_names(untied) == kept | {
        "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight",
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["tied", "with the head", "experts", "transposed experts"])
def test_sizes_are_those_that_will_be_stored(llama, tmp_path, kind):
    """device_map="auto" uses these sizes: their sum over the meta model equals the bytes of the loaded one."""
    if "experts" in kind:
        sizes = {**SIZES, "num_local_experts": 4, "intermediate_size": 64, "num_experts_per_tok": 2}
        dense = random_model((MixtralConfig if kind == "experts" else GptOssConfig)(**sizes))
        dense.save_pretrained(folder := tmp_path / "experts")
    else:
        dense, folder = llama()
    options = {"quantize_lm_head": kind == "with the head"}
    model = from_pretrained(folder, None, options)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(dense.config, dtype=torch.bfloat16)
    quantizer = WhileLoadingQuantizer(NVFP4TensorConfig(**options), pre_quantized=False)
    quantizer._process_model_before_weight_loading(empty)
    found = empty.named_parameters(remove_duplicate=kind != "with the head")
    planned = sum(quantizer.param_element_size(empty, name, p) * p.numel() for name, p in found)
    assert planned == model_size(model).total - sum(b.nbytes for b in model.buffers())
    assert model.get_memory_footprint() == model_size(model).total


def test_device_map_auto_plans_by_them(llama, tmp_path):
    """The NVFP4 model fits in this memory; the dense one does not, and its layers are offloaded to disk."""
    _, folder = llama(hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    options = {"device_map": "auto", "max_memory": {"cpu": int(1.6 * model_size(load(folder)).total)}}
    assert len(quantized_names(load(folder, **options))) == 28
    dense = AutoModelForCausalLM.from_pretrained(folder, offload_folder=tmp_path / "offload", **options)
    assert "disk" in dense.hf_device_map.values()
    options["max_memory"] = {"cpu": options["max_memory"]["cpu"] // 3}
    with pytest.raises(ValueError, match="cannot be offloaded to a disk"):
        load(folder, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_dtype_of_the_callers(llama, dtype):
    """The weight is cast to the model's dtype before it is quantized."""
    dense, folder = llama()
    weight = load(folder, dtype=dtype).model.layers[0].mlp.down_proj.weight
    expected = quantize(dense.model.layers[0].mlp.down_proj.weight.to(dtype))
    assert weight.dtype == dtype and torch.equal(weight.qdata, expected.qdata)


@pytest.mark.parametrize(
    "config",
    [
        None,
        NVFP4WeightOnlyConfig(round_mode="stochastic", random_bits=8, seed=7, activations="fp8", experts=False),
        NVFP4Config(four_over_six="mae", activation_round_mode="away", product_backend="scaled_mm"),
        NVFP4Config(weight_spec=QuantizeSpec(hadamard_sign=True), activation_spec=QuantizeSpec(hadamard_sign=0xD7E8)),
    ],
)
def test_settings_survive_json(config):
    written = NVFP4TensorConfig(config, modules_to_not_convert=["a.*"], share_scales=False)
    fields = json.loads(written.to_json_string())
    again = NVFP4TensorConfig.from_dict(fields)
    assert again.to_dict() == fields and fields["quant_method"] == "nvfp4_tensor"
    assert (again.config.weight, again.activation) == (written.config.weight, written.activation)
    assert (again.config.seed, again.config.experts) == (written.config.seed, written.config.experts)
    assert type(again.config) is type(written.config) and again.config.fields == written.config.fields
    assert (again.modules_to_not_convert, again.share_scales) == (["a.*"], False)


def test_what_is_refused(llama, tmp_path):
    with pytest.raises(TypeError, match="not Linear"):
        NVFP4TensorConfig(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="attach_quantizer"):
        NVFP4TensorConfig(NVFP4Config(step="convert"))
    with pytest.raises(ValueError, match="'nvfp4_tensor', got 'nvfp4'"):
        NVFP4TensorConfig(quant_method="nvfp4")
    nothing = GPT2Config(vocab_size=96, n_embd=40, n_inner=72, n_layer=1, n_head=4)  # no multiples of 16
    AutoModelForCausalLM.from_config(nothing).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="nothing to quantize in GPT2LMHeadModel"):
        load(tmp_path / "gpt2")
    model, folder = llama()
    model.config.quantization_config = NVFP4TensorConfig()
    model.config.save_pretrained(folder)
    with pytest.raises(ValueError, match="apply to dense weights, not to quantized ones"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_under_init_empty_weights_it_is_refused_with_the_way_that_works(llama, tmp_path, ids):
    accelerate = pytest.importorskip("accelerate")
    model = load(llama()[1])
    model.save_pretrained(tmp_path / "saved")
    with accelerate.init_empty_weights(), pytest.raises(ValueError, match="call from_pretrained outside of it"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with accelerate.init_empty_weights(include_buffers=False):
        empty = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
    filled = checkpoints.load(empty, tmp_path / "saved", progress=False)
    assert torch.equal(filled(ids).logits, model(ids).logits)


# --- the output layer: with its own weight, and as a copy if it shares the embedding's -------------------------------


def with_head(folder, **settings):
    return load(folder, FOUR_OVER_SIX, quantize_lm_head=True, **settings)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_quantized_and_the_embedding_stays(llama, ids, tied):
    dense, folder = llama(tie_word_embeddings=tied)
    model = with_head(folder, modules_to_not_convert=["down_proj"])
    assert not any("down_proj" in name for name in quantized(model))
    assert same_codes(model.lm_head.weight, quantize(dense.lm_head.weight, FOUR_OVER_SIX.weight))
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is False and not model.all_tied_weights_keys
    assert dense.config.tie_word_embeddings is tied
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(model(ids).logits, model.lm_head(hidden))
    decoded = model.lm_head.weight.dequantize()
    expected = torch.nn.functional.linear(hidden.float(), decoded.float())
    torch.testing.assert_close(model(ids).logits.float(), expected, rtol=0.02, atol=0.02)
    model.generate(ids, max_new_tokens=2)


def test_a_file_that_names_the_shared_weight_after_the_head(llama):
    dense, folder = llama()
    state = {name: t for name, t in dense.state_dict().items() if "embed_tokens" not in name}
    checkpoints.save(state, folder.parent / "renamed", format="dense", config=dense.config.to_dict(), progress=False)
    model = with_head(folder.parent / "renamed")
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert same_codes(model.lm_head.weight, quantize(dense.lm_head.weight, FOUR_OVER_SIX.weight))


def test_the_head_is_saved_as_of_a_folder_and_loaded_again(llama, ids, tmp_path):
    _, folder = llama()
    model = with_head(folder)
    nvfp4.save(model, tmp_path / "nvfp4")
    checkpoints.quantize(folder, tmp_path / "folder", spec=FOUR_OVER_SIX.weight, quantize_lm_head=True, progress=False)
    assert same_file(tmp_path / "nvfp4", tmp_path / "folder")
    quantization = json.loads((tmp_path / "nvfp4/hf_quant_config.json").read_text())["quantization"]
    with checkpoints.read(tmp_path / "folder") as stored:
        assert stored.entries["lm_head.weight"].quantized and quantization["exclude_modules"] == []
    for each in ("nvfp4", "folder"):
        assert json.loads((tmp_path / each / "config.json").read_text())["tie_word_embeddings"] is False
    again = assert_kept(model, ids, tmp_path / "saved")
    assert same_codes(again.lm_head.weight, model.lm_head.weight)


def test_an_output_layer_that_it_does_not_take(llama):
    with pytest.raises(ValueError, match="whose inputs are a multiple of 16"):
        with_head(llama(hidden_size=72, num_attention_heads=2, num_key_value_heads=1)[1])
