"""Batch invariance: a text has the same bits alone, among any others, at any place, padded or not."""

import copy
import pickle
import random

import pytest
import torch

pytest.importorskip("transformers")
from helpers.tiny_models import tiny_model
from torchao.quantization import quantize_
from transformers import DynamicCache

from nvfp4_tensor import NVFP4Config
from nvfp4_tensor.generation import decode_counts, decode_natively, generate, nvfp4_cache
from nvfp4_tensor.generation.cache_argument import CACHE
from nvfp4_tensor.generation.decoder import Decoder

COUNT = 10
PROMPTS = [torch.randint(3, 300, (n,), generator=torch.Generator().manual_seed(n)) for n in (1, 3, 7, 17, 21, 40)]


@pytest.fixture
def invariant(way):
    """Let a model decode batch-invariantly in this way."""

    def install(model):
        if way != "graph":
            return decode_natively(model.to("cuda" if way == "cuda" else "cpu"), batch_invariant=True)
        Decoder(model, by_operators=True, invariant=True).install()
        return model

    return install


def batch_of(prompts, model, extra=0):
    """Return ids and mask (B, S), with padding before the texts, and ``extra`` columns of it before all."""
    size = max(map(len, prompts)) + extra
    ids, mask = torch.zeros((2, len(prompts), size), dtype=torch.int64)
    for row, each in enumerate(prompts):
        ids[row, size - len(each) :], mask[row, size - len(each) :] = each, 1
    return {"ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def by_transformers(model, prompts, extra=0, **options):
    """Return each text's tokens and logits by ``model.generate``, up to its end."""
    batch = batch_of(prompts, model, extra)
    options = {"max_new_tokens": COUNT, "do_sample": False, **options}
    out = model.generate(batch.pop("ids"), **batch, output_logits=True, return_dict_in_generate=True, **options)
    tokens, logits = out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1)
    ends = [(each == options.get("eos_token_id", -1)).long().cumsum(0).tolist() for each in tokens]
    lengths = [each.index(1) + 1 if 1 in each else len(each) for each in ends]
    return [(tokens[i, :n].tolist(), logits[i, :n]) for i, n in enumerate(lengths)]


def by_iterator(model, prompts, seeds, extra=0, cache=None, **options):
    """Return each text's tokens by ``generation.generate``."""
    batch = batch_of(prompts, model, extra)
    options = {"max_new_tokens": COUNT, "cache": cache, "seed": seeds, **options}
    return torch.stack(list(generate(model, **batch, **options)), 1).tolist()


def some(seed, most=19):
    """Return numbers of texts in any order, some more than once, and columns of padding before all of them."""
    draw = random.Random(seed)
    return [draw.randrange(len(PROMPTS)) for _ in range(draw.randint(2, most))], draw.choice([0, 5])


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_logits_and_tokens(family, way, invariant):
    """By transformers' generate. With an end that some texts meet, so that the others are moved to its rows."""
    model = invariant(tiny_model(family))
    for end in (-1, by_transformers(model, [PROMPTS[3]])[0][0][2]):
        options = {"eos_token_id": end, "pad_token_id": 0}
        alone = [by_transformers(model, [each], **options)[0] for each in PROMPTS]
        for seed in range(2):
            which, extra = some(seed)
            together = by_transformers(model, [PROMPTS[i] for i in which], extra, **options)
            for i, (tokens, logits) in zip(which, together, strict=True):
                assert tokens == alone[i][0] and torch.equal(logits, alone[i][1]), (seed, i)
    assert decode_counts(model).transformers == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9}], ids=["greedy", "sampling"])
def test_tokens_of_the_iterator(options, way, invariant):
    """A text that is drawn depends on its seed; two turns with one cache are those of the text alone."""
    model = invariant(tiny_model("Llama", num_key_value_heads=4))
    decoder = vars(model)["forward"]

    def two_turns(which, extra=0, stop=()):
        prompts, seeds, cache = [PROMPTS[i] for i in which], [3 * i for i in which], decoder.new_cache(100)
        first = by_iterator(model, prompts, seeds, extra, cache, stop_tokens=stop, **options)
        mask = batch_of(prompts, model, extra)["attention_mask"]
        new = torch.tensor([[row[-1], 5, 6] for row in first], device=model.device)
        more = mask.new_ones((len(which), cache.get_seq_length() + 3 - mask.shape[1]))
        tokens = generate(
            model, new, max_new_tokens=4, attention_mask=torch.cat((mask, more), 1), cache=cache, seed=seeds, **options
        )
        return first, torch.stack(list(tokens), 1).tolist()

    alone = [two_turns([i]) for i in range(len(PROMPTS))]
    for seed in range(2, 5):
        which, extra = some(seed)
        first, second = two_turns(which, extra)
        assert first == [alone[i][0][0] for i in which] and second == [alone[i][1][0] for i in which]
    # Half of the texts end: the others go on in the first rows, and for the second turn where they were.
    others = {token for i in (3, 4, 5) for token in alone[i][0][0]}
    stop = [next(token for token in alone[i][0][0][1:] if token not in others) for i in (0, 1, 2)]
    which, extra = [0, 3, 1, 4, 2, 5, 0, 1, 2, 3] * 2, 1
    ends = [next((at + 1 for at, token in enumerate(alone[i][0][0]) if token in stop), None) for i in range(6)]
    assert ends[3:] == [None] * 3 and None not in ends[:3]
    for i, row, more in zip(which, *two_turns(which, extra, stop), strict=True):
        assert row[: ends[i]] == alone[i][0][0][: ends[i]] and (ends[i] or more == alone[i][1][0])


@torch.no_grad()
def test_logits_of_whole_texts(way, invariant):
    """Without a cache, as evaluations score texts; and without grad only."""
    model = invariant(tiny_model("Llama"))
    alone = [model(each[None].to(model.device), use_cache=False).logits[0] for each in PROMPTS]
    batch = batch_of([PROMPTS[i] for i in (4, 0, 5, 3)], model, 2)
    output = model(batch["ids"], attention_mask=batch["attention_mask"], use_cache=False)
    for i, logits in zip((4, 0, 5, 3), output.logits, strict=True):
        assert torch.equal(logits[-len(PROMPTS[i]) :], alone[i])
    assert getattr(output, CACHE) is None and decode_counts(model).transformers == 0
    with torch.enable_grad():
        assert model(batch["ids"]).logits.requires_grad


def test_the_size_of_the_cache(way, invariant):
    """It does not divide attention otherwise, not that of a single head of keys either."""
    model = invariant(tiny_model("Llama", num_key_value_heads=1))
    if way == "graph":
        pytest.skip("torch's own products see the size on a CPU")
    small, large = (vars(model)["forward"].new_cache(each) for each in (64, 9000))
    expected = by_iterator(model, PROMPTS[3:5], 0, cache=small, temperature=1.0)
    assert by_iterator(model, PROMPTS[3:5], 0, cache=large, temperature=1.0) == expected
    assert small.layers[0].capacity == 256 and large.layers[0].capacity > 4096


def test_a_number_that_bfloat16_products_do_not_take(invariant, way):
    """On a CPU it makes an operator take another kernel for all of its rows: those of its own text only."""
    model = tiny_model("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = torch.inf
    model = invariant(model)
    alone = by_transformers(model, [PROMPTS[4]])[0]
    together = by_transformers(model, [PROMPTS[4], torch.full((4,), 299), PROMPTS[4]])
    for tokens, logits in (together[0], together[2]):
        assert tokens == alone[0] and torch.equal(logits, alone[1])
    assert together[1][1].isnan().all()


def test_copies_and_pickles(invariant, way):
    model = invariant(tiny_model("Llama"))
    expected = by_transformers(model, PROMPTS[:2])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for (tokens, logits), (others, its) in zip(expected, by_transformers(other, PROMPTS[:2]), strict=True):
            assert tokens == others and torch.equal(logits, its)
        with pytest.raises(RuntimeError, match="batch_invariant=True serves"):
            other.generate(PROMPTS[2][None].to(model.device), num_beams=2, max_new_tokens=2)


def test_what_cannot_be_is_refused(way, invariant):
    model = invariant(tiny_model("Llama"))
    ids = PROMPTS[2][None].to(model.device)
    for cache in (DynamicCache(config=model.config), nvfp4_cache(model.config, max_tokens=64)):
        with pytest.raises(RuntimeError, match="batch_invariant=True serves"):
            next(generate(model, ids, max_new_tokens=2, cache=cache))
    for options in (
        {"output_hidden_states": True},
        {"attention_mask": torch.tensor([[1] * 6 + [0]], device=ids.device)},
    ):
        with torch.no_grad(), pytest.raises(RuntimeError, match="batch_invariant=True serves"):
            model(ids, **options)
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        model.generate(ids, max_new_tokens=2, prefill_chunk_size=4)
    cache = vars(model)["forward"].new_cache(32)
    batch = batch_of(PROMPTS[1:3], model)
    tokens = list(generate(model, **batch, max_new_tokens=2, cache=cache))[-1][:, None].to(model.device)
    with pytest.raises(RuntimeError, match="batch_invariant=True serves"):  # without the padding of its first turn
        next(generate(model, tokens, max_new_tokens=2, cache=cache))
    with pytest.raises(RuntimeError, match="make another cache"):
        cache.reorder_cache(torch.tensor([1, 1, 0], device=model.device))
    decode_natively(model)
    with pytest.raises(RuntimeError, match="make another cache"):
        next(generate(model, tokens, max_new_tokens=2, cache=cache))


@pytest.mark.parametrize("family, changes, message", [
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, "rope_type dynamic"),
    ("Qwen3Moe", {}, "how many tokens of the batch choose it"), ("Starcoder2", {}, "no native step"),
])  # fmt: skip
def test_models_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=f"batch_invariant=True: .*{message}"):
        Decoder(tiny_model(family, **changes), by_operators=True, invariant=True)


def test_scales_of_activations(device):
    """One dynamic scale of a batch is refused by name; that of each row is not, nor a calibrated one."""
    model = tiny_model("Llama", quantized=False)
    quantize_(model.model, NVFP4Config())
    with pytest.raises(ValueError, match=r"q_proj\.weight scales its activations by the largest of the batch"):
        Decoder(model.to(device), by_operators=True, invariant=True)
    calibrated = copy.deepcopy(model)
    for name, parameter in calibrated.named_parameters():
        if name.endswith("proj.weight"):
            weight = parameter.detach()._replace(activation_amax=torch.tensor(8.0, device=device))
            calibrated.get_submodule(name[:-7]).weight = torch.nn.Parameter(weight, False)
    by_row = tiny_model("Llama", quantized=False).to(device)
    quantize_(by_row.model, NVFP4Config(row_scaled=True))
    for each in (calibrated, by_row):
        Decoder(each, by_operators=True, invariant=True).install()
        alone = by_transformers(each, [PROMPTS[3]], max_new_tokens=4)[0]
        together = by_transformers(each, [PROMPTS[5], PROMPTS[0], PROMPTS[3]], max_new_tokens=4)[2]
        assert together[0] == alone[0] and torch.equal(together[1], alone[1])
