"""A cache of codes whose tokens a CUDA graph writes: its ring, and native decoding with it."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
from helpers.texts import relative_error, written  # noqa: E402
from helpers.tiny_models import tiny_model  # noqa: E402

from nvfp4_tensor.generation import decode_natively  # noqa: E402
from nvfp4_tensor.generation.cache import NVFP4CacheLayer, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import CACHE  # noqa: E402


def dense_model():
    return tiny_model("Llama", quantized=False, num_hidden_layers=2, max_position_embeddings=512)


@pytest.fixture(params=["graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request):
    return request.param


def random_tokens(count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, 2, 3, count, 64), generator=generator).bfloat16().to(device)


@pytest.mark.parametrize("tokens, room", [(40, 40), (41, 80), (81, 144), (209, 272), (300, 336)])
def test_room_doubles_then_grows_by_blocks(tokens, room, monkeypatch):
    monkeypatch.setattr("nvfp4_tensor.generation.cache.LARGEST_GROWTH", 64)
    layer = NVFP4CacheLayer(recent=8, max_tokens=40)
    layer.update(*random_tokens(tokens, "cpu"))
    assert layer.capacity == room and layer.keys is not None
    assert all(states.codes.shape[2] == -(-room // 128) * 128 for states in layer._pair)


def test_codes_stay_where_they_are():
    layer = NVFP4CacheLayer(recent=8, max_tokens=128)
    layer.update(*random_tokens(40, "cpu"))
    addresses = layer.step_buffers().identity
    layer.update(*random_tokens(80, "cpu"))
    assert layer.step_buffers().identity == addresses
    layer.reset()
    layer.update(*random_tokens(30, "cpu"))
    assert layer.step_buffers().identity == addresses
    layer.update(*random_tokens(120, "cpu"))  # more tokens than it made room for
    assert layer.is_steady and layer.capacity == 256 and layer.step_buffers().identity != addresses
    grown = layer.step_buffers().identity
    layer.reset()
    layer.update(*random_tokens(30, "cpu"))
    assert layer.step_buffers().identity == grown
    layer.reset()
    layer.update(*random_tokens(30, "cpu")[:, :1])
    assert layer.is_steady and layer.step_buffers().identity != grown


def test_native_steps_write_the_text_of_the_growing_cache(natively, steps):
    """The token for which there is no room takes the model's own forward, which moves the codes."""
    model = natively(dense_model())
    own = decode_natively(copy.deepcopy(model), False)
    prompt = torch.randint(1, 128, (3, 90), generator=torch.Generator().manual_seed(1)).to(model.device)
    tokens, expected = written(own, prompt, 24, **{CACHE: nvfp4_cache(model.config)})
    for room in (200, 100):
        steps.clear()
        cache = nvfp4_cache(model.config, max_tokens=room)
        logits = written(model, prompt, 24, along=tokens, **{CACHE: cache})[1]
        assert steps == [each for each in range(90, 113) if each != room] and cache.get_seq_length() == 113
        assert relative_error(logits, expected).max() < 0.03 and all(layer.capacity == 200 for layer in cache.layers)
    cache.reset()
    again = written(model, prompt, 24, along=tokens, **{CACHE: cache})[1]
    assert relative_error(again, expected).max() < 0.03 and steps[22:] == list(range(90, 113))
    cache.reset()
    assert torch.equal(written(model, prompt, 24, along=tokens, **{CACHE: cache})[1], again)


@pytest.mark.parametrize("other", [{"rotate_keys": False}, {"recent": 5}, {"sink": 2}])
def test_layers_of_two_kinds_are_decoded_by_transformers(other, natively, steps):
    """A step takes one kind of codes and one place of the ring for all layers."""
    options = {"recent": 8, "sink": 1, "max_tokens": 100}
    model, texts = natively(dense_model()), []
    for each in (model, decode_natively(copy.deepcopy(model), False)):
        cache = transformers.Cache(layers=[NVFP4CacheLayer(**options), NVFP4CacheLayer(**options | other)])
        texts.append(written(each, torch.arange(30, device=model.device)[None], **{CACHE: cache})[0])
    assert torch.equal(*texts) and not steps
