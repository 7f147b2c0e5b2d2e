"""The NVFP4 cache for transformers: its bits, appending, and generation with it."""

import copy
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.tiny_models import tiny_model  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from nvfp4_tensor import QuantizeSpec, quantize  # noqa: E402
from nvfp4_tensor.generation.cache import NVFP4CacheLayer, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import CACHE, cache_argument  # noqa: E402
from nvfp4_tensor.generation.coded_states import CodedStates, append  # noqa: E402

SPECS = [QuantizeSpec(), QuantizeSpec(four_over_six="mse"), QuantizeSpec(scale_search="mse")]


def states(batch=2, heads=3, tokens=50, head_dim=64, seed=0, dtype=torch.bfloat16):
    """Return keys and values whose tokens differ in magnitude by up to 2^20."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-10, 11, (batch, heads, tokens, 1), generator=generator)
    x = torch.randn((2, batch, heads, tokens, head_dim), generator=generator) * sizes
    return x[0].to(dtype), x[1].to(dtype)


def dense_model(layers=2):
    return tiny_model("Llama", torch.float32, quantized=False, num_hidden_layers=layers, max_position_embeddings=512)


def rows_of(x, spec):
    """Return the decoded rows of x (n, columns), and their factors."""
    heads = x.view(1, 1, *x.shape)
    keys, values = CodedStates(heads), CodedStates(heads)
    append(keys, values, heads, heads.flip(2), spec)
    got = keys.decode(torch.float32, len(x))[0, 0]
    assert torch.equal(values.decode(torch.float32, len(x))[0, 0], got.flip(0))
    return got, keys.factor[0, 0, : len(x)].view(torch.float8_e8m0fnu).float()


def used(states):
    """Return the bytes of a layer's keys or values that are in use."""
    return [t[:, :, : states.stored] for t in states.coded]


@pytest.mark.parametrize(
    "spec, dtype", zip(SPECS, [torch.bfloat16, torch.float16, torch.float32], strict=True), ids=str
)
def test_a_row_is_quantized_by_itself(spec, dtype):
    """Each row equals quantize() of it times a power of two, with the amax that makes the per-tensor scale 1.

    So the error does not depend on the size of a token.
    """
    x = states(dtype=dtype)[0].reshape(-1, 64)
    x[3] = 0
    got, factors = rows_of(x, spec)
    for row, value, factor in zip(x, got, factors, strict=True):
        alone = quantize(row.float() / factor, spec, amax=spec.largest_value)
        assert torch.equal(value, alone.dequantize() * factor)
    scaled = x.float().abs().amax(-1) / factors
    assert ((scaled < spec.largest_value) & ((scaled > spec.largest_value / 4) | (scaled == 0))).all()
    x, got = x.float()[4:], got[4:]
    error = (got - x).norm(dim=-1) / x.norm(dim=-1)
    assert error.max() < 0.15 and error.mean() < 0.1


def test_rows_of_any_magnitude():
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([2.0**-126, 2.0**-100, 2.0**-20, 1.0, 2.0**100, 2.0**124]).unsqueeze(1)
    got = rows_of(x * sizes, QuantizeSpec())[0] / sizes
    assert ((got - x).norm(dim=-1) < 0.15 * x.norm(dim=-1)).all()


@pytest.mark.parametrize("rotate_keys", [False, True])
def test_a_value_that_is_not_finite_stays_in_its_block(rotate_keys):
    """Of rotated keys, in its row."""
    keys, values = states()
    layer, clean = (NVFP4CacheLayer(recent=0, rotate_keys=rotate_keys) for _ in range(2))
    expected = clean.update(keys, values)[0].clone()
    keys = keys.clone()
    keys[1, 2, 7, 20] = torch.inf
    got = layer.update(keys, values)[0].clone()
    reached = slice(None) if rotate_keys else slice(16, 32)
    assert got[1, 2, 7, reached].isnan().all()
    got[1, 2, 7, reached] = expected[1, 2, 7, reached] = 0
    others = torch.ones(got.shape, dtype=torch.bool)
    others[1, 2, 7] = False
    assert torch.equal(got[others], expected[others]) and got.isfinite().all()


# --- what a cache must be able to do ---------------------------------------------------------------------------------


def stored(recent=20):
    """Return a layer after appending, cropping and reordering."""
    keys, values = states()
    layer = NVFP4CacheLayer(recent=recent)
    for start, end in ((0, 30), (30, 31), (31, 50)):
        layer.update(keys[..., start:end, :], values[..., start:end, :])
    layer.crop(-3)
    layer.reorder_cache(torch.tensor([1, 0], device="cpu"))
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([0, 3], device="cpu"))
    return layer


def assert_same_bytes(a, b):
    for one, other in zip(a._states, b._states, strict=True):
        assert torch.equal(one.latest, other.latest) and one.stored == other.stored > 0
        assert all(torch.equal(*both) for both in zip(used(one), used(other), strict=True))


def test_defaults_of_torch_change_nothing(other_defaults, monkeypatch):
    expected, made = other_defaults(stored), other_defaults(states)
    monkeypatch.setitem(globals(), "states", lambda: made)
    assert_same_bytes(stored(), expected)


def test_compiled_it_stores_the_same_bytes():
    """Chunks of one token write to existing tiles of block scales."""
    keys, values = states(tokens=8)
    plain, compiled = NVFP4CacheLayer(recent=3), NVFP4CacheLayer(recent=3)
    update = torch.compile(lambda layer, k, v: layer.update(k, v), backend="aot_eager")
    start = 0
    for size in (6, 1, 1):
        k, v = (x[..., start : start + size, :] for x in (keys, values))
        start += size
        for a, b in zip(plain.update(k, v), update(compiled, k, v), strict=True):
            assert torch.equal(a, b)
    assert_same_bytes(plain, compiled)


def test_what_is_refused():
    layer = NVFP4CacheLayer(recent=0)
    layer.update(*states(batch=3))
    with pytest.raises(ValueError, match=r"the cache has \(batch, heads\) \(3, 3\)"):
        layer.update(*states(batch=2))
    layer.reset()
    assert layer.nbytes == NVFP4CacheLayer(recent=5).nbytes == 0
    layer = NVFP4CacheLayer(recent=0, max_tokens=64)
    keys, _ = layer.update(*states())
    layer.reset()  # whose memory the next tokens take
    with pytest.raises(RuntimeError, match="has removed or reordered tokens since"):
        keys.sum()
    for name, wrong in (("recent", [-1, 1.0, None]), ("sink", [-1, 1.0, None]), ("max_tokens", [0, -3, 2.5])):
        for number in wrong:
            with pytest.raises(ValueError, match=f"{name} must be a number of tokens"):
                NVFP4CacheLayer(**{name: number})
    for options in ({"round_mode": "stochastic"}, {"block_rows": 16}, {"hadamard_sign": True}, {"round_mode": "eden"}):
        with pytest.raises(ValueError, match="a cache needs a spec that rounds to nearest, in 1x16 blocks"):
            NVFP4CacheLayer(QuantizeSpec(**options))
    with pytest.raises(ValueError, match="give a spec without row_scaled"):
        NVFP4CacheLayer(QuantizeSpec(row_scaled=True))
    with pytest.raises(TypeError, match="needs the config of a model"):
        nvfp4_cache(dense_model())


def test_only_layers_that_grow_are_quantized():
    config = transformers.Gemma2Config(num_hidden_layers=4, sliding_window=32)
    kinds = [type(layer).__name__ for layer in nvfp4_cache(config).layers]
    assert kinds == ["DynamicSlidingWindowLayer", "NVFP4CacheLayer"] * 2
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=32)
    with pytest.raises(ValueError, match=r"no layer with growing keys and values, only DynamicSlidingWindowLayer"):
        nvfp4_cache(config)


# --- models ----------------------------------------------------------------------------------------------------------


GREEDY = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None, "do_sample": False}


@pytest.mark.parametrize("how, recent", [
    ("assistant_model", 0), ("prompt_lookup_num_tokens", 0),
    ("assistant_model", 64),  # with fewer dense tokens, a chunk reads more of them than single tokens
])  # fmt: skip
def test_what_an_assistant_proposed_in_vain_is_forgotten(how, recent):
    model, ids = dense_model(), torch.arange(60, 72).view(1, 12)
    option = {how: dense_model(layers=1) if how == "assistant_model" else 3}
    made = [
        model.generate(ids, past_key_values=nvfp4_cache(model.config, recent=recent), **GREEDY, **more)
        for more in ({}, option)
    ]
    assert torch.equal(*made)


def test_a_prompt_is_not_kept():
    """The memory that keys and values of a layer refer to is what ``nbytes`` says; codes grow by 128 tokens."""
    layer = NVFP4CacheLayer(recent=20, sink=4)
    layer.update(*states(tokens=2000))
    found = {}
    for each in layer._states:
        for t in (each.front, *each.coded, each.latest):
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    assert sum(found.values()) == layer.nbytes
    layer = NVFP4CacheLayer(recent=0)
    layer.update(*states(batch=1, heads=4, tokens=256, head_dim=128))
    assert 8 * layer.nbytes / (2 * 4 * 256 * 128) == 4.5 + 8 / 128
    layer.update(*states(batch=1, heads=4, tokens=1, head_dim=128))
    assert 8 * layer.nbytes / (2 * 4 * 384 * 128) == 4.5 + 8 / 128


def test_gradients_that_end_in_codes_warn():
    """Tokens of an earlier call are codes, which have no gradient; within one call gradients are right."""
    model, ids = dense_model(), torch.arange(80)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(ids, **{cache_argument(model): nvfp4_cache(model.config, recent=16)}, labels=ids).loss.backward()
    got = model.model.layers[0].self_attn.k_proj.weight.grad.clone()
    model.zero_grad()
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert torch.equal(got, model.model.layers[0].self_attn.k_proj.weight.grad)
    cache = nvfp4_cache(model.config, recent=16)
    model(ids[:, :60], **{cache_argument(model): cache})
    with pytest.warns(UserWarning, match="gradients do not reach the keys and values of earlier calls"):
        model(ids[:, 60:], **{cache_argument(model): cache})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(ids[:, 60:], **{cache_argument(model): cache})


@pytest.mark.parametrize("how", ["assistant_model", "num_beams"])
def test_an_encoder_and_a_decoder(how):
    """transformers takes tokens back from the caches of encoder-decoder models, if these are a DynamicCache."""
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=192, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    arguments = {how: copy.deepcopy(model) if how == "assistant_model" else 2, "max_new_tokens": 8, "do_sample": False}
    arguments |= {"decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    texts = [
        model.generate(
            torch.arange(9)[None],
            **{CACHE: transformers.EncoderDecoderCache(cache, DynamicCache())},
            **arguments,
        )
        for cache in (nvfp4_cache(config, recent=64), DynamicCache())
    ]
    assert torch.equal(*texts)
