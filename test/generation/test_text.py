"""Test generation.generate, the iterator over tokens."""

import pytest
import torch

pytest.importorskip("transformers")
from helpers.texts import gaps
from helpers.tiny_models import MIXTURES, SIZES, tiny_model
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, StaticCache

from nvfp4_tensor.generation import decode_natively, generate, nvfp4_cache
from nvfp4_tensor.generation.cache_argument import CACHE
from nvfp4_tensor.generation.decoder import Decoder
from nvfp4_tensor.generation.fixed_cache import FixedCache
from nvfp4_tensor.generation.runner import Runner


def prompt(batch=1, length=8, device="cpu"):
    return torch.randint(3, 300, (batch, length), generator=torch.Generator().manual_seed(5)).to(device)


def model_on(device, family="Llama"):
    model = tiny_model(family).to(device)
    return decode_natively(model) if device == "cuda" or family == "Mistral" else model


def stepwise_on(device, family="Llama"):
    """A model that decodes by the operators of a graph, on a CPU one by one."""
    model = tiny_model(family).to(device)
    Decoder(model, by_operators=True).install()
    return model


def written(model, ids, count=12, **options):
    """Return tokens (B, count)."""
    return torch.stack(list(generate(model, ids, max_new_tokens=count, **options)), 1)


def ties(model, ids, tokens, rank=0):
    return gaps(model, torch.cat((ids, tokens.to(ids.device)), 1), tokens.shape[1], rank)


@pytest.mark.parametrize("family, batch", [
    ("Llama", 1), ("Mistral", 4), ("Gemma3", 16), ("Qwen3Moe", 4), ("Starcoder2", 18), ("Llama", 67),
])  # fmt: skip
def test_greedy(family, batch, device):
    model, ids = model_on(device, family), prompt(batch, device=device)
    tokens = written(model, ids)
    assert tokens.shape == (batch, 12) and tokens.dtype == torch.int64 and not tokens.is_cuda
    gap = ties(model, ids, tokens)
    assert gap.median() == 0 and gap.max() < (1.0 if family in MIXTURES else 0.2)


def test_long_texts(device, steps, monkeypatch):
    """Longer than the room after a prompt, and than the random numbers that are computed at once."""
    sampling, texts = {"temperature": 1.0, "top_k": 3, "seed": 1}, []
    for room in (False, True):
        if room:
            monkeypatch.setattr("nvfp4_tensor.generation.fixed_cache.ROOM", 4)
            monkeypatch.setattr("nvfp4_tensor.generation.fixed_cache.GROWTH", 8)
            monkeypatch.setattr("nvfp4_tensor.generation.choice.ROWS", 8)
        model, ids = stepwise_on(device), prompt(2, device=device)
        texts.append([written(model, ids, 24, **options) for options in ({}, sampling)])
        for rank, tokens in zip((0, 2), texts[-1], strict=True):
            assert ties(model, ids, tokens, rank).max() < 0.2
    if device == "cpu":  # on a GPU sums are split by the size of the cache
        assert all(torch.equal(*pair) for pair in zip(*texts, strict=True))


def test_as_transformers_writes(device):
    """And without decode_natively, which leaves nothing in the model."""
    model, ids = model_on(device, "Mistral"), prompt(device=device)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)[:, 8:]
    with torch.device("meta"):  # the caller's default, which neither plans nor tokens take
        tokens = written(decode_natively(model), ids)
    assert torch.equal(tokens, expected.cpu())
    plain = tiny_model("Llama").to(device)
    before = set(vars(plain))
    assert ties(plain, ids, written(plain, ids)).max() < 0.1 and set(vars(plain)) == before


@pytest.mark.parametrize("options", [
    {"temperature": 1.0}, {"temperature": 0.8, "top_k": 20}, {"temperature": 1.2, "top_p": 0.9},
], ids=str)  # fmt: skip
def test_the_same_seed_writes_the_same_text(options, device):
    model, ids = model_on(device), prompt(3, device=device)
    first = written(model, ids, seed=1, **options)
    assert torch.equal(written(model, ids, seed=1, **options), first)
    assert torch.equal(written(model, ids, 7, seed=1, **options), first[:, :7])
    text = generate(model, ids, max_new_tokens=12, seed=1, **options)
    with torch.inference_mode(), torch.device("meta"):
        begun = next(text)
    assert torch.equal(torch.stack([begun, *text], 1), first)
    assert not torch.equal(written(model, ids, seed=2, **options), first)
    # Rows of equal prompts are drawn independently.
    assert len(set(map(tuple, written(model, ids[:1].expand(3, -1), seed=1, **options).tolist()))) == 3


def cache_for(model, kind):
    config = model.config
    return {
        "dense": lambda: DynamicCache(config=config), "ours": lambda: FixedCache(config.num_hidden_layers, 64),
        "static": lambda: StaticCache(config=config, max_cache_len=64), "nvfp4": lambda: nvfp4_cache(config),
        "in a graph": lambda: nvfp4_cache(config, max_tokens=40, recent=6),
    }[kind]()  # fmt: skip


@pytest.mark.parametrize("kind, starts", [
    ("none", [0, 4, 7]), ("dense", [0, 4, 7]), ("dense", [0, 0, 0]), ("ours", [0]), ("ours", [0, 0, 0]),
    ("nvfp4", [0]), ("in a graph", [0, 0, 0]), ("in a graph", [0, 4, 7]), ("static", [0]),
], ids=str)  # fmt: skip
def test_two_turns_with_a_cache(kind, starts, device, steps):
    """Each text is the one that its prompt has alone, up to ties; without padding, that of transformers' generate."""
    model, batch, begins = stepwise_on(device), len(starts), torch.tensor(starts, device=device)[:, None]
    cache, is_padded = None if kind == "none" else cache_for(model, kind), any(starts)
    text, bound = prompt(batch, 9, device), 0.9 if kind in ("in a graph", "nvfp4") else 0.2
    for turn in range(1 if cache is None else 2):
        mask = torch.arange(text.shape[1], device=device) >= begins if is_padded else None
        new = text[:, cache.get_seq_length() :] if turn else text
        tokens = written(model, new, 9, attention_mask=mask, cache=cache)
        assert cache is None or cache.get_seq_length() == text.shape[1] + 9 - 1
        for row, start in enumerate(starts):
            gap = ties(model, text[row : row + 1, start:], tokens[row : row + 1])
            assert gap.max() < bound, (turn, row, gap)
        if turn == 0 and not is_padded:
            own, how = tiny_model("Llama").to(device), {CACHE: cache_for(model, kind), "do_sample": False}
            expected = own.generate(text, **how, max_new_tokens=9)[:, 9:].cpu()
            assert (tokens == expected).all(1).sum() >= batch - 1  # but for a tie
        text = torch.cat((text, tokens.to(device), prompt(batch, 2, device)), 1)
    waits = 4 if kind == "in a graph" and is_padded else 0  # while padding is among dense tokens
    assert len(steps) == {"none": 8, "ours": 16, "in a graph": 16 - waits}.get(kind, 0)


def test_a_static_cache_without_room_raises():
    model = tiny_model("Llama")
    cache = StaticCache(config=model.config, max_cache_len=20)
    assert written(model, prompt(), 13, cache=cache).shape == (1, 13)  # all but the last token are in the cache
    with pytest.raises(ValueError, match="has 20 of 20 tokens, and the text up to 2 more: make it"):
        generate(model, prompt(length=1), max_new_tokens=2, cache=cache)


@pytest.mark.parametrize("kind", ["ours", "in a graph"])
def test_a_text_that_is_not_finished_leaves_what_was_read(kind, device, steps):
    model, ids = stepwise_on(device), prompt(2, device=device)
    whole, cache = written(model, ids, 12, cache=cache_for(model, kind)), cache_for(model, kind)
    begun = generate(model, ids, max_new_tokens=12, cache=cache)
    tokens = [next(begun) for _ in range(5)]
    begun.close()
    assert cache.get_seq_length() == 8 + 4 and torch.equal(torch.stack(tokens, 1), whole[:, :5])
    rest = written(model, tokens[-1].to(device)[:, None], 7, cache=cache)
    if kind != "in a graph" or device == "cpu":  # what a graph computed ahead is in codes now, no longer dense
        assert torch.equal(rest, whole[:, 5:])
    assert cache.get_seq_length() == 8 + 12 - 1


def test_a_cache_of_other_texts_raises():
    model = tiny_model("Llama")
    for kind in ("dense", "ours", "nvfp4", "static"):
        cache = cache_for(model, kind)
        written(model, prompt(2), 2, cache=cache)
        with pytest.raises(ValueError, match="the cache is of 2 texts, and ids of 3"):
            generate(model, prompt(3), max_new_tokens=2, cache=cache)


def test_it_stops_at_the_end_of_sequence_unless_told_otherwise(device):
    model, ids = model_on(device, "Mistral"), prompt(device=device)
    (tokens,) = written(model, ids).tolist()
    end = tokens.index(tokens[5]) + 1
    for model.generation_config.eos_token_id in ([tokens[5], 299], tokens[5]):
        assert written(model, ids).tolist() == [tokens[:end]]
    assert written(model, ids, stop_tokens=()).tolist() == [tokens]
    assert written(model, ids, stop_tokens=tokens[0]).tolist() == [tokens[:1]]


def test_graphs_are_used_again(device, steps, monkeypatch):
    model, ids = stepwise_on(device), prompt(2, device=device)
    made = []
    monkeypatch.setattr(Runner, "__init__", lambda *args, make=Runner.__init__: made.append(1) or make(*args))
    first = written(model, ids, temperature=1.0, seed=3)
    assert torch.equal(written(model, ids, temperature=1.0, seed=3), first)
    assert not torch.equal(written(model, ids, temperature=0.5, seed=3), first)
    written(model, ids + 1, 5, temperature=1.0)
    assert len(made) == 1
    written(model, ids)
    assert len(made) == 2


def test_a_model_that_changes(device):
    model, ids = stepwise_on(device), prompt(2, device=device)
    tokens = []
    for i, token in enumerate(generate(model, ids, max_new_tokens=20)):
        tokens.append(token)
        if i == 5:
            model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()
    tokens = torch.stack(tokens, 1)
    # At most four more tokens were chosen before.
    text = torch.cat((ids, tokens.to(device)), 1)[:, :-1]
    with torch.no_grad():
        logits = type(model).forward(model, text, use_cache=False).logits[:, 7:].float().cpu()
    gap = (logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]) / logits.std(-1)
    assert (gap[:, :6] > 0.1).any() and gap[:, 10:].max() < 0.2


@pytest.mark.parametrize("change, message", [
    ({"ids": torch.zeros(3, dtype=torch.int64)}, "ids must be prompts of one length"),
    ({"ids": torch.zeros(1, 3)}, "ids must be prompts of one length"),
    ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, "ids must be prompts"),
    ({"ids": torch.zeros(1, 3, dtype=torch.int64, device="meta")}, "ids are on meta, and the model on cpu"),
    ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer"), ({"top_k": 5}, "set temperature"),
    ({"temperature": 1.0, "seed": [1, 2]}, "one for each of the 1 texts"),
    ({"train": True}, r"call model.eval\(\) first"),
    ({"ids": prompt(2), "attention_mask": torch.tensor([[1] * 8, [0] * 8])}, "is 0 in all of text 1: a prompt needs"),
])  # fmt: skip
def test_invalid_arguments_raise_at_the_call(change, message):
    arguments = {"ids": prompt(), "max_new_tokens": 4, **change}
    with pytest.raises(ValueError, match=message):
        generate(tiny_model("Llama").train(arguments.pop("train", False)), arguments.pop("ids"), **arguments)


@pytest.mark.parametrize("at", [0, 3])
def test_nan_raises_and_leaves_what_was_read(at, device, steps):
    """The cache lacks the token that was yielded last, or all of a prompt without one."""
    model, ids = stepwise_on(device), prompt(2, device=device)
    cache, tokens, weight = cache_for(model, "ours"), [], model.model.norm.weight
    with pytest.raises(RuntimeError, match=r"the logits of rows \[.*\] have a NaN"):
        begun = generate(model, ids, max_new_tokens=12, cache=cache)
        for i in range(12):
            if i == at:
                weight.data = torch.full_like(weight.data, torch.nan)
            tokens.append(next(begun))
    assert at <= len(tokens) < 12
    assert cache.get_seq_length() == (8 + len(tokens) - 1 if tokens else 0)
    weight.data = torch.ones_like(weight.data)
    model.model.embed_tokens.weight.data[ids[1, 3]] = torch.nan
    with pytest.raises(RuntimeError, match=r"the logits of rows \[1\] have a NaN"):
        written(model, ids)


def model_with_convolutions():
    torch.manual_seed(1)
    model = Lfm2ForCausalLM(Lfm2Config(**{**SIZES, "layer_types": ["conv", "full_attention"] * 2})).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("make", [lambda: tiny_model("Gemma3"), model_with_convolutions], ids=["windows", "conv"])
def test_an_error_with_full_windows_or_convolutions_warns(make):
    model = make()
    cache = DynamicCache(config=model.config)
    model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), pytest.warns(UserWarning, match="ended with an error: reset"):
        written(model, prompt(2, 20), 4, cache=cache)
