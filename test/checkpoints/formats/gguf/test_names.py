"""Names, settings and orders of rows in GGUF, against transformers' models."""

import pytest
import torch
from helpers.checkpoints import TINY, same_parts, tiny_tensors
from helpers.checkpoints import write_gguf as write

from nvfp4_tensor import quantize
from nvfp4_tensor.checkpoints import parts_of

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "mistral"])
def test_other_architectures(tmp_path, model_type):
    transformers = pytest.importorskip("transformers")
    config = {**TINY, "model_type": model_type, "sliding_window": None}
    tensors = tiny_tensors(config)
    ones = {n: quantize(t, amax=2688.0) if "_proj.weight" in n else t for n, t in tensors.items()}
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) == (model_type == "qwen2")
    with write(tmp_path / "a.gguf", ones, config) as checkpoint:
        read = checkpoint.config
        assert read["model_type"] == {"mistral": "llama"}.get(model_type, model_type)
        for name, want in ones.items():
            if checkpoint.entries[name].quantized:
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:
                assert torch.equal(checkpoint.dense(name).to(want.dtype), want), name
    transformers.AutoConfig.for_model(**{k: v for k, v in read.items() if k != "architectures"})


def test_tied_output_is_left_out(tmp_path, tensors):
    with write(tmp_path / "a.gguf", tensors, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in checkpoint.entries
    head = {**tensors, "lm_head.weight": quantize(tensors["lm_head.weight"])}
    with write(tmp_path / "b.gguf", head, {**TINY, "tie_word_embeddings": True}) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False  # an NVFP4 output layer of its own
        assert same_parts(checkpoint.linear("lm_head.weight"), parts_of(head["lm_head.weight"]))


@pytest.mark.parametrize("factor, low, high, original", [(32.0, 1.0, 4.0, 8192), (8.0, 2.0, 8.0, 64), (3.7, 1, 32, 9)])
def test_rope_scaling_of_llama_3(tmp_path, tensors, factor, low, high, original):
    transformers = pytest.importorskip("transformers")
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = {**TINY, "rope_theta": 500000.0, "rope_scaling": rope}
    with write(tmp_path / "a.gguf", tensors, config) as checkpoint:
        factors = checkpoint._plain("rope_freqs.weight")
        assert checkpoint.config["rope_scaling"] == rope
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k != "model_type"})
        )
    head_dim = TINY["hidden_size"] // TINY["num_attention_heads"]
    plain = 500000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    assert torch.allclose(model.model.rotary_emb.inv_freq.double(), plain / factors.double(), rtol=1e-6)
    assert original != 8192 or (factors.max() == 32.0 and factors.min() == 1.0)


@pytest.mark.parametrize("heads", [0, 2, 3, 8])
def test_rows_that_are_not_those_of_the_heads_raise_an_error(tmp_path, heads):
    config = TINY | {"num_attention_heads": heads, "head_dim": 32}
    with pytest.raises(
        ValueError, match=rf"q_proj\.weight has 128 rows, but the configuration has {heads} heads of 32"
    ):
        write(tmp_path / "a.gguf", tiny_tensors(), config)
    assert not list(tmp_path.iterdir())
