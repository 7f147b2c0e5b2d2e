"""A write changes what it would change in a dense tensor, or raises: it is never lost or in another tensor."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts


def matrix(rows=256, columns=128, scale=1.0, **arguments) -> NVFP4Tensor:
    return quantize(torch.randn(rows, columns) * scale, **arguments)


# --- new tensors own their fields ------------------------------------------------------------------------------------

NEW = {
    "index": lambda t: t[[0, 1]],
    "mask": lambda t: t[torch.arange(256) < 3],
    "index_select": lambda t: t.index_select(0, torch.tensor([3, 3])),
    "cat": lambda t: torch.cat([t, t]),
    "cat one": lambda t: torch.cat([t]),
    "cat chunks": lambda t: torch.cat(t.chunk(2)),
    "cat columns": lambda t: torch.cat(t.chunk(2, dim=-1), dim=-1),
    "stack": lambda t: torch.stack([t, t]),
    "vstack": lambda t: torch.vstack([t, t]),
    "hstack": lambda t: torch.hstack([t, t]),
    "clone": lambda t: t.clone(),
    "clone of a part": lambda t: t[0:128].clone(),
}


def fields(t):
    return [getattr(t, name) for name in t.__tensor_flatten__()[0]]


def storages(t):
    return {field.untyped_storage().data_ptr() for field in fields(t)}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("new", NEW)
def test_new_tensors_share_nothing_with_their_source(new, compiled):
    t = matrix()._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2.0))
    before = t.dequantize()
    function = torch.compile(NEW[new], fullgraph=True, backend="aot_eager") if compiled else NEW[new]
    u = function(t)
    assert torch.equal(u.dequantize(), NEW[new](before)) and not storages(u) & storages(t)
    u.fill_(100.0)
    assert (u.dequantize() == 100).all() and torch.equal(t.dequantize(), before)
    u = function(t)
    held = u.dequantize()
    t.fill_(-7.0)
    assert torch.equal(u.dequantize(), held)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("columns, pieces", [(128, 2), (160, 2), (192, 4)])
def test_pieces_along_the_blocks_join_again(columns, pieces, compiled):
    t = matrix(70, columns)

    def function(t):
        return torch.cat(t.chunk(pieces, dim=-1), dim=-1)

    joined = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(t)
    assert torch.equal(joined.dequantize(), t.dequantize()) and joined.per_tensor_scale.dim() == 0


def test_a_view_out_of_a_graph_or_into_one_is_a_view():
    t = matrix()
    part = torch.compile(lambda t: t[1:19], fullgraph=True, backend="aot_eager")(t)
    t.mul_(2)
    assert torch.equal(part.dequantize(), t.dequantize()[1:19]) and part.storage_offset() == 128
    before = t.dequantize()
    with pytest.raises(Exception, match="per-tensor scale"):
        torch.compile(lambda t: t.fill_(3.0), fullgraph=True, backend="aot_eager")(part)
    assert torch.equal(t.dequantize(), before)
    torch.compile(lambda t: t.zero_(), fullgraph=True, backend="aot_eager")(part)
    before[1:19] = 0
    assert torch.equal(t.dequantize(), before)


# --- views that share scales with what they leave out ----------------------------------------------------------------


@pytest.mark.parametrize("name, make, view, index", [
    ("columns of rows with a scale each", lambda: torch.cat([matrix(128), matrix(128, scale=50)]),
     lambda t: t[:, 0:64], (slice(None), slice(0, 64))),
    ("rows of an only expert", lambda: quantize_experts(torch.randn(1, 256, 64)),
     lambda t: t[:, 0:128], (slice(None), slice(0, 128))),
    ("rows of an only expert, selected", lambda: quantize_experts(torch.randn(1, 256, 64)),
     lambda t: t[0][0:128], (0, slice(0, 128))),
])  # fmt: skip
def test_a_scale_that_others_share_is_not_rewritten(name, make, view, index):
    t = make()
    before = t.dequantize()
    with pytest.raises(RuntimeError, match="shares its per-tensor scale"):
        view(t).copy_(torch.randn(view(t).shape) * 1000)
    assert torch.equal(t.dequantize(), before)
    view(t).zero_()
    before[index] = 0
    assert torch.equal(t.dequantize(), before)


def test_rows_with_a_scale_each_are_written_through_a_view():
    t = torch.cat([matrix(128), matrix(128, scale=50)])
    before, x = t.dequantize(), torch.randn(128, 128) * 1000
    t[128:256].copy_(x)
    assert torch.equal(t.dequantize()[:128], before[:128])
    assert torch.equal(t.dequantize()[128:], quantize(x).dequantize())


# --- operators that write --------------------------------------------------------------------------------------------


def iadd(a, b):
    a += b
    return a


def isub(a, b):
    a -= b
    return a


def imul(a, b):
    a *= b
    return a


def itruediv(a, b):
    a /= b
    return a


def ifloordiv(a, b):
    a //= b
    return a


def imod(a, b):
    a %= b
    return a


def ipow(a, b):
    a **= b
    return a


BINARY = {
    "+=": iadd, "-=": isub, "*=": imul, "/=": itruediv, "//=": ifloordiv, "%=": imod, "**=": ipow,
    "add_": lambda a, b: a.add_(b, alpha=0.5), "copy_": lambda a, b: a.copy_(b), "lerp_": lambda a, b: a.lerp_(b, 0.25),
    "addcmul_": lambda a, b: a.addcmul_(b, b), "index_add_": lambda a, b: a.index_add_(0, torch.arange(len(a)), b),
    "masked_scatter_": lambda a, b: a.masked_scatter_(b > 0, b), "add out": lambda a, b: torch.add(a, b, out=a),
    "_foreach_add_": lambda a, b: torch._foreach_add_([a], [b])[0],
    "_foreach_mul_": lambda a, b: torch._foreach_mul_([a], [b])[0],
    "_foreach_copy_": lambda a, b: torch._foreach_copy_([a], [b])[0],
    "_foreach_lerp_": lambda a, b: torch._foreach_lerp_([a], [b], 0.25)[0],
}  # fmt: skip
UNARY = {
    "*= 2": lambda a: imul(a, 2), "mul_": lambda a: a.mul_(-0.5), "relu_": lambda a: torch.relu_(a),
    "clamp_": lambda a: a.clamp_(-0.5, 0.25),
    "masked_fill_": lambda a: a.masked_fill_(torch.ones(a.shape[-1]) > 0, 2.0),
    "index_fill_": lambda a: a.index_fill_(0, torch.tensor([0]), 0.0), "neg_": lambda a: a.neg_(),
    "fill_": lambda a: a.fill_(-3.0), "fill_ tensor": lambda a: a.fill_(torch.tensor(0.1)),
    "zero_": lambda a: a.zero_(),
    "exp out": lambda a: torch.exp(a, out=a),
    "_foreach_mul_ scalar": lambda a: torch._foreach_mul_([a], 3.0)[0],
}  # fmt: skip
WRITES = {name: (function, True) for name, function in BINARY.items()} | {
    name: (function, False) for name, function in UNARY.items()
}


@pytest.mark.parametrize("write", BINARY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_a_dense_tensor_goes_what_the_nvfp4_one_decodes_to(write, dtype):
    dense, t = torch.rand(40, 48).to(dtype) + 1, quantize(torch.randn(40, 48).to(dtype))
    expected, kept = dense.clone(), t.dequantize()
    BINARY[write](expected, kept)
    assert BINARY[write](dense, t) is dense
    torch.testing.assert_close(dense, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(t.dequantize(), kept)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("make", [matrix, lambda: matrix(128, 256).t(), lambda: matrix().bfloat16()])
def test_into_an_nvfp4_tensor_goes_the_quantized_result(make, write):
    t = make()
    function, binary = WRITES[write]
    other = (torch.rand(t.shape).to(t.dtype) + 0.5,) if binary else ()
    expected = t.dequantize().contiguous()
    function(expected, *other)
    pointers = [field.data_ptr() for field in fields(t)]
    assert function(t, *other) is t and pointers == [field.data_ptr() for field in fields(t)]
    if write.startswith(("fill_", "zero_")):
        assert torch.equal(t.dequantize(), expected)
    else:
        stored = expected.mT if t.transposed else expected
        wanted = quantize(stored.contiguous()).dequantize()
        wanted = wanted.mT if t.transposed else wanted
        torch.testing.assert_close(t.dequantize(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", WRITES)
def test_an_unsupported_write_is_no_type_error(write):
    """torch turns a TypeError into NotImplemented, and Python then binds the name to a new tensor."""
    t = matrix()
    before = t.dequantize()
    function, binary = WRITES[write]
    other = (torch.rand(18, 128),) if binary else ()
    part = t[1:19]
    if write != "zero_":
        with pytest.raises(RuntimeError, match=r"clone\(\) it"):
            function(part, *other)
    transformed = matrix(16, 32, spec=QuantizeSpec(hadamard_sign=True))
    held = transformed.dequantize()
    if write not in ("copy_", "fill_", "fill_ tensor", "zero_"):
        with pytest.raises(RuntimeError, match="Hadamard"):
            function(transformed, *((torch.rand(16, 32),) if binary else ()))
        assert torch.equal(transformed.dequantize(), held)
    assert torch.equal(t.dequantize(), before)


def test_nothing_is_half_written():
    t, part, dense = matrix(), matrix()[0:128], torch.ones(256, 128)
    before = [t.dequantize(), part.dequantize()]
    with pytest.raises(RuntimeError, match="shares its per-tensor scale"):
        torch._foreach_mul_([dense, t, part], 2.0)
    with pytest.raises(RuntimeError, match="cannot be resized"), pytest.warns(UserWarning, match="resized"):
        torch.add(torch.ones(3, 4), 1, out=t)
    assert (dense == 1).all() and torch.equal(t, before[0]) and torch.equal(part, before[1])


def test_the_same_tensor_twice_is_written_twice():
    t = quantize(torch.full((4, 32), 2.0))
    torch._foreach_mul_([t, t], 3.0)
    assert torch.allclose(t.dequantize(), torch.full((4, 32), 18.0), rtol=1e-6)


def test_random_values_are_drawn_as_a_dense_tensor_draws_them():
    t = matrix()
    torch.manual_seed(3)
    expected = quantize(torch.empty(256, 128).normal_(1, 2)).dequantize()
    torch.manual_seed(3)
    torch.nn.init.normal_(t, 1, 2)
    assert torch.equal(t.dequantize(), expected)


def test_experts_are_written_with_a_scale_each():
    w = quantize_experts(torch.stack([torch.randn(16, 32), 1e6 * torch.randn(16, 32)]))
    expected = torch.stack([quantize(matrix * 3).dequantize() for matrix in w.dequantize()])
    w *= 3
    assert w.per_tensor_scale.shape == (2, 1) and torch.equal(w.dequantize(), expected)


@pytest.mark.parametrize("write", ["*=", "_foreach_lerp_", "copy_", "+="])
def test_writes_in_a_graph(write):
    x, t, other = torch.randn(256, 128), matrix(), torch.rand(256, 128)
    dense, expected = x.clone(), matrix()
    expected.copy_(t)
    compiled = torch.compile(lambda *arguments: BINARY[write](*arguments), fullgraph=True, backend="aot_eager")
    compiled(t, other), compiled(dense, t)
    BINARY[write](expected, other), BINARY[write](x, expected)
    assert torch.equal(t.dequantize(), expected.dequantize()) and torch.equal(dense, x)


@pytest.mark.parametrize("write", ["*=", "lerp_", "_foreach_add_", "add out"])
def test_writes_in_inference_mode(write):
    with torch.inference_mode():
        t, other = matrix(), torch.rand(256, 128)
        expected = t.dequantize()
        BINARY[write](expected, other)
        assert BINARY[write](t, other) is t
        assert torch.equal(t.dequantize(), quantize(expected).dequantize())


def test_an_average_of_models_takes_quantized_weights():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    models = [torch.nn.Linear(64, 48) for _ in range(2)]
    for model in models:
        model.weight = torch.nn.Parameter(quantize(model.weight.detach()), requires_grad=False)
    average = AveragedModel(models[0], multi_avg_fn=get_ema_multi_avg_fn(0.75))
    average.update_parameters(models[0])
    expected = torch.lerp(average.module.weight.dequantize(), models[1].weight.dequantize(), 0.25)
    bias = torch.lerp(models[0].bias, models[1].bias, 0.25)
    average.update_parameters(models[1])
    assert torch.equal(average.module.weight.dequantize(), quantize(expected).dequantize())
    assert torch.equal(average.module.bias, bias)


# --- views x writes --------------------------------------------------------------------------------------------------

TENSORS = {
    "matrix": lambda: matrix(256, 128),
    "odd": lambda: matrix(150, 72),
    "transposed": lambda: matrix(128, 256).t(),
    "row scales": lambda: torch.cat([matrix(128), matrix(128, scale=50)]),
    "experts": lambda: quantize_experts(torch.randn(3, 128, 64) * torch.tensor([1.0, 50, 0.02]).view(3, 1, 1)),
}
VIEWS = {
    "whole": lambda t, n: t, "tile of rows": lambda t, n: t[0:128], "rows": lambda t, n: t[n:],
    "last rows": lambda t, n: t[128:], "columns": lambda t, n: t[..., 0:64], "one": lambda t, n: t[n % len(t)],
    "odd columns": lambda t, n: t[..., 16:48], "mT": lambda t, n: t.mT, "flat": lambda t, n: t.flatten(0, -2),
    "unsqueeze": lambda t, n: t.unsqueeze(0), "last": lambda t, n: t.unbind()[-1], "chunk": lambda t, n: t.chunk(2)[-1],
    "split": lambda t, n: t.split(16, -1)[0], "view": lambda t, n: t.reshape(1, *t.shape),
    "detach": lambda t, n: t.detach(),
}  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(TENSORS)), st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3),
    st.sampled_from(sorted(WRITES)), st.integers(0, 130), st.integers(0, 2**31),
)  # fmt: skip
def test_a_write_into_any_view_changes_that_view_alone(tensor, views, write, n, seed):
    """Only the elements that change in a dense tensor are quantized again, or it raises and changes nothing."""
    torch.manual_seed(seed)
    t = TENSORS[tensor]()
    before = t.dequantize()
    dense = before.clone()
    take = functools.partial(functools.reduce, lambda taken, name: VIEWS[name](taken, n), views)
    try:
        expected = take(dense)
    except (IndexError, RuntimeError, TypeError, ZeroDivisionError):  # a dense one has no such view either
        return
    try:
        view = take(t)
    except RuntimeError:
        return
    function, binary = WRITES[write]
    other = (torch.rand(view.shape) + 0.5,) if binary else ()
    inside = torch.zeros_like(dense, dtype=torch.bool)
    take(inside).fill_(True)
    try:
        function(view, *other)
    except (IndexError, RuntimeError) as error:
        assert "clone() it" in str(error) or not view.numel()  # of no elements: torch's own error
        assert torch.equal(t.dequantize(), before)
        return
    function(expected, *other)
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    same(t.dequantize()[~inside], dense[~inside])
    same(view.dequantize(), take(t).dequantize())
    error, largest = (t.dequantize() - dense)[inside].abs(), dense[inside].abs().max() if inside.any() else 0
    ordinary = dense[inside].isfinite().all()
    assert not ordinary or (error <= 0.18 * largest).all()
