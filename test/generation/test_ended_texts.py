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
from nvfp4_tensor.generation.runner import Runner

TEXTS, TOKENS = 7, 24


@pytest.fixture
def rows(monkeypatch):
    """The number of texts of each step."""
    seen, launch = [], Runner.launch
    monkeypatch.setattr(Runner, "launch", lambda self, *args: seen.append(self.batch) or launch(self, *args))
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


def mask_of(ids, padded):
    starts = torch.tensor([0, 3, 1, 0, 2, 5, 4] if padded else [0] * TEXTS, device=ids.device)
    return (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None]).long()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_k": 20, "seed": 3}], ids=["greedy", "sampling"])
@pytest.mark.parametrize("kind", [None, "codes"])
def test_generation_generate(kind, options, padded, way, natively, rows, monkeypatch):
    """And a cache that is given has all texts in their places."""
    if kind == "codes" and way == "step":
        pytest.skip("a CPU's operator reads dense caches")
    model = model_of("Llama", natively)
    ids, mask = prompt(model, TEXTS, 12), mask_of(prompt(model, TEXTS, 12), padded)

    def write(**more):
        cache = None if kind is None else nvfp4_cache(model.config, max_tokens=64, recent=4, sink=2)
        more = {"attention_mask": mask, "cache": cache, **options, **more}
        return torch.stack(list(generate(model, ids, max_new_tokens=TOKENS, **more)), 1), cache

    stops = stops_for(write()[0], 4)
    rows.clear()
    tokens, cache = write(stop_tokens=stops)
    assert rows[0] == TEXTS and rows[-1] in (1, 2, 4) and sorted(rows, reverse=True) == rows
    all_go_on(monkeypatch)
    expected, other = write(stop_tokens=stops)
    assert_alike(tokens, expected, way)
    if kind == "codes" and way != "cuda":
        going_on = ~torch.isin(expected[:, :-1], torch.tensor(stops)).any(1)
        assert 0 < going_on.sum() < TEXTS
        for layer, same in zip(cache.layers, other.layers, strict=True):
            for x, y in ((layer.keys, same.keys), (layer.values, same.values)):
                assert torch.equal(x.clone()[going_on], y.clone()[going_on]) and x.clone().isfinite().all()


@pytest.mark.parametrize("options", [
    {"do_sample": False}, {"do_sample": True, "temperature": 1.5}, {"num_return_sequences": TEXTS, "do_sample": True},
], ids=["greedy", "sampling", "sequences"])  # fmt: skip
@pytest.mark.parametrize("pad", [0, 2])
def test_generate_of_transformers(pad, options, way, natively, rows, monkeypatch):
    model = model_of("Qwen3", natively)
    ids = prompt(model, TEXTS, 12)
    mask = mask_of(ids, "num_return_sequences" not in options)
    if "num_return_sequences" in options:
        ids, mask = ids[:1], mask[:1]

    def write(**more):
        torch.manual_seed(7)
        return model.generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, pad_token_id=pad, return_dict_in_generate=True,
            output_logits=True, **options, **more,
        )  # fmt: skip

    stops = stops_for(write(eos_token_id=None).sequences[:, 12:].cpu(), 4)
    rows.clear()
    out = write(eos_token_id=stops)
    assert rows[0] == TEXTS and rows[-1] in (1, 2, 4) and sorted(rows, reverse=True) == rows
    all_go_on(monkeypatch)
    expected = write(eos_token_id=stops)
    assert_alike(out.sequences, expected.sequences, way)
    assert decode_counts(model).transformers == (3 if way == "step" else 0)
    if way == "cuda":
        return
    going_on = ~torch.isin(expected.sequences[:, 12:-1], torch.tensor(stops, device=ids.device)).any(1)
    assert 0 < going_on.sum() < TEXTS
    assert all(torch.equal(x[going_on], y[going_on]) for x, y in zip(out.logits, expected.logits, strict=True))
    for layer, same in zip(out[CACHE].layers, expected[CACHE].layers, strict=True):
        assert torch.equal(layer.keys[going_on], same.keys[going_on])


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
