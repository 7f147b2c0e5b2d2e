"""What GGUF refuses: settings that llama.cpp computes otherwise, and tensors that it does not have or store."""

import functools

import pytest
import torch
from helpers.checkpoints import DOWN, EXPERTS, TINY, InMemory, Q, expert_tensors
from helpers.checkpoints import write_gguf as write
from helpers.tiny_models import tiny_model

from nvfp4_tensor import quantize
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.21")


@functools.cache
def config_of(family):
    """The settings of a tiny model, which llama.cpp supports."""
    if family == "GPT2":
        return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4).to_dict()
    changes = {"query_pre_attn_scalar": 32, "layer_types": None} if "Gemma" in family else {}
    changes |= {"num_hidden_layers": 6} if family == "Gemma3" else {"mlp_bias": False} if family == "Llama" else {}
    return tiny_model(family, quantized=False, **changes).config.to_dict()


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 3, "original_max_position_embeddings": 9}
SETTINGS = [
    ("Llama", {"model_type": "opt"}, "qwen2, qwen3, mixtral, qwen3_moe, .*, not of 'opt'"),
    ("Llama", {"hidden_act": "gelu"}, "hidden_act silu, not 'gelu'"),
    ("Llama", {"rope_parameters": YARN}, "type 'yarn' is not supported in GGUF for llama: expected default or llama3"),
    ("Llama", {"vocab_size": None}, "config.json has no vocab_size, which llama.cpp needs"),
    ("Mixtral", {"num_experts_per_tok": None}, "no num_experts_per_tok"),
    ("Qwen3Moe", {"norm_topk_prob": False}, "qwen3moe with norm_topk_prob True, not False"),
    ("Qwen3Moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}, r"mlp_only_layers \[\], not \[0\]"),
    ("Gemma2", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar 32, not 64"),
    ("Gemma2", {"layer_types": ["full_attention"] * 4}, "with layer_types"),
    ("Gemma2", {"final_logit_softcapping": None}, "has no final_logit_softcapping, which llama.cpp needs for gemma2"),
    ("Gemma2", {"hidden_activation": "silu"}, "hidden_activation gelu_pytorch_tanh, not 'silu'"),
    ("Gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings True, not False"),
    ("Gemma2", {"head_dim": None}, "config.json has no head_dim, which llama.cpp needs for gemma2"),
    ("Gemma3", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 32, not 256"),
    ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention False"),
    ("Gemma3", {"sliding_window": None}, "config.json has no sliding_window, which llama.cpp needs for gemma3"),
    ("Phi3", {"head_dim": 64}, "head_dim 32, not 64"),
    ("Phi3", {"hidden_act": "gelu"}, "hidden_act silu, not 'gelu'"),
    ("Phi3", {"rope_parameters": YARN}, "rope scaling of type 'yarn'.*expected default or longrope"),
    ("Phi3", {"rope_parameters": LONGROPE}, "has 3 values of long_factor, expected 8"),
    ("SmolLM3", {"no_rope_layers": [1, 1, 1, 1]}, r"no_rope_layers \[1, 1, 1, 0\]"),
    ("SmolLM3", {"no_rope_layers": None, "no_rope_layer_interval": 2}, "no_rope_layer_interval 4, not 2"),
    ("SmolLM3", {"use_sliding_window": True}, "use_sliding_window False"),
    ("SmolLM3", {"rope_theta": None, "rope_parameters": None}, "has no rope_theta, which llama.cpp needs for smollm3"),
    ("Olmo2", {"head_dim": 16}, "head_dim 32, not 16"),
    ("Olmo2", {"tie_word_embeddings": True}, "tie_word_embeddings False"),
    ("Granite", {"residual_multiplier": 0}, "takes residual_multiplier 0 of granite for a missing one"),
    ("Granite", {"head_dim": 16}, "head_dim 32, not 16"),
    ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit 7.0, not 5.0"),
    ("GptOss", {"layer_types": ["full_attention"] * 4}, "with layer_types"),
    ("GptOss", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "beta_fast 32.0, not 16.0"),
    ("GPT2", {"activation_function": "relu"}, "llama.cpp supports gpt2 with hidden_act gelu_new, not 'relu'"),
    ("GPT2", {"scale_attn_weights": False}, "scale_attn_weights True, not False"),
    ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx False, not True"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "message"), SETTINGS)
def test_settings_that_llama_cpp_computes_otherwise(tmp_path, family, changes, message):
    with pytest.raises(ValueError, match=message):
        FORMAT.write(InMemory({}, config_of(family) | changes), tmp_path / "a.gguf", progress=False, tokenizer=None)
    assert not list(tmp_path.iterdir())


def test_tensors_that_cannot_be_written(tmp_path, tensors):
    nan = quantize(torch.full((192, 128), float("nan")))
    rows = torch.cat([quantize(torch.randn(64, 128)), quantize(torch.randn(64, 128) * 9)])
    layer, biased = "model.layers.0.", {**TINY, "model_type": "smollm3"}
    cases = [
        (TINY, {DOWN: quantize(torch.randn(128, 96))}, {}, f"{DOWN} has 96 columns.* multiple of 64"),
        (TINY, {f"{layer}mlp.up_proj.weight": nan}, {}, "1536 NaN blocks"),
        (TINY, {Q: rows}, {}, r"per-tensor scales \(128,\)"),
        (TINY, {f"{layer}extra.weight": torch.ones(2, 2)}, {}, "extra.weight is not a tensor of llama.cpp's llama"),
        (TINY, {f"{layer}self_attn.q_norm.weight": torch.ones(32)}, {}, "q_norm.weight is not a tensor of llama.cpp"),
        (TINY, {f"{layer}mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, {}, "not a tensor of llama.cpp"),
        (biased, {f"{layer}self_attn.o_proj.bias": torch.ones(128)}, {"lossy": True}, "o_proj.bias is not a tensor"),
        (TINY, {"model.norm.weight": torch.ones(128, dtype=torch.int64)}, {}, "is torch.int64"),
        ({**TINY, "model_type": "qwen2"}, {}, {}, "qwen2's feed-forward weights, and .* or pass lossy=True"),
        (TINY, {f"{layer}mlp.up_proj.bias": torch.ones(192)}, {}, "with a bias: leave .*up_proj.weight dense"),
        ({**TINY, "num_attention_heads": 3}, {}, {}, "q_proj.weight has 128 rows, but the configuration has 3 heads"),
        ({**TINY, "num_attention_heads": 0}, {}, {}, "q_proj.weight has 128 rows, but the configuration has 0 heads"),
        ({}, {}, {}, "GGUF needs a transformers configuration, but the model has none"),
        (TINY, {}, {"dense": "Q3_K"}, "dense: expected one of F32, F16"),
        (TINY, {}, {"shard": 3}, "no option shard"),
    ]  # fmt: skip
    for config, changes, options, message in cases:
        config = {"head_dim": 32, "rope_theta": 1e4, **config} if config else {}
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a.gguf", {**tensors, **changes}, config, **options)
        assert list(tmp_path.iterdir()) == [], message


def test_experts_that_are_not_alike(tmp_path):
    tensors = expert_tensors("qwen3_moe")
    first, last = (f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in (0, 3))
    for change, message in [
        (None, r"blk\.1\.ffn_up_exps\.weight needs experts 0 to 3"),
        (tensors[last].dequantize(), f"{last} differ from {first}"),
        (quantize(torch.randn(64, 128)), f"{last} differ from {first}"),
    ]:
        changed = {name: t for name, t in (tensors | {last: change}).items() if t is not None}
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "a.gguf", changed, EXPERTS["qwen3_moe"])
        assert list(tmp_path.iterdir()) == [], message
