"""Random calls of natively decoding models and changes of their caches, against the model's own forward without one."""

import copy
import pickle
import random

import pytest
import torch

pytest.importorskip("transformers")
from helpers.tiny_models import tiny_model
from transformers import DynamicCache, StaticCache

from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.fixed_cache import FixedCache
from nvfp4_tensor.generation.graph_decoder import GraphDecoder

FAMILIES = ["Llama", "Mistral", "Qwen2", "Gemma3"]
MOST_TOKENS = 128


class Text:
    """Texts of one length, and the cache that a model has filled with them."""

    def __init__(self, ids, cache):
        self.ids, self.cache = ids, cache

    @property
    def is_static(self):
        return type(self.cache) is StaticCache

    def batch(self):
        return len(self.ids)


class Player:
    """Takes random turns with some texts, and checks the logits of each against those of the whole text at once."""

    def __init__(self, model, own, seed):
        self.model, self.own, self.random, self.log = model, own, random.Random(seed), []
        self.texts = [self.start()]

    def new_ids(self, batch, count):
        numbers = [self.random.randrange(3, 300) for _ in range(batch * count)]
        return torch.tensor(numbers, dtype=torch.int64).view(batch, count)

    def check(self, logits, ids):
        expected = self.own(ids, use_cache=False).logits[:, -1].float()
        error = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 0.08, self.log

    def feed(self, text, ids, forward=None, **arguments):
        text.ids = torch.cat([text.ids, ids], 1)
        out = (forward or self.model)(ids, past_key_values=text.cache, use_cache=True, **arguments)
        self.check(out.logits[:, -1], text.ids)

    def start(self):
        capacity = self.random.choice([10, 64, 300])
        cache = self.random.choice([
            FixedCache(len(self.model.model.layers), capacity), FixedCache(len(self.model.model.layers), capacity),
            StaticCache(config=self.model.config, max_cache_len=MOST_TOKENS), DynamicCache(config=self.model.config),
        ])  # fmt: skip
        text = Text(self.new_ids(self.random.choice([1, 1, 2, 3]), 0), cache)
        self.feed(text, self.new_ids(text.batch(), self.random.choice([1, 2, 11, 12, 13, 30, 120])))
        return text

    def turn(self):
        text = self.random.choice(self.texts)
        turns = [self.one] * 6 + [self.many, self.own_forward, self.crop, self.choose, self.repeat, self.reset]
        turn = self.random.choice([*turns, self.copied, self.begin, self.generate])
        self.log.append((turn.__name__, type(text.cache).__name__, tuple(text.ids.shape)))
        turn(text)

    def one(self, text, forward=None):
        batch, length = text.ids.shape
        if length < MOST_TOKENS:
            arguments = {}
            if self.random.random() < 0.3:
                arguments["attention_mask"] = torch.ones(batch, length + 1, dtype=torch.int64)
            if self.random.random() < 0.2:
                arguments["position_ids"] = torch.full((self.random.choice([1, batch]), 1), length)
            self.feed(text, self.new_ids(batch, 1), forward, **arguments)

    def many(self, text):
        if text.ids.shape[1] + 7 < MOST_TOKENS:
            self.feed(text, self.new_ids(text.batch(), self.random.randrange(2, 8)))

    def own_forward(self, text):
        """A token that is not decoded natively."""
        forward = self.model.model.__dict__.get("forward")  # of a model that decodes on a CPU
        if forward is None:
            self.one(text, lambda *args, **kwargs: type(self.model).forward(self.model, *args, **kwargs))
        else:
            del self.model.model.forward
            self.one(text)
            self.model.model.forward = forward

    def crop(self, text):
        length = text.ids.shape[1]
        drops_tokens = getattr(self.model.config, "sliding_window", None) is not None
        croppable = not drops_tokens if type(text.cache) is DynamicCache else text.cache.is_croppable
        if length > 1 and croppable:  # static caches from transformers 5.24 on
            kept = self.random.randrange(1, length)
            text.cache.crop(kept - length)
            text.ids = text.ids[:, :kept]

    def choose(self, text):
        if not text.is_static:
            batch = text.batch()
            chosen = torch.tensor([self.random.randrange(batch) for _ in range(batch)])
            if self.random.random() < 0.5:
                text.cache.reorder_cache(chosen)
            else:
                chosen = chosen[: self.random.randrange(1, batch + 1)]
                text.cache.batch_select_indices(chosen)
            text.ids = text.ids[chosen]

    def repeat(self, text):
        if not text.is_static and text.batch() < 3:
            text.cache.batch_repeat_interleave(2)
            text.ids = text.ids.repeat_interleave(2, 0)

    def reset(self, text):
        if type(text.cache) is not DynamicCache:
            text.cache.reset()
            batch = text.batch() if text.is_static else self.random.choice([1, 2])
            text.ids = self.new_ids(batch, 0)
            self.feed(text, self.new_ids(batch, self.random.choice([1, 3, 9, 40])))

    def copied(self, text):
        is_pickled = type(text.cache) is FixedCache and self.random.random() < 0.5
        cache = pickle.loads(pickle.dumps(text.cache)) if is_pickled else copy.deepcopy(text.cache)
        self.texts.append(Text(text.ids.clone(), cache))

    def begin(self, _):
        self.texts.append(self.start())

    def generate(self, text):
        count = self.random.randrange(1, 6)
        ids = torch.cat([text.ids, self.new_ids(text.batch(), self.random.randrange(1, 3))], 1)
        if ids.shape[1] + count < MOST_TOKENS:
            out = self.model.generate(
                ids, past_key_values=text.cache, max_new_tokens=count, do_sample=False, output_logits=True,
                return_dict_in_generate=True, attention_mask=torch.ones_like(ids),
            )  # fmt: skip
            for i, logits in enumerate(out.logits):
                self.check(logits, out.sequences[:, : ids.shape[1] + i])
            text.ids = out.sequences[:, : int(text.cache.get_seq_length())]


@pytest.fixture(scope="module")
def models():
    """{(family, decoder): (a model that decodes natively, the forward of another one that does not)}."""
    made = {}
    for family in FAMILIES:
        model = tiny_model(family)
        graph = copy.deepcopy(model)
        GraphDecoder(graph).install()
        made[family, "graph"] = graph, model
        made[family, "step"] = decode_natively(copy.deepcopy(model)), model
    return made


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("decoder", ["graph", "step"])
def test_random_calls(models, decoder, seed):
    with torch.no_grad() if seed % 2 else torch.inference_mode():
        player = Player(*models[FAMILIES[seed % 4], decoder], seed)
        for _ in range(25):
            player.turn()


@pytest.mark.parametrize("decoder", ["graph", "step"])
def test_own_forwards_after_native_tokens_in_a_static_cache(models, decoder):
    """The mask of a static cache depends on a flag of its layers, which native tokens may not change."""
    with torch.no_grad():
        player = Player(*models["Llama", decoder], 0)
        text = Text(player.new_ids(1, 0), StaticCache(config=player.model.config, max_cache_len=MOST_TOKENS))
        player.feed(text, player.new_ids(1, 5))
        for turn in (player.one, player.own_forward, player.one, player.own_forward):
            turn(text)
