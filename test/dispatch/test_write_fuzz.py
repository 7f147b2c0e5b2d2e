"""Random writes into random views of views, against dense tensors.

After a write, the written elements have the values of a dense tensor, rounded once; all others are unchanged, or
rounded rounded once to a new per-tensor scale. A write that raises changes nothing. Views show what their tensor has.
"""

import random
from collections import Counter

import pytest
import torch
from torch import Tensor

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts

SPECS = [
    QuantizeSpec(), QuantizeSpec(row_scaled=True), QuantizeSpec(block_rows=16), QuantizeSpec(four_over_six=True),
    QuantizeSpec(round_mode="stochastic"), QuantizeSpec(scale_search="mse"), QuantizeSpec(scale_rounding="up"),
    QuantizeSpec(hadamard_sign=True), QuantizeSpec(row_scaled=True, four_over_six=True, round_mode="stochastic"),
]  # fmt: skip
SHAPES = [(128,), (100,), (48, 64), (300, 150), (256, 128), (130, 96), (4, 40, 64), (3, 128, 80), (1, 150, 64)]


def values(shape, rng, factor=1.0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31))) * factor
    if rng.random() < 0.3:
        x = x * 2.0 ** torch.randint(-3, 4, (*x.shape[:-1], 1))
    if rng.random() < 0.1:
        x[torch.rand(x.shape) < 0.9] = 0
    if rng.random() < 0.05:
        x.view(-1)[rng.randrange(x.numel()) :][:1] = torch.nan
    return x


def tensor(shape, rng, spec, factor=1.0) -> NVFP4Tensor:
    """Return an NVFP4Tensor with one per-tensor scale, one per matrix or one per row."""
    x = values(shape, rng, factor)
    if rng.random() < 0.05:
        x.zero_()
    if len(shape) == 3 and shape[0] and not spec.row_scaled and rng.random() < 0.4:
        return quantize_experts(x, spec)
    if len(shape) == 2 and shape[0] > 1 and spec.block_rows == 1 and not spec.row_scaled and rng.random() < 0.2:
        return torch.cat([quantize(x[:1], spec), quantize(x[1:], spec)])
    t = quantize(x, spec, amax=rng.choice([None, 4.0]) if not spec.row_scaled else None)
    return t.bfloat16() if rng.random() < 0.1 else t


def cut(size, rng, multiple) -> slice:
    start = rng.randrange(0, size + 1, multiple)
    return slice(start, rng.choice([size, min(size, start + multiple * rng.randint(0, 3)), rng.randint(start, size)]))


def random_view(shape, rng):
    """Return a random view as a function of a tensor."""
    dim = rng.randrange(len(shape))
    size, multiple = shape[dim], rng.choice([1, 16, 16, 64, 128])
    region, at, pieces = cut(size, rng, multiple), rng.randrange(max(size, 1)), rng.randint(1, 3)
    everywhere = tuple(cut(n, rng, 1 if rng.random() < 0.5 and i < len(shape) - 1 else 16) for i, n in enumerate(shape))
    slices = [
        lambda t: t.narrow(dim, region.start, region.stop - region.start), lambda t: t[everywhere],
        lambda t: t[(slice(None),) * dim + (region,)], lambda t: t[..., everywhere[-1]], lambda t: t[everywhere[0]],
        lambda t: t.chunk(pieces, dim)[-1], lambda t: t.split(multiple, dim)[0],
    ]  # fmt: skip
    others = [
        lambda t: t.select(dim, at), lambda t: t.mT, lambda t: t.unsqueeze(dim), lambda t: t.flatten(0, -2),
        lambda t: t.detach(), lambda t: t.data, lambda t: t.view(t.shape), lambda t: t.squeeze(0),
        lambda t: t.unbind(dim)[0], lambda t: t.transpose(0, dim), lambda t: t[::2], lambda t: t.flatten(),
        lambda t: t.view(-1, t.shape[-1]), lambda t: t.view(2, -1, t.shape[-1]), lambda t: t.expand(2, *t.shape),
        lambda t: t[:0], lambda t: t[..., :0], lambda t: t[..., :16], lambda t: t[128:],
    ]  # fmt: skip
    return rng.choice(slices if rng.random() < 0.7 else others)


def written_codes(view, root, rng) -> Tensor:
    """Return codes that could be stored in the view."""
    shape = list(view.shape)
    if view.transposed:
        shape[-2:] = shape[:-3:-1]
    spec = rng.choice([root.spec, root.spec, *SPECS])
    if root.spec.hadamard_sign is not None or (root.per_tensor_scale.dim() == 0 and rng.random() < 0.9):
        spec = root.spec  # others are refused
    kind = rng.random()
    if kind < 0.1 or not view.numel():
        return quantize(torch.zeros(shape), spec)
    if kind < 0.2 and root.dim() > 1 and not root.transposed and view.shape[1:] == root.shape[1:]:
        return root[-len(view) :] if rng.random() < 0.5 else root[1 : 1 + len(view)]  # of itself
    source = tensor(shape, rng, spec, rng.choice([1.0, 0.25, 3.01, 3.01, 40.0]))
    if kind > 0.7 and source.per_tensor_scale.dim() == view.per_tensor_scale.dim():
        source = source._replace(per_tensor_scale=view.per_tensor_scale * rng.choice([1.0, 2.0]))
    return source.mT if view.transposed else source


WRITES = {
    "zero_": lambda t, x: t.zero_(), "fill_": lambda t, x: t.fill_(1.7), "mul_": lambda t, x: t.mul_(1.5),
    "add_": lambda t, x: t.add_(x), "lerp_": lambda t, x: t.lerp_(x, 0.5), "clamp_": lambda t, x: t.clamp_(-0.5, 0.5),
    "setitem 0": lambda t, x: t.__setitem__(slice(None), 0), "setitem": lambda t, x: t.__setitem__(slice(None), x),
    "dense": lambda t, x: t.copy_(x), "index_fill_": lambda t, x: t.index_fill_(0, torch.tensor([0]), 0.3),
    "index_put_": lambda t, x: t.__setitem__(torch.tensor([0, len(t) - 1]), x[[0, -1]]),
    "index_copy_": lambda t, x: t.index_copy_(0, torch.tensor([0]), x[:1]),
    "masked_fill_": lambda t, x: t.masked_fill_(x > 0, 0.5), "out": lambda t, x: torch.mul(x, 2, out=t),
    "foreach": lambda t, x: torch._foreach_mul_([t], 2.0),
    "setitem col": lambda t, x: t.__setitem__((..., slice(16)), x[..., :16]),
    "setitem row": lambda t, x: t.__setitem__(slice(3, 20), x[3:20]), "exp": lambda t, x: t.exp_(),
}  # fmt: skip


def exact(t) -> Tensor:
    return t.dequantize(torch.float32)


def same(a, b) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def rounded_once(new: Tensor, old: Tensor, t: NVFP4Tensor, share: float) -> Tensor:
    """Whether each element of new is one of old, rounded: to a step of its block (or tile) of 16 under t's scale."""
    new, old = (x.mT if t.transposed else x for x in (new, old))
    if new.numel() == 0:
        return torch.ones(new.shape, dtype=torch.bool)
    columns = new.shape[-1]
    new, old = (torch.nn.functional.pad(x.reshape(-1, columns), (0, -columns % 16)) for x in (new, old))
    largest = old.abs().unflatten(-1, (-1, 16)).nan_to_num(nan=0).amax(-1)
    if t.spec.block_rows == 16:
        padded = torch.nn.functional.pad(largest, (0, 0, 15, 15))
        largest = padded.unfold(0, 31, 1).amax(-1)
    scale = t.row_scale().reshape(-1, 1).expand(len(new), 1)
    bound = share * largest.repeat_interleave(16, -1) + 6 * 2**-9 * scale
    ok = ((new - old).abs() <= bound) | (old.isnan() & new.isnan())
    return ok[:, :columns]


def trial(seed: int, counts: Counter) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    root = tensor(rng.choice(SHAPES), rng, rng.choice(SPECS))
    numbers = torch.arange(root.numel()).view(root.shape)
    if rng.random() < 0.2 and root.dim() > 1:
        root, numbers = root.mT, numbers.mT
    chain, named, takes = [root], [numbers], []
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 3, 4])):
        take = random_view(tuple(chain[-1].shape), rng)
        try:
            number = take(named[-1])
        except (IndexError, RuntimeError, TypeError, ValueError):
            continue
        if number.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
            break  # a copy
        try:
            view = take(chain[-1])
            view.scale  # noqa: B018  a flattened matrix raises when it is read
        except (RuntimeError, IndexError):
            counts["no such view"] += 1
            continue
        assert view.shape == number.shape
        if not same(exact(view).float(), exact(root).reshape(-1)[flat(number, named[0])].view(number.shape)):
            raise AssertionError(f"{seed}: a view shows other values")
        chain.append(view), named.append(number), takes.append(take)
    view, number = chain[-1], named[-1]
    try:
        beside = [
            (take(t), take(n))
            for t, n, take in (
                (view, number, lambda t: t.chunk(2)[0]), (root, numbers, lambda t: t.chunk(3)[-1]),
                (root, numbers, lambda t: t.split(40)[0]), (root, numbers, lambda t: t.view(-1, t.shape[-1])),
                (root, numbers, lambda t: t[1::2]), (root, numbers, lambda t: t.detach()[1:]),
            )
        ]  # fmt: skip
    except RuntimeError:
        beside = []
    write = "codes" if rng.random() < 0.8 else rng.choice(list(WRITES))
    if write == "codes" and rng.random() < 0.2 and root.spec.hadamard_sign is None:
        root.mul_(1.25)  # views are older than this
    check(seed, rng, chain, named, beside, write, counts)


def flat(number: Tensor, numbers: Tensor) -> Tensor:
    """Positions of logical elements in root.reshape(-1)."""
    where = torch.empty(numbers.numel(), dtype=torch.int64)
    where[numbers.reshape(-1)] = torch.arange(numbers.numel())
    return where[number.reshape(-1)]


def check(seed, rng, chain, named, beside, write, counts) -> None:
    root, view = chain[0], chain[-1]
    where = flat(named[-1], named[0])
    everyone = [*zip(chain, named, strict=True), *beside]
    before = [exact(t).clone() for t, _ in everyone]
    scales = root.row_scale().clone()
    assert_in = f"seed {seed}, {write} into {view!r} of {root!r}"
    if write == "codes":
        source = written_codes(view, root, rng)
        expected = exact(source).clone()
        act = rng.choice([lambda: view.copy_(source), lambda: view.__setitem__(slice(None), source)])
    else:
        x = values(tuple(view.shape), rng, rng.choice([0.5, 3.0])) if view.numel() else torch.zeros(view.shape)
        expected = exact(view).to(view.dtype).clone()
        x = x.to(view.dtype)
        try:
            WRITES[write](expected, x)
        except (IndexError, RuntimeError):
            return
        act = lambda: WRITES[write](view, x)  # noqa: E731
    try:
        act()
    except (RuntimeError, IndexError, ValueError) as error:
        counts["refused"] += 1
        counts[f"  {str(error)[-90:]}"] += 1
        for (t, _), held in zip(everyone, before, strict=True):
            assert same(exact(t), held), f"{assert_in}: refused, and changed"
        return
    counts["written"] += 1
    counts[f"written {write} {view.window is not None} {root.per_tensor_scale.dim()}"] += 1
    after = exact(root).reshape(-1)
    inside = torch.zeros(root.numel(), dtype=torch.bool)
    inside[where] = True
    inside = inside.view(root.shape)
    result = after[where].view(view.shape)
    if write == "codes":
        assert same(result, expected), f"{assert_in}: {source!r} is not what was written"
    elif view.spec.hadamard_sign is None and expected.isfinite().all():
        share = 0.52 if view.spec.is_stochastic else 0.28
        assert rounded_once(result, expected.float(), view, share).all(), f"{assert_in}: not the values"
    old, new = before[0], exact(root)
    unchanged = (old == new) | (old.isnan() & new.isnan())
    if write != "codes":
        assert unchanged[~inside].all(), f"{assert_in}: others changed"
    kept = (root.row_scale() == scales).expand(root.qdata.shape[:-1].numel()).view(*root.qdata.shape[:-1], 1)
    kept = kept.mT if root.transposed else kept
    assert (unchanged | inside | ~kept).all(), f"{assert_in}: others changed under the same scale"
    others = torch.where(inside, 0, old)
    once = rounded_once(torch.where(inside, 0, new), others, root, 0.28)
    once = once.view(root.mT.shape).mT if root.transposed else once.view(root.shape)
    assert once.all(), f"{assert_in}: others are not themselves, rounded"
    for t, number in everyone if len(where) else ():
        counts["shown"] += 1
        assert same(exact(t), after[flat(number, named[0])].view(t.shape)), f"{assert_in}: {t!r} does not show it"


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_writes_do_what_they_do_to_a_dense_tensor(first):
    counts = Counter()
    for seed in range(first, first + 100):
        trial(seed, counts)
    assert counts["written"] > 30 and counts["refused"] > 10 and counts["shown"] > 100
