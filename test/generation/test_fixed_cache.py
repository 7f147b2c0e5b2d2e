"""Test the cache with fixed buffers: its memory, and what else sees it (its layers: test_layers.py)."""

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers import DynamicCache

from nvfp4_tensor.generation import fixed_cache
from nvfp4_tensor.generation.ended_texts import narrow
from nvfp4_tensor.generation.fixed_cache import Buffers, FixedCache, keeps_all_keys


def states(tokens, batch=2, heads=3, dim=8):
    return torch.randn(batch, heads, tokens, dim), torch.randn(batch, heads, tokens, dim)


def append(caches, tokens, batch=2):
    """The same random tokens to each layer of all caches, which return the same."""
    for i in range(2):
        new = states(tokens, batch)
        returned = [cache.update(*new, i) for cache in caches]
        assert all(torch.equal(same[0], same[-1]) for same in zip(*returned, strict=True))


def test_a_far_limit_takes_no_memory(monkeypatch):
    monkeypatch.setattr(fixed_cache, "ROOM", 512)
    cache = FixedCache(1, 1 << 40)
    cache.update(*states(300), 0)
    assert cache.layers[0].capacity == 1024


def test_buffers_are_lent_again():
    lender = Buffers()
    cache = FixedCache(2, 100, lender)
    append([cache], 4)
    addresses = [each.buffers[0].data_ptr() for each in cache.layers]
    assert lender.in_use
    narrow(cache, [True, False])
    del cache
    assert not lender.in_use  # at once
    cache = FixedCache(2, 50, lender)
    append([cache, DynamicCache()], 3)
    assert [each.buffers[0].data_ptr() for each in cache.layers] == addresses
    assert not cache.layers[0].buffers[0][:, :, 3:].any()  # nothing of the text before
    other = FixedCache(2, 50, lender)
    other.update(*states(3, batch=1), 0)  # another batch size
    assert other.layers[0].buffers[0].data_ptr() not in addresses


def test_what_a_reader_keeps_is_not_lent_again():
    """Keys of one text do not become those of a later one, nor those of tokens after a crop."""
    lender = Buffers()
    cache = FixedCache(2, 50, lender)
    append([cache], 4)
    before, layer = cache.layers[0].keys, cache.layers[1]
    kept = before.clone()
    cache.crop(-2)
    append([cache], 2)
    assert torch.equal(before, kept) and torch.equal(cache.layers[0].keys[:, :, :2], kept[:, :, :2])
    del cache
    assert lender.in_use and layer.length == 4
    del layer
    assert not lender.in_use
    append([FixedCache(2, 50, lender)], 4)
    assert torch.equal(before, kept)


def test_other_texts_are_not_appended():
    """One text would be written into all three, and its layer have more tokens than the next."""
    cache = FixedCache(2, 10)
    append([cache], 4, batch=3)
    for shape in ({"batch": 1}, {"heads": 1}):
        with pytest.raises(ValueError, match=r"the cache has \(batch, heads\) \(3, 3\), and got .* make a new cache"):
            cache.update(*states(2, **{"batch": 3} | shape), 0)
    assert [each.length for each in cache.layers] == [4, 4]


def test_inference_mode():
    """Buffers that were allocated in inference mode can be written to outside of it."""
    with torch.inference_mode():
        cache = FixedCache(1, 10)
        cache.update(*states(2), 0)
    cache.update(*states(2), 0)
    assert cache.get_seq_length() == 4


def test_models_with_other_layers():
    assert keeps_all_keys(transformers.Gemma3TextConfig()) and keeps_all_keys(transformers.MistralConfig())
    assert not keeps_all_keys(transformers.MambaConfig()) and not keeps_all_keys(transformers.Qwen3NextConfig())
    assert not keeps_all_keys(transformers.Llama4TextConfig())
