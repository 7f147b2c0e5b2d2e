"""Random conversations by generation.generate, against the model's own forward.

Each turn changes a cache in some way. A dense cache must then be what the model's own forward makes of all tokens at
once; one of codes what its own forward makes of another such cache, which was given the same tokens in the same calls.
"""

import contextlib
import copy
import functools
import random
import warnings

import pytest
import torch

pytest.importorskip("transformers")
from helpers.texts import own_logits, relative_error
from helpers.tiny_models import SIZES, tiny_model
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM, StaticCache

from nvfp4_tensor.generation import decode_natively, generate, nvfp4_cache, text
from nvfp4_tensor.generation.cache_argument import CACHE, cache_argument
from nvfp4_tensor.generation.choice import uniforms
from nvfp4_tensor.generation.decoder import Decoder
from nvfp4_tensor.generation.fixed_cache import FixedCache, length_of
from nvfp4_tensor.generation.fused_layers import FusedLayers, fits

MOST_TOKENS = 110
SMALL = {"num_hidden_layers": 2}
MODELS = {
    "Llama": SMALL, "Qwen3": SMALL, "Mistral": SMALL, "Qwen2": SMALL | {"max_window_layers": 1},
    "Gemma3": {**SMALL, "layer_types": ["sliding_attention", "full_attention"]},
    "Qwen3Moe": SMALL, "Starcoder2": SMALL, "Lfm2": {**SMALL, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Families, of which the last two have no native decoding, and the last one a layer without keys and values."""
PLAYS = [
    ("Llama", "own"), ("Llama", "step"), ("Llama", "graph"), ("Qwen3", "step"), ("Qwen3", "graph"), ("Qwen3", "fused"),
    ("Gemma3", "own"), ("Gemma3", "step"), ("Gemma3", "graph"), ("Mistral", "graph"), ("Qwen2", "step"),
    ("Qwen3Moe", "own"), ("Starcoder2", "own"), ("Lfm2", "own"),
]  # fmt: skip
BOUNDS = {"own": (1e-3, 1e-3), "step": (0.03, 0.1), "graph": (0.03, 0.1), "fused": (0.03, 0.1)}
"""The largest error of logits, by their norm, and how far a chosen token may be from the largest, in deviations."""
GRAPHS = ("graph", "fused")
"""Ways that a GPU takes; "fused" has one kernel for all layers, whose place the operator in plain torch takes."""
CODES = {
    "codes": {"recent": 6}, "codes only": {"recent": 0}, "codes, sink": {"recent": 4, "sink": 3},
    "steady codes": {"recent": 6, "max_tokens": 20}, "steady codes, sink": {"recent": 4, "sink": 2, "max_tokens": 110},
}  # fmt: skip


def new_cache(kind, config):
    if kind in CODES:
        return nvfp4_cache(config, **CODES[kind])
    return {
        "none": lambda: None, "dynamic": lambda: DynamicCache(config=config),
        "ours": lambda: FixedCache(config.num_hidden_layers, 24),
        "static": lambda: StaticCache(config=config, max_cache_len=MOST_TOKENS + 2),
    }[kind]()  # fmt: skip


class Conversation:
    """Some texts of one length and their cache.

    ids: the tokens in the cache (B, T). pending: the tokens that were yielded last (B, 0 or 1), which it lacks.
    shadow: the cache to compare one of codes with.
    """

    def __init__(self, kinds, config, batch, rng):
        self.kinds, self.config, self.kind = kinds, config, (kind := rng.choice(kinds))
        self.cache, self.shadow = new_cache(kind, config), new_cache(kind, config) if kind in CODES else None
        self.ids = self.pending = torch.zeros((batch, 0), dtype=torch.int64)

    @property
    def caches(self):
        return [each for each in (self.cache, self.shadow) if each is not None]

    @property
    def is_croppable(self):
        if self.kind == "static":
            return self.cache.is_croppable  # from transformers 5.24 on
        return self.config.model_type != "lfm2" and (self.kind == "ours" or not has_windows(self.config))

    def forget(self, rng):
        """Begin again with an empty cache of some kind."""
        self.__init__(self.kinds, self.config, rng.choice([1, 1, 2, 3]), rng)

    def check_length(self):
        if self.cache is not None:
            lengths = [int(e.get_seq_length()) for e in self.cache.layers if hasattr(e, "get_seq_length")]
            assert set(lengths) == {self.ids.shape[1]} == {length_of(self.cache)}


def has_windows(config):
    return getattr(config, "sliding_window", None) is not None


class Call:
    """One call of generate, whose tokens are asked for one by one."""

    def __init__(self, player, talk):
        rng, self.talk, self.player = player.random, talk, player
        room = MOST_TOKENS - talk.ids.shape[1] - talk.pending.shape[1]
        new = player.new_ids(len(talk.ids), min(rng.choice([1, 2, 5, 13, 38]), room - 9) - talk.pending.shape[1])
        self.ids = torch.cat((talk.pending, new), 1)
        if talk.kind == "none":
            self.ids = torch.cat((talk.ids, self.ids), 1)
        self.count = rng.randrange(1, 9)
        self.options = rng.choice([{}, {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "top_k": 4}])
        self.stops = [rng.randrange(300) for _ in range(rng.choice([0, 0, 40]))]
        self.asked = rng.choice([self.count, self.count, rng.randrange(self.count + 1)])
        self.ending = rng.choice(["close", "delete", "throw"])
        self.start = 0 if talk.kind == "none" else talk.ids.shape[1]
        self.tokens, self.is_done = [], False
        player.log.append((talk.kind, self.start, tuple(self.ids.shape), self.count, self.asked, self.ending))
        self.iterator = generate(
            player.model, self.ids, max_new_tokens=self.count, cache=talk.cache, stop_tokens=self.stops, **self.options
        )

    def step(self):
        """Ask for a token, or end the call."""
        if len(self.tokens) < self.asked:
            token = next(self.iterator, None)
            if token is not None:
                assert token.shape == (len(self.ids),) and token.dtype == torch.int64
                self.tokens.append(token)
                return
        elif self.ending == "throw" and self.asked < self.count:
            with pytest.raises(KeyError):
                self.iterator.throw(KeyError())
        elif self.ending == "close":
            self.iterator.close()
        self.iterator, self.is_done = None, True
        self.check()

    def check(self):
        """Compare the tokens, and let the conversation have them."""
        talk, got = self.talk, len(self.tokens)
        if not got:
            return talk.check_length()
        tokens = torch.stack(self.tokens, 1)
        stops = torch.isin(tokens, torch.tensor(self.stops, dtype=torch.int64))
        ends = torch.where(stops.any(1), stops.int().argmax(1), got - 1)
        assert got == self.asked or (got == int(ends.max()) + 1 and bool(stops.any(1).all()))
        before = talk.ids if self.start else talk.ids[:, :0]
        logits = self.expected(torch.cat((before, self.ids, tokens[:, :-1]), 1), got)
        for row, end in enumerate(ends.tolist()):
            self.check_choice(row, logits[row, : end + 1], tokens[row, : end + 1])
            assert (tokens[row, end:] == tokens[row, end]).all(), self.player.log
        talk.ids = torch.cat((before, self.ids, tokens[:, :-1]), 1)
        talk.pending = tokens[:, -1:]
        talk.check_length()
        if (ends < got - 1).any():  # what a text that ended first went on with is not known
            talk.forget(self.player.random)

    def expected(self, ids, got):
        """Return the logits (B, got, V) that tokens were chosen from, and give them to the shadow."""
        player, talk = self.player, self.talk
        if talk.shadow is None:
            return own_logits(player.own, ids)[:, -got:]
        logits = [player.own_forward(self.ids, talk.shadow)]
        for i in range(self.start + self.ids.shape[1], ids.shape[1]):
            logits.append(player.own_forward(ids[:, i : i + 1], talk.shadow))
        ahead = min(self.count - got, text.AHEAD) if player.kind in GRAPHS and not has_windows(talk.config) else 0
        for _ in range(ahead):  # tokens that were computed and taken back: others became codes for them
            player.own_forward(ids[:, :1], talk.shadow)
        if ahead:
            talk.shadow.crop(-ahead)
        return torch.stack(logits, 1).float()

    def check_choice(self, row, logits, tokens):
        bound = self.player.bounds[1]
        scale = logits.std(-1)
        chosen = logits.gather(-1, tokens[:, None])[:, 0]
        if not self.options or "top_k" in self.options:
            rank = self.options.get("top_k", 1) - 1
            gap = (logits.topk(rank + 1).values[:, rank] - chosen) / scale
            assert gap.max() <= bound, (gap, self.player.log)
            return
        draws = uniforms(self.options["seed"], len(tokens), range(len(self.ids)))[:, row]
        ends = torch.softmax(logits / self.options["temperature"], -1).double().cumsum(-1)
        low, high = (ends.gather(-1, (tokens[:, None] - i).clamp(min=0))[:, 0] for i in (1, 0))
        assert ((draws >= low.where(tokens > 0, 0.0) - bound) & (draws <= high + bound)).all(), self.player.log


class Player:
    """Takes random turns with some conversations."""

    def __init__(self, models, kind, seed):
        self.model, self.own = models
        self.kind, self.random, self.log = kind, random.Random(seed), [seed]
        self.bounds = BOUNDS[kind]
        self.talks = [self.new_talk(), self.new_talk()]

    def new_talk(self):
        config, kinds = self.own.config, ["none", "dynamic", "static", "ours", *CODES]
        if config.model_type == "lfm2":
            kinds = ["none", "dynamic"]
        elif config.model_type == "mistral":  # no layer grows
            kinds = [*kinds[:4], "ours"]
        elif self.kind in GRAPHS:
            kinds += ["ours", "steady codes", "steady codes, sink"] * 2
        return Conversation(kinds, config, self.random.choice([1, 1, 2, 3]), self.random)

    def new_ids(self, batch, count):
        numbers = [self.random.randrange(3, 300) for _ in range(batch * max(count, 0))]
        return torch.tensor(numbers, dtype=torch.int64).view(batch, -1) if numbers else torch.zeros(batch, 0).long()

    def own_forward(self, ids, cache):
        """Return the last logits (B, V) of the model's own forward."""
        with torch.no_grad():
            return self.own(ids, **{cache_argument(self.own): cache}, use_cache=True).logits[:, -1]

    def play(self, turns):
        names = ["write"] * 5 + ["both", "refuse", "fail", "crop", "reset", "choose", "copy", "forward", "transformers"]
        for _ in range(turns):
            talk = self.random.choice(self.talks)
            if talk.ids.shape[1] > MOST_TOKENS - 12:
                self.talks[self.talks.index(talk)] = talk = self.new_talk()
            name = self.random.choice(names)
            self.log.append((name, talk.kind, tuple(talk.ids.shape)))
            getattr(self, name)(talk)
            if self.random.random() < 0.5:
                self.probe(talk)

    def probe(self, talk):
        """Compare the logits after one more token, with copies of the caches."""
        talk.check_length()
        if talk.cache is None:
            return
        token = torch.full((len(talk.ids), 1), 7)
        got = self.own_forward(token, copy.deepcopy(talk.cache))
        if talk.shadow is None:
            expected = own_logits(self.own, torch.cat((talk.ids, token), 1))[:, -1]
        else:
            expected = self.own_forward(token, copy.deepcopy(talk.shadow))
        error = relative_error(got, expected).max()
        assert error <= self.bounds[0], (error, self.log)
        return got

    def write(self, talk):
        call = Call(self, talk)
        while not call.is_done:
            call.step()

    def both(self, _):
        """Two conversations at once."""
        if max(each.ids.shape[1] for each in self.talks) <= MOST_TOKENS - 12:
            calls = [Call(self, each) for each in self.talks[:2]]
            while calls := [each for each in calls if not each.is_done]:
                self.random.choice(calls).step()

    def refuse(self, talk):
        """Calls that raise leave everything as it was."""
        batch = len(talk.ids)
        ids, options = self.random.choice([
            (self.new_ids(batch, 0), {}), (self.new_ids(batch, 3).int(), {}), (self.new_ids(batch, 3), {"top_k": 3}),
            (self.new_ids(batch, 3), {"max_new_tokens": 0}), (self.new_ids(batch, 3), {"temperature": -1.0}),
            *([(self.new_ids(batch + 1, 3), {})] if talk.ids.shape[1] and talk.kind not in ("none",) else []),
        ])  # fmt: skip
        if talk.config.model_type == "lfm2" and len(ids) != batch:
            return
        before = self.probe(talk)
        with pytest.raises(ValueError):
            generate(self.model, ids, **{"max_new_tokens": 3, "cache": talk.cache, **options})
        after = self.probe(talk)
        assert before is None or torch.equal(before, after)

    def fail(self, talk):
        """A model that raises within some layer, at some token."""
        left, layer = [self.random.randrange(4)], self.random.choice(self.own.model.layers)
        at = [*self.own.model.layers].index(layer)

        def hook(*_):
            left[0] -= 1
            if left[0] < 0:
                raise ZeroDivisionError

        call = Call(self, talk)
        handle = self.model.model.layers[at].register_forward_pre_hook(hook)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hooks are not called natively, and full windows cannot be cropped
                tokens = []
                with contextlib.suppress(ZeroDivisionError):
                    for token in call.iterator:
                        tokens.append(token)
        finally:
            handle.remove()
        if talk.cache is None:
            return
        kept = call.start + (call.ids.shape[1] + len(tokens) - 1 if tokens else 0)
        if talk.is_croppable and left[0] < 0:
            full = torch.cat((talk.ids, call.ids, *(each[:, None] for each in tokens)), 1)
            talk.ids, talk.pending = full[:, :kept], full[:, kept : kept + 1] if tokens else talk.pending
            talk.check_length()
        if talk.shadow is not None or not talk.is_croppable or left[0] >= 0 or call.stops:
            talk.forget(self.random)

    def crop(self, talk):
        if talk.is_croppable and talk.kind != "none" and talk.ids.shape[1] > 1:
            kept = self.random.randrange(1, talk.ids.shape[1])
            for cache in talk.caches:
                cache.crop(kept - talk.ids.shape[1])
            talk.ids, talk.pending = talk.ids[:, :kept], talk.pending[:, :0]

    def reset(self, talk):
        if talk.kind in ("none", "dynamic") or (has_windows(talk.config) and talk.kind in CODES):
            return talk.forget(self.random)  # sliding layers of transformers do not forget their length, or their batch
        for cache in talk.caches:
            cache.reset()
        batch = len(talk.ids) if talk.kind == "static" else self.random.choice([1, 2, 3])
        talk.ids = talk.pending = self.new_ids(batch, 0)

    def choose(self, talk):
        """Reorder, select or repeat texts."""
        if talk.kind in ("static", "none") or not talk.ids.shape[1]:
            return
        batch = len(talk.ids)
        way = "reorder" if talk.config.model_type == "lfm2" else self.random.choice(["reorder", "select", "repeat"])
        count = {"reorder": batch, "select": self.random.randrange(1, 4), "repeat": 0}[way]
        chosen = torch.tensor([self.random.randrange(batch) for _ in range(count)], dtype=torch.int64)
        if way == "repeat":
            chosen = torch.arange(batch).repeat_interleave(1 + (batch == 1))
        for cache in talk.caches:
            if way == "repeat":
                cache.batch_repeat_interleave(1 + (batch == 1))
            else:
                (cache.reorder_cache if way == "reorder" else cache.batch_select_indices)(chosen)
        talk.ids, talk.pending = talk.ids[chosen], talk.pending[chosen]

    def copy(self, talk):
        """A copy goes on in the place of another conversation, or of the copied one."""
        self.talks[self.random.randrange(2)] = copy.deepcopy(talk)

    def forward(self, talk):
        """Some tokens by a call of the model, which may decode natively, or by one that does not."""
        ids = torch.cat((talk.pending, self.new_ids(len(talk.ids), self.random.choice([1, 1, 4]))), 1)
        start, end = talk.ids.shape[1], talk.ids.shape[1] + ids.shape[1]
        if talk.cache is None:
            return
        options = {"use_cache": True, cache_argument(self.own): talk.cache}
        if self.random.random() < 0.3:
            options["attention_mask"] = torch.ones(len(ids), end, dtype=torch.int64)
        if self.random.random() < 0.2:
            options["position_ids"] = torch.arange(start, end).expand(self.random.choice([1, len(ids)]), -1)
        with torch.no_grad():
            by = self.random.choice([self.model, self.model, functools.partial(type(self.model).forward, self.model)])
            got = by(ids, **options).logits[:, -1]
        talk.ids, talk.pending = torch.cat((talk.ids, ids), 1), talk.pending[:, :0]
        own = own_logits(self.own, talk.ids)[:, -1] if talk.shadow is None else self.own_forward(ids, talk.shadow)
        assert relative_error(got, own).max() <= self.bounds[0], self.log

    def transformers(self, talk):
        """Some tokens by generate of transformers."""
        ids = torch.cat((talk.ids, talk.pending, self.new_ids(len(talk.ids), self.random.choice([1, 4]))), 1)
        start, count = talk.ids.shape[1], self.random.randrange(1, 4)
        if talk.cache is None:
            return
        out = self.model.generate(
            ids, **{CACHE: talk.cache}, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        talk.ids, talk.pending = out[:, :-1], out[:, -1:]
        talk.check_length()
        if talk.shadow is not None:
            self.own_forward(ids[:, start:], talk.shadow)
            for i in range(ids.shape[1], out.shape[1] - 1):
                self.own_forward(out[:, i : i + 1], talk.shadow)


MADE = {}


def models_of(family, kind):
    """Return a model that decodes in this way, and one that does not: float32 where both are transformers' own."""
    if (family, kind) not in MADE:
        if family == "Lfm2":
            torch.manual_seed(1)
            config = Lfm2Config(**{**SIZES, **MODELS[family], "max_position_embeddings": 128})
            own = Lfm2ForCausalLM(config).eval()
            own.generation_config.eos_token_id = None
        else:
            dtype = torch.float32 if kind == "own" else torch.bfloat16
            own = tiny_model(family, dtype, quantized=kind != "own", **MODELS[family])
        model = copy.deepcopy(own)
        if kind in GRAPHS:
            Decoder(model, by_operators=True).install()
        elif kind == "step":
            decode_natively(model)
        MADE[family, kind] = model, own
    return MADE[family, kind]


@pytest.fixture(autouse=True)
def surroundings(kind, monkeypatch):
    """Caches that move often; steps of graphs that run on a CPU too, ahead of the tokens that are read."""
    monkeypatch.setattr("nvfp4_tensor.generation.fixed_cache.GROWTH", 8)
    monkeypatch.setattr("nvfp4_tensor.generation.coded_states.GROWTH", 16)
    monkeypatch.setattr("nvfp4_tensor.generation.fixed_cache.ROOM", 16)
    monkeypatch.setattr("nvfp4_tensor.generation.choice.ROWS", 4)
    if kind in GRAPHS:
        monkeypatch.setattr(text, "_runs_ahead", lambda ids: True)
    seen = []

    def of(model, buffers):
        if not fits(model) or len(buffers[0].dense[0]) > 1:
            return None
        seen.append(type(buffers[0]))
        return FusedLayers(model, buffers)

    if kind == "fused":
        monkeypatch.setattr(FusedLayers, "of", of)
    yield
    assert seen or kind != "fused"


@pytest.mark.parametrize("seed, turns", [
    (0, 25), *(pytest.param(seed, 60, marks=pytest.mark.exhaustive) for seed in range(100, 103)),
])  # fmt: skip
@pytest.mark.parametrize(("family", "kind"), PLAYS)
def test_random_texts(family, kind, seed, turns):
    Player(models_of(family, kind), kind, seed).play(turns)
