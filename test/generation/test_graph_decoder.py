"""Test what the step of graphs does beyond the op of CPUs: more models, batches, graphs that are used again.

On a CPU the same decoder runs the operators one by one; a graph is captured on CUDA only.
"""

import contextlib
import copy
import functools
import warnings

import pytest
import torch

pytest.importorskip("transformers")
from helpers.texts import assert_writes_its_own, own_logits, prompt, relative_error, written
from helpers.tiny_models import tiny_model
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_counts, decode_natively, nvfp4_cache
from nvfp4_tensor.generation import prompt as prompts
from nvfp4_tensor.generation.cache_argument import CACHE
from nvfp4_tensor.generation.capture import captured
from nvfp4_tensor.generation.fixed_cache import FixedCache
from nvfp4_tensor.generation.runner import Runner


@pytest.fixture(params=["graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request):
    return request.param


@pytest.mark.parametrize("way", ["graph"])
@pytest.mark.parametrize("family", ["Qwen3", "Starcoder2"])
def test_warming_up_leaves_no_trace(family, natively, monkeypatch):
    """A capture on CUDA runs steps before. Here they run before the first step."""
    init = Runner.__init__

    def with_warm_up(self, plan, cache, *others):
        init(self, plan, cache, *others)
        with torch.no_grad():
            self._warm_up(self._replay, cache.layers[0].length)

    model = natively(tiny_model(family))
    expected = written(model, prompt(model, 2))
    vars(model)["forward"]._runners.clear()
    monkeypatch.setattr(Runner, "__init__", with_warm_up)
    for a, b in zip(written(natively(model), prompt(model, 2)), expected, strict=True):
        assert torch.equal(a, b)


MODELS = {
    **{f"dense {family}": (family, {"quantized": False}) for family in ("Llama", "Gemma3", "Mixtral")},
    "float16": ("Qwen2", {"dtype": torch.float16}), "float32": ("Llama", {"dtype": torch.float32, "quantized": False}),
    "GPTNeoX": ("GPTNeoX", {"rotary_pct": 0.5}), "Gemma": ("Gemma", {}), "Glm": ("Glm", {"num_attention_heads": 4}),
    "Qwen2Moe": ("Qwen2Moe", {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}),
}  # fmt: skip
OWN_FORWARD = ("float32", "GPTNeoX", "Gemma", "Glm", "Qwen2Moe")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("error:tokens are decoded by transformers, not")
def test_models_that_the_op_of_cpus_does_not_take(name, natively, steps):
    """Dense ones, float16 with an output layer in NVFP4, and those whose own forward is captured."""
    family, how = MODELS[name]
    model = tiny_model(family, **how)
    if name == "float16":
        quantize_(model.lm_head, NVFP4WeightOnlyConfig())
    message = "not natively: the native step needs a bfloat16 or float16 model"
    with pytest.warns(UserWarning, match=message) if name == "float32" else contextlib.nullcontext():
        model = natively(model)
    assert (vars(model)["forward"].plan().description is None) == (name in OWN_FORWARD)
    assert_writes_its_own(model, prompt(model, 16, 20), {"float16": 0.01, "float32": 1e-5}.get(name, 0.02))
    assert len(steps) == 11


@pytest.mark.parametrize("cache", [None, "codes"])
def test_prompts_of_different_lengths(cache, natively, steps):
    """In generate of transformers; codes of a text whose dense tokens are padding wait until they are not."""
    model = natively(tiny_model("Llama"))
    own = decode_natively(copy.deepcopy(model), False)

    def coded():
        return {CACHE: nvfp4_cache(model.config, max_tokens=64, recent=3, sink=2)} if cache else {}

    ids = prompt(model, 4)
    for starts, first in (([0, 3, 5, 1], 8), ([0, 3, 7, 1], 10 if cache else 8)):
        mask = (torch.arange(8) >= torch.tensor(starts)[:, None]).long().to(model.device)
        steps.clear()
        with pytest.warns(UserWarning, match="fewer tokens than the 3 that") if first > 8 else contextlib.nullcontext():
            tokens, logits = written(model, ids, 20, attention_mask=mask, **coded())
        expected = written(own, ids, 20, along=tokens, attention_mask=mask, **coded())[1]
        assert relative_error(logits, expected).max() < 0.04 and steps == [*range(first, 27)]
    with warnings.catch_warnings():  # the first chunks of a text are all padding
        warnings.filterwarnings("error", "tokens are decoded by transformers")
        chunked = written(model, ids, 8, along=tokens, attention_mask=mask, prefill_chunk_size=3)[1]
    expected = written(own, ids, 8, along=tokens, attention_mask=mask)[1]
    assert relative_error(chunked, expected).max() < 0.04


@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Mistral"])
def test_short_prompts_are_replayed(family, natively, monkeypatch):
    """Prompts of a length that came before have its graph, with the bits that they had before. Weights may change."""
    model, captures, found = natively(tiny_model(family)), [], {}
    if model.device.type == "cuda":
        monkeypatch.setattr(prompts, "captured", lambda *args: captures.append(1) or captured(*args))
    for scale in (1, 1, 1 if family == "Gemma3" else 0.5, 1):  # whose norm adds one to its weight
        for batch, length, start in ((1, 5, 0), (1, 16, 0), (2, 17, 0), (2, 24, 3), (3, 90, 80), (1, 7, 2)):
            ids = prompt(model, batch, length)
            mask = torch.ones_like(ids)
            mask[0, :start] = 0
            cache = FixedCache(4, 16)
            with torch.no_grad():
                model.model.norm.weight.mul_(scale)
                kept = {"logits_to_keep": 1, "attention_mask": mask, CACHE: cache}
                kept["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
                logits = model(ids, **kept).logits.float()
                model.model.norm.weight.div_(scale)
            state = torch.stack([torch.stack(each.buffers)[:, :, :, :length].clone() for each in cache.layers])
            before, states = found.setdefault((batch, length), (logits, state))
            assert torch.equal(logits, before * scale) and torch.equal(state, states), (batch, length, scale)
            assert cache.get_seq_length() == length
    assert len(captures) == (5 if model.device.type == "cuda" else 0)


@pytest.mark.parametrize("family", ["Llama"])
def test_padding_that_is_not_before_a_text(family, natively, steps):
    model = natively(tiny_model(family))
    ids, mask = prompt(model, 2), torch.ones(2, 8, dtype=torch.int64, device=model.device)
    mask[0, 5] = 0
    with pytest.warns(UserWarning, match="padding is not before the texts"):
        written(model, ids, 4, attention_mask=mask)
    assert not steps and decode_counts(model) == (0, 4)
    mask[0, :6] = 0  # in place: what was known of the mask is not used
    written(model, ids, 4, attention_mask=mask)
    assert steps == [8, 9, 10] and decode_counts(model) == (4, 4)
    with pytest.raises(ValueError, match="call decode_natively"):
        decode_counts(decode_natively(model, False))


def test_quantized_activations(natively, steps):
    """W4A4 weights. Behind attention, another last bit of bfloat16 may change the codes of activations."""
    model = tiny_model("Llama", quantized=False, num_hidden_layers=1)
    quantize_(model.model, NVFP4Config(row_scaled=True))
    model = natively(model)
    tokens, logits = written(model, prompt(model, 2))
    assert len(steps) == 11
    own = decode_natively(copy.deepcopy(model), False)
    error = relative_error(logits, written(own, prompt(model, 2), along=tokens)[1])
    assert error.median() < 0.05 and error.max() < 0.3


@pytest.mark.parametrize("length", [513, 600, 1024])
def test_prompts_of_many_lengths_share_graphs(length, natively):
    """Above 512 tokens, padded to a multiple of 128: tokens see none of it, and neither does what is read next."""
    model = natively(tiny_model("Llama"))
    ids, cache = prompt(model, 1, length + 3), FixedCache(4, 16)
    with torch.no_grad():
        parts = [model(ids[:, :length], **{CACHE: cache}).logits]
        parts += [model(ids[:, i : i + 1], **{CACHE: cache}).logits for i in range(length, length + 3)]
    assert [key[1] for key in vars(model)["forward"].plan().prompts._kinds] == [-(-length // 128) * 128]
    assert relative_error(torch.cat(parts, 1), own_logits(model, ids)).max() < 0.04


@pytest.mark.parametrize("short", [8, 128])
def test_fp8_activations_of_long_prompts(short, natively, monkeypatch):
    """Each prompt of as many tokens as that takes has them, and shorter ones of a batch with as many do not.

    short: tokens of all texts up to which a prompt is replayed: fewer than those of a batch, or more.
    """
    monkeypatch.setattr("nvfp4_tensor.generation.prompt.SHORT", short)
    for module in ("matmul.backends", "generation.prompt"):
        monkeypatch.setattr(f"nvfp4_tensor.{module}.FP8_ROWS", 48)
    dense, logits = tiny_model("Llama", quantized=False), {}
    for activations in (None, "fp8"):
        model = copy.deepcopy(dense)
        quantize_(model.model, NVFP4WeightOnlyConfig(activations=activations))
        model = natively(model)
        for length in (40, 48):
            with torch.no_grad():
                one = prompt(model, 2, length)
                first, again = (model(one, logits_to_keep=1, **{CACHE: FixedCache(4, 64)}).logits for _ in range(2))
                logits[activations, length] = model(one, **{CACHE: FixedCache(4, 64)}).logits
            assert torch.equal(first, again) and torch.equal(first, logits[activations, length][:, -1:])
        own = own_logits(model, prompt(model, 1, 48)), own_logits(model, prompt(model, 1, 40))
        for length, expected in zip((48, 40), own, strict=True):
            assert relative_error(logits[activations, length][:1], expected).median() < 0.02
    assert torch.equal(logits["fp8", 40], logits[None, 40])
    assert relative_error(logits["fp8", 48], logits[None, 48]).median() > 0.02


def test_buffers_and_graphs_are_used_again(natively):
    model = natively(tiny_model("Mixtral"))
    ids, decoder = prompt(model), vars(model)["forward"]
    first = written(model, ids)
    (runner,) = decoder._runners.values()
    for a, b in zip(first, written(model, ids), strict=True):
        assert torch.equal(a, b)
    assert list(decoder._runners.values()) == [runner]
    # A cache that the user keeps is not written to again.
    kept = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, do_sample=False)[CACHE]
    before = kept.layers[0].keys.clone()
    assert before.shape[2] == 11 and type(kept) is FixedCache
    written(model, ids + 1)
    assert torch.equal(kept.layers[0].keys, before) and len(decoder._runners) == 2


@pytest.mark.smoke
def test_a_text_goes_on(natively, steps):
    """A second prompt into the same cache, and more tokens than the cache had room for."""
    model = natively(tiny_model("Mistral"))
    out = model.generate(prompt(model), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat((out.sequences, prompt(model, length=5)), 1)
    assert_writes_its_own(model, longer, count=5, **{CACHE: out[CACHE]})
    assert steps == [*range(8, 13), *range(19, 23)]
    cache, ids, more = FixedCache(4, 1), prompt(model, length=254), prompt(model, length=6)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        logits = [model(token, **{CACHE: cache}).logits for token in more.split(1, 1)]
    expected = own_logits(model, torch.cat((ids, more), 1))[:, -6:]
    assert steps[9:] == [254, 255, 256, 257, 258, 259]  # position 256 moved the cache to larger buffers
    assert relative_error(torch.cat(logits, 1), expected).max() < 0.03


def test_a_model_that_changes_at_every_token(natively, monkeypatch):
    """Graphs are captured a few times only, and the text is that of the model's own forward."""
    model = natively(tiny_model("Starcoder2"))
    made, init = [], Runner.__init__
    monkeypatch.setattr(Runner, "__init__", lambda *args: made.append(1) or init(*args))
    mlp = type(model.model.layers[1].mlp)
    forward = mlp.forward

    def counting(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x)

    monkeypatch.setattr(mlp, "forward", counting)
    with pytest.warns(UserWarning, match="the model changes at every token"):
        assert_writes_its_own(model, prompt(model, 2), count=24)
    assert 1 < len(made) < 12


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
    decode_natively(model)
    with pytest.warns(UserWarning, match="it cannot be captured"):
        written(model, prompt(model))
    assert_writes_its_own(model, prompt(model))
    # Other models can still be captured.
    assert_writes_its_own(decode_natively(tiny_model("Llama").to("cuda")), prompt(model))


@pytest.mark.gpu
def test_garbage_is_not_collected_during_a_capture():
    """The memory of another graph, which goes with it, could not be freed."""
    x = torch.arange(8.0, device="cuda")
    pool = torch.cuda.graph_pool_handle()

    def doubled_by(objects):
        y = 2 * x
        held = [[] for _ in range(objects)]  # enough for a collection
        return y + len(held)

    garbage = [captured(lambda: torch.empty(1 << 26, device="cuda").fill_(1), x.device, None)]
    garbage.append(garbage)  # a cycle
    del garbage
    replay = captured(functools.partial(doubled_by, 100_000), x.device, pool)
    assert torch.equal(replay(), 2 * x + 100_000)
