"""Test nvfp4::decode_step on described models: every family against its own forward, token by token, on a CPU."""

import copy

import pytest
import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.ops import composite

pytest.importorskip("transformers")
from helpers.tiny_models import WINDOW, tiny_model
from transformers import StaticCache

from nvfp4_tensor.generation.architectures import Mixture
from nvfp4_tensor.generation.cpu_arguments import flatten
from nvfp4_tensor.generation.families import FAMILIES, describe

NAMES = [family.name for family in FAMILIES.values()]
LENGTH = 40


class Decoder:
    """Logits of a model by the op, one token at a time, in the static cache of a prompt that the model has read."""

    def __init__(self, model, prompt, op=torch.ops.nvfp4.decode_step):
        self.model, self.op = model, op
        self.description = describe(model)
        self.constants = flatten(self.description).constants
        self.cache = StaticCache(model.config.get_text_config(), max_cache_len=LENGTH)
        model(prompt, past_key_values=self.cache)
        self.position = prompt.shape[1]

    def hidden(self, token):
        """Return the hidden state (1, D) after a token."""
        x = self.model.model.embed_tokens(token[None, None])[0]
        if self.description.family == "Granite":
            x = x * self.description.embedding_multiplier
        at = torch.tensor([[self.position]])
        cos, sin = zip(*(each.cos_sin(x[None], at) for each in self.description.rotaries), strict=True)
        keys, values = ([getattr(each, name) for each in self.cache.layers] for name in ("keys", "values"))
        flat = ([t.flatten() for t in each] for each in (cos, sin))
        y = self.op(x, *self.constants, keys, values, *flat, self.position)
        self.position += 1
        return y

    def __call__(self, token):
        return self.model.lm_head(self.hidden(token))[0] / self.description.logits_divisor


@torch.no_grad()
def compare(model, op=torch.ops.nvfp4.decode_step, prompt_length=5, count=20):
    """Return relative errors (count,) of logits, and the caches of the op and of the model's own forward."""
    torch.manual_seed(7)
    ids = torch.randint(3, 300, (1, prompt_length + count))
    decoder = Decoder(model, ids[:, :prompt_length], op)
    own = StaticCache(model.config.get_text_config(), max_cache_len=LENGTH)
    model(ids[:, :prompt_length], past_key_values=own)
    errors = []
    for token in ids[0, prompt_length:]:
        expected = model(token[None, None], past_key_values=own).logits[0, 0].float()
        got = decoder(token).float()
        if cap := decoder.description.logits_softcap:
            got = torch.tanh(got / cap) * cap
        errors.append(float((got - expected).norm() / expected.norm()))
    return torch.tensor(errors), decoder.cache, own


def assert_alike(model, errors, ours, theirs):
    """Rounding: 1 to 2 %, as two orders of summation do. Ties of a router may fall otherwise."""
    is_mixture = isinstance(describe(model).blocks[0].feed_forward, Mixture)
    assert errors.median() < 0.02
    assert is_mixture or errors.max() < 0.04
    for ours_layer, layer in zip(ours.layers, theirs.layers, strict=True):
        for a, b in ((ours_layer.keys, layer.keys), (ours_layer.values, layer.values)):
            error = (a - b).float().norm() / b.float().norm()
            assert error < (0.2 if is_mixture else 0.03)


@pytest.mark.parametrize("family", NAMES)
def test_a_step_equals_the_models_forward(family):
    """The windows of sliding layers are full on the way."""
    assert WINDOW < 25 <= LENGTH
    model = tiny_model(family)
    assert_alike(model, *compare(model))


@torch.no_grad()
@pytest.mark.parametrize("op", [torch.ops.nvfp4.decode_step, composite.decode_step], ids=["native", "torch"])
@pytest.mark.parametrize("family", NAMES)
def test_the_first_token_is_bit_for_bit_the_models(family, op):
    """Where a token sees only itself, attention adds nothing, and all other values are rounded as in the model."""
    model = tiny_model(family)
    for layer in model.model.layers if family == "GptOss" else ():
        layer.self_attn.sinks.fill_(-1e4)  # the model rounds probabilities beside a sink, the op does not
    same = []
    for token in range(5, 15):
        own = StaticCache(model.config.get_text_config(), max_cache_len=LENGTH)
        expected = model.model(torch.tensor([[token]]), past_key_values=own).last_hidden_state[0]
        decoder = Decoder(model, torch.tensor([[token]]), op)
        decoder.cache.reset()
        decoder.position = 0
        same.append((decoder.hidden(torch.tensor(token)) == expected).float().mean())
        ours, theirs = decoder.cache.layers[-1], own.layers[-1]
        same += [(ours.keys == theirs.keys).float().mean(), (ours.values == theirs.values).float().mean()]
    assert min(same) > 0.9 and torch.stack(same).mean() > 0.99  # another exponential function may change a last bit


@pytest.mark.parametrize("family", NAMES)
def test_in_plain_torch(family):
    model = tiny_model(family)
    assert_alike(model, *compare(model, op=composite.decode_step, count=12))


@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
def test_a_prompt_longer_than_the_window(family):
    model = tiny_model(family)
    assert_alike(model, *compare(model, prompt_length=WINDOW + 3, count=4))


def test_weights_are_the_models_own():
    model = tiny_model("Qwen2")
    weights, kinds, _ = flatten(describe(model)).constants
    before = [t.data_ptr() for t in weights]
    own = [p.data_ptr() for p in model.model.norm.parameters()]
    assert own[0] == before[-1] and len(kinds) == len(model.model.layers) + 1
    other = copy.deepcopy(model)
    assert all(t.data_ptr() not in before for t in flatten(describe(other)).weights)


def quantize_activations(model):
    quantize_(model.model, NVFP4Config())


def quantize_linears(model):
    quantize_(model.model, NVFP4WeightOnlyConfig(experts=False))


def change_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 1.0


def make_dense(model):
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().dequantize())


@pytest.mark.parametrize("family, sizes, change, message", [
    ("Llama", {}, make_dense, "model.layers.1.mlp.down_proj is dense: call quantize_"),
    ("Llama", {"quantized": False}, quantize_activations, r"q_proj quantizes its activations \(W4A4\)"),
    ("Llama", {}, torch.nn.Module.half, r"is torch.float16 on cpu: decode_natively needs bfloat16"),
    ("Llama", {}, change_eps, "equal norms in a layer, and eps and style of model.layers.1.input_layernorm"),
    ("Llama", {"head_dim": 24}, lambda m: None, "head_dim is 24"),
    ("Mixtral", {"intermediate_size": 96}, lambda m: None, "192 rows per expert: .* a multiple of 128"),
    ("Mixtral", {"quantized": False}, quantize_linears, r"experts.gate_up_proj is dense: .*experts=True"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_what_does_not_fit_is_named(family, sizes, change, message):
    model = tiny_model(family, **sizes)
    change(model)
    with pytest.raises(ValueError, match=message):
        flatten(describe(model))
