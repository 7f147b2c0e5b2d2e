"""Test decode_natively: what generate writes, what is left to transformers, copies, and refusals."""

import contextlib
import copy
import gc
import inspect
import pickle
import sys
import threading
import types
import warnings

import pytest
import torch
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig

transformers = pytest.importorskip("transformers")
from helpers.texts import assert_writes_its_own, gaps, prompt, relative_error, written  # noqa: E402
from helpers.tiny_models import MIXTURES, tiny_model  # noqa: E402

from nvfp4_tensor.generation import decode_natively, generate, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import CACHE, NAMES, cache_argument, cache_in  # noqa: E402
from nvfp4_tensor.generation.families import FAMILIES, describe, family_of  # noqa: E402
from nvfp4_tensor.generation.fixed_cache import FixedCache  # noqa: E402

FAMILY_NAMES = [family.name for family in FAMILIES.values()]
OPTIONS = {"max_new_tokens": 4, "do_sample": False}


def restored(model):
    """Return a copy that transformers decodes."""
    return decode_natively(copy.deepcopy(model), False)


def assert_as_restored(model, count=12, bound=0.04, **arguments):
    """Check a text against the one of a copy without native decoding, token by token."""
    tokens, logits = written(model, prompt(model), count, **arguments)
    expected = written(restored(model), prompt(model), count, along=tokens, **arguments)[1]
    assert relative_error(logits, expected).max() < bound


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family(family, way, natively, steps):
    """The text is longer than a window."""
    model = natively(tiny_model(family))
    ids = prompt(model, 3)
    _, error = assert_writes_its_own(model, ids, 0.1 if family in MIXTURES else 0.02)
    assert steps == list(range(8, 19))  # of 12 tokens the prompt gives the first
    assert error.max() < 0.03 or family in MIXTURES


VARIANTS = {
    "dynamic": ("Llama", {"max_position_embeddings": 12, "rope_parameters": {
        "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1000.0}}),
    "longrope": ("Llama", {"max_position_embeddings": 48, "rope_parameters": {
        "rope_type": "longrope", "factor": 4.0, "rope_theta": 1000.0, "original_max_position_embeddings": 12,
        "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}}),
    "eps and head_dim": ("Llama", {"tie_word_embeddings": False, "rms_norm_eps": 1e-2, "head_dim": 16}),
    "without a window": ("Mistral", {"sliding_window": None}),
    "halves of a fused weight": ("Phi3", {"intermediate_size": 256}),
    "no mixture in any layer": ("Qwen3Moe", {"mlp_only_layers": [0, 1, 2, 3]}),
    "NVFP4 output layer": ("Qwen3", {}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, natively, steps):
    family, changes = VARIANTS[variant]
    model = tiny_model(family, **changes)
    if "output" in variant:
        quantize_(model.lm_head, NVFP4WeightOnlyConfig())
    assert_as_restored(natively(model))
    assert steps == list(range(8, 19))


def test_what_it_leaves_to_transformers(way, natively, steps, monkeypatch):
    """The same tokens as without native decoding; and what was asked for before leaves no trace."""
    monkeypatch.setattr("nvfp4_tensor.generation.decoder.MAX_BATCH", 16)
    model = tiny_model("Llama")
    model.set_attn_implementation("eager")
    model = natively(model)
    plain, ids = restored(model), prompt(model, 2)
    padded = torch.ones_like(ids)
    padded[0, 3] = 0  # not before the text
    assistant = natively(tiny_model("Llama", num_hidden_layers=1))
    for arguments in (
        {"attention_mask": padded}, {"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 2}, {"assistant_model": assistant},
        {"output_hidden_states": True}, {"output_attentions": True}, {"cache_implementation": "dynamic"},
        {"use_cache": False}, {CACHE: lambda: transformers.DynamicCache(config=model.config)},
        {CACHE: lambda: nvfp4_cache(model.config)},
        *([{CACHE: lambda: nvfp4_cache(model.config, max_tokens=64, recent=3)}] if way == "step" else []),
    ):  # fmt: skip
        is_one = arguments.keys() & {"prompt_lookup_num_tokens", "assistant_model"}
        got = []
        for each in (model, plain):
            torch.manual_seed(3)
            given = {k: v() if k == CACHE else v for k, v in arguments.items()}
            got.append(each.generate(ids[:1] if is_one else ids, **OPTIONS | given))
        assert torch.equal(*got), arguments
    with torch.autocast(model.device.type, torch.float16):
        assert torch.isfinite(written(model, ids[:1], 3)[1]).all()
    many, cache = prompt(model, 17), FixedCache(4, 20)
    model.generate(many, **OPTIONS)
    with torch.no_grad():
        for part in many.split([7, 1], 1):
            model(part, **{CACHE: cache})
    assert not steps
    model.generate(ids[:1], **OPTIONS)
    assert steps == [8, 9, 10]


@pytest.mark.parametrize("way", ["step", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_other_calls(way, natively, steps, tmp_path):
    """Embeddings, the stop strings' tokenizer, labels, positional arguments, compilation, and a saved model."""
    model = tiny_model("Llama")
    model.forward = types.MethodType(inspect.unwrap(type(model).forward), model)  # as accelerate's unwrap_model does
    model = natively(model)
    plain, ids, tokenizer = restored(model), prompt(model), {"tokenizer": object()}
    embeds = model.model.embed_tokens(ids).detach()
    of_embeddings = torch.cat((ids, model.generate(inputs_embeds=embeds, **OPTIONS)), 1)
    others = [model.generate(ids, **OPTIONS, **more) for more in (tokenizer, {"cache_implementation": "static"})]
    for text in (of_embeddings, *others):  # equal up to ties
        assert text.shape == (1, 12) and gaps(model, text, 4).max() < 0.2
    assert steps == [8, 9, 10] * 3
    steps.clear()
    cache = FixedCache(4, 20)
    with torch.no_grad():
        hidden = [each.model(ids, torch.ones_like(ids)).last_hidden_state for each in (model, plain)]
        compiled = torch.compile(model, backend="eager")(ids, use_cache=False).logits
        exported = torch.export.export(model, (ids,), {"use_cache": False}).module()(ids, use_cache=False).logits
        assert torch.equal(*hidden) and torch.equal(compiled, plain(ids, use_cache=False).logits)
        assert torch.equal(exported, compiled)
        model(ids, **{CACHE: cache})
        output = model(ids[:, :1], **{CACHE: cache}, labels=ids[:, :1])
        assert output.loss is not None and cache.get_seq_length() == 9
    assert not steps
    model.generation_config.save_pretrained(tmp_path)
    assert "static" not in (tmp_path / "generation_config.json").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_under_both_names(name, natively, steps):
    """``past_key_values``, and ``cache`` of transformers 5.24 and later: calls, and generate."""
    if name == "cache" != CACHE:
        pytest.skip("transformers 5.24 renames it")
    model = natively(tiny_model("Llama"))
    ids, cache = prompt(model), FixedCache(4, 64)
    tokens, expected = written(model, ids, 6)
    with torch.no_grad():
        model(ids, **{name: cache})
        outputs = [model(token, **{name: cache}) for token in tokens[:, 8:13].split(1, 1)]
    assert steps == [8, 9, 10, 11, 12] * 2 and all(getattr(each, CACHE) is cache for each in outputs)
    assert torch.equal(torch.cat([each.logits for each in outputs], 1).float(), expected[:, 1:])
    coded = nvfp4_cache(model.config)
    assert model.generate(ids, **{name: coded}, **OPTIONS).shape[1] == 12 and coded.get_seq_length() == 11


def test_positions_of_a_caller(way, natively, steps):
    """And calls in inference mode; a static cache of transformers takes its own forward, with a warning."""
    model, batch = natively(tiny_model("Qwen3")), 2
    ids, tokens = prompt(model, batch), prompt(model, batch, 6)
    positions = torch.arange(14, device=model.device)[None] * 2
    with torch.inference_mode():
        growing = transformers.DynamicCache(config=model.config)  # without one, transformers takes these for two texts
        expected = model(torch.cat((ids, tokens), 1), **{CACHE: growing}, position_ids=positions).logits[:, -6:].float()
        for cache in (FixedCache(4, 20), transformers.StaticCache(model.config, 20)):
            is_own = isinstance(cache, FixedCache)
            with contextlib.nullcontext() if is_own else pytest.warns(UserWarning, match="a StaticCache is"):
                model(ids, **{CACHE: cache}, position_ids=positions[:, :8])
            each = [
                model(tokens[:, i : i + 1], **{CACHE: cache}, position_ids=positions[:, 8 + i : 9 + i]).logits
                for i in range(6)
            ]
            assert relative_error(torch.cat(each, 1), expected).max() < 0.03
            if is_own:  # static ones are croppable from transformers 5.24 on
                cache.crop(-1)
                last = model(tokens[:, -1:], **{CACHE: cache}, position_ids=positions[:, -1:]).logits
                assert torch.equal(last, each[-1]) and last.data_ptr() != each[-1].data_ptr()
    assert steps == [*range(8, 14), 13]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_positions_of_padded_texts(family, natively, steps):
    """Prompts and steps without position_ids have the positions of the own forward, also behind those of generate."""
    model = natively(tiny_model(family))
    own = restored(model)
    ids, tokens = prompt(model, 2), prompt(model, 2, 3)
    mask = torch.ones(2, 11, dtype=torch.int64, device=model.device)
    mask[0, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    def logits_of(model, cache, given):
        """Return the logits of the prompt and the steps, with position_ids in those of the three calls in ``given``."""
        logits = []
        for i, (start, end) in enumerate(((0, 8), (8, 9), (9, 10), (10, 11))):
            its = {"position_ids": positions[:, start:end]} if min(i, 2) in given else {}
            new = torch.cat((ids, tokens), 1)[:, start:end]
            logits.append(model(new, **{CACHE: cache}, attention_mask=mask[:, :end], **its).logits[:, -1].float())
        return torch.stack(logits, 1)

    with torch.no_grad():
        for given in ((), (0,), (0, 1), (1,), (0, 1, 2)):
            expected = logits_of(own, transformers.DynamicCache(config=own.config), given)
            error = relative_error(logits_of(model, FixedCache(4, 20), given), expected).max()
            assert error < (0.1 if family in MIXTURES else 0.03), given
    assert steps == [8, 9, 10] * 5


def test_names_of_the_cache():
    class Remote(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            return input_ids

    assert cache_in({"cache": 1}) == cache_in({"past_key_values": 1}) == 1 and cache_in({"cache": None}) is None
    assert cache_argument(tiny_model("Llama")) == CACHE and cache_argument(Remote()) == "past_key_values"
    assert hasattr(transformers.modeling_outputs.CausalLMOutputWithPast(), CACHE)


def test_undone(natively, steps):
    model = natively(tiny_model("Llama"))  # on its device
    decode_natively(model, False)
    parts = model, model.model, model.lm_head
    attributes, parameters = [set(vars(each)) for each in parts], dict(model.named_parameters())
    natively(natively(model))
    written(model, prompt(model), 3)
    assert steps == [8, 9]
    decode_natively(model, False)
    assert [set(vars(each)) for each in parts] == attributes
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[name] is each for name, each in parameters.items())
    written(model, prompt(model), 3)
    assert steps == [8, 9]


def test_a_change_is_named_once_and_may_be_undone(natively, steps):
    model = natively(tiny_model("Llama"))
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match="tokens are decoded by transformers, not .*layers.1.mlp has hooks"):
        written(model, prompt(model), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(model, prompt(model), 20)
    assert not steps
    handle.remove()
    assert_writes_its_own(model, prompt(model), count=4)
    assert steps == [8, 9, 10]


@pytest.mark.parametrize("way", ["step", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_forward_takes_the_tokens(natively, steps):
    model = natively(tiny_model("Llama", num_hidden_layers=1))
    model.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"not .*: model.compile\(\) was called \(copy.deepcopy\(model\)"):
        tokens = written(model, prompt(model), 3)[0]
    assert not steps and not gaps(model, tokens, 3).any()
    assert_writes_its_own(copy.deepcopy(model), prompt(model), count=3)
    assert steps == [8, 9]


@pytest.mark.parametrize("copied", [
    copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)),
], ids=["deepcopy", "pickle"])  # fmt: skip
def test_a_copy_has_its_own_weights(copied, natively, steps):
    model = natively(tiny_model("Llama"))
    expected = written(model, prompt(model), 6)[1]
    steps.clear()
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(written(other, prompt(model), 6)[1], expected) and len(steps) == 5
    other.model.norm.weight.data = torch.linspace(-2, 2, 128).to(other.model.norm.weight)
    assert_writes_its_own(other, prompt(other))


@pytest.mark.parametrize("config", [
    ("LoraConfig", {"r": 4, "init_lora_weights": False}), ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    ("PromptTuningConfig", {"num_virtual_tokens": 3}), ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
], ids=lambda v: v[0])  # fmt: skip
@pytest.mark.filterwarnings("ignore:tokens are decoded by transformers")
def test_peft(config, steps):
    peft = pytest.importorskip("peft")
    kind, arguments = config
    torch.manual_seed(5)
    model = decode_natively(tiny_model("Llama"))
    tuned = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **arguments)).eval()
    own = copy.deepcopy(tuned)
    decode_natively(own.get_base_model(), False)
    got = [each.generate(input_ids=prompt(model), **OPTIONS) for each in (tuned, own)]
    assert torch.equal(*got) and not steps
    with pytest.raises(TypeError, match="not a PeftModelForCausalLM of peft: merge its adapters"):
        decode_natively(tuned)


def test_threads_that_write_at_once(natively, monkeypatch):
    """A thread comes in where another has looked at what both share, and not yet used it."""
    model, threads, found = natively(tiny_model("Llama")), [], []
    texts, places = [prompt(model, 2), prompt(model, 2).flip(0)], torch.arange(8, device=model.device).expand(2, -1)
    masks = [(places >= start).long() for start in (3, 5)]

    def write(i):
        how = {"attention_mask": masks[i], "max_new_tokens": 4, "temperature": 1.0}
        return torch.stack(list(generate(model, texts[i], **how)), 1)

    alone = [write(i) for i in range(2)]
    own = model.forward.new_chooser

    def interrupted(*args):
        result = own(*args)
        if not threads:
            threads.append(threading.Thread(target=lambda: found.append(write(1))))
            threads[0].start()
            threads[0].join(0.5)  # it waits for this one
        return result

    monkeypatch.setattr(model.forward, "new_chooser", interrupted)
    first = write(0)
    threads[0].join()
    assert torch.equal(first, alone[0]) and torch.equal(found[0], alone[1])


def test_a_token_of_more_layers_takes_no_more_calls():
    calls = []
    for layers in (2, 6):
        model = decode_natively(tiny_model("Llama", num_hidden_layers=layers))
        text, tokens = generate(model, prompt(model), max_new_tokens=8), []
        next(text), next(text)
        gc.disable()  # which calls back for what other tests left
        try:
            for _ in range(3):
                seen = []
                sys.setprofile(lambda frame, event, _, seen=seen: seen.append(event == "call"))
                next(text)
                sys.setprofile(None)
                tokens.append(sum(seen))
        finally:
            sys.setprofile(None)
            gc.enable()
        calls.append(min(tokens))
    assert calls[0] == calls[1] < 100, calls


# --- refusals --------------------------------------------------------------------------------------------------------


def set_(path, value):
    def change(model):
        holder, _, name = path.rpartition(".")
        setattr(model.get_submodule(holder), name, value)

    return change


def make_dense(model):
    linear = model.model.layers[1].mlp.down_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().dequantize())


def drop_out(model):
    model.model.layers[0].self_attn.attention_dropout = 0.1
    model.train()


LAYER = "model.layers.1"


@pytest.mark.parametrize("family, sizes, change, message", [
    ("Llama", {}, make_dense, "model.layers.1.mlp.down_proj is dense: call quantize_"),
    ("Llama", {"quantized": False}, lambda m: quantize_(m.model, NVFP4Config()), r"q_proj quantizes its .* \(W4A4\)"),
    ("Llama", {}, torch.nn.Module.half, "is torch.float16 on cpu: decode_natively needs bfloat16"),
    ("Llama", {}, set_(f"{LAYER}.input_layernorm.variance_epsilon", 1.0), "equal norms .* model.layers.1.input_layern"),
    ("Llama", {"head_dim": 24}, None, "head_dim is 24"),
    ("Llama", {"hidden_act": "gelu"}, None, "has GELUActivation"),
    ("Mixtral", {"intermediate_size": 96}, None, "192 rows per expert: .* a multiple of 128"),
    ("Mixtral", {"quantized": False}, lambda m: quantize_(m.model, NVFP4WeightOnlyConfig(experts=False)),
     r"experts.gate_up_proj is dense: .*experts=True"),
    ("Llama", {}, set_(f"{LAYER}.mlp", torch.nn.Identity()), "layers.1.mlp is a Identity, not transformers' own Llama"),
    ("Qwen3", {}, set_("model.embed_tokens", torch.nn.Sequential()), "embed_tokens is a Sequential"),
    ("Gemma2", {}, set_(f"{LAYER}.self_attn.layer_idx", 3), "layers.1.self_attn has layer_idx 3"),
    ("Phi3", {}, drop_out, "attention dropout in training mode"),
    ("Mistral", {}, set_(f"{LAYER}.self_attn.is_causal", False), "layers.1.self_attn is not causal"),
    ("Gemma2", {}, lambda m: setattr(m.config, "_attn_implementation_internal", "sdpa"), "soft cap"),
    ("Llama", {}, set_(f"{LAYER}.mlp.act_fn", torch.nn.ReLU()), "activations silu"),
    ("Llama", {}, set_("forward", print), "LlamaForCausalLM has a forward of its own, .*: `del model.forward` first"),
])  # fmt: skip
def test_models_that_the_op_refuses(family, sizes, change, message):
    model = tiny_model(family, **sizes)
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        decode_natively(model)
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("way", ["graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_models_that_graphs_refuse(way, natively):
    model = tiny_model("Llama")
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="LlamaForCausalLM has hooks, which decode_natively would not call"):
        natively(model)
    config = transformers.MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=50)
    with pytest.raises(ValueError, match="layers other than attention"):
        natively(transformers.MambaForCausalLM(config).eval())
    if way == "cuda":
        with pytest.raises(TypeError, match="models of transformers that generate text"):
            decode_natively(transformers.LlamaModel(model.config).cuda())


def test_other_modules_raise():
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="supports models of transformers that generate text"):
        decode_natively(linear)
    with pytest.raises(TypeError, match=r"supports a Llama, Mistral, .* of transformers with an output layer"):
        describe(linear)
    assert family_of(linear) is None
