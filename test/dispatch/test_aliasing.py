"""Random views, copies and writes against dense tensors: the same values, strides and sharing, or an error.

All values are codes times powers of two, so that the dense tensor is exact, also after a change of per-tensor scale.
"""

import copy
import io
import pickle
import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.tensor.windows import Unreadable

SHAPES = [(128,), (48, 64), (300, 64), (300, 80), (256, 128), (130, 100), (4, 40, 64), (3, 128, 80), (1, 150, 64)]


def exact(shape, kind: str, rng: random.Random, factor: float = 1.0) -> NVFP4Tensor:
    """Return codes with per-tensor scales of ``factor``: one, one per row or one per matrix. Each block has a 6."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    t = quantize_experts(torch.ones(shape)) if kind == "matrices" else quantize(
        torch.ones(shape), QuantizeSpec(row_scaled=kind == "rows"))  # fmt: skip
    codes = torch.randint(0, 16, (*shape[:-1], t.qdata.shape[-1] * 2), generator=generator, dtype=torch.uint8)
    codes[..., ::16] |= 7
    codes[..., shape[-1] :] = 0
    scale = 2.0 ** torch.randint(-1, 3, t.unswizzled_scale().shape, generator=generator)
    scale = layout.swizzle(scale.view(-1, scale.shape[-1]).to(torch.float8_e4m3fn))
    factors = torch.full_like(t.per_tensor_scale, factor)
    return t._replace(qdata=layout.pack(codes), scale=scale, per_tensor_scale=factors)


def cut(size: int, rng: random.Random, multiple: int) -> slice:
    start = rng.randrange(0, size + 1, multiple)
    return slice(start, rng.choice([size, min(size, start + multiple * rng.randint(0, 3)), rng.randint(start, size)]))


def random_view(shape, rng: random.Random):
    """Return a random view, or copy, as a function of a tensor."""
    dim = rng.randrange(len(shape))
    size, multiple = shape[dim], rng.choice([1, 16, 16, 64, 128])
    region, at, pieces = cut(size, rng, multiple), rng.randrange(max(size, 1)), rng.randint(1, 3)
    step = rng.choice([2, 3, 16])
    everywhere = tuple(cut(n, rng, 1 if rng.random() < 0.5 and i < len(shape) - 1 else 16) for i, n in enumerate(shape))
    slices = [
        lambda t: t.narrow(dim, region.start, region.stop - region.start), lambda t: t[everywhere],
        lambda t: t[..., everywhere[-1]], lambda t: t[everywhere[0]], lambda t: t.chunk(pieces, dim)[-1],
        lambda t: t.split(multiple, dim)[0], lambda t: t.select(dim, at), lambda t: t[at % len(t)],
        lambda t: t.tensor_split(pieces, dim)[-1],
    ]  # fmt: skip
    others = [
        lambda t: t.mT, lambda t: t.t(), lambda t: t.unsqueeze(dim), lambda t: t.squeeze(), lambda t: t.flatten(0, -2),
        lambda t: t.detach(), lambda t: t.data, lambda t: t.view(t.shape), lambda t: t.unbind(dim)[0],
        lambda t: t.transpose(0, dim), lambda t: t[::step], lambda t: t.view(-1), lambda t: t.view(-1, t.shape[-1]),
        lambda t: t.unflatten(-1, (-1, 16)), lambda t: t.unflatten(0, (2, -1)), lambda t: t.expand(2, *t.shape),
        lambda t: t.view(-1, 32), lambda t: t.movedim(0, dim), lambda t: copy.copy(t), lambda t: t.view_as(t),
        lambda t: t.as_strided((4, 16), (t.stride(0), 1), t.storage_offset()), lambda t: t.unfold(0, 3, 2),
    ]  # fmt: skip
    copies = [
        lambda t: t.contiguous(), lambda t: t.ravel(), lambda t: t.flatten(), lambda t: t.reshape(-1, t.shape[-1]),
        lambda t: t.reshape(-1), lambda t: t.reshape(t.shape), lambda t: t.clone(), lambda t: t.reshape(-1, 16),
        lambda t: t.to(torch.float32), lambda t: t.to(torch.float32, copy=True), lambda t: t[[0, -1]],
        lambda t: t.contiguous().view(-1), lambda t: t.repeat(*[1] * t.dim()),
    ]  # fmt: skip
    return rng.choice(rng.choices([slices, others, copies], [4, 3, 2])[0])


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


TOGETHER = [copy.deepcopy, saved, lambda value: [pickle.loads(pickle.dumps(each)) for each in value]]
"""Copies of all tensors at once, which keep to themselves what they share."""
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def has(error: Exception, *words: str) -> bool:
    return any(word in str(error) for word in words)


def geometry(t: Tensor) -> tuple:
    strides = [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]
    return strides, t.storage_offset(), t.is_contiguous()


class Pool:
    """NVFP4 tensors and the dense ones that they stand for."""

    def __init__(self, seed: int, counts: Counter) -> None:
        self.rng, self.seed, self.counts = random.Random(seed), seed, counts
        shape, kind = self.rng.choice(SHAPES), self.rng.choice(["one", "one", "rows", "matrices"])
        self.kind = kind if kind != "matrices" or len(shape) == 3 else "one"
        t = exact(shape, self.kind, self.rng)
        self.pairs: list[tuple[NVFP4Tensor, Tensor]] = [(t, t.dequantize())]
        self.steps: list[str] = []

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.5:
            self.take()
        elif kind < 0.97:
            self.write()
        else:
            together = self.rng.choice(TOGETHER)
            ours, dense = together([t for t, _ in self.pairs]), together([d for _, d in self.pairs])
            self.pairs = [*self.pairs, *zip(ours, dense, strict=True)][-12:]
        self.compare()

    def take(self) -> None:
        t, dense = self.rng.choice(self.pairs)
        take = random_view(tuple(dense.shape), self.rng)
        try:
            expected = take(dense)
        except (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
            expected = None
        try:
            view = take(t)
            if isinstance(view.window, Unreadable):
                return
        except (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            assert expected is None or has(error, "dequantize() first"), f"{self.seed}: {error}"
            self.counts["no such view"] += 1
            return
        assert expected is not None, f"{self.seed}: no such dense view of {t!r}"
        assert view.shape == expected.shape
        if expected.untyped_storage()._cdata == dense.untyped_storage()._cdata and view.numel():
            assert geometry(view) == geometry(expected), f"{self.seed}: {view!r}"
        elif geometry(view) != geometry(expected):  # a copy of a transposed tensor is transposed
            expected = torch.empty_strided(view.shape, view.stride()).copy_(expected)
        self.counts["views"] += 1
        self.pairs = [*self.pairs, (view, expected)][-12:]

    def write(self) -> None:
        t, dense = self.rng.choice(self.pairs)
        kind = self.rng.choice(["zero_", "setitem 0", "codes", "codes", "codes", "scale", "of itself"])
        shape = dense.mT.shape if t.transposed else dense.shape
        forms = t.per_tensor_scale.dim()
        factor = float(self.rng.choice([1, 1, 2, 4, 8]))
        source = exact(shape, "rows" if forms == 1 else "one", self.rng, factor) if dense.numel() else t.clone()
        source = source.mT if t.transposed else source
        source = source._replace(spec=t.spec)
        value = source.dequantize()
        try:
            if kind == "zero_":
                t.zero_(), dense.zero_()
            elif kind == "setitem 0":
                t[...] = 0
                dense[...] = 0
            elif kind == "scale" and forms == 0 and self.kind == "one" and dense.numel():
                t.per_tensor_scale.mul_(2)
                torch.empty(0).set_(dense.untyped_storage()).mul_(2)
            elif kind == "of itself" and dense.dim() > 1 and len(dense) > 2:
                expected = dense[1:].clone()
                t[:-1].copy_(t[1:])
                dense[:-1].copy_(expected)
            else:
                t.copy_(source)
                dense.copy_(value)
        except RuntimeError as error:
            assert has(error, "clone", "dequantize() first"), f"{self.seed}: {error}"
            self.counts["refused"] += 1
            return
        self.counts["written"] += 1

    def compare(self) -> None:
        for t, dense in self.pairs:
            assert torch.equal(t.dequantize(), dense), f"{self.seed}: {t!r} {t.stride()} {t.window}"


def trials(seeds, counts: Counter) -> None:
    for seed in seeds:
        with MODES[seed % 3]():
            pool = Pool(seed, counts)
            for _ in range(16):
                pool.step()


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_views_and_writes_do_what_they_do_to_dense_tensors(first):
    counts = Counter()
    trials(range(first, first + 50), counts)
    assert counts["written"] > 40 and counts["views"] > 100
