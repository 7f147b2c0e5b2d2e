"""Test the step that CUDA graphs contain, through transformers' generate and calls of the model.

On a CPU the same decoder runs the operators one by one; a graph is captured on CUDA only.
"""

import copy
import functools
import pickle

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from helpers.texts import own_logits, relative_error, written
from helpers.tiny_models import MIXTURES, WINDOW, tiny_model
from torchao.quantization import quantize_
from transformers import DynamicCache, StaticCache

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.families import FAMILIES
from nvfp4_tensor.generation.fixed_cache import FixedCache
from nvfp4_tensor.generation.graph_decoder import GraphDecoder
from nvfp4_tensor.generation.runner import Runner

NAMES = [family.name for family in FAMILIES.values()]


def natively(model):
    """Install the decoder of CUDA graphs, on a CPU too."""
    if model.device.type == "cuda":
        return decode_natively(model)
    GraphDecoder(model).install()
    return model


def prompt(batch=1, length=8, device="cpu"):
    return torch.randint(3, 300, (batch, length), generator=torch.Generator().manual_seed(5)).to(device)


@pytest.fixture
def launches(monkeypatch):
    """Collect the positions of tokens that a runner computes."""
    seen, launch = [], Runner.launch

    def counted(self, position, *others):
        seen.append(position)
        return launch(self, position, *others)

    monkeypatch.setattr(Runner, "launch", counted)
    return seen


def assert_writes_its_own(model, ids, bound, count=12, **arguments):
    """Check a text that the model wrote against its own forward over that text: logits, and each choice up to ties."""
    tokens, logits = written(model, ids, count, **arguments)
    expected = own_logits(model, tokens[:, :-1])[:, ids.shape[1] - 1 :]
    error = relative_error(logits, expected)
    assert error.median() < bound
    chosen = expected.gather(-1, tokens[:, ids.shape[1] :, None])[..., 0]
    gap = (expected.amax(-1) - chosen) / expected.std(-1)
    assert gap.median() == 0 and (gap < 10 * bound + 20 * error).all()
    return tokens, error


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", NAMES)
def test_writes_what_the_model_writes(family, batch, device, launches):
    model = natively(tiny_model(family).to(device))
    _, error = assert_writes_its_own(model, prompt(batch, device=device), 0.1 if family in MIXTURES else 0.02)
    assert launches == list(range(8, 19))  # of 12 tokens the prompt gives the first
    assert error.max() < 0.03 or family in MIXTURES


@pytest.mark.parametrize("family", ["Qwen3", "Starcoder2"])
def test_warming_up_leaves_no_trace(family, monkeypatch):
    """A capture on CUDA runs steps before. Here they run before the first step."""
    init = Runner.__init__

    def with_warm_up(self, plan, cache, *others):
        init(self, plan, cache, *others)
        with torch.no_grad():
            self._warm_up(cache.layers[0].length)

    model = natively(tiny_model(family))
    expected = written(model, prompt(2))
    vars(model)["forward"]._runners.clear()
    monkeypatch.setattr(Runner, "__init__", with_warm_up)
    for a, b in zip(written(natively(model), prompt(2)), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mixtral"])
def test_dense_models(family, device, launches):
    model = natively(tiny_model(family, quantized=False).to(device))
    assert_writes_its_own(model, prompt(16, 20, device), 0.02)
    assert len(launches) == 11


def test_an_nvfp4_output_layer_and_float16(device, launches):
    model = tiny_model("Qwen2", torch.float16)
    quantize_(model.lm_head, NVFP4WeightOnlyConfig())
    assert_writes_its_own(natively(model.to(device)), prompt(2, device=device), 0.01)
    assert len(launches) == 11


def test_quantized_activations(device, launches):
    """W4A4 weights. Behind attention, another last bit of bfloat16 may change the codes of activations."""
    model = tiny_model("Llama", quantized=False, num_hidden_layers=1)
    quantize_(model.model, NVFP4Config(row_scaled=True))
    own = copy.deepcopy(model).to(device)
    tokens, logits = written(natively(model.to(device)), prompt(2, device=device))
    assert len(launches) == 11
    error = relative_error(logits, written(own, prompt(2, device=device), along=tokens)[1])
    assert error.median() < 0.05 and error.max() < 0.3


OTHERS = {
    "GPTNeoX": {"num_key_value_heads": None, "rotary_pct": 0.5}, "Starcoder2": {}, "Gemma": {}, "Cohere": {},
    "Glm": {"num_attention_heads": 4}, "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 64,
                                                    "shared_expert_intermediate_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
@pytest.mark.filterwarnings("error:tokens are decoded")
def test_models_without_a_description(family, device, launches):
    """Their own forward is captured."""
    changes = {name: value for name, value in OTHERS[family].items() if value is not None}
    model = natively(tiny_model(family, **changes).to(device))
    assert vars(model)["forward"].plan().description is None
    assert_writes_its_own(model, prompt(2, device=device), 0.02)
    assert launches == list(range(8, 19))


def test_a_family_in_another_dtype_takes_its_own_forward(device, launches):
    model = tiny_model("Llama", torch.float32, quantized=False).to(device)
    with pytest.warns(UserWarning, match="not natively: the native step needs a bfloat16 or float16 model"):
        natively(model)
    assert_writes_its_own(model, prompt(2, 20, device), 1e-5)
    assert len(launches) == 11


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_buffers_and_graphs_are_used_again(family, device):
    model = natively(tiny_model(family).to(device))
    decoder = vars(model)["forward"]
    first = written(model, prompt(device=device))
    (runner,) = decoder._runners.values()
    for a, b in zip(first, written(model, prompt(device=device)), strict=True):
        assert torch.equal(a, b)
    assert list(decoder._runners.values()) == [runner]
    # A cache that the user keeps is not written to again.
    kept = model.generate(prompt(device=device), max_new_tokens=4, return_dict_in_generate=True, do_sample=False)
    before = kept.past_key_values.layers[0].keys.clone()
    assert before.shape[2] == 11 and type(kept.past_key_values) is FixedCache
    written(model, prompt(device=device) + 1)
    assert torch.equal(kept.past_key_values.layers[0].keys, before) and len(decoder._runners) == 2


def test_a_text_goes_on(device, launches):
    """A second prompt into the same cache, and more tokens than the cache had room for."""
    model = natively(tiny_model("Mistral").to(device))
    ids = prompt(device=device)
    out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat((out.sequences, prompt(length=5, device=device)), 1)
    assert_writes_its_own(model, longer, 0.02, count=5, past_key_values=out.past_key_values)
    assert launches == [*range(8, 13), *range(19, 23)]

    cache = FixedCache(4, 1)
    ids = prompt(length=254, device=device)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        logits = [model(token, past_key_values=cache).logits for token in prompt(length=6, device=device).split(1, 1)]
    expected = own_logits(model, torch.cat((ids, prompt(length=6, device=device)), 1))[:, -6:]
    assert launches[9:] == [254, 255, 257, 258, 259]  # position 256 moved the cache to larger buffers
    assert relative_error(torch.cat(logits, 1), expected).max() < 0.03


def test_what_it_leaves_to_transformers(device, launches):
    model = natively(tiny_model("Llama").to(device))
    ids, mask = prompt(2, device=device), torch.ones(2, 8, dtype=torch.int64, device=device)
    mask[0, :3] = 0
    options = {"max_new_tokens": 4, "do_sample": False}
    plain = copy.deepcopy(model)
    decode_natively(plain, False)
    for arguments in (
        {"attention_mask": mask}, {"num_beams": 2}, {"cache_implementation": "dynamic"}, {"use_cache": False},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"past_key_values": DynamicCache(config=model.config)}, {"prompt_lookup_num_tokens": 2},
    ):  # fmt: skip
        row = ids[:1] if "prompt_lookup_num_tokens" in arguments else ids
        if "past_key_values" in arguments:
            expected = plain.generate(row, **options)
        else:
            expected = plain.generate(row, **options, **arguments)
        got = model.generate(row, **options, **arguments)
        sequences = [each if isinstance(each, torch.Tensor) else each.sequences for each in (got, expected)]
        assert torch.equal(*sequences), arguments
    with torch.autocast(device, torch.float16):
        model.generate(ids, **options)
    model.generate(prompt(17, device=device), **options)
    assert not launches


def test_other_calls(device, launches):
    """Positions that a caller gives, a static cache of transformers, and calls in inference mode."""
    model = natively(tiny_model("Qwen3").to(device))
    ids, tokens = prompt(2, device=device), prompt(2, 6, device)
    positions = torch.arange(14, device=device)[None] * 2
    with torch.inference_mode():
        for make in (lambda: FixedCache(4, 20), lambda: StaticCache(model.config, 20)):
            cache = make()
            model(ids, past_key_values=cache, position_ids=positions[:, :8])
            each = [
                model(tokens[:, i : i + 1], past_key_values=cache, position_ids=positions[:, 8 + i : 9 + i]).logits
                for i in range(6)
            ]
            whole = torch.cat((ids, tokens), 1)
            growing = DynamicCache(config=model.config)  # without one, transformers takes such positions for two texts
            expected = model(whole, past_key_values=growing, position_ids=positions).logits[:, -6:].float()
            assert relative_error(torch.cat(each, 1), expected).max() < 0.03
    assert launches == [*range(8, 14)] * 2
    with torch.no_grad():
        cache = FixedCache(4, 20)
        model(ids, past_key_values=cache)
        logits = model(ids[:, :1], past_key_values=cache).logits
        again = model(ids[:, :1], past_key_values=cache).logits
        assert logits.shape == (2, 1, 300) and not torch.equal(logits, again)  # not the same memory


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length(rope, device, launches):
    parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 1000.0}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "original_max_position_embeddings": 12}
    changes = {"rope_parameters": parameters, "max_position_embeddings": 48 if rope == "longrope" else 12}
    model = tiny_model("Llama", **changes).to(device)
    plain = copy.deepcopy(model)
    natively(model)
    tokens, logits = written(model, prompt(device=device))
    assert len(launches) == 11
    expected = written(plain, prompt(device=device), along=tokens)[1]
    assert relative_error(logits, expected).max() < 0.03


def layer_of(model):
    return model.model.layers[1]


def replace_weight(model):
    linear = layer_of(model).self_attn.o_proj
    weight = linear.weight.detach()
    doubled = weight._replace(per_tensor_scale=weight.per_tensor_scale * 2)
    linear.weight = torch.nn.Parameter(doubled, requires_grad=False)


@torch.no_grad()
def write_weight(model):
    layer_of(model).self_attn.q_proj.weight.mul_(-1)


def set_norm(model):
    model.model.norm.weight.data = torch.linspace(-2, 2, 128, device=model.device).to(model.dtype)


@torch.no_grad()
def write_norm(model):
    layer_of(model).input_layernorm.weight.mul_(2)


def set_bias(model):
    layer_of(model).self_attn.q_proj.bias.data = torch.ones(128, device=model.device).to(model.dtype)


def set_head(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())


def set_embedding(model):
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data.flip(0).clone()


def set_eps(model):
    layer_of(model).post_attention_layernorm.variance_epsilon = 3.0


def set_scaling(model):
    layer_of(model).self_attn.scaling = 1.0


def set_rotation(model):
    model.model.rotary_emb.inv_freq.mul_(3)


def set_rotation_scaling(model):
    model.model.rotary_emb.attention_scaling = 1.5


def make_dense(model):
    linear = layer_of(model).mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().dequantize() * 2)


def drop_layer(model):
    del model.model.layers[3]
    model.config.num_hidden_layers = 3


def add_lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


def hook(model):
    layer_of(model).mlp.register_forward_hook(lambda module, args, y: y * 2)


def set_forward(model):
    layer_of(model).mlp.act_fn.forward = torch.tanh


def set_activation(model):
    layer_of(model).mlp.act_fn = torch.nn.Tanh()


CHANGES = {  # by how tokens are decoded then
    "natively": [replace_weight, write_weight, set_norm, write_norm, set_bias, set_head, set_embedding, set_eps,
                 set_scaling, set_rotation, set_rotation_scaling, make_dense, drop_layer],
    "own graph": [set_activation, add_lora],
    "transformers": [hook, set_forward],
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
@pytest.mark.parametrize(
    "how, change", [(how, each) for how, changes in CHANGES.items() for each in changes],
    ids=lambda v: getattr(v, "__name__", str(v)),
)  # fmt: skip
def test_a_changed_model(how, change, device, launches):
    model = natively(tiny_model("Llama").to(device))
    before = written(model, prompt(2, device=device))[1]
    assert len(launches) == 11
    change(model)
    model.eval()
    launches.clear()
    assert not torch.equal(assert_changed(model, device), before)
    assert len(launches) == (0 if how == "transformers" else 11)
    plan = vars(model)["forward"].plan()
    assert (plan is not None and plan.description is not None) == (how == "natively")


def assert_changed(model, device):
    ids = prompt(2, device=device)
    own = copy.deepcopy(model)
    decode_natively(own, False)
    expected, expected_logits = written(own, ids)
    tokens, logits = written(model, ids)
    differ = (tokens != expected).any(0).nonzero()
    same = int(differ[0]) - ids.shape[1] if len(differ) else 12
    error = (logits - expected_logits).norm(dim=-1) / expected_logits.norm(dim=-1)
    assert same >= 1 and error[:, : same + 1].max() < 0.05
    return logits


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
def test_changes_between_tokens(device):
    """What a graph computed for a model that has changed is not returned."""
    model = natively(tiny_model("Llama").to(device))
    ids, tokens = prompt(2, device=device), prompt(2, 8, device)
    own = copy.deepcopy(model)
    decode_natively(own, False)
    caches = FixedCache(4, 20), DynamicCache(config=model.config)
    with torch.no_grad():
        for each, cache in zip((model, own), caches, strict=True):
            each(ids, past_key_values=cache)
        for i, change in enumerate((set_norm, write_weight, set_activation, hook, set_head)):
            for each in (model, own):
                change(each)
                each.eval()
            token = tokens[:, i : i + 1]
            a, b = (e(token, past_key_values=c).logits.float() for e, c in zip((model, own), caches, strict=True))
            assert ((a - b).norm(dim=-1) / b.norm(dim=-1)).max() < 0.05, change


def test_a_model_that_changes_at_every_token(device, monkeypatch):
    """Graphs are captured a few times only, and the text is that of the model's own forward."""
    model = natively(tiny_model("Starcoder2").to(device))
    made, init = [], Runner.__init__
    monkeypatch.setattr(Runner, "__init__", lambda *args: made.append(1) or init(*args))
    forward = type(layer_of(model).mlp).forward

    def counting(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x)

    monkeypatch.setattr(type(layer_of(model).mlp), "forward", counting)
    with pytest.warns(UserWarning, match="the model changes at every token"):
        assert_writes_its_own(model, prompt(2, device=device), 0.02, count=24)
    assert 1 < len(made) < 12


@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
def test_a_change_that_is_undone(device, launches):
    model, ids = natively(tiny_model("Llama").to(device)), prompt(2, device=device)
    handle = layer_of(model).mlp.register_forward_hook(lambda module, args, y: y * 2)
    written(model, ids, count=20)
    assert not launches
    handle.remove()
    assert_writes_its_own(model, ids, 0.02)
    assert len(launches) == 11


def test_a_compiled_model(device, launches):
    """torch.compile sees the model's own forward."""
    model, ids = natively(tiny_model("Llama").to(device)), prompt(2, device=device)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert not launches


def test_arguments_that_need_transformers(device, launches):
    model, ids = natively(tiny_model("Llama").to(device)), prompt(2, device=device)
    cache = FixedCache(4, 20)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        output = model(ids[:, :1], past_key_values=cache, labels=ids[:, :1])
    assert output.loss is not None and cache.get_seq_length() == 9 and not launches


def test_the_tokenizer_of_stop_strings(device, launches):
    """generate passes it to the model at each token."""
    model, ids = natively(tiny_model("Llama").to(device)), prompt(2, device=device)
    model.generate(ids, max_new_tokens=4, do_sample=False, tokenizer=object())
    assert launches == [8, 9, 10]


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)),
], ids=["deepcopy", "pickle"])  # fmt: skip
def test_a_copy_has_its_own_weights(copied, device, launches):
    model = natively(tiny_model("Qwen3").to(device))
    _, expected = written(model, prompt(device=device))
    launches.clear()
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(written(other, prompt(device=device))[1], expected) and len(launches) == 11


def test_undone(device, launches):
    model = tiny_model("Llama").to(device)
    before = set(vars(model))
    decode_natively(natively(natively(model)), False)
    assert set(vars(model)) == before
    written(model, prompt(device=device))
    assert not launches


def test_models_that_cannot_be_captured_raise(device):
    model = tiny_model("Llama").to(device)
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM has hooks, which decode_natively would not call"):
        natively(model)
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=50)
    with pytest.raises(ValueError, match="layers other than attention"):
        natively(transformers.MambaForCausalLM(config).to(device).eval())
    if device == "cuda":
        with pytest.raises(TypeError, match="models of transformers that generate text"):
            decode_natively(transformers.LlamaModel(tiny_model("Llama").config).to(device))


def test_windows_are_those_of_the_model(device):
    """A prompt and a text longer than the sliding windows."""
    model = natively(tiny_model("Mistral").to(device))
    assert_writes_its_own(model, prompt(2, 2 * WINDOW + 1, device), 0.02, count=WINDOW + 5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("always:tokens are decoded by transformers, not by a CUDA graph")
def test_a_forward_that_waits_for_the_device_is_not_captured(monkeypatch):
    model = tiny_model("Starcoder2").to("cuda")  # no family with a step of its own
    forward = type(model).forward

    @functools.wraps(forward)
    def waiting(self, input_ids=None, **others):
        assert int(input_ids.sum()) >= 0
        return forward(self, input_ids, **others)

    monkeypatch.setattr(type(model), "forward", waiting)
    natively(model)
    with pytest.warns(UserWarning, match="which cannot be captured"):
        written(model, prompt(device="cuda"))
    assert_writes_its_own(model, prompt(device="cuda"), 0.02)
    # Other models can still be captured.
    assert_writes_its_own(natively(tiny_model("Llama").to("cuda")), prompt(device="cuda"), 0.02)
