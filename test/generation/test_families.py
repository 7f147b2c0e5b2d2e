"""Test descriptions of families: a step in plain operators, and the CPU's op, against the model's own forward."""

import pytest
import torch

from nvfp4_tensor.ops.schemas import plain

pytest.importorskip("transformers")
from helpers.texts import relative_error
from helpers.tiny_models import WINDOW, tiny_model
from transformers import StaticCache

from nvfp4_tensor.generation.families import FAMILIES, describe
from nvfp4_tensor.generation.fused_layers import flatten
from nvfp4_tensor.generation.ring import DenseBuffers, Place
from nvfp4_tensor.generation.token_step import TokenStep

VARIANTS = [
    *((family.name, {}) for family in FAMILIES.values()),
    ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "hidden_act": "gelu_pytorch_tanh"}),
    ("Llama", {"attention_bias": False, "mlp_bias": False, "hidden_size": 96}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "rope_theta": 5000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    ("Qwen3Moe", {"mlp_only_layers": [0, 2], "norm_topk_prob": True}),
]  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family, changes", VARIANTS, ids=str)
def test_a_step_equals_the_models_forward(family, changes):
    """In float32, where rounding is no excuse. Windows and text are such that windows leave tokens out."""
    model, ids = tiny_model(family, torch.float32, quantized=False, **changes), torch.randint(3, 300, (2, WINDOW + 4))
    description = describe(model)
    step, kinds = TokenStep(description), [block.kinds for block in description.blocks]
    shapes = [(2, each["kv_heads"], ids.shape[1], each["dim"]) for each in kinds]
    buffers = [DenseBuffers(torch.zeros(shape), torch.zeros(shape)) for shape in shapes]
    for starts in (None, torch.tensor([0, 3])):
        logits = []
        for i, tokens in enumerate(ids.unbind(1)):
            at = torch.tensor([[i]]) if starts is None else (i - starts).clamp(min=0)[:, None]
            rotations = [tuple(t[:, 0] for t in each.cos_sin(buffers[0].keys, at)) for each in description.rotaries]
            logits.append(step(tokens, Place(torch.tensor([i]), starts), rotations, buffers))
        for row, start in enumerate((0, 0) if starts is None else starts):
            expected = model(ids[row : row + 1, start:], use_cache=False).logits[0]
            assert relative_error(torch.stack(logits, 1)[row, start:], expected).max() < 5e-6


@torch.no_grad()
@pytest.mark.parametrize("family", [family.name for family in FAMILIES.values()])
def test_the_first_token_is_bit_for_bit_the_models(family):
    """Where a token sees only itself, attention adds nothing, and all other values are rounded as in the model."""
    model = tiny_model(family)
    for layer in model.model.layers if family == "GptOss" else ():
        layer.self_attn.sinks.fill_(-1e4)  # the model rounds probabilities beside a sink, the op does not
    description, same = describe(model), []
    constants = flatten(description)
    for token in torch.arange(5, 10).view(-1, 1, 1):
        own = StaticCache(model.config.get_text_config(), max_cache_len=16)
        expected = model.model(token, past_key_values=own).last_hidden_state[0]
        x = model.model.embed_tokens(token)[0] * (12.0 if family == "Granite" else 1.0)
        turns = [each.cos_sin(x[None], torch.tensor([[0]])) for each in description.rotaries]
        cos, sin = ([t.flatten() for t in each] for each in zip(*turns, strict=True))
        for op in (torch.ops.nvfp4.decode_step, plain.decode_step):
            caches = [[torch.zeros_like(getattr(each, name)) for each in own.layers] for name in ("keys", "values")]
            got = op(x, *constants, *caches, cos, sin, 0)
            pairs = (got, expected), (caches[0][-1], own.layers[-1].keys), (caches[1][-1], own.layers[-1].values)
            same += [(a == b).float().mean() for a, b in pairs]
    assert min(same) > 0.9 and torch.stack(same).mean() > 0.99  # another exponential function may change a last bit
