"""Test the cache with fixed buffers: to transformers it is one that grows."""

import copy
import gc
import pickle

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers import DynamicCache

from nvfp4_tensor.generation import fixed_cache
from nvfp4_tensor.generation.fixed_cache import Buffers, FixedCache, keeps_all_keys, static_view


def states(tokens, batch=2, heads=3, dim=8):
    return torch.randn(batch, heads, tokens, dim), torch.randn(batch, heads, tokens, dim)


def append(caches, tokens, batch=2):
    """The same random tokens to each layer of all caches, which return the same."""
    for i in range(2):
        new = states(tokens, batch)
        returned = [cache.update(*new, i) for cache in caches]
        assert all(torch.equal(same[0], same[-1]) for same in zip(*returned, strict=True))


def both(tokens=(7, 1, 4)):
    caches = FixedCache(2, 10), DynamicCache()
    for count in tokens:
        append(caches, count)
    return caches


def assert_same(fixed, growing):
    for a, b in zip(fixed.layers, growing.layers, strict=True):
        assert a.get_seq_length() == b.get_seq_length()
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert a.get_mask_sizes(5) == b.get_mask_sizes(5)


def test_moves_to_larger_buffers():
    fixed, growing = both((250, 6))
    assert fixed.layers[0].capacity == 256 and not fixed.is_compileable and fixed.get_seq_length() == 256
    buffers, moves = fixed.layers[0].buffers, fixed.moves
    append((fixed, growing), 1)
    assert_same(fixed, growing)
    assert fixed.layers[0].capacity == 512 and fixed.layers[0].buffers[0] is not buffers[0] and fixed.moves == moves + 2


@pytest.mark.parametrize("change", [
    lambda cache: None, lambda cache: cache.crop(-5), lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    lambda cache: cache.batch_repeat_interleave(3), lambda cache: cache.batch_select_indices(torch.tensor([1])),
    lambda cache: cache.crop(0), lambda cache: cache.crop(-12), copy.deepcopy,
    lambda cache: pickle.loads(pickle.dumps(cache)),
])  # fmt: skip
def test_methods_of_transformers(change):
    """After each, further tokens go on from there; those of a copy are not those of the original."""
    fixed, growing = both()
    changed = [change(cache) or cache for cache in (fixed, growing)]
    assert_same(*changed)
    append(changed, 2, batch=changed[0].layers[0].keys.shape[0])
    assert_same(*changed)
    assert changed[0] is fixed or fixed.get_seq_length() == 12


def test_reset():
    fixed, _ = both()
    fixed.reset()
    assert fixed.get_seq_length() == 0
    keys, values = states(3, batch=5)
    assert torch.equal(fixed.update(keys, values, 0)[0], keys)


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
    del cache
    gc.collect()
    assert not lender.in_use
    cache = FixedCache(2, 50, lender)
    append([cache, DynamicCache()], 3)
    assert [each.buffers[0].data_ptr() for each in cache.layers] == addresses
    assert not cache.layers[0].buffers[0][:, :, 3:].any()  # nothing of the text before
    other = FixedCache(2, 50, lender)
    other.update(*states(3, batch=1), 0)  # another batch size
    assert other.layers[0].buffers[0].data_ptr() not in addresses


def test_a_static_view_has_the_same_buffers():
    fixed, _ = both()
    view = static_view(fixed)
    keys, values = states(1)
    view.layers[0].cumulative_length.fill_(12)
    view.update(keys, values, 0)
    assert torch.equal(fixed.layers[0].buffers[0][:, :, 12:13], keys) and view.get_seq_length() == 13


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
