"""Copies that stand in for views: they have the values of their tensor after it was written to, or raise an error."""

import copy
import pickle

import pytest
import torch
from torch import nn

from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.quantization.linear import NVFP4Linear
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, refit_


def matrix(seed=0):
    return torch.randn((300, 64), generator=torch.Generator().manual_seed(seed)).bfloat16()


def codes(seed=0):
    return quantize(matrix(seed), amax=6.0)


SLICES = {
    "rows": lambda t: t[3:40],
    "first rows": lambda t: t[:100],
    "columns": lambda t: t[:, 16:48],
    "a chunk": lambda t: t.split(60)[1],
    "of a slice": lambda t: t[3:90][5:40],
    "of a tile": lambda t: t[128:][3:90],
    "same shape": lambda t: t[3:40].view(37, 64),
    "of an alias": lambda t: t.detach()[3:40],
    "of one matrix": lambda t: t[None][0, 3:40],
}
OTHERS = {
    "a row": lambda t: t[3],
    "every second": lambda t: t[::2],
    "unbound": lambda t: t.unbind()[7],
    "rows of another length": lambda t: t.view(150, 128),
    "a transposed slice": lambda t: t[3:40].t(),
    "a matrix": lambda t: t.view(5, 60, 64)[1],
}


def alone(t):
    """A view made within another operator, with versions of its own."""
    return t.data.view(5, 60, 64)


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "dense": lambda t: t.copy_(matrix(5)),
    "codes": lambda t: t.copy_(codes(5)),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "data": lambda t: t.data.copy_(codes(5)),
    "detached": lambda t: t.detach().copy_(codes(5)),
    "tiles": lambda t: t[:256].copy_(codes(5)[:256]),
    "a slice": lambda t: t[2:250].copy_(codes(5)[2:250]),
    "a slice of data": lambda t: t.data[2:250].copy_(codes(5)[2:250]),
    "a larger scale": lambda t: t[2:250].copy_(quantize(matrix(5), amax=24.0)[2:250]),
    "a row": lambda t: t.index_copy_(0, torch.tensor([5]), matrix(5)[:1]),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "foreach of a view": lambda t: torch._foreach_mul_([t.view(5, 60, 64)], 2.0),
    "zeros of data": lambda t: t.data[:256].zero_(),
    "other shape": lambda t: alone(t).copy_(codes(5).view(5, 60, 64)),
    "other data": lambda t: t.data.unsqueeze(0).zero_(),
    "its codes": lambda t: t.qdata.copy_(codes(5).qdata),
    "its block scales": lambda t: t.scale.copy_(t.scale.float().mul(2)),
    "its per-tensor scale": lambda t: t.per_tensor_scale.mul_(2),
}
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", SLICES)
@pytest.mark.parametrize("mode", MODES)
def test_slices_have_later_values(view, write, mode):
    if write == "its codes" and view == "of one matrix":
        pytest.skip("the codes of the view in between have a version of their own")
    t, x = codes(), torch.randn(2, 64).bfloat16()
    with MODES[mode]():
        part = SLICES[view](t)
        WRITES[write](t)
        expected = SLICES[view](t.clone())
        assert not torch.equal(expected.dequantize(), SLICES[view](codes()).dequantize())
        assert torch.equal(part.dequantize(), expected.dequantize())
        x = x[:, : part.shape[1]]
        assert torch.equal(nn.functional.linear(x, part), nn.functional.linear(x, expected))


@pytest.mark.parametrize("read", [
    lambda t: t.dequantize(), lambda t: t + 1, lambda t: t.clone(), lambda t: torch.cat([t, t]),
    lambda t: torch.zeros(t.shape).copy_(t),
], ids=["dequantize", "add", "clone", "cat", "copy_"])  # fmt: skip
@pytest.mark.parametrize("view", SLICES)
def test_each_way_of_reading(view, read):
    t = codes()
    part = SLICES[view](t)
    t.mul_(2)
    got, expected = read(part), read(SLICES[view](t.clone()))
    if hasattr(got, "dequantize") and got.dtype == torch.bfloat16 and type(got) is not torch.Tensor:
        got, expected = got.dequantize(), expected.dequantize()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("write", ["mul_", "codes", "data", "a slice", "a larger scale"])
@pytest.mark.parametrize("view", OTHERS)
def test_other_copies_raise(view, write):
    t = codes()
    part = OTHERS[view](t)
    assert part.dequantize().shape == part.shape  # before the write
    kept = part.clone()
    WRITES[write](t)
    for read in (lambda: part.dequantize(), lambda: part + 1, lambda: torch.stack([part, part])):
        with pytest.raises(RuntimeError, match="its tensor was written since"):
            read()
    assert torch.equal(kept.dequantize(), OTHERS[view](codes()).dequantize())


@pytest.mark.parametrize("view", SLICES)
def test_a_tensor_of_inference_mode(view):
    with torch.inference_mode():
        t = codes()
        part, row = SLICES[view](t), t[3]
        WRITES["codes"](t)
        if view != "of a slice":  # the slice between is gone
            assert torch.equal(part.dequantize(), SLICES[view](t.clone()).dequantize())
        with pytest.raises(RuntimeError, match="its tensor was written since"):
            row.dequantize()


def test_views_taken_after_a_write_are_fresh():
    """Within an operator, and by .data, views have versions of their own, which begin at zero."""
    t, e = codes(), quantize_experts(torch.randn(4, 40, 64))
    t.mul_(2), e.copy_(quantize_experts(torch.randn(4, 40, 64)))
    assert torch.equal(torch.stack(t.unbind()[:4]).dequantize(), t.dequantize()[:4])
    assert torch.equal(torch.stack(t.split(100)).dequantize(), t.dequantize().view(3, 100, 64))
    assert torch.equal(torch.stack([e, e]).dequantize(), torch.stack([e.dequantize()] * 2))
    assert torch.equal(t[3].data.dequantize(), t.dequantize()[3])
    assert torch.equal(nn.Parameter(t[3], False).data.dequantize(), t.dequantize()[3])
    with torch.inference_mode():
        assert torch.equal(t[:, None][3:5].mT.dequantize(), t.dequantize()[:, None][3:5].mT)


def test_a_refused_write_is_none():
    t = codes()
    row, part = t[3], t[3:40]
    with pytest.raises(RuntimeError, match="more per-tensor scales"):
        t.copy_(quantize(matrix(1), QuantizeSpec(row_scaled=True)))
    assert torch.equal(row.dequantize(), t.dequantize()[3]) and torch.equal(part.dequantize(), t.dequantize()[3:40])


def test_a_flat_view_is_read_when_it_is_used():
    t = codes()
    whole, part = t.view(-1), t[3:40].view(-1)
    t.mul_(2)
    assert torch.equal(part.dequantize(), t.dequantize()[3:40].reshape(-1))
    other = whole.view(150, 128)
    assert torch.equal(other.dequantize(), t.dequantize().view(150, 128))
    t.mul_(2)
    with pytest.raises(RuntimeError, match="its tensor was written since"):
        other.dequantize()


@pytest.mark.parametrize("optimizer", [
    lambda p: NVFP4AdamW([p], lr=0.1), lambda p: NVFP4Optimizer([p], torch.optim.AdamW, lr=0.1),
    lambda p: NVFP4Optimizer([p], torch.optim.AdamW, states="nvfp4", lr=0.1),
    lambda p: torch.optim.SGD([p], lr=0.1, foreach=True),
], ids=["NVFP4AdamW", "NVFP4Optimizer", "states", "SGD"])  # fmt: skip
def test_an_optimizer_writes(optimizer):
    p = nn.Parameter(quantize(matrix()))
    part, of_tile, row = p.detach()[3:40], p.detach()[128:][3:40], p.detach()[3]
    stepper = optimizer(p)
    p.grad = torch.randn(300, 64).bfloat16()
    stepper.step()
    assert torch.equal(part.dequantize(), p.detach().dequantize()[3:40])
    assert torch.equal(of_tile.dequantize(), p.detach().dequantize()[131:168])
    with pytest.raises(RuntimeError, match="its tensor was written since"):
        row.dequantize()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("module", [nn.Linear, NVFP4Linear])
def test_a_compiled_function_reads(module, backend):
    t, x = codes(), torch.randn(2, 64).bfloat16()
    linear = nn.Linear(64, 37, bias=False)
    linear.weight = nn.Parameter(t[3:40], requires_grad=False)
    linear.__class__ = module
    functions = [lambda p: nn.functional.linear(x, p), lambda p: p.dequantize(), lambda p: x @ p.mT, lambda p: p + 1]
    compiled = [torch.compile(each, backend=backend) for each in functions]
    compiled_linear = torch.compile(linear, backend=backend)
    part = t[3:40]
    with torch.no_grad():
        for _ in range(3):
            expected = t[3:40].clone()
            for function, each in zip(functions, compiled, strict=True):
                assert torch.equal(each(part), function(expected))
            assert torch.equal(compiled_linear(x), nn.functional.linear(x, expected))
            t.mul_(2)


def test_old_slices_are_saved_as_they_are_now(tmp_path):
    t = codes()
    part, row = t[3:40], t[3]
    t.mul_(2)
    assert torch.equal(pickle.loads(pickle.dumps(part)).dequantize(), t.dequantize()[3:40])
    t.mul_(2)
    torch.save({"a": part}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"].dequantize(), t.dequantize()[3:40])
    with pytest.raises(RuntimeError, match="its tensor was written since"):
        pickle.dumps(row)


def test_data_set_to_a_slice_follows_it():
    t = codes()
    p = codes()[3:40].clone()
    p.data = t[3:40]
    t.mul_(2)
    assert torch.equal(p.dequantize(), t.dequantize()[3:40])


def test_chunks_follow_a_state_dict_and_a_refit():
    module = nn.Linear(64, 300, bias=False)
    module.weight = nn.Parameter(codes(), requires_grad=False)
    chunks = module.weight.split(100)
    module.load_state_dict({"weight": codes(1)})
    assert all(torch.equal(a.dequantize(), b.dequantize()) for a, b in zip(chunks, codes(1).split(100), strict=True))
    refit_(module, {"weight": matrix(2)})
    for mine, its in zip(chunks, module.weight.clone().split(100), strict=True):
        assert torch.equal(mine.dequantize(), its.dequantize())


def test_overlapping_slices():
    t = codes()
    a, b = t[3:40], t[20:60]
    a.copy_(codes(1)[:37])
    assert torch.equal(b.dequantize(), t.dequantize()[20:60])
    b.copy_(codes(2)[:40])
    assert torch.equal(a.dequantize(), t.dequantize()[3:40])


def test_copies_of_copies_are_independent():
    t = codes()
    part, row = t[3:40], t[3]
    kept = [copy.deepcopy(part), pickle.loads(pickle.dumps(part)), part.clone(), copy.deepcopy(row), row.clone()]
    values = [each.dequantize() for each in kept]
    t.mul_(2)
    assert all(torch.equal(each.dequantize(), value) for each, value in zip(kept, values, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_slice_outlives_its_tensor(mode):
    with MODES[mode]():
        t = codes()
        part, values = t[3:40], t.dequantize()[3:40]
        del t
        assert torch.equal(part.dequantize(), values)


def test_a_module_moves_while_a_former_slice_is_forgotten():
    module = nn.Linear(64, 300, bias=False)
    module.weight = nn.Parameter(codes(), requires_grad=False)
    module.weight[3:40].dequantize()
    assert module.to(torch.float32).weight.dtype == torch.float32
