"""Layers of our caches under random changes, with tokens that a step writes between them, against a dense mirror."""

import copy
import pickle

import pytest
import torch
from helpers.instruction_sets import needs_library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")
from nvfp4_tensor.generation.architectures import Block
from nvfp4_tensor.generation.cache import NVFP4CacheLayer
from nvfp4_tensor.generation.fixed_cache import FixedLayer

pytestmark = needs_library
SEEDS = st.integers(0, 1000)
CHANGES = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 40)),
    st.tuples(st.just("append"), st.just(1)),
    st.tuples(st.just("append"), st.integers(100, 300)),
    st.tuples(st.just("steps"), st.integers(1, 9)),
    st.tuples(st.just("steps"), st.integers(10, 40)),
    st.tuples(st.just("crop"), st.integers(1, 200)),
    st.tuples(st.sampled_from(["reorder", "select", "mask", "copy", "pickle", "offload", "reset", "read"]), SEEDS),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
)
NEVER = 1 << 30


class Mirror:
    """Dense tokens (2, batch, heads, tokens, dim), the rounded ones of them, and how many: never twice, never back."""

    def __init__(self, recent, sink):
        self.recent, self.sink, self.rounded = recent, sink, 0
        self.x, self.front = None, 0

    @staticmethod
    def round(x):
        layer = NVFP4CacheLayer(recent=0)
        layer.update(*x)
        return torch.stack([each.decode(x.dtype, each.stored) for each in layer._states])

    def append(self, new):
        fills = self.x is None or self.x.shape[3] == self.front
        if fills and self.front < self.sink:
            self.front += min(self.sink - self.front, new.shape[3])
        self.x = new if self.x is None else torch.cat((self.x, new), dim=3)
        if not self.recent:
            self._round()
        seen = self.x.clone()
        self._round()
        return seen

    def _round(self):
        end = max(self.x.shape[3] - self.recent, self.front + self.rounded)
        start = self.front + self.rounded
        if end > start:
            self.x = torch.cat((self.x[..., :start, :], self.round(self.x[..., start:end, :]), self.x[..., end:, :]), 3)
            self.rounded = end - self.front

    def crop(self, kept):
        self.x = self.x[..., :kept, :]
        self.front = min(self.front, kept)
        self.rounded = min(self.rounded, kept - self.front)


def step(layer, q, keys, values):
    """One token (batch, heads, 1, dim), by the operators of a step."""
    buffers = layer.step_buffers()
    place = buffers.place_of(torch.tensor([layer.length], device=q.device), None)
    block = Block()
    block.kinds["heads"], block.numbers["scaling"] = q.shape[1], q.shape[3] ** -0.5
    qkv = torch.cat([x.flatten(1) for x in (q, keys, values)], dim=1)
    return buffers.attend(block, (qkv, None, None, 0.0, 0.0, True, None, None), place).view(q.shape)


def can_step(layer):
    return layer.is_steady if isinstance(layer, NVFP4CacheLayer) else layer.length < layer.capacity


def assert_attends(got, q, seen):
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), *seen.float(), enable_gqa=True)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if q.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(got.float(), expected, **tolerance)


def assert_same(found, expected):
    """Of 16 bits a product with the Hadamard matrix may depend on how many rows it has."""
    close = {"rtol": 0, "atol": 0} if expected.dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-2}
    torch.testing.assert_close(found + 0, expected, **close)


def assert_tokens(layer, mirror):
    assert_same(layer.keys, mirror.x[0])
    assert_same(layer.values, mirror.x[1])
    if isinstance(layer, NVFP4CacheLayer):
        assert [each.stored for each in layer._states] == [mirror.rounded] * 2
        assert layer._states[0].tokens == layer.length


def entries_of(kind, number, batch):
    chooser = torch.Generator().manual_seed(number)
    if kind == "mask":
        mask = torch.rand(batch, generator=chooser) < 0.7
        mask[number % batch] = True
        return mask
    if kind == "repeat":
        return torch.arange(batch).repeat_interleave(number)
    return torch.randint(batch, (batch if kind == "reorder" else 1 + number % 3,), generator=chooser)


@settings(max_examples=90, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=14), kind=st.sampled_from(["codes", "ring", "dense"]), seed=SEEDS,
    recent=st.sampled_from([0, 1, 20, 128]), sink=st.sampled_from([0, 0, 3, 40]), dim=st.sampled_from([32, 24, 80]),
)  # fmt: skip
def test_random_changes(device, changes, kind, recent, sink, dim, seed):
    generator, batch = torch.Generator().manual_seed(seed), 2
    if kind == "dense":
        layer, mirror = FixedLayer(64), Mirror(NEVER, 0)
    else:
        layer, mirror = NVFP4CacheLayer(recent=recent, sink=sink), Mirror(recent, sink)
        if kind == "ring":
            layer = NVFP4CacheLayer(recent=recent, sink=sink, max_tokens=200)

    def random(heads, tokens, count=2):
        x = torch.randn((count, batch, heads, tokens, dim), generator=generator)
        return x if device == "cpu" else x.bfloat16().to(device)  # the kernels of a step take 16 bits

    assert layer.keys is None and layer.values is None
    for change, number in [("append", 30), *changes, ("read", 0)]:
        if change == "append":
            new, (q,) = random(2, number), random(4, 1, 1)
            keys, values = layer.update(*new)
            seen = mirror.append(new)
            assert_same(keys, seen[0])
            assert_same(values, seen[1])
            got = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            assert_attends(got, q, seen)
        elif change == "steps":
            for i in range(number):
                if not can_step(layer):
                    break
                new, (q,) = random(2, 1), random(4, 1, 1)
                for _ in range(1 + i % 2):  # a step may run again
                    got = step(layer, q, *new)
                layer.length += 1
                assert_attends(got, q, mirror.append(new))
        elif change == "crop" and layer.length > number:
            layer.crop(-number)
            mirror.crop(mirror.x.shape[3] - number)
        elif change in ("reorder", "select", "mask", "repeat"):
            entries = entries_of(change, number, batch)
            if change == "repeat":
                layer.batch_repeat_interleave(number)
            else:
                (layer.reorder_cache if change == "reorder" else layer.batch_select_indices)(entries)
            mirror.x = mirror.x[:, entries]
            batch = mirror.x.shape[1]
        elif change in ("copy", "pickle"):
            layer = copy.deepcopy(layer) if change == "copy" else pickle.loads(pickle.dumps(layer))
        elif change == "offload" and kind != "dense":
            layer.offload()
            layer.prefetch()
        elif change == "reset":
            layer.reset()
            assert layer.get_seq_length() == 0 and layer.keys is None
            batch, mirror = 1 + number % 3, Mirror(mirror.recent, mirror.sink)
            new = random(2, 1 + number % 90)
            layer.update(*new), mirror.append(new)
        elif change == "read":
            assert_tokens(layer, mirror)
        assert layer.get_seq_length() == mirror.x.shape[3] and layer.get_mask_sizes(3) == (mirror.x.shape[3] + 3, 0)
        if batch > 6:
            layer.batch_select_indices(torch.arange(2))
            mirror.x, batch = mirror.x[:, :2], 2
