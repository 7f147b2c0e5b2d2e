"""Test that a CPU's native step follows every constant and tensor of a model that its family may change."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from helpers.texts import relative_error, written
from helpers.tiny_models import MIXTURES, tiny_model

from nvfp4_tensor.generation.step import decode_natively

PROMPT = torch.arange(3, 11)[None]


def set_attribute(path, value):
    def change(model):
        holder, name = path.rsplit(".", 1)
        setattr(model.get_submodule(holder), name, value)

    change.__name__ = f"{path} = {value}"
    return change


def write(path, factor=-1.0):
    @torch.no_grad()
    def change(model):
        tensor = model.get_parameter(path)
        tensor.mul_(factor)

    change.__name__ = f"write {path}"
    return change


def replace(path):
    def change(model):
        parameter = model.get_parameter(path)
        parameter.data = torch.linspace(-1, 1, parameter.numel()).view_as(parameter).to(parameter.dtype)

    change.__name__ = f"replace {path}"
    return change


def remove_bias(model):
    model.model.layers[1].self_attn.q_proj.bias = None


def remove_sinks(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)


def scale_frequencies(model):
    model.model.rotary_emb.sliding_attention_inv_freq.data.mul_(3)


LAYER = "model.layers.1"
CHANGES = [
    ("Qwen2", replace(f"{LAYER}.self_attn.k_proj.bias")), ("Qwen2", write(f"{LAYER}.self_attn.q_proj.bias")),
    ("Qwen2", remove_bias),
    ("Qwen3", replace(f"{LAYER}.self_attn.q_norm.weight")), ("Qwen3", write(f"{LAYER}.self_attn.k_norm.weight")),
    ("Gemma2", set_attribute(f"{LAYER}.self_attn.attn_logit_softcapping", 0.5)),
    ("Gemma2", write(f"{LAYER}.post_feedforward_layernorm.weight", 3.0)),
    ("Gemma3", scale_frequencies), ("Gemma3", set_attribute(f"{LAYER}.self_attn.scaling", 3.0)),
    ("Phi3", write(f"{LAYER}.mlp.gate_up_proj.weight")), ("Phi3", write(f"{LAYER}.self_attn.qkv_proj.weight")),
    ("SmolLM3", set_attribute(f"{LAYER}.self_attn.use_rope", 0)),
    ("Olmo2", replace(f"{LAYER}.self_attn.q_norm.weight")),
    ("Olmo2", write(f"{LAYER}.post_attention_layernorm.weight")),
    ("Granite", set_attribute(f"{LAYER}.residual_multiplier", 2.0)),
    ("Granite", set_attribute("model.embedding_multiplier", 1.0)),
    ("Mixtral", replace(f"{LAYER}.mlp.gate.weight")), ("Mixtral", write(f"{LAYER}.mlp.experts.down_proj")),
    ("Qwen3Moe", set_attribute(f"{LAYER}.mlp.gate.top_k", 1)),
    ("Qwen3Moe", set_attribute(f"{LAYER}.mlp.gate.norm_topk_prob", True)),
    ("GptOss", write(f"{LAYER}.mlp.experts.gate_up_proj_bias")), ("GptOss", remove_sinks),
    ("GptOss", set_attribute(f"{LAYER}.mlp.experts.limit", 0.1)),
    ("GptOss", set_attribute(f"{LAYER}.mlp.experts.alpha", 10.0)),
]  # fmt: skip


@pytest.mark.parametrize("family, change", CHANGES, ids=[f"{family}: {change.__name__}" for family, change in CHANGES])
def test_a_changed_model(family, change, monkeypatch):
    model = decode_natively(tiny_model(family))
    before = written(model, PROMPT, 5)[1]
    change(model)
    seen, op = [], torch.ops.nvfp4.decode_step
    monkeypatch.setattr(torch.ops.nvfp4, "decode_step", lambda *args: seen.append(args[8]) or op(*args))
    tokens, logits = written(model, PROMPT, 5)
    assert seen == list(range(8, 12))
    expected = written(decode_natively(copy.deepcopy(model), False), PROMPT, 5, along=tokens)[1]
    bound = 0.1 if family in MIXTURES else 0.03
    assert relative_error(logits, expected)[:, 1:].median() < bound  # the prompt gives the first
    assert not torch.equal(logits, before)
