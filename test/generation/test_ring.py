"""A cache of codes whose tokens a CUDA graph writes: its ring, and native decoding with it."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers")
from helpers.texts import relative_error, written  # noqa: E402
from helpers.tiny_models import tiny_model  # noqa: E402

from nvfp4_tensor.generation import decode_natively  # noqa: E402
from nvfp4_tensor.generation.cache import NVFP4CacheLayer, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import CACHE  # noqa: E402
from nvfp4_tensor.generation.coded_states import StoredStates  # noqa: E402


def dense_model():
    return tiny_model("Llama", quantized=False, num_hidden_layers=2, max_position_embeddings=512)


@pytest.fixture(params=["graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request):
    return request.param


def write_as_a_graph(layer, keys, values):
    """One token, by the operators of a step."""
    buffers = layer.graph_buffers()
    place = buffers.place_of(torch.tensor([layer.length], device=keys.device), None)
    batch, heads, _, size = keys.shape
    qkv = torch.cat([x.reshape(batch, heads * size) for x in (keys, keys, values)], dim=1)
    q = buffers.place((qkv, None, None, 0.0, 0.0, True, None, None), place, heads)
    assert torch.equal(q, keys)
    out = buffers.attend(q, place, size**-0.5, 0.0)
    layer.length += 1
    return out.view(batch, heads, 1, size)


def random_tokens(count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, 2, 3, count, 64), generator=generator).bfloat16().to(device)


@pytest.mark.parametrize("recent, sink", [(1, 3), (20, 0), (64, 3)])
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


def test_native_steps_write_the_text_of_the_growing_cache(natively, steps):
    model = natively(dense_model())
    own = decode_natively(copy.deepcopy(model), False)
    prompt = torch.randint(1, 128, (3, 90), generator=torch.Generator().manual_seed(1)).to(model.device)
    tokens, expected = written(own, prompt, 24, **{CACHE: nvfp4_cache(model.config)})
    cache = nvfp4_cache(model.config, max_tokens=200)
    logits = written(model, prompt, 24, along=tokens, **{CACHE: cache})[1]
    assert steps == list(range(90, 113)) and cache.get_seq_length() == 113
    assert relative_error(logits, expected).max() < 0.03
    cache.reset()
    assert torch.equal(written(model, prompt, 24, along=tokens, **{CACHE: cache})[1], logits) and len(steps) == 46


@pytest.mark.parametrize("other", [{"rotate_keys": False}, {"recent": 5}, {"sink": 2}])
def test_layers_of_two_kinds_are_decoded_by_transformers(other, natively, steps):
    """A step takes one kind of codes and one place of the ring for all layers."""
    options = {"recent": 8, "sink": 1, "max_tokens": 100}
    model, texts = natively(dense_model()), []
    for each in (model, decode_natively(copy.deepcopy(model), False)):
        cache = transformers.Cache(layers=[NVFP4CacheLayer(**options), NVFP4CacheLayer(**options | other)])
        texts.append(written(each, torch.arange(30, device=model.device)[None], **{CACHE: cache})[0])
    assert torch.equal(*texts) and not steps


def test_a_text_that_outgrows_its_room_is_decoded_natively_on(natively, steps):
    """The token for which there is no room takes the model's own forward, which moves the codes."""
    model = natively(dense_model())
    prompt = torch.randint(1, 128, (1, 90), generator=torch.Generator().manual_seed(2)).to(model.device)
    expected = written(model, prompt, 20, **{CACHE: nvfp4_cache(model.config, max_tokens=200)})[0]
    assert steps == list(range(90, 109))
    cache = nvfp4_cache(model.config, max_tokens=100)
    got = written(model, prompt, 20, **{CACHE: cache})[0]
    assert steps[19:] == [*range(90, 100), *range(101, 109)] and all(layer.room == 200 for layer in cache.layers)
    assert torch.equal(got[:, :100], expected[:, :100])  # one token's attention was computed by another operator
