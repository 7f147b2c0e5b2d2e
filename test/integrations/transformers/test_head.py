"""The output layer in NVFP4: with its own weight, and as a copy if it shares the embedding's."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.integrations.transformers import NVFP4TensorConfig, save

pytestmark = pytest.mark.slow

FOUR_OVER_SIX = NVFP4WeightOnlyConfig(four_over_six=True)


def load(folder, **options):
    config = NVFP4TensorConfig(FOUR_OVER_SIX, quantize_lm_head=True, **options)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def same(a, b):
    return all(torch.equal(x, y) for x, y in ((a.qdata, b.qdata), (a.scale, b.scale))) and torch.equal(
        a.per_tensor_scale, b.per_tensor_scale
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_quantized_and_the_embedding_stays(llama, ids, tied):
    dense, folder = llama(tie_word_embeddings=tied)
    model = load(folder)
    assert same(model.lm_head.weight, quantize(dense.lm_head.weight, QuantizeSpec(four_over_six=True)))
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert model.config.tie_word_embeddings is False and not model.all_tied_weights_keys
    assert dense.config.tie_word_embeddings is tied
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(model(ids).logits, model.lm_head(hidden))
    decoded = model.lm_head.weight.dequantize()
    expected = torch.nn.functional.linear(hidden.float(), decoded.float())
    torch.testing.assert_close(model(ids).logits.float(), expected, rtol=0.02, atol=0.02)
    model.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("skipped", [None, ["down_proj"]])
def test_without_it_the_head_stays_dense_and_tied(llama, skipped):
    folder = llama()[1]
    config = NVFP4TensorConfig(FOUR_OVER_SIX, modules_to_not_convert=skipped)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    with_head = load(folder, modules_to_not_convert=skipped)
    assert isinstance(with_head.lm_head.weight, NVFP4Tensor)
    assert isinstance(with_head.model.layers[0].mlp.down_proj.weight, NVFP4Tensor) == (skipped is None)


def test_a_file_that_names_the_shared_weight_after_the_head(llama):
    dense, folder = llama()
    state = {name: t for name, t in dense.state_dict().items() if "embed_tokens" not in name}
    checkpoints.save(state, folder.parent / "renamed", format="dense", config=dense.config.to_dict(), progress=False)
    model = load(folder.parent / "renamed")
    assert torch.equal(model.model.embed_tokens.weight, dense.model.embed_tokens.weight)
    assert same(model.lm_head.weight, quantize(dense.lm_head.weight, QuantizeSpec(four_over_six=True)))


def test_it_is_saved_and_loaded_again(llama, ids, tmp_path):
    model = load(llama()[1])
    save(model, tmp_path / "nvfp4")
    config = json.loads((tmp_path / "nvfp4/config.json").read_text())
    quantization = json.loads((tmp_path / "nvfp4/hf_quant_config.json").read_text())["quantization"]
    assert config["tie_word_embeddings"] is False and quantization["exclude_modules"] == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "nvfp4")
    assert same(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again(ids).logits, model(ids).logits)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(again.config, dtype=torch.bfloat16)
    loaded = checkpoints.load(empty.to_empty(device="cpu"), tmp_path / "nvfp4", progress=False)
    assert same(loaded.lm_head.weight, model.lm_head.weight)


def test_a_folder_quantized_without_a_model_is_the_same(llama, tmp_path):
    _, folder = llama()
    load(folder).save_pretrained(tmp_path / "model")
    spec = QuantizeSpec(four_over_six=True)
    checkpoints.quantize(folder, tmp_path / "folder", spec=spec, quantize_lm_head=True, progress=False)
    with checkpoints.read(tmp_path / "model") as a, checkpoints.read(tmp_path / "folder") as b:
        assert a.entries.keys() == b.entries.keys() and "lm_head.weight" in a.entries
        assert b.config["tie_word_embeddings"] is False
        for name, entry in a.entries.items():
            assert entry.quantized == b.entries[name].quantized
            if entry.quantized:
                assert torch.equal(a.linear(name).qdata, b.linear(name).qdata)
            else:
                assert torch.equal(a.dense(name), b.dense(name))


def test_an_output_layer_that_it_does_not_take(llama):
    with pytest.raises(ValueError, match="whose inputs are a multiple of 16"):
        load(llama(hidden_size=72, num_attention_heads=2, num_key_value_heads=1)[1])
