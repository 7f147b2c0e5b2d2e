"""Texts of a batch that end early: the others are written as if all went on, by smaller steps."""

import pytest
import torch

pytest.importorskip("transformers")
from helpers.texts import prompt
from helpers.tiny_models import tiny_model
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4WeightOnlyConfig
from nvfp4_tensor.generation import decode_counts, decoder, ended_texts, generate, nvfp4_cache, text
from nvfp4_tensor.generation.cache_argument import CACHE
from nvfp4_tensor.generation.fixed_cache import FixedCache
from nvfp4_tensor.generation.runner import Runner

TEXTS, TOKENS = 7, 24


@pytest.fixture
def rows(monkeypatch):
    """The number of texts of each step."""
    seen, launch = [], Runner.launch
    monkeypatch.setattr(Runner, "launch", lambda self, *a, **k: seen.append(self.batch) or launch(self, *a, **k))
    return seen


def all_go_on(monkeypatch):
    for module in (text, decoder):
        monkeypatch.setattr(module, "narrow", lambda *_: None)


def stops_for(tokens, count):
    """Return tokens that end ``count`` or more of the texts (B, T) within half of them, and not all.

    The text that repeats itself most goes on: in any other there may be all tokens that a random model writes.
    """
    kept, early, stops = min(tokens, key=lambda row: len(row.unique())), tokens[:, : TOKENS // 2], []
    for row in early:
        new = row[~torch.isin(row, kept)].tolist()
        if new and torch.isin(early, torch.tensor(stops, dtype=torch.int64)).any(1).sum() < count:
            stops.append(new[0])
    assert torch.isin(early, torch.tensor(stops)).any(1).sum() >= count
    return stops


def model_of(family, natively):
    """A model whose products have the same bits for all these numbers of texts on a CPU, the output layer's too."""
    model = tiny_model(family)
    quantize_(model.lm_head, NVFP4WeightOnlyConfig())
    return natively(model)


def assert_alike(x, y, way):
    """On a GPU other kernels multiply fewer rows, so that ties may fall to the other side."""
    assert torch.equal(x, y) if way != "cuda" else (x == y).float().mean() > 0.6


def by_iterator(model, ids, mask, stops, codes=False, **options):
    """Return tokens, the cache, and no logits."""
    config = model.config
    cache = nvfp4_cache(config, max_tokens=64, recent=4, sink=2) if codes else FixedCache(config.num_hidden_layers, 64)
    how = {"attention_mask": mask, "cache": cache, "max_new_tokens": TOKENS, "stop_tokens": stops, **options}
    return torch.stack(list(generate(model, ids, **how)), 1), cache, ()


def by_transformers(model, ids, mask, stops, **options):
    torch.manual_seed(7)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, return_dict_in_generate=True, output_logits=True,
        eos_token_id=stops or None, **options,
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :].cpu(), out[CACHE], out.logits


SAMPLING = {"temperature": 1.5, "top_k": 20, "seed": 3}


@pytest.mark.parametrize("write, padded, options", [
    (by_iterator, True, {}), (by_iterator, False, SAMPLING), (by_iterator, False, {"codes": True}),
    (by_iterator, True, {"codes": True, **SAMPLING}), (by_transformers, True, {"do_sample": False, "pad_token_id": 0}),
    (by_transformers, True, {"do_sample": True, "temperature": 1.5, "pad_token_id": 2}),
    (by_transformers, False, {"do_sample": True, "num_return_sequences": TEXTS, "pad_token_id": 0}),
], ids=lambda v: getattr(v, "__name__", str(v)))  # fmt: skip
def test_texts_that_go_on_are_as_if_all_did(write, padded, options, way, natively, rows, monkeypatch):
    """And all texts are in their places of the cache."""
    if "codes" in options and way == "step":
        pytest.skip("a CPU's operator reads dense caches")
    model = model_of("Llama" if write is by_iterator else "Qwen3", natively)
    ids = prompt(model, TEXTS, 12)[: 1 if "num_return_sequences" in options else TEXTS]
    starts = torch.tensor([0, 3, 1, 0, 2, 5, 4] if padded else [0] * len(ids), device=ids.device)
    mask = (torch.arange(12, device=ids.device) >= starts[:, None]).long()
    stops = stops_for(write(model, ids, mask, (), **options)[0], 4)
    rows.clear()
    tokens, cache, logits = write(model, ids, mask, stops, **options)
    assert rows[0] == TEXTS and rows[-1] in (1, 2, 4) and sorted(rows, reverse=True) == rows
    all_go_on(monkeypatch)
    expected, other, its_logits = write(model, ids, mask, stops, **options)
    assert_alike(tokens, expected, way)
    assert decode_counts(model).transformers == (3 if way == "step" or "codes" in options else 0)  # the prompts
    if way == "cuda":
        return
    going_on = ~torch.isin(expected[:, :-1], torch.tensor(stops)).any(1)
    assert 0 < going_on.sum() < TEXTS
    assert all(torch.equal(x[going_on], y[going_on]) for x, y in zip(logits, its_logits, strict=True))
    for layer, same in zip(cache.layers, other.layers, strict=True):
        for x, y in ((layer.keys, same.keys), (layer.values, same.values)):
            assert torch.equal(x.clone()[going_on], y.clone()[going_on]) and x.clone().isfinite().all()


def test_a_token_that_ends_texts_given_by_the_user(way, natively, rows):
    """Outside of the loop that made the cache, and in a loop of another call, such a token ends nothing."""
    model = natively(tiny_model("Qwen3"))
    ids, step = prompt(model, 4), ended_texts.LOOK_EVERY
    out = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=299, return_dict_in_generate=True)
    cache, text_ = out[CACHE], out.sequences
    with torch.no_grad():
        for _ in range(2 * step):
            model(torch.full_like(ids[:, :1], 299), **{CACHE: cache})
    assert set(rows) == {4}
    more = torch.full((4, 2 * step + 1), 299, device=ids.device)
    text_ = torch.cat((text_[:, :-1], more), 1)
    how = {"attention_mask": torch.ones_like(text_), "eos_token_id": 298, "pad_token_id": 0, CACHE: cache}
    model.generate(text_, max_new_tokens=2 * step, do_sample=False, **how)
    assert set(rows) == {4} and len(rows) > 4 * step
