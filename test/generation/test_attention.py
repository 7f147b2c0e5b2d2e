"""Attention to the codes of a cache in place: against the same cache decoded, in models."""

import copy
import logging
import pickle

import pytest
import torch
from helpers.instruction_sets import needs_library

transformers = pytest.importorskip("transformers")

from helpers.tiny_models import tiny_model  # noqa: E402

from nvfp4_tensor.generation import attention, coded_states  # noqa: E402
from nvfp4_tensor.generation.cache import NVFP4CacheLayer, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.coded_states import StoredStates  # noqa: E402

pytestmark = needs_library
GREEDY = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}


def dense_model(kind="Llama", dtype=torch.float32, **changes):
    return tiny_model(kind, dtype, quantized=False, num_hidden_layers=2, max_position_embeddings=4096, **changes)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of new tokens of each attention to codes in place, and (decoded) of each that decoded a layer."""
    found = {"in place": [], "decoded": 0}
    attend, dense = coded_states.attend, StoredStates.dense

    def counted(q, *args, **options):
        found["in place"].append(q.shape[2])
        return attend(q, *args, **options)

    def counted_dense(self):
        found["decoded"] += 1
        return dense(self)

    monkeypatch.setattr(coded_states, "attend", counted)
    monkeypatch.setattr(attention, "attend", counted)
    monkeypatch.setattr(StoredStates, "dense", counted_dense)
    return found


def decoded_cache(model, **options):
    """Return an nvfp4_cache that decodes every layer, as on devices without native attention."""

    class Decoded(NVFP4CacheLayer):
        def update(self, *args, **kwargs):
            return tuple(x.dense() if isinstance(x, StoredStates) else x for x in super().update(*args, **kwargs))

    return transformers.Cache(layers=[Decoded(**options) for _ in range(model.config.num_hidden_layers)])


@pytest.mark.parametrize("implementation, options", [
    ("sdpa", {}), ("sdpa", {"recent": 0}), ("nvfp4", {"recent": 0}), ("nvfp4", {"recent": 16, "sink": 5}),
], ids=str)  # fmt: skip
def test_text_of_a_long_prompt_is_that_of_the_decoded_cache(implementation, options, calls):
    model = dense_model()
    ids = torch.randint(1, 128, (1, 300), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, past_key_values=decoded_cache(model, **options), max_new_tokens=15, **GREEDY)
    calls["in place"], calls["decoded"] = [], 0
    model.set_attn_implementation(implementation)
    cache = nvfp4_cache(model.config, **options)
    assert torch.equal(model.generate(ids, past_key_values=cache, max_new_tokens=15, **GREEDY), expected)
    assert calls["in place"][-28:] == [1] * 28 and cache.get_seq_length() == 314
    assert calls["decoded"] == (4 if options.get("recent") == 0 and implementation == "sdpa" else 0)


@pytest.mark.parametrize("kind, how", [
    ("Llama", {"num_beams": 3}), ("Qwen3", {"do_sample": True, "num_return_sequences": 2}), ("Gemma2", {}),
], ids=str)  # fmt: skip
def test_padded_batches_beams_and_samples(how, kind, calls):
    """Padding on the left, grouped heads, and Gemma 2's soft cap; chunks of the prompt read codes in place too."""
    more = {"sliding_window": 4096, "layer_types": ["full_attention"] * 2} if kind == "Gemma2" else {}
    model = dense_model(kind, **more)
    model.set_attn_implementation("eager")
    ids = torch.randint(1, 128, (2, 70), generator=torch.Generator().manual_seed(1))
    ids[0, :25] = 0
    options = {"attention_mask": ids.ne(0).long(), "max_new_tokens": 20, **GREEDY, **how}
    torch.manual_seed(1)
    expected = model.generate(ids, past_key_values=decoded_cache(model, recent=10), **options)
    calls["in place"], calls["decoded"] = [], 0
    model.set_attn_implementation("nvfp4")
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, past_key_values=nvfp4_cache(model.config, recent=10), **options), expected)
    capped = [70] * 2 if kind == "Gemma2" else []  # a prompt without codes yet
    assert calls["in place"] == capped + [1] * 38 and not calls["decoded"]


def in_chunks(model, ids, sizes, implementation, cache, seen=None):
    """Return the logits of a prompt that is read in chunks."""
    model.set_attn_implementation(implementation)
    parts, end = [], 0
    for size in sizes:
        begin, end = end, end + size
        how = {} if seen is None else {"attention_mask": seen[:, :end]}
        with torch.no_grad():
            parts.append(model(ids[:, begin:end], past_key_values=cache, **how).logits.float())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("kind, recent, sizes, padding, options", [
    ("Llama", 0, [1] * 50, 0, {}), ("Llama", 40, [7] * 14, 5, {}), ("Llama", 0, [16] * 6, 9, {}),
    ("Llama", 40, [30, 30, 30, 10], 0, {}), ("Llama", 40, [1] * 70, 0, {"dtype": torch.bfloat16}),
    ("Gemma2", 4, [20, 1, 15, 1, 1, 22], 9, {"sliding_window": 12}),
    ("Gemma2", 4, [20, 1, 15, 1, 1, 22], 0, {"sliding_window": 12}),
    ("Gemma2", 4, [20, 1, 15, 1, 1, 22], 9, {"sliding_window": 4096}),
], ids=str)  # fmt: skip
def test_a_prompt_in_chunks(kind, recent, sizes, padding, options, calls):
    """A chunk attends to the codes before it, and to itself dense, or, without dense tokens, rounded.

    Every other layer of Gemma 2 has a window, and a cache of its own.
    """
    model = dense_model(kind, **options)
    ids = torch.randint(1, 128, (2, sum(sizes)), generator=torch.Generator().manual_seed(1))
    seen = (torch.arange(sum(sizes)) >= torch.tensor([[padding], [0]])).long()
    logits = []
    for implementation in ("eager", "nvfp4"):
        calls.update({"in place": [], "decoded": 0})
        cache = nvfp4_cache(model.config, recent=recent)
        logits.append(in_chunks(model, ids, sizes, implementation, cache, seen if padding else None)[seen.bool()])
    assert (logits[1] - logits[0]).norm() < (0.02 if "dtype" in options else 1e-5) * logits[0].norm()
    assert calls["in place"] and set(calls["in place"]) <= set(sizes) and not calls["decoded"]


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 20, 100])
def test_on_cuda_short_chunks_read_codes_and_long_ones_decode_them(size, calls):
    model = dense_model(dtype=torch.bfloat16).cuda()
    ids = torch.randint(128, (2, 500), generator=torch.Generator().manual_seed(1)).cuda()
    sizes = [400, *[size] * (100 // size)]
    expected = in_chunks(model, ids, sizes, "sdpa", decoded_cache(model))
    calls.update({"in place": [], "decoded": 0})
    got = in_chunks(model, ids, sizes, "nvfp4", nvfp4_cache(model.config))
    assert (expected - got)[:, 400:].norm() < 0.02 * expected[:, 400:].norm()
    assert (size > attention.MOST_NEW_TOKENS) == bool(calls["decoded"]) == (not calls["in place"])


@pytest.mark.parametrize("implementation, dtype", [
    ("eager", torch.bfloat16), ("sdpa", torch.float16), ("nvfp4", torch.bfloat16),
])  # fmt: skip
def test_a_cache_under_autocast(implementation, dtype):
    """Keys are float32 and values 16 bits: both are stored, and attention is that of the decoded cache."""
    model, sizes, cache = dense_model(), [13] * 4 + [8], nvfp4_cache(dense_model().config, recent=8)
    ids = torch.randint(1, 128, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype):
        expected = in_chunks(model, ids, sizes, "eager", decoded_cache(model, recent=8))
        got = in_chunks(model, ids, sizes, implementation, cache)
    keys, values = cache.layers[0].update(torch.zeros(1, 2, 1, 32), torch.zeros(1, 2, 1, 32, dtype=dtype))
    assert keys.dtype == torch.float32 and values.dtype == dtype and keys.shape[2] == values.shape[2] == 61
    assert (got - expected).norm() < 0.03 * expected.norm()


# --- what falls back -------------------------------------------------------------------------------------------------


def test_another_mask_falls_back_by_name(calls, caplog):
    model = dense_model()
    model.set_attn_implementation("nvfp4")
    ids = torch.arange(60).view(1, 60)
    mask = torch.ones(1, 1, 10, 60, dtype=torch.bool).tril(50)
    mask[..., 7] = False
    results = []
    attention._log_once.cache_clear()
    for cache in (decoded_cache(model, recent=20), nvfp4_cache(model.config, recent=20)):
        with torch.no_grad(), caplog.at_level(logging.WARNING):
            model(ids[:, :50], past_key_values=cache)
            results.append(model(ids[:, 50:], past_key_values=cache, attention_mask=mask).logits)
    assert torch.allclose(*results, atol=1e-5)
    assert calls["decoded"] and not calls["in place"]
    assert [r.message for r in caplog.records].count(
        "attention decodes the NVFP4 cache, which costs time: the mask is not causal with padding on the left"
    ) == 1


def test_sinks_of_a_model_raise():
    q = torch.randn(1, 2, 1, 32)
    with pytest.raises(ValueError, match="attention sinks need"):
        attention.nvfp4_attention(torch.nn.Module(), q, q, q, None, s_aux=torch.zeros(2))


def test_gradients_flow_through_dense_tokens():
    layer = NVFP4CacheLayer(recent=4, sink=2)
    old, new = torch.randn(2, 1, 2, 30, 32), torch.randn(2, 1, 2, 3, 32, requires_grad=True)
    layer.update(*old)
    keys, values = layer.update(*new)
    assert not isinstance(keys, StoredStates)
    (keys.sum() + values.sum()).backward()
    assert torch.equal(new.grad, torch.ones_like(new))
    first = torch.randn(2, 1, 2, 5, 32, requires_grad=True)
    sum(x.sum() for x in NVFP4CacheLayer(sink=2).update(*first)).backward()
    assert torch.equal(first.grad, torch.ones_like(first))


# --- stored states are a tensor --------------------------------------------------------------------------------------


def stored_pair(tokens=50, recent=10, **options):
    layer = NVFP4CacheLayer(recent=recent, **options)
    x = torch.randn(2, 2, 3, tokens, 32, generator=torch.Generator().manual_seed(0))
    layer.update(*x[..., : tokens - 1, :])
    return layer, *layer.update(*x[..., tokens - 1 :, :])


def test_any_operator_decodes():
    layer, keys, values = stored_pair(sink=3)
    dense = keys.dense()
    assert type(dense) is torch.Tensor and keys.shape == dense.shape and "39 tokens in codes" not in repr(dense)
    assert repr(keys) == "StoredStates(shape=(2, 3, 50, 32), dtype=torch.float32, 36 tokens in codes)"
    for f in (lambda x: x + 1, lambda x: x[:, 1:], lambda x: x.transpose(1, 2).contiguous(), copy.deepcopy,
              lambda x: pickle.loads(pickle.dumps(x)), lambda x: torch.cat((x, x)), lambda x: x.detach()):  # fmt: skip
        assert type(f(keys)) is torch.Tensor and torch.equal(f(keys), f(dense))
    for write in (lambda: keys.mul_(2), lambda: layer.keys.zero_(), lambda: layer.keys.__setitem__(0, 0)):
        with pytest.raises(RuntimeError, match=r"cannot write into stored keys or values: clone\(\)"):
            write()
    with pytest.raises(RuntimeError, match=r"append tokens by update\(\)"):
        layer.values = values
    q = torch.randn(2, 6, 1, 32)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    mask = torch.rand(1, 50) > 0.3
    for options in ({}, {"attn_mask": mask}, {"scale": 0.3}):
        expected = sdpa(q, dense, values.dense(), enable_gqa=True, **options)
        assert torch.allclose(sdpa(q, keys, values, enable_gqa=True, **options), expected, atol=1e-5)
    with pytest.raises(RuntimeError):
        sdpa(q, keys, values)
    grouped = sdpa(q.view(2, 3, 2, 32), keys, values)
    assert torch.allclose(grouped.view_as(q), sdpa(q, dense, values.dense(), enable_gqa=True), atol=1e-5)


def test_states_are_not_read_after_the_cache_changed():
    layer, keys, _ = stored_pair()
    before = keys.dense()
    layer.update(*torch.randn(2, 2, 3, 300, 32))
    assert torch.equal(keys.dense(), before)  # appending moves the codes, and leaves these
    layer.crop(-310)
    with pytest.raises(RuntimeError, match="has removed or reordered tokens since"):
        keys + 1


def test_gradients_of_capped_scores():
    model = dense_model("Gemma2", sliding_window=12)
    ids = torch.randint(1, 128, (2, 30), generator=torch.Generator().manual_seed(1))
    gradients = []
    for implementation in ("eager", "nvfp4"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-3)


def test_dropout_of_capped_scores():
    model = dense_model("Gemma2", attention_dropout=0.5).train()
    model.set_attn_implementation("nvfp4")
    ids = torch.arange(1, 30)[None]
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("grad", [False, True])
def test_capped_scores_of_an_encoder(grad):
    """T5Gemma's encoder and its cross attention see all tokens, and have no mask without padding."""
    sizes = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_logit_softcapping": 5.0, "initializer_range": 0.3,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    ids = torch.randint(1, 128, (2, 11), generator=torch.Generator().manual_seed(1))
    logits = []
    for implementation in ("eager", "nvfp4"):
        model.set_attn_implementation(implementation)
        with torch.set_grad_enabled(grad):
            logits.append(model(input_ids=ids, decoder_input_ids=ids[:, :7]).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
