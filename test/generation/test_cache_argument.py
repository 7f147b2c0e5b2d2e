"""Test the cache under both names: ``past_key_values``, and ``cache`` of transformers 5.24 and later."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from helpers.texts import written  # noqa: E402
from helpers.tiny_models import tiny_model  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

from nvfp4_tensor.generation import decode_natively, nvfp4_cache  # noqa: E402
from nvfp4_tensor.generation.cache_argument import CACHE, NAMES, cache_argument, cache_in  # noqa: E402
from nvfp4_tensor.generation.fixed_cache import FixedCache  # noqa: E402

SUPPORTED = [
    pytest.param(name, marks=pytest.mark.skipif(name == "cache" != CACHE, reason="transformers 5.24 renames it"))
    for name in NAMES
]
IDS = torch.arange(3, 11)[None]


def test_names():
    assert hasattr(CausalLMOutputWithPast(), CACHE)
    assert cache_in({"cache": 1}) == cache_in({"past_key_values": 1}) == 1 and cache_in({"cache": None}) is None
    assert cache_argument(tiny_model("Llama")) == CACHE

    class Remote(torch.nn.Module):
        def forward(self, input_ids, past_key_values=None):
            return input_ids

    assert cache_argument(Remote()) == "past_key_values"


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_token_is_decoded_natively(name, monkeypatch):
    """The op serves a call of the model with the cache under either name, and returns it under the library's."""
    model, seen, op = tiny_model("Llama"), [], torch.ops.nvfp4.decode_step
    expected = written(model, IDS, 6)[1]
    monkeypatch.setattr(torch.ops.nvfp4, "decode_step", lambda *args: seen.append(args[8]) or op(*args))
    decode_natively(model)
    cache = FixedCache(len(model.model.layers), 64)
    tokens = written(model, IDS, 6)[0][:, IDS.shape[1] :]
    assert seen == [8, 9, 10, 11, 12]
    with torch.no_grad():
        model(IDS, **{name: cache})
        outputs = [model(token, **{name: cache}) for token in tokens[:, :5].split(1, 1)]
    assert seen == [8, 9, 10, 11, 12] * 2 and all(getattr(each, CACHE) is cache for each in outputs)
    logits = torch.cat([each.logits for each in outputs], 1)
    torch.testing.assert_close(logits.float(), expected[:, 1:], rtol=0, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("natively", [False, True])
def test_generate_fills_the_given_cache(name, natively):
    model = tiny_model("Llama")
    model = decode_natively(model) if natively else model
    cache = nvfp4_cache(model.config)
    text = model.generate(IDS, **{name: cache}, max_new_tokens=5, do_sample=False)
    assert text.shape[1] == 13 and cache.get_seq_length() == 12
