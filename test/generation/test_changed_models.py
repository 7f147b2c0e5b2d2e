"""Change a natively decoding model: what it then writes is what transformers' own forward writes."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from helpers.texts import relative_error, written  # noqa: E402
from helpers.tiny_models import MIXTURES, tiny_model  # noqa: E402

from nvfp4_tensor.generation import decode_natively  # noqa: E402

LAYER = "model.layers.1"


def prompt(model):
    return torch.arange(3, 11, device=model.device)[None]


def named(name):
    def decorate(change):
        change.__name__ = name
        return change

    return decorate


def set_(path, value):
    @named(f"{path} = {value}")
    def change(model):
        holder, _, name = path.rpartition(".")
        setattr(model.get_submodule(holder), name, value)

    return change


def write(path, factor=-1.0):
    @torch.no_grad()
    @named(f"write {path}")
    def change(model):
        model.get_parameter(path).mul_(factor)

    return change


def replace(path):
    @named(f"replace {path}")
    def change(model):
        parameter = model.get_parameter(path)
        values = torch.linspace(-1, 1, len(parameter)).to(parameter) if parameter.dim() == 1 else parameter.flip(0)
        parameter.data = values.detach().clone()

    return change


def double_weight(model):
    linear = model.get_submodule(f"{LAYER}.self_attn.o_proj")
    weight = linear.weight.detach()
    doubled = weight._replace(per_tensor_scale=weight.per_tensor_scale * 2)
    linear.weight = torch.nn.Parameter(doubled, requires_grad=False)


def set_scale(model):
    weight = model.get_parameter(f"{LAYER}.self_attn.v_proj.weight")
    weight.per_tensor_scale = weight.per_tensor_scale * 3


def make_dense(model):
    linear = model.get_submodule(f"{LAYER}.mlp.down_proj")
    linear.weight = torch.nn.Parameter(linear.weight.detach().dequantize() * 2)


def remove_bias(model):
    model.get_submodule(f"{LAYER}.self_attn.q_proj").bias = None


def remove_sinks(model):
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)


def scale_frequencies(model):
    for name, buffer in model.model.rotary_emb.named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(3)


def pre_hook(model):
    linear = model.get_submodule(f"{LAYER}.self_attn.k_proj")
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def set_forward(model):
    model.get_submodule(f"{LAYER}.mlp.act_fn").forward = torch.tanh


def drop_layer(model):
    del model.model.layers[0]
    model.config.num_hidden_layers = len(model.model.layers)
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = i


def fewer_layers_by_the_config(model):
    model.config.num_hidden_layers = 3


def replace_inner(model):
    other = decode_natively(copy.deepcopy(model), False)
    write(f"{LAYER}.self_attn.q_proj.weight")(other), scale_frequencies(other)
    model.model = other.model


def turn_data(model):
    """The same memory by other strides."""
    norm = model.model.norm.weight
    norm.data = torch.linspace(-2, 2, 256, device=model.device).bfloat16()[:128]
    written(model, prompt(model), 2)
    norm.data = norm.data.as_strided((128,), (2,))


def set_attention(model):
    def flat(module, query, key, value, mask, **others):
        heads = value.mean(2, keepdim=True).repeat_interleave(module.num_key_value_groups, 1)
        return heads.transpose(1, 2).expand(-1, query.shape[2], -1, -1), None

    transformers.AttentionInterface.register("flat", flat)
    model.set_attn_implementation("flat")


def ask_for_hidden_states(model):
    model.config.output_hidden_states = True


def add_lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.eval()


CHANGES = {  # by how tokens are decoded then
    "natively": [
        ("Llama", double_weight), ("Llama", set_scale), ("Llama", set_("model.rotary_emb.attention_scaling", 1.5)),
        ("Llama", drop_layer), ("Llama", replace_inner), ("Qwen2", replace(f"{LAYER}.self_attn.k_proj.bias")),
        ("Qwen2", remove_bias), ("Qwen3", write(f"{LAYER}.self_attn.k_norm.weight")),
        ("Gemma2", set_(f"{LAYER}.self_attn.attn_logit_softcapping", 0.5)),
        ("Gemma2", write(f"{LAYER}.post_feedforward_layernorm.weight", 3.0)), ("Gemma3", scale_frequencies),
        ("Gemma3", set_(f"{LAYER}.self_attn.scaling", 3.0)), ("Phi3", write(f"{LAYER}.mlp.gate_up_proj.weight")),
        ("Phi3", write(f"{LAYER}.self_attn.qkv_proj.weight")), ("SmolLM3", set_(f"{LAYER}.self_attn.use_rope", 0)),
        ("Olmo2", replace(f"{LAYER}.self_attn.q_norm.weight")),
        ("Olmo2", write(f"{LAYER}.post_attention_layernorm.weight")),
        ("Granite", set_(f"{LAYER}.residual_multiplier", 2.0)), ("Granite", set_("model.embedding_multiplier", 1.0)),
        ("Mixtral", replace(f"{LAYER}.mlp.gate.weight")), ("Mixtral", write(f"{LAYER}.mlp.experts.down_proj")),
        ("Qwen3Moe", set_(f"{LAYER}.mlp.gate.top_k", 1)), ("Qwen3Moe", set_(f"{LAYER}.mlp.gate.norm_topk_prob", True)),
        ("GptOss", write(f"{LAYER}.mlp.experts.gate_up_proj_bias")), ("GptOss", remove_sinks),
        ("GptOss", set_(f"{LAYER}.mlp.experts.limit", 0.1)), ("GptOss", set_(f"{LAYER}.mlp.experts.alpha", 10.0)),
    ],
    "natively in graphs": [
        ("Llama", make_dense), ("Llama", set_(f"{LAYER}.post_attention_layernorm.variance_epsilon", 3.0)),
        ("Llama", turn_data), ("Llama", torch.nn.Module.half),
    ],
    "own forward in graphs": [
        ("Llama", set_(f"{LAYER}.mlp.act_fn", torch.nn.Tanh())), ("Llama", add_lora), ("Llama", torch.nn.Module.float),
        ("Llama", fewer_layers_by_the_config),
    ],
    "by transformers": [
        ("Llama", pre_hook), ("Llama", set_forward), ("Llama", set_attention), ("Llama", ask_for_hidden_states),
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
@pytest.mark.parametrize(
    "how, family, change",
    [(how, *each) for how, changes in CHANGES.items() for each in changes],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_changed_model(how, family, change, way, natively, steps):
    model = natively(tiny_model(family))
    before = written(model, prompt(model), 5)[1]
    assert steps == list(range(8, 12))
    change(model)
    model.eval()
    steps.clear()
    tokens, logits = written(model, prompt(model), 5)
    runs = how == "natively" or (way != "step" and how != "by transformers")
    assert steps == (list(range(8, 12)) if runs else [])
    if runs and way != "step":
        assert (vars(model)["forward"].plan().description is not None) == ("own" not in how)
    expected = written(decode_natively(copy.deepcopy(model), False), prompt(model), 5, along=tokens)[1]
    error = relative_error(logits, expected)[:, 1:]  # the prompt gives the first
    assert error.median() < 0.1 if family in MIXTURES else error.max() < 0.04
    assert not torch.equal(logits, before) or change is ask_for_hidden_states
