"""nvfp4.decode_llama: what the CPU library decodes in one parallel section, beside the same in torch's operators."""

import dataclasses
import itertools

import pytest
import torch

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.ops import composite, native
from test.helpers.instruction_sets import each_instruction_set

LENGTH = 48


def instruction_sets():
    """Each of float32, then the machine's best, which may have bfloat16 products."""
    yield from each_instruction_set()
    yield ""


@dataclasses.dataclass
class Step:
    """A random model, its caches, and one token."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    dim: int

    def run(self, function, position):
        """(hidden state, caches behind it)."""
        keys, values = ([t.clone() for t in each] for each in (self.keys, self.values))
        angles = position * 10000.0 ** (-torch.arange(0, self.dim, 2) / self.dim)
        cos, sin = (f(torch.cat([angles, angles])).bfloat16() for f in (torch.cos, torch.sin))
        y = function(self.x, self.weights, keys, values, cos, sin, position, 1e-5, self.dim**-0.5)
        return y, keys, values


def random_step(hidden=96, inner=160, heads=6, kv_heads=2, dim=32, layers=2, per_row=False):
    def weight(n, k):
        t = NVFP4Tensor.to_nvfp4(torch.randn(n, k, dtype=torch.bfloat16) * k**-0.5)
        factor = t.per_tensor_scale * torch.linspace(0.5, 1.5, n) if per_row else t.per_tensor_scale
        return [t.qdata, t.scale, factor]

    def norm():
        return torch.rand(hidden).bfloat16() + 0.5

    weights = []
    for _ in range(layers):
        qkvo = [(heads * dim, hidden), (kv_heads * dim, hidden), (kv_heads * dim, hidden), (hidden, heads * dim)]
        mlp = [(inner, hidden), (inner, hidden), (hidden, inner)]
        weights += [norm(), *(t for shape in qkvo for t in weight(*shape))]
        weights += [norm(), *(t for shape in mlp for t in weight(*shape))]
    caches = [[torch.randn(1, kv_heads, LENGTH, dim).bfloat16() for _ in range(layers)] for _ in range(2)]
    return Step(torch.randn(1, hidden).bfloat16(), [*weights, norm()], *caches, dim)


def assert_same(step, position, rtol=0.02):
    """Within what sums in another order change: a bfloat16 that falls to the other side now and then."""
    y, *caches = step.run(torch.ops.nvfp4.decode_llama, position)
    expected, *expected_caches = step.run(composite.decode_llama, position)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(y, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
    for ours, others in zip(itertools.chain(*caches), itertools.chain(*expected_caches), strict=True):
        torch.testing.assert_close(ours, others, rtol=rtol, atol=rtol)
        behind = slice(position + 1, None)
        assert torch.equal(ours[:, :, behind], others[:, :, behind])


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("position", [0, 1, 15, 16, 47])
def test_decodes_as_torch_does(position, threads):
    for _ in instruction_sets():
        assert_same(random_step(), position)


@pytest.mark.parametrize("sizes", [
    {"hidden": 576, "inner": 1536, "heads": 9, "kv_heads": 3, "dim": 64},
    {"hidden": 64, "inner": 48, "heads": 4, "kv_heads": 4, "dim": 128},
    {"hidden": 32, "inner": 16, "heads": 1, "kv_heads": 1, "layers": 1},
    {"per_row": True},
], ids=str)  # fmt: skip
def test_sizes(sizes):
    for _ in instruction_sets():
        assert_same(random_step(**sizes), 20)


def test_threads_change_no_bit():
    step, results = random_step(), []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        results.append(step.run(torch.ops.nvfp4.decode_llama, 7))
    torch.set_num_threads(1)
    for y, keys, values in results[1:]:
        for a, b in zip([y, *keys, *values], [results[0][0], *results[0][1], *results[0][2]], strict=True):
            assert torch.equal(a, b)


def test_numbers_beyond_bfloat16_products():
    """x above 2^100 overflows before the block scales, below 2^-100 it is flushed: other kernels take over."""
    for scale in (2.0**105, 2.0**-105):
        step = random_step(layers=1)
        step.weights[13] = step.weights[13] * scale
        for at in (16, 19):
            step.weights[at] = step.weights[at] / scale
        for _ in instruction_sets():
            assert_same(step, 3)


def test_nan_is_kept():
    step = random_step()
    step.x[0, 5] = float("nan")
    for _ in instruction_sets():
        assert step.run(torch.ops.nvfp4.decode_llama, 3)[0].isnan().all()


@pytest.mark.parametrize("change, message", [
    (lambda s: s.weights.pop(), "23 tensors a layer"),
    (lambda s: s.keys.pop(), "one a layer"),
    (lambda s: s.weights.__setitem__(0, s.weights[0].float()), "a norm must be 96 contiguous bfloat16"),
    (lambda s: s.weights.__setitem__(4, s.weights[4][:-1]), r"k must be a contiguous weight of \(64, 96\)"),
    (lambda s: s.values.__setitem__(1, s.values[1][:, :, ::2]), "all alike"),
    (lambda s: setattr(s, "x", s.x.float()), "x must be 96"),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_what_is_refused(change, message):
    if not native.library("cpu").loaded:
        pytest.skip("plain torch serves")
    step = random_step()
    change(step)
    with pytest.raises(RuntimeError, match=message):
        step.run(torch.ops.nvfp4.decode_llama, 3)


def test_a_position_outside_of_the_cache():
    with pytest.raises((RuntimeError, IndexError)):
        random_step().run(torch.ops.nvfp4.decode_llama, LENGTH)


@pytest.mark.parametrize("rows, columns", [(1, 32), (100, 96), (1000, 576)])
def test_a_dense_row(rows, columns, threads):
    x, w = torch.randn(1, columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    expected = (x.double() @ w.double().mT).bfloat16()
    assert torch.equal(composite.linear_row(x, w), (x.float() @ w.float().mT).bfloat16())
    for _ in instruction_sets():
        y = torch.ops.nvfp4.linear_row(x, w)
        assert y.shape == (1, rows)
        torch.testing.assert_close(y, expected, rtol=2**-8, atol=1e-4)
