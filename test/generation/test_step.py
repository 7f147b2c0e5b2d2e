"""Test decode_natively: generated text, fallbacks to transformers, errors. Needs no integration of transformers."""

import copy
import pickle
import warnings

import pytest
import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

transformers = pytest.importorskip("transformers")
from helpers.texts import relative_error, written  # noqa: E402
from helpers.tiny_models import MIXTURES, tiny_model  # noqa: E402

from nvfp4_tensor.generation.cache import nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.families import FAMILIES  # noqa: E402
from nvfp4_tensor.generation.step import NativeDecoder, decode_natively  # noqa: E402

PROMPT = torch.arange(3, 11)[None]


def tiny(dtype=torch.bfloat16, quantized=True, kind="Llama", **changes):
    sizes = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **heads, "tie_word_embeddings": True, **changes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    for parameter in model.parameters():  # as large as those of a trained model: attention is not flat
        torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5) if parameter.dim() > 1 else None
    if quantized:
        quantize_(model.model, NVFP4WeightOnlyConfig())
    model.generation_config.eos_token_id = None
    return model


def logits_of(model, count=20, prompt=PROMPT, **arguments):
    """Return (tokens, logits (count, V)) of generate."""
    torch.manual_seed(0)
    tokens, logits = written(model, prompt, count, **arguments)
    return tokens, logits[0]


@pytest.fixture
def steps(monkeypatch):
    """Collect the positions of tokens that the op decodes."""
    seen, op = [], torch.ops.nvfp4.decode_step
    monkeypatch.setattr(torch.ops.nvfp4, "decode_step", lambda *args: seen.append(args[8]) or op(*args))
    return seen


def assert_close(logits, expected):
    assert relative_error(logits, expected).max() < 0.04


@pytest.mark.parametrize("kind, changes", [
    ("Llama", {}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0},
               "max_position_embeddings": 16}),
    ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-2}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("Mistral", {"sliding_window": None}),
], ids=str)  # fmt: skip
def test_writes_what_the_model_writes(kind, changes, steps):
    model = tiny(kind=kind, **changes)
    own = copy.deepcopy(model)
    tokens, logits = logits_of(decode_natively(model))
    assert steps == list(range(8, 27))  # of 20 tokens the prompt gives the first
    assert_close(logits, logits_of(own, cache_implementation="static", along=tokens)[1])
    assert len(steps) == 19


FAMILY_NAMES = [family.name for family in FAMILIES.values()]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("cache", [None, "static"])
def test_every_family(family, cache, steps):
    """generate by the op against generate by the model's own forward along the same text."""
    model = tiny_model(family)
    own = copy.deepcopy(model)
    tokens, logits = logits_of(decode_natively(model), 12, cache_implementation=cache)
    assert steps == list(range(8, 19))
    error = relative_error(logits, logits_of(own, 12, cache_implementation=cache, along=tokens)[1])
    assert error.median() < 0.1 if family in MIXTURES else error.max() < 0.04


def test_what_it_leaves_to_transformers(steps):
    model = decode_natively(tiny())
    model(PROMPT)
    logits_of(model, cache_implementation="dynamic")
    logits_of(model, prompt=PROMPT.expand(2, -1))
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    logits_of(model, attention_mask=mask)
    logits_of(model, output_hidden_states=True)
    assert not steps


def test_a_mixture_without_a_mixture_in_any_layer(steps):
    """Its outputs have router logits all the same, which the output layer's forward reads."""
    model = tiny_model("Qwen3Moe", mlp_only_layers=[0, 1, 2, 3])
    own = copy.deepcopy(model)
    tokens, logits = logits_of(decode_natively(model), 6)
    assert len(steps) == 5
    assert_close(logits, logits_of(own, 6, along=tokens)[1])


def test_the_tokenizer_of_stop_strings(steps):
    """generate passes it to the model at each token."""
    model = decode_natively(tiny())
    tokens, logits = logits_of(model, 6)
    again = logits_of(model, 6, tokenizer=object())
    assert torch.equal(again[0], tokens) and torch.equal(again[1], logits) and steps == [*range(8, 13)] * 2


@pytest.mark.smoke
def test_a_padded_prompt_gives_what_it_gave(steps):
    model, mask = tiny(), torch.ones_like(PROMPT)
    mask[0, :3] = 0
    tokens, expected = logits_of(model, attention_mask=mask)
    logits = logits_of(decode_natively(model), attention_mask=mask, along=tokens)[1]
    assert relative_error(logits, expected).max() < 0.01  # the output layer has a kernel of its own
    assert not steps


def test_weights_stay_where_they_are():
    model = tiny()
    before = dict(model.named_parameters())
    decode_natively(model)
    logits_of(model)
    after = dict(model.named_parameters())
    assert len(after) == len(before) and all(after[name] is weight for name, weight in before.items())


def test_undone(steps):
    model = tiny()
    before = [set(vars(each)) for each in (model, model.model, model.lm_head)]
    decode_natively(decode_natively(model))
    assert isinstance(model.model.forward, NativeDecoder)
    decode_natively(model, False)
    assert [set(vars(each)) for each in (model, model.model, model.lm_head)] == before
    logits_of(model)
    assert not steps


def compare(model, steps, count=8, **arguments):
    """Compare generation with the model's own forward; return the number of tokens that the op decoded."""
    steps.clear()
    tokens, logits = logits_of(model, count, **arguments)
    decoded = len(steps)
    own = decode_natively(copy.deepcopy(model), False)
    assert_close(logits, logits_of(own, count, along=tokens, **arguments)[1])
    return decoded


def layer_of(model, i=1):
    return model.model.layers[i]


def add_lora(model):
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(
        peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False), model
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)


def add_bias(model):
    layer_of(model).mlp.up_proj.bias = torch.nn.Parameter(torch.randn(160).bfloat16())


def replace_module(model):
    layer_of(model).mlp.up_proj = torch.nn.Linear(96, 160, bias=False).bfloat16()


def replace_weight(model):
    layer_of(model).self_attn.o_proj.weight = doubled(layer_of(model).self_attn.o_proj)


def doubled(linear):
    weight = linear.weight.detach()
    return torch.nn.Parameter(weight._replace(per_tensor_scale=weight.per_tensor_scale * 2), requires_grad=False)


def swap_weight(model):
    linear = layer_of(model).mlp.down_proj
    torch.utils.swap_tensors(linear.weight, doubled(linear))


def make_dense(model):
    linear = layer_of(model).mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().dequantize() * 2)


@torch.no_grad()
def write_weight(model):
    layer_of(model).self_attn.q_proj.weight.mul_(-1)


def set_scale(model):
    weight = layer_of(model).self_attn.v_proj.weight
    weight.per_tensor_scale = weight.per_tensor_scale * 3


@torch.no_grad()
def write_norm(model):
    layer_of(model).input_layernorm.weight.mul_(torch.linspace(-2, 2, 96).bfloat16())


def set_norm(model):
    model.model.norm.weight.data = torch.linspace(-2, 2, 96).bfloat16()


def set_eps(model):
    layer_of(model).post_attention_layernorm.variance_epsilon = 3.0


def set_rotation(model):
    model.model.rotary_emb.inv_freq.data.mul_(3)


def set_rotation_scaling(model):
    model.model.rotary_emb.attention_scaling = 1.5


def hook(model):
    layer_of(model).mlp.register_forward_hook(lambda module, args, y: y * 2)


def pre_hook(model):
    layer_of(model).self_attn.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def set_forward(model):
    layer_of(model).mlp.act_fn.forward = torch.tanh


def set_activation(model):
    layer_of(model).mlp.act_fn = torch.nn.Tanh()


def drop_layer(model):
    model.config.num_hidden_layers = 2


def drop_first_layer(model):
    del model.model.layers[0]
    model.config.num_hidden_layers = 2
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i


def swap_layers(model):
    layers = model.model.layers
    layers[0].mlp, layers[1].mlp = layers[1].mlp, layers[0].mlp


def other(model):
    """Return a model of the same shapes with other weights."""
    model = decode_natively(copy.deepcopy(model), False)
    set_norm(model), write_weight(model), set_rotation(model)
    return model


def replace_layers(model):
    model.model.layers = other(model).model.layers


def reverse_list(model):
    model.model.layers = torch.nn.ModuleList(reversed(model.model.layers))
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i


def replace_last_norm(model):
    model.model.norm = other(model).model.norm


def replace_rotary(model):
    model.model.rotary_emb = other(model).model.rotary_emb


def replace_inner(model):
    model.model = other(model).model


def turn_data(model):
    """The same memory by other strides."""
    norm = model.model.norm.weight
    norm.data = torch.linspace(-2, 2, 192).bfloat16()[:96]
    logits_of(model, 2)
    norm.data = norm.data.as_strided((96,), (2,))


def patch_norm(model):
    model.model.norm.forward = lambda x: x * 2


def set_attention(model):
    def flat(module, query, key, value, mask, **others):
        heads = value.mean(2, keepdim=True).repeat_interleave(module.num_key_value_groups, 1)
        return heads.transpose(1, 2).expand(-1, query.shape[2], -1, -1), None

    transformers.AttentionInterface.register("flat", flat)
    model.set_attn_implementation("flat")


def set_scaling(model):
    layer_of(model).self_attn.scaling = 1.0


def ask_for_hidden_states(model):
    model.config.output_hidden_states = True


CHANGES = {  # by whether tokens are still decoded natively
    True: [add_bias, set_scaling, replace_weight, swap_weight, write_weight, set_scale, write_norm, set_norm,
           set_rotation, set_rotation_scaling, drop_first_layer, swap_layers, replace_layers, reverse_list,
           replace_last_norm, replace_rotary, replace_inner],
    False: [turn_data, patch_norm, make_dense, add_lora, replace_module, set_eps, hook, pre_hook, set_forward,
            set_activation, drop_layer, set_attention, ask_for_hidden_states, torch.nn.Module.half,
            torch.nn.Module.float],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
@pytest.mark.parametrize("stays, change", [(stays, each) for stays, changes in CHANGES.items() for each in changes],
                         ids=lambda v: getattr(v, "__name__", str(v)))  # fmt: skip
def test_a_changed_model(stays, change, steps):
    model = decode_natively(tiny())
    before = logits_of(model, 8)[1]
    assert len(steps) == 7
    change(model)
    assert not torch.equal(logits_of(model, 8)[1], before) or change is ask_for_hidden_states
    assert compare(model, steps) == (7 if stays else 0)


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
@pytest.mark.parametrize("seed", range(4))
def test_changes_in_a_row(seed, steps):
    """After each of several changes, generation equals that of the model's own forward."""
    model, chance = decode_natively(tiny()), torch.Generator().manual_seed(seed)
    changes = [*CHANGES[True][:10], set_eps, hook, add_lora]
    for i in torch.randperm(len(changes), generator=chance).tolist():
        logits_of(model, 2)
        changes[i](model)
        compare(model, steps, 4)


def test_a_change_is_named_once_and_may_be_undone(steps):
    model = decode_natively(tiny())
    handle = layer_of(model).mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="not natively: model.layers.1.mlp has hooks"):
        logits_of(model, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits_of(model, 4)
    assert not steps
    handle.remove()
    logits_of(model, 4)
    assert len(steps) == 3


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)),
], ids=["deepcopy", "pickle"])  # fmt: skip
def test_a_copy_has_its_own_weights(copied, steps):
    model = decode_natively(tiny())
    expected = logits_of(model, 6)[1]
    steps.clear()
    other = copied(model)
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter.zero_()
    assert torch.equal(logits_of(other, 6)[1], expected) and len(steps) == 5
    set_norm(other)
    write_weight(other)
    assert compare(other, steps) == 7


@pytest.mark.parametrize("arguments", [
    {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2},
    {"do_sample": True, "num_return_sequences": 2}, {"output_hidden_states": True}, {"output_attentions": True},
    {"cache_implementation": "dynamic"}, {"use_cache": False},
], ids=str)  # fmt: skip
def test_other_ways_to_generate(arguments, steps):
    model = tiny()
    model.set_attn_implementation("eager")

    def write():
        torch.manual_seed(3)
        return model.generate(PROMPT, **{"max_new_tokens": 8, "do_sample": False, **arguments})

    expected = write()
    decode_natively(model)
    assert torch.equal(write(), expected) and not steps
    logits_of(model, 4)
    assert len(steps) == 3  # what was asked for before leaves no trace


@pytest.mark.parametrize("config", [
    ("LoraConfig", {"r": 4, "init_lora_weights": False}), ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ("PromptTuningConfig", {"num_virtual_tokens": 3}), ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
], ids=lambda v: v[0])  # fmt: skip
@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
def test_peft(config, steps):
    peft = pytest.importorskip("peft")
    kind, arguments = config
    torch.manual_seed(5)
    tuned = peft.get_peft_model(decode_natively(tiny()), getattr(peft, kind)(task_type="CAUSAL_LM", **arguments)).eval()
    own = copy.deepcopy(tuned)
    decode_natively(own.get_base_model(), False)
    expected = own.generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False)
    assert torch.equal(tuned.generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False), expected) and not steps


def test_a_quantized_cache(steps):
    model = tiny()
    expected = logits_of(model, 6, past_key_values=nvfp4_cache(model.config))[1]
    decode_natively(model)
    assert_close(logits_of(model, 6, past_key_values=nvfp4_cache(model.config))[1], expected)
    assert not steps


def test_an_assistant(steps):
    model, assistant = tiny(), decode_natively(tiny(num_hidden_layers=1))
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    decode_natively(model)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, do_sample=False, assistant_model=assistant), expected)


def test_embeddings_and_positional_arguments(steps):
    model = tiny()
    embeds = model.model.embed_tokens(PROMPT).detach()
    expected = model.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False)
    hidden = model.model(PROMPT, torch.ones_like(PROMPT)).last_hidden_state
    decode_natively(model)
    assert torch.equal(model.generate(inputs_embeds=embeds, max_new_tokens=4, do_sample=False), expected)
    assert torch.equal(model.model(PROMPT, torch.ones_like(PROMPT)).last_hidden_state, hidden) and len(steps) == 3


def test_a_sliding_window(steps):
    """A Mistral decodes natively within its sliding window and beyond it, in our cache and in a static one."""
    model = decode_natively(tiny(kind="Mistral", sliding_window=12))
    for cache in (None, "static"):
        assert compare(model, steps, 10, cache_implementation=cache) == 9
        assert steps == list(range(8, 17))


def test_autocast_and_a_saved_model(steps, tmp_path):
    model = decode_natively(tiny())
    with torch.autocast("cpu", torch.float16):
        logits_of(model, 3, cache_implementation="dynamic")
        assert torch.isfinite(logits_of(model, 3)[1]).all()
    assert not steps
    model.generation_config.save_pretrained(tmp_path)
    assert "static" not in (tmp_path / "generation_config.json").read_text()


@pytest.mark.parametrize("make, error, message", [
    (lambda: torch.nn.Linear(2, 2), TypeError, "supports a Llama, Mistral, .* or GptOss of transformers"),
    (lambda: tiny(quantized=False), ValueError, "layers.0.self_attn.q_proj is dense"),
    (lambda: tiny(torch.float32), ValueError, "is torch.float32 on cpu"),
    (lambda: tiny(hidden_act="gelu"), ValueError, "has GELUActivation"),
    (lambda: tiny(head_dim=24), ValueError, "head_dim is 24"),
    (lambda: quantize_(model := tiny(quantized=False), NVFP4Config(), filter_fn=_is_inner) or model,
     ValueError, "W4A4"),
], ids=["module", "dense", "float32", "gelu", "head_dim", "w4a4"])  # fmt: skip
def test_unsupported_models_raise(make, error, message):
    model = make()
    with pytest.raises(error, match=message):
        decode_natively(model)
    assert "forward" not in vars(getattr(model, "model", model))


def _is_inner(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name
