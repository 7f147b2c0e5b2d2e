"""Random views, copies and writes against dense tensors: the same values, strides and sharing, or an error.

Written elements have the values of the codes that were written, or those of a dense tensor, quantized once. All others
are unchanged, or rounded once to a new per-tensor scale. What raises changes nothing. In every second pool all values
are codes times powers of two, which a change of the per-tensor scale does not round.
"""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from helpers.files import saved
from helpers.writes import WRITES
from torch import Tensor

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.numerics import layout
from nvfp4_tensor.tensor.windows import Unreadable

SHAPES = [
    (128,), (100,), (48, 64), (300, 80), (300, 150), (256, 128), (130, 96), (37, 41), (4, 40, 64), (3, 128, 80),
    (1, 150, 64), (2, 5, 7, 50),
]  # fmt: skip
SPECS = [
    QuantizeSpec(), QuantizeSpec(row_scaled=True), QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six=True),
    QuantizeSpec(round_mode="stochastic"), QuantizeSpec(scale_search="mse"), QuantizeSpec(scale_rounding="up"),
    QuantizeSpec(hadamard_sign=True), QuantizeSpec(row_scaled=True, four_over_six=True, round_mode="stochastic"),
]  # fmt: skip
ERRORS = (IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError)


def exact_tensor(shape, rng: random.Random, kind: str, factor: float = 1.0) -> NVFP4Tensor:
    """Return codes with per-tensor scales of ``factor``: one, one per row or one per matrix. Each block has a 6."""
    ones, generator = torch.ones(shape), torch.Generator().manual_seed(rng.randrange(2**31))
    matrices = kind == "matrices" and len(shape) == 3
    t = quantize_experts(ones) if matrices else quantize(ones, QuantizeSpec(row_scaled=kind == "rows"))
    codes = torch.randint(0, 16, (*shape[:-1], t.qdata.shape[-1] * 2), generator=generator, dtype=torch.uint8)
    codes[..., ::16] |= 7
    codes[..., shape[-1] :] = 0
    scale = 2.0 ** torch.randint(-1, 3, t.unswizzled_scale().shape, generator=generator)
    scale = layout.swizzle(scale.view(-1, scale.shape[-1]).to(torch.float8_e4m3fn))
    factors = torch.full_like(t.per_tensor_scale, factor)
    return t._replace(qdata=layout.pack(codes), scale=scale, per_tensor_scale=factors)


def values(shape, rng: random.Random, factor: float = 1.0) -> Tensor:
    x = torch.randn(shape) * factor
    if rng.random() < 0.3:
        x = x * 2.0 ** torch.randint(-3, 4, (*x.shape[:-1], 1))
    if rng.random() < 0.15:
        x = x * (torch.rand(x.shape) < rng.choice([0, 0.1]))
    if rng.random() < 0.05 and x.numel():
        x.view(-1)[rng.randrange(x.numel())] = torch.nan
    return x


def any_tensor(shape, rng: random.Random, spec: QuantizeSpec, factor: float = 1.0) -> NVFP4Tensor:
    x = values(shape, rng, factor)
    if len(shape) == 3 and not spec.row_scaled and rng.random() < 0.4:
        return quantize_experts(x, spec)
    if len(shape) == 2 and len(x) > 1 and spec.block_rows == 1 and not spec.row_scaled and rng.random() < 0.2:
        return torch.cat([quantize(x[:1], spec), quantize(x[1:], spec)])
    t = quantize(x, spec, amax=rng.choice([None, 4.0]) if not spec.row_scaled else None)
    return t.bfloat16() if rng.random() < 0.1 else t


def cut(size: int, rng: random.Random, multiple: int) -> slice:
    start = rng.randrange(0, size + 1, multiple)
    return slice(start, rng.choice([size, min(size, start + multiple * rng.randint(0, 3)), rng.randint(start, size)]))


def random_take(shape, rng: random.Random) -> Callable[[Tensor], Tensor]:
    """Return a random view, or copy, as a function of a tensor."""
    dim = rng.randrange(len(shape))
    size, multiple, step = shape[dim], rng.choice([1, 16, 16, 64, 128]), rng.choice([2, 3, 16])
    region, at, pieces = cut(size, rng, multiple), rng.randrange(max(size, 1)), rng.randint(1, 3)
    everywhere = tuple(cut(n, rng, 1 if rng.random() < 0.5 and i < len(shape) - 1 else 16) for i, n in enumerate(shape))
    slices = [
        lambda t: t.narrow(dim, region.start, region.stop - region.start), lambda t: t[everywhere],
        lambda t: t[..., everywhere[-1]], lambda t: t[everywhere[0]], lambda t: t.chunk(pieces, dim)[-1],
        lambda t: t.split(multiple, dim)[0], lambda t: t.select(dim, at), lambda t: t[at % len(t)],
        lambda t: t.tensor_split(pieces, dim)[-1], lambda t: t.split([1, size - 1], dim)[1], lambda t: t[128:],
        lambda t: t[..., :16], lambda t: t.unbind(dim)[0], lambda t: t[::step], lambda t: t[..., 5:30],
    ]  # fmt: skip
    others = [
        lambda t: t.mT, lambda t: t.t(), lambda t: t.unsqueeze(dim), lambda t: t.unsqueeze(-1),
        lambda t: t.squeeze(), lambda t: t.squeeze(dim), lambda t: t.flatten(0, -2), lambda t: t.flatten(),
        lambda t: t.detach(), lambda t: t.data, lambda t: t.view(t.shape), lambda t: t.transpose(0, dim),
        lambda t: t.permute(*reversed(range(t.dim()))), lambda t: t.movedim(0, dim), lambda t: t.view(-1),
        lambda t: t.view(-1, t.shape[-1]), lambda t: t.view(2, -1, t.shape[-1]), lambda t: t.view(-1, 32),
        lambda t: t.unflatten(-1, (-1, 16)), lambda t: t[..., :32].unflatten(-1, (2, 16)),
        lambda t: t.unflatten(0, (2, -1)), lambda t: t.expand(2, *t.shape),
        lambda t: t.expand(*[-1] * t.dim()), lambda t: t[..., None].expand(*t.shape, 3), lambda t: copy.copy(t),
        lambda t: t.as_strided((4, 16), (t.stride(0), 1), t.storage_offset()), lambda t: t.unfold(0, 3, 2),
    ]  # fmt: skip
    copies = [
        lambda t: t.contiguous(), lambda t: t.ravel(), lambda t: t.clone(), lambda t: t.reshape(-1, t.shape[-1]),
        lambda t: t.reshape(-1), lambda t: t.reshape(-1, 16), lambda t: t.to(torch.float32, copy=True),
        lambda t: t.contiguous().view(-1), lambda t: t.repeat(*[1] * t.dim()), lambda t: t[[0, -1]],
        lambda t: t.index_select(0, torch.tensor([at % len(t), 0])), lambda t: t[torch.arange(len(t)) % 3 == 1],
        lambda t: t[torch.tensor([1, 0]), torch.tensor([2, 3])], lambda t: t[torch.tensor([[0, -1], [1, 1]])],
        lambda t: torch.cat([t, t[:3]]), lambda t: torch.cat([t, t], -1), lambda t: torch.stack([t, t]),
        lambda t: torch.cat(t.split(5)), lambda t: torch.cat(t.chunk(pieces, -1), -1), lambda t: torch.stack([t], -1),
        lambda t: torch.nn.functional.pad(t, [0, 0, 1, 2]),
    ]  # fmt: skip
    return rng.choice(rng.choices([slices, others, copies], [4, 3, 2])[0])


TOGETHER = [copy.deepcopy, saved, lambda value: [pickle.loads(pickle.dumps(each)) for each in value]]
"""Copies of all tensors at once, which keep to themselves what they share."""
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def storage_of(t: Tensor) -> int:
    return (t._stored().qdata if isinstance(t, NVFP4Tensor) else t).untyped_storage()._cdata


def geometry(t: Tensor) -> tuple:
    strides = [stride for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1]
    return strides, t.storage_offset(), t.is_contiguous()


def whole(t: NVFP4Tensor) -> NVFP4Tensor:
    """Return all that is stored for t and its views, as a tensor of the same parts."""
    return NVFP4Tensor._of_parts(*t._stored(), torch.float32, t.spec)


def row_scales(t: NVFP4Tensor) -> Tensor:
    return t.row_scale().expand(t.qdata.shape[:-1].numel()).clone()


def quantized_like(t: NVFP4Tensor, x: Tensor) -> Tensor:
    """Return the values of x, quantized as those of t are."""
    create = quantize_experts if t.per_tensor_scale.dim() == 2 else quantize
    x = create(x.mT if t.transposed else x, t.spec).dequantize(torch.float32)
    return x.mT if t.transposed else x


def rounded_once(new: Tensor, old: Tensor, t: NVFP4Tensor, share: float) -> bool:
    """Return whether each new value of a stored tensor is the old one, rounded to a step of its block (or tile)."""
    new, old = (torch.nn.functional.pad(x.view(-1, t.columns), (0, -t.columns % 16)) for x in (new, old))
    largest = old.abs().unflatten(-1, (-1, 16)).nan_to_num(nan=0).amax(-1)
    if t.spec.block_rows == 16:
        largest = torch.nn.functional.pad(largest, (0, 0, 15, 15)).unfold(0, 31, 1).amax(-1)
    smallest = 6 * 2**-9 * t.row_scale().expand(len(new)).view(-1, 1)
    bound = share * largest.repeat_interleave(16, -1) + smallest
    return bool((((new - old).abs() <= bound) | (old.isnan() & new.isnan())).all())


class Pool:
    """NVFP4 tensors and the dense ones that they stand for."""

    def __init__(self, seed: int, counts: Counter) -> None:
        self.rng, self.seed, self.counts, self.exact = random.Random(seed), seed, counts, seed % 2 == 0
        torch.manual_seed(seed)
        shape, kind = self.rng.choice(SHAPES), self.rng.choice(["one", "one", "rows", "matrices"])
        t = exact_tensor(shape, self.rng, kind) if self.exact else any_tensor(shape, self.rng, self.rng.choice(SPECS))
        t = t.mT if t.dim() > 1 and self.rng.random() < 0.2 else t
        self.pairs: list[tuple[NVFP4Tensor, Tensor]] = [(t, t.dequantize(torch.float32))]

    def add(self, *pairs: tuple[NVFP4Tensor, Tensor]) -> None:
        self.pairs = [*self.pairs, *pairs][-12:]

    def step(self) -> None:
        kind = self.rng.random()
        if kind < 0.5:
            self.take()
        elif kind < 0.97:
            self.write()
        else:
            together = self.rng.choice(TOGETHER)
            self.add(*zip(*(together(list(each)) for each in zip(*self.pairs, strict=True)), strict=True))
        for t, dense in self.pairs:
            assert same(t.dequantize(torch.float32), dense), f"{self.seed}: {t!r} {t.stride()} {t.window}"

    def take(self) -> None:
        t, dense = self.rng.choice(self.pairs)
        take = random_take(tuple(dense.shape), self.rng)
        try:
            expected = take(dense)
        except ERRORS:
            expected = None
        try:
            view = take(t)
        except ERRORS as error:
            assert expected is None or "dequantize() first" in str(error), f"{self.seed}: {error}"
            self.counts["no such view"] += 1
            return
        assert expected is not None, f"{self.seed}: no such dense view of {t!r}"
        assert view.shape == expected.shape
        if isinstance(view.window, Unreadable) or not view.numel():
            return
        is_view = storage_of(expected) == storage_of(dense)
        assert is_view == (storage_of(view) == storage_of(t)), f"{self.seed}: {view!r}"
        if is_view:
            assert geometry(view) == geometry(expected), f"{self.seed}: {view!r}"
        elif geometry(view) != geometry(expected):  # a copy of a transposed tensor is transposed
            expected = torch.empty_strided(view.shape, view.stride()).copy_(expected)
        self.counts["views"] += 1
        self.add((view, expected))

    def codes_for(self, t: NVFP4Tensor) -> NVFP4Tensor:
        """Return codes of the shape and the order of t."""
        rng, shape, spec = self.rng, t.mT.shape if t.transposed else t.shape, t.spec
        if self.exact:
            kind = "rows" if t.per_tensor_scale.dim() == 1 else "one"
            source = exact_tensor(shape, rng, kind, rng.choice([1.0, 1.0, 2.0, 4.0, 8.0]))._replace(spec=spec)
        elif rng.random() < 0.1:
            source = quantize(torch.zeros(shape), spec)
        else:
            if spec.hadamard_sign is None and rng.random() < 0.3:  # others are refused
                spec = rng.choice(SPECS)
            source = any_tensor(shape, rng, spec, rng.choice([1.0, 0.25, 3.01, 40.0]))
            if rng.random() < 0.3 and source.per_tensor_scale.dim() == t.per_tensor_scale.dim():
                source = source._replace(per_tensor_scale=t.per_tensor_scale * rng.choice([1.0, 2.0]))
        return source.mT if t.transposed else source

    def draw_write(self, t: NVFP4Tensor, dense: Tensor) -> tuple[str, Callable[[], object], Tensor]:
        """Return a write by name, and the values that a dense tensor has after it."""
        dense_writes = ["dense"] * (0 if self.exact else 4)
        name = self.rng.choice(["zero_", "= 0", *["codes"] * 5, "= codes", "= codes", *dense_writes])
        if "codes" in name:
            source = self.codes_for(t)
            act = (lambda: t.copy_(source)) if name == "codes" else (lambda: t.__setitem__(..., source))
            return name, act, source.dequantize(torch.float32)
        if name == "= 0":
            return name, lambda: t.__setitem__(..., 0), torch.zeros(dense.shape)
        name = name if name == "zero_" else self.rng.choice(list(WRITES))
        x = values(dense.shape, self.rng, self.rng.choice([0.5, 3.0])).to(t.dtype)
        return name, lambda: WRITES[name](t, x), WRITES[name](dense.to(t.dtype, copy=True), x)

    def write(self) -> None:
        windows = [pair for pair in self.pairs if pair[0].window is not None]
        t, dense = self.rng.choice(windows if windows and self.rng.random() < 0.7 else self.pairs)
        stored, mirror = whole(t), torch.empty(0).set_(dense.untyped_storage())
        before, scales = stored.dequantize().view(-1), row_scales(stored)
        where = torch.arange(len(mirror)).as_strided(dense.size(), dense.stride(), dense.storage_offset())
        if (kind := self.rng.random()) < 0.1:  # in place of all of its parts, which views read
            t._stored().per_tensor_scale.mul_(2)
            mirror.mul_(2)
            return
        if kind < 0.2 and dense.dim() > 1 and len(dense) > 2:
            to, source = self.rng.sample([slice(1, None), slice(-1)], 2)
            name, act, expected, where = "of itself", lambda: t[to].copy_(t[source]), dense[source].clone(), where[to]
        else:
            try:
                name, act, expected = self.draw_write(t, dense)
            except (IndexError, RuntimeError):  # no such write of a dense tensor
                return
        try:
            act()
        except ERRORS as error:
            message = f"{self.seed}: {name} into {t!r}: {error}"
            assert "clone" in message or "dequantize()" in message, message
            if name in ("zero_", "= 0"):  # which fit any scale
                assert "ends within a block" in message or "more than one element of this view" in message, message
            elif name not in WRITES:  # codes bring a scale of their own
                assert "write an NVFP4Tensor" not in message, message
            assert same(whole(t).dequantize().view(-1), before), f"changed by {message}"
            self.counts["refused"] += 1
            return
        self.counts["written"] += 1
        self.check_written(f"{self.seed}: {name} into {t!r}", name, t, expected, where, before, scales)
        mirror.copy_(whole(t).dequantize().view(-1))

    def check_written(self, label, name, t, expected, where, before, scales) -> None:
        stored = whole(t)
        after, inside = stored.dequantize().view(-1), torch.zeros(len(before), dtype=torch.bool)
        inside[where.reshape(-1)] = True
        is_copy = name not in WRITES or name == "zero_"
        if is_copy or (name.startswith("fill_") and t.spec.hadamard_sign is None):
            assert same(after[where], expected.float()), f"{label}: not what was written"
        elif t.spec.block_rows == 1 and not t.spec.is_stochastic:
            assert same(after[where], quantized_like(t, expected)), f"{label}: not what is quantized"
        elif t.spec.hadamard_sign is None and expected.isfinite().all():
            target, share = before.clone(), 0.52 if t.spec.is_stochastic else 0.28
            target[where] = expected.float()
            assert rounded_once(after, target, stored, share), f"{label}: not the values, rounded"
        kept = (row_scales(stored) == scales).repeat_interleave(stored.columns) | (not is_copy or self.exact)
        assert ((before == after) | (before.isnan() & after.isnan()) | inside | ~kept).all(), f"{label}: others changed"
        others = (x.masked_fill(inside, 0) for x in (after, before))
        assert rounded_once(*others, stored, 0.28), f"{label}: others are not themselves, rounded"


@pytest.mark.filterwarnings("ignore:an average that is rounded")
@pytest.mark.parametrize("first", range(0, 180, 60))
def test_tensors_act_as_dense_ones_or_raise(first):
    counts = Counter()
    for seed in range(first, first + 60):
        with MODES[seed % 3]():
            pool = Pool(seed, counts)
            for _ in range(16):
                pool.step()
    assert counts["written"] > 100 and counts["views"] > 100 and counts["refused"] > 30, counts
