"""A cache of codes whose tokens a CUDA graph writes: its ring, and native decoding with it."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nvfp4_tensor.generation import decode_natively  # noqa: E402
from nvfp4_tensor.generation.cache import NVFP4CacheLayer, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import cache_argument  # noqa: E402
from nvfp4_tensor.generation.coded_states import StoredStates  # noqa: E402
from nvfp4_tensor.generation.graph_decoder import GraphDecoder  # noqa: E402
from nvfp4_tensor.generation.runner import Runner  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tiny_model(device="cpu", seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16().eval().to(device)


def natively(model):
    """decode_natively, on a CPU too: the operators of the graph one by one."""
    if model.device.type == "cuda":
        return decode_natively(model)
    GraphDecoder(model).install()
    return model


def write_as_a_graph(layer, keys, values):
    """One token, by the operators of a step."""
    buffers = layer.graph_buffers()
    place = buffers.place_of(torch.tensor([layer.length], device=keys.device))
    batch, heads, _, size = keys.shape
    qkv = torch.cat([x.reshape(batch, heads * size) for x in (keys, keys, values)], dim=1)
    q = buffers.place((qkv, None, None, 0.0, 0.0, True, None, None), place, heads)
    assert torch.equal(q, keys)
    out = buffers.attend(q, place.lengths, size**-0.5, 0.0)
    layer.count_one()
    return out.view(batch, heads, 1, size)


def random_tokens(count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, 2, 3, count, 64), generator=generator).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sink", [0, 3])
@pytest.mark.parametrize("recent", [1, 20, 64])
def test_a_ring_is_the_cache_that_it_replaces(recent, sink, device):
    """Attention and, after tokens leave the ring, all bytes are those of a cache that grows."""
    fixed = NVFP4CacheLayer(recent=recent, sink=sink, max_tokens=300)
    grown = NVFP4CacheLayer(recent=recent, sink=sink)
    prompt = random_tokens(90, device)
    for layer in (fixed, grown):
        layer.update(*prompt)
    assert fixed.is_steady and not grown.is_steady
    for i in range(2 * recent + 5):
        new = random_tokens(1, device, seed=i + 1)
        for _ in range(1 + i % 2):  # a step may run again
            length = fixed.length
            out = write_as_a_graph(fixed, *new)
            fixed.length = length
        fixed.length += 1
        keys, values = grown.update(*new)
        assert isinstance(keys, StoredStates)
        expected = torch.nn.functional.scaled_dot_product_attention(new[0], keys, values)
        assert torch.allclose(out.float(), expected.float(), rtol=2**-7, atol=1e-3)
    assert fixed.get_seq_length() == grown.get_seq_length() == 95 + 2 * recent
    assert fixed._ring is not None
    for a, b in zip(fixed._states, grown._states, strict=True):
        assert fixed._ring is None and a.stored == b.stored and torch.equal(a.latest, b.latest)
        assert torch.equal(a.front, b.front)
        for x, y in zip(a.coded, b.coded, strict=True):
            assert torch.equal(x[:, :, : a.stored], y[:, :, : b.stored])


def test_changes_take_tokens_out_of_the_ring():
    def steady():
        layer = NVFP4CacheLayer(recent=8, max_tokens=128)
        layer.update(*random_tokens(40, "cpu"))
        for i in range(11):
            write_as_a_graph(layer, *random_tokens(1, "cpu", seed=i + 1))
        return layer

    dense = [x + 0 for x in steady().update(*random_tokens(1, "cpu", seed=50))]
    for copied in (copy.deepcopy(steady()), pickle.loads(pickle.dumps(steady()))):
        for got, right in zip(copied.update(*random_tokens(1, "cpu", seed=50)), dense, strict=True):
            assert torch.equal(got + 0, right)
    layer = steady()
    layer.reorder_cache(torch.tensor([1, 0]))
    for got, right in zip(layer.update(*random_tokens(1, "cpu", seed=50)[:, [1, 0]]), dense, strict=True):
        assert torch.equal(got + 0, right[[1, 0]])
    layer = steady()
    layer.crop(-5)
    assert layer.get_seq_length() == 46 and not layer.is_steady
    for i in range(5):
        layer.update(*random_tokens(1, "cpu", seed=i + 7))
    assert layer.is_steady
    for got, right in zip(layer.update(*random_tokens(1, "cpu", seed=50)), dense, strict=True):
        assert torch.allclose(got + 0, right) and torch.equal(got[:, :, :38], right[:, :, :38])


@pytest.mark.parametrize("tokens, room", [(40, 40), (41, 80), (81, 144), (209, 272), (300, 336)])
def test_room_doubles_then_grows_by_blocks(tokens, room, monkeypatch):
    monkeypatch.setattr("nvfp4_tensor.generation.cache.LARGEST_GROWTH", 64)
    layer = NVFP4CacheLayer(recent=8, max_tokens=40)
    layer.update(*random_tokens(tokens, "cpu"))
    assert layer.room == room and layer.keys is not None
    assert all(states.codes.shape[2] == -(-room // 128) * 128 for states in layer._pair)


def test_codes_stay_where_they_are():
    layer = NVFP4CacheLayer(recent=8, max_tokens=128)
    layer.update(*random_tokens(40, "cpu"))
    addresses = layer.graph_buffers().addresses
    write_as_a_graph(layer, *random_tokens(1, "cpu"))
    layer.update(*random_tokens(80, "cpu"))
    assert layer.graph_buffers().addresses == addresses
    layer.reset()
    layer.update(*random_tokens(30, "cpu"))
    assert layer.graph_buffers().addresses == addresses
    layer.update(*random_tokens(120, "cpu"))  # more tokens than it made room for
    assert layer.is_steady and layer.room == 256 and layer.graph_buffers().addresses != addresses
    grown = layer.graph_buffers().addresses
    layer.reset()
    layer.update(*random_tokens(30, "cpu"))
    assert layer.graph_buffers().addresses == grown
    layer.reset()
    layer.update(*random_tokens(30, "cpu")[:, :1])
    assert layer.is_steady and layer.graph_buffers().addresses != grown


@pytest.mark.parametrize("max_tokens", [0, -3, 2.5])
def test_max_tokens_is_checked(max_tokens):
    with pytest.raises(ValueError, match="max_tokens must be a number of tokens"):
        NVFP4CacheLayer(max_tokens=max_tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 3])
def test_native_steps_write_the_text_of_the_growing_cache(batch, device, monkeypatch):
    prompt = torch.randint(1, 128, (batch, 90), generator=torch.Generator().manual_seed(1)).to(device)
    how = dict(max_new_tokens=40, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True)
    model = tiny_model(device)
    expected = model.generate(prompt, past_key_values=nvfp4_cache(model.config), **how)
    model = natively(model)
    cache = nvfp4_cache(model.config, max_tokens=200)
    steps = []
    count = NVFP4CacheLayer.count_one
    monkeypatch.setattr(NVFP4CacheLayer, "count_one", lambda self: (steps.append(1), count(self)))
    got = model.generate(prompt, past_key_values=cache, **how)
    assert len(steps) == 39 * 2 and cache.get_seq_length() == 129
    for i, (a, b) in enumerate(zip(got.logits, expected.logits, strict=True)):
        if not torch.equal(got.sequences[:, : 90 + i], expected.sequences[:, : 90 + i]):
            break
        assert (a - b).float().norm() < 0.03 * b.float().norm()
    assert i > 3
    cache.reset()
    again = model.generate(prompt, past_key_values=cache, **how)
    assert torch.equal(again.sequences, got.sequences) and len(steps) == 2 * 39 * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("other", [{"rotate_keys": False}, {"recent": 5}, {"sink": 2}])
def test_layers_of_two_kinds_are_decoded_by_transformers(other, device, monkeypatch):
    """A step takes one kind of codes and one place of the ring for all layers."""
    model = tiny_model(device)
    options = {"recent": 8, "sink": 1, "max_tokens": 100}

    def mixed():
        return transformers.Cache(layers=[NVFP4CacheLayer(**options), NVFP4CacheLayer(**options | other)])

    ids = torch.arange(30, device=device)[None]
    how = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **{cache_argument(model): mixed()}, **how)
    launched = []
    monkeypatch.setattr(Runner, "launch", lambda *arguments: launched.append(arguments))
    assert torch.equal(natively(model).generate(ids, **{cache_argument(model): mixed()}, **how), expected)
    assert not launched


@pytest.mark.parametrize("device", DEVICES)
def test_a_text_that_outgrows_its_room_is_decoded_natively_on(device, monkeypatch):
    """The token for which there is no room takes the model's own forward, which moves the codes."""
    prompt = torch.randint(1, 128, (1, 90), generator=torch.Generator().manual_seed(2)).to(device)
    how = dict(max_new_tokens=60, do_sample=False, pad_token_id=0)
    model = natively(tiny_model(device))
    steps = []
    count = NVFP4CacheLayer.count_one
    monkeypatch.setattr(NVFP4CacheLayer, "count_one", lambda self: (steps.append(1), count(self)))
    expected = model.generate(prompt, past_key_values=nvfp4_cache(model.config, max_tokens=200), **how)
    assert len(steps) == 59 * 2
    cache = nvfp4_cache(model.config, max_tokens=100)
    got = model.generate(prompt, past_key_values=cache, **how)
    assert len(steps) == (59 + 58) * 2 and all(layer.room == 200 for layer in cache.layers)
    assert torch.equal(got[:, :100], expected[:, :100])  # one token's attention was computed by another operator


def test_a_short_prompt_is_decoded_by_transformers_until_dense_tokens_are_complete():
    model = natively(tiny_model())
    cache = nvfp4_cache(model.config, max_tokens=100, recent=16)
    how = dict(max_new_tokens=30, do_sample=False, pad_token_id=0)
    text = model.generate(torch.arange(1, 6)[None], past_key_values=cache, **how)
    plain = tiny_model().generate(torch.arange(1, 6)[None], past_key_values=nvfp4_cache(model.config, recent=16), **how)
    assert torch.equal(text[:, :20], plain[:, :20]) and cache.get_seq_length() == 34
