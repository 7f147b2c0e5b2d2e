"""Test descriptions of architectures: a step in plain operators against the model's own forward, token by token."""

import pytest
import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

pytest.importorskip("transformers")
from helpers.texts import relative_error
from helpers.tiny_models import WINDOW, tiny_model
from transformers import DynamicCache

from nvfp4_tensor.generation.architectures import Mixture
from nvfp4_tensor.generation.families import FAMILIES, describe, family_of
from nvfp4_tensor.generation.token_step import TokenStep

NAMES = [family.name for family in FAMILIES.values()]
TOKENS = 24


@torch.no_grad()
def logits_of_steps(model, ids):
    """Return the logits (B, T, V) of ids (B, T), decoded one token at a time by a step."""
    description = describe(model)
    step = TokenStep(description)
    batch, length = ids.shape
    attentions = [block.attention for block in description.blocks]
    shapes = [(batch, each.kv_heads, length, each.head_dim) for each in attentions]
    keys, values = ([torch.zeros(shape, dtype=model.dtype, device=ids.device) for shape in shapes] for _ in range(2))
    logits = []
    for i in range(length):
        position = torch.tensor([i], device=ids.device)
        rotations = [tuple(t[0] for t in each.cos_sin(keys[0], position[None])) for each in description.rotaries]
        logits.append(step(ids[:, i], position, rotations, keys, values))
    return torch.stack(logits, 1).float()


@torch.no_grad()
def errors(model, batch=2, token_by_token=False):
    """Return the relative errors (B, T) of the step's logits, and how far its choices are below the model's largest.

    That distance (B, T) is in standard deviations of the logits: 0 where the two choose the same token.
    """
    ids = torch.randint(3, 300, (batch, TOKENS), device=model.device)
    if token_by_token:
        cache = DynamicCache(config=model.config)
        each = [model(token, past_key_values=cache).logits for token in ids.split(1, 1)]
        expected = torch.cat(each, 1).float()
    else:
        expected = model(ids, use_cache=False).logits.float()
    got = logits_of_steps(model, ids)
    chosen = expected.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
    return relative_error(got, expected), (expected.amax(-1) - chosen) / expected.std(-1)


@pytest.mark.parametrize("family", NAMES)
def test_a_step_equals_the_models_forward(family):
    """In float32, where rounding is no excuse. Windows and text are such that windows leave tokens out."""
    assert TOKENS > WINDOW
    error, gap = errors(tiny_model(family, torch.float32, quantized=False))
    assert error.max() < 5e-6 and gap.max() < 1e-4


@pytest.mark.parametrize("family", NAMES)
def test_in_bfloat16_with_nvfp4_weights(family):
    """Logits differ by rounding: 1 to 2 %, as two orders of summation do. Ties of a router may fall otherwise."""
    model = tiny_model(family)
    error, gap = errors(model)
    assert error.median() < 0.02 and gap.median() == 0
    if not isinstance(describe(model).blocks[0].feed_forward, Mixture):
        assert error.max() < 0.03


@pytest.mark.parametrize("changes", [
    {"tie_word_embeddings": True}, {"attention_bias": False, "mlp_bias": False, "hidden_size": 96},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5000.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16}},
    {"num_key_value_heads": 4}, {"hidden_act": "gelu_pytorch_tanh"},
], ids=str)  # fmt: skip
def test_variants_of_llama(changes):
    error, gap = errors(tiny_model("Llama", torch.float32, quantized=False, **changes))
    assert error.max() < 5e-6 and gap.max() < 1e-4


def test_experts_between_dense_layers():
    model = tiny_model("Qwen3Moe", torch.float32, quantized=False, mlp_only_layers=[0, 2], norm_topk_prob=True)
    kinds = [isinstance(block.feed_forward, Mixture) for block in describe(model).blocks]
    assert kinds == [False, True, False, True]
    assert errors(model)[0].max() < 5e-6


def test_halves_of_a_fused_weight():
    """Phi-3's gate and up in one weight are two views, where tiles of scales allow it."""
    error, gap = errors(tiny_model("Phi3", intermediate_size=256))
    assert error.max() < 0.03 and gap.max() < 0.2


def test_an_nvfp4_output_layer():
    model = tiny_model("Qwen3")
    quantize_(model.lm_head, NVFP4WeightOnlyConfig())
    error, gap = errors(model)
    assert error.max() < 0.03 and gap.max() < 0.2


def test_quantized_activations():
    """W4A4 weights take torch's linear. After attention, another last bit of bfloat16 may change codes."""
    model = tiny_model("Qwen3", quantized=False)
    quantize_(model.model, NVFP4Config())
    error, _ = errors(model, token_by_token=True)
    assert error[:, 0].max() < 0.02 and error.median() < 0.4


def test_what_a_description_says():
    gemma = describe(tiny_model("Gemma3"))
    assert [block.attention.window for block in gemma.blocks] == [WINDOW, 0, WINDOW, 0]
    assert [each.layer_type for each in gemma.rotaries] == ["full_attention", "sliding_attention"]
    assert [block.attention.rotary for block in gemma.blocks] == [1, 0, 1, 0]
    assert gemma.embedding_multiplier == 11.3125 and gemma.norm.offset == 1.0
    smollm = describe(tiny_model("SmolLM3"))
    assert [block.attention.rotary for block in smollm.blocks] == [0, 0, 0, None]
    phi = describe(tiny_model("Phi3"))
    assert phi.rotaries[0].dim == 16 and [len(block.attention.qkv) for block in phi.blocks] == [1] * 4
    inner = describe(tiny_model("Granite").model)
    assert inner.head is None and inner.blocks[0].residual_multiplier == 0.22


def replace_mlp(model):
    model.model.layers[1].mlp = torch.nn.Identity()


def replace_embedding(model):
    model.model.embed_tokens = torch.nn.Sequential()


def other_index(model):
    model.model.layers[1].self_attn.layer_idx = 3


def drop_out(model):
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()


def see_both_ways(model):
    model.model.layers[2].self_attn.is_causal = False


@pytest.mark.parametrize("family, change, message", [
    ("Llama", replace_mlp, "layers.1.mlp is a Identity, not transformers' own LlamaMLP"),
    ("Qwen3", replace_embedding, "embed_tokens is a Sequential"),
    ("Gemma2", other_index, "layers.1.self_attn has layer_idx 3"),
    ("Phi3", drop_out, "attention dropout in training mode"),
    ("Mistral", see_both_ways, "layers.2.self_attn is not causal"),
    ("Gemma2", lambda model: model.model.config.__setattr__("_attn_implementation_internal", "sdpa"), "soft cap"),
    ("Llama", lambda model: model.model.layers[0].mlp.__setattr__("act_fn", torch.nn.ReLU()), "activations silu"),
])  # fmt: skip
def test_what_does_not_fit_is_named(family, change, message):
    model = tiny_model(family)
    change(model)
    with pytest.raises(ValueError, match=message):
        describe(model)


def test_other_models_raise():
    assert family_of(torch.nn.Linear(2, 2)) is None
    with pytest.raises(TypeError, match="Linear is none of the described models of transformers: Llama, Mistral"):
        describe(torch.nn.Linear(2, 2))
