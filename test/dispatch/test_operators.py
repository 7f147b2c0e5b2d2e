"""Copies, casts, fills, comparisons, reads and unsupported operators."""

import pytest
import torch

from nvfp4_tensor import NVFP4Tensor, ProductBackend, QuantizeSpec, quantize, quantize_experts

STOCHASTIC = QuantizeSpec(round_mode="stochastic")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def matrix(dtype=torch.float32, **arguments) -> NVFP4Tensor:
    return quantize(torch.randn(130, 72).to(dtype), **arguments)


def test_a_cast_changes_what_it_decodes_to_and_no_code():
    t = matrix()
    for dtype in DTYPES:
        cast = t.to(dtype)
        assert cast.dtype == dtype and torch.equal(cast.qdata, t.qdata)
        assert torch.equal(cast.dequantize(), t.dequantize(dtype))
    assert t.to(t.dtype) is t
    for dtype in (torch.float64, torch.int8, torch.bool):
        with pytest.raises(RuntimeError, match=r"_to_copy.*bfloat16, float16 or float32.*dequantize\(\) first"):
            t.to(dtype)


def test_moving_between_devices(device):
    t = matrix()
    there = t.to(device)
    assert there.device.type == device and torch.equal(there.cpu().dequantize(), t.dequantize())
    meta = t.to("meta")
    assert meta.device.type == "meta" and meta.shape == t.shape and meta.dequantize().shape == t.shape
    assert not t.copy_(meta).is_meta and torch.equal(t.dequantize(), there.cpu().dequantize())


@pytest.mark.gpu
def test_pin_memory():
    t = matrix()
    pinned = t.pin_memory()
    assert pinned.is_pinned() and not t.is_pinned()
    assert torch.equal(pinned.dequantize(), t.dequantize())


def test_copies_of_dimensions_in_another_order_keep_it():
    t = quantize(torch.randn(3, 5, 40)).transpose(0, 1)
    for copied in (t.clone(), t.to(torch.bfloat16).float()):
        assert copied.stride() == (40, 200, 1) and torch.equal(copied.bfloat16().float(), t.bfloat16().float())
    assert t.clone(memory_format=torch.contiguous_format).stride() == t.contiguous().stride() == (120, 40, 1)
    assert torch.equal(t.contiguous(), t) and t.contiguous().contiguous().is_contiguous()


def test_copy_from_dense_quantizes_by_the_spec_of_the_destination():
    t, x, y = matrix(spec=QuantizeSpec(block_rows=16)), torch.randn(130, 72), torch.randn(72, 130)
    for into, source, stored in (
        (t, x, x),
        (t.t(), y, y.t()),
        (t, torch.arange(72.0), torch.arange(72.0).expand(130, 72)),
    ):
        into.copy_(source)
        assert torch.equal(t.dequantize(), quantize(stored, t.spec).dequantize())
    dense = torch.empty(130, 72, dtype=torch.bfloat16)
    assert torch.equal(dense.copy_(t), t.dequantize(torch.bfloat16))
    assert torch.equal(dense.double().copy_(t), t.dequantize().double())
    draws = matrix(spec=STOCHASTIC).copy_(x), matrix(spec=STOCHASTIC).copy_(x)
    assert not torch.equal(draws[0].qdata, draws[1].qdata)


def test_copies_that_do_not_fit_change_nothing():
    t = matrix()
    before = t.clone()
    joined = torch.cat([quantize(torch.randn(100, 72)), quantize(torch.randn(30, 72))])
    for source in (matrix().t(), quantize(torch.randn(130, 80)), matrix(spec=QuantizeSpec(hadamard_sign=1)), joined):
        with pytest.raises(RuntimeError, match="copy_"):
            t.copy_(source)
    with pytest.raises(RuntimeError, match="expand"):
        t.copy_(torch.randn(130, 80))
    assert torch.equal(t.dequantize(), before.dequantize())


def test_a_scale_a_row_is_loaded_by_assigning():
    source, target = torch.nn.Linear(72, 130, bias=False), torch.nn.Linear(72, 130, bias=False)
    joined = torch.cat([quantize(torch.randn(100, 72)), quantize(torch.randn(30, 72))])
    source.weight, target.weight = (torch.nn.Parameter(t, requires_grad=False) for t in (joined, matrix()))
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\.\.\., assign=True\).*dequantize\(\)"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict({"weight": source.weight.dequantize()})
    assert target.weight.per_tensor_scale.dim() == 0
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 72)
    assert torch.equal(target(x), source(x))


CONSTANTS = [0.0, -0.0, 1.0, 3.0, -2.5, 0.1, 1 / 3, 1e-20, -1e-40, 3e4, 1e38, 1e-45]


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC, QuantizeSpec(four_over_six=True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_is_exact(dtype, spec):
    t, x = matrix(dtype, spec=spec), torch.randn(3, 72).to(dtype)
    for value in {each for each in torch.tensor(CONSTANTS, dtype=dtype).tolist() if abs(each) < float("inf")}:
        made = [t.clone().fill_(value), t.clone().fill_(torch.tensor(value)), t.new_full((130, 72), value)]
        for new in (*made, t.t().clone().fill_(value).t()):
            assert isinstance(new, NVFP4Tensor) and new.spec == spec
            assert new.dequantize(torch.float32).unique().tolist() == [value]
        if 1e-30 < abs(value) < 1e4:
            expected = (x.double().sum(1, keepdim=True) * value).expand(3, 130)
            torch.testing.assert_close((x @ made[0].t()).double(), expected, rtol=1e-2, atol=1e-2 * abs(value))


def test_a_constant_that_is_no_number_is_nan():
    t = matrix()
    for value in (float("nan"), float("inf"), -float("inf")):
        for new in (t.clone().fill_(value), t.new_full((5, 33), value), t.clone().fill_(torch.tensor(value))):
            assert new.dequantize().isnan().all()


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, lambda t, **how: torch.full_like(t, 2.5, **how)])
def test_what_is_made_like_it_is_dense(make):
    """Optimizers store their state in the result of zeros_like."""
    t = matrix(torch.bfloat16)
    for like in (t, t.t(), torch.nn.Parameter(t), t[3:40]):
        new = make(like)
        assert type(new) is torch.Tensor and new.dtype == torch.bfloat16
        assert torch.equal(new, make(like.detach().dequantize()))
    assert make(t, dtype=torch.float32).dtype == torch.float32 and make(t, dtype=torch.bool).dtype == torch.bool
    assert make(t, device="meta").is_meta and make(t, memory_format=torch.preserve_format).shape == t.shape
    assert make(t, requires_grad=True).requires_grad


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC, QuantizeSpec(hadamard_sign=True)], ids=str)
def test_new_tensors(spec):
    t = matrix(torch.bfloat16, spec=spec)
    for new, shape, value in (
        (t.new_zeros(5, 33), (5, 33), 0), (t.new_empty(7, 20), (7, 20), 0), (torch.empty_like(t), t.shape, 0),
        (torch.empty_like(t.t()), (72, 130), 0), (t.clone().zero_(), t.shape, 0),
        *(() if spec.hadamard_sign else ((t.new_full((4, 5), -2.0), (4, 5), -2), (t.new_ones(3), (3,), 1))),
    ):  # fmt: skip
        assert isinstance(new, NVFP4Tensor) and new.dtype == torch.bfloat16 and new.spec == t.spec
        assert new.shape == shape and (new.dequantize() == value).all()
    assert torch.empty_like(t.t()).stride() == t.t().stride()
    assert torch.empty_like(t, device="meta").device.type == t.new_ones(3, device="meta").device.type == "meta"
    for dtype in (torch.int8, torch.float64):
        for new in (t.new_ones((4, 5), dtype=dtype), torch.empty_like(t, dtype=dtype)):
            assert type(new) is torch.Tensor and new.dtype == dtype
    assert type(t.new_ones(())) is torch.Tensor and torch.empty_like(t, dtype=torch.float16).dtype == torch.float16


def test_a_new_tensor_multiplies_as_what_it_is_like():
    t = matrix()._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2.5))
    assert t.fill_(2.0).activation_amax == 2.5 and t.activation_spec == QuantizeSpec()
    new = t.new_zeros(4, 32)
    assert new.activation_amax == 2.5 and new.activation_spec == QuantizeSpec()
    assert new.activation_amax is not t.activation_amax
    assert matrix()._replace(product_backend=ProductBackend.FP8).new_ones(4, 32).product_backend == ProductBackend.FP8
    experts, rows = quantize_experts(torch.randn(3, 8, 32)), matrix(spec=QuantizeSpec(row_scaled=True))
    shapes = [
        each.new_zeros(*shape).per_tensor_scale.shape for each in (experts, rows) for shape in ((2, 4, 16), (5, 32))
    ]
    assert shapes == [(2, 1), (5,), (8,), (5,)] and torch.empty_like(experts).per_tensor_scale.tolist() == [[1]] * 3


READS = {
    "abs max": lambda t: t.abs().max(), "amax dim": lambda t: t.amax(dim=1), "sum": lambda t: t.sum(),
    "mean dim": lambda t: t.mean(0), "norm": lambda t: t.norm(), "vector_norm": lambda t: torch.linalg.vector_norm(t),
    "std": lambda t: t.std(), "isnan": lambda t: t.isnan(), "isfinite": lambda t: torch.isfinite(t).all(),
    "isinf any": lambda t: torch.isinf(t).any(), "add": lambda t: t + 1, "mul": lambda t: 2 * t,
    "radd": lambda t: torch.ones(t.shape[1]) + t, "sub self": lambda t: t - t, "gt": lambda t: t > 0.5,
    "where": lambda t: torch.where(t > 0, t, 0.0), "relu": lambda t: torch.relu(t), "neg": lambda t: -t,
    "argmax": lambda t: t.argmax(), "min dim": lambda t: t.min(dim=0).values, "item": lambda t: t.abs().amax().item(),
    "einsum": lambda t: torch.einsum("ij,ij->ij", t, t), "vmap": lambda t: torch.vmap(lambda v: v**2)(t),
    "tolist": lambda t: t.tolist(), "inference": lambda t: torch.inference_mode()(torch.isfinite)(t),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_reads_decode(read):
    for t in (matrix(), matrix().t()):
        got, expected = READS[read](t), READS[read](t.dequantize())
        assert not isinstance(got, NVFP4Tensor)
        assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_what_it_decodes_to(dtype):
    t = matrix(dtype)
    decodings = t.dequantize(), t.dequantize(torch.float32), t.dequantize(torch.bfloat16)
    for decoded in (*decodings, decodings[1].double()):
        assert torch.equal(t, decoded) and torch.equal(decoded, t)
        changed = decoded.clone()
        changed[5, 7] += 1
        assert not torch.equal(t, changed)
    assert torch.allclose(t, t.dequantize()) and not torch.allclose(t, t.dequantize() + 0.01)
    assert torch.equal(t, t.clone()) and not torch.equal(t, t.clone().mul_(1.5)) and not torch.equal(t, t.t())


def test_embedding():
    t = quantize(torch.randn(50, 40).bfloat16())
    indices = torch.tensor([[3, 49], [0, 3]])
    joined = torch.cat([t, quantize(torch.randn(50, 40).bfloat16() * 9)])
    for weight, index in ((t, indices), (joined, indices + 48), (t, indices.int())):
        rows = torch.nn.functional.embedding(index, weight)
        assert type(rows) is torch.Tensor and torch.equal(rows, weight.dequantize()[index.long()])
    for index in ([-1], [50]):
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            torch.nn.functional.embedding(torch.tensor(index), t)
    with pytest.raises(TypeError, match="int32 or int64"):
        torch.nn.functional.embedding(torch.ones(4, dtype=torch.uint8), t)
    for weight in (t.t(), t[0]):
        with pytest.raises(RuntimeError, match=r"a matrix that is not transposed|must be 2-D"):
            torch.nn.functional.embedding(indices, weight)


@pytest.mark.parametrize("call", [
    lambda x, t: x[t], lambda x, t: t[t], lambda x, t: x.index_select(0, t[0]), lambda x, t: t.index_select(0, t[0]),
])  # fmt: skip
def test_an_nvfp4_tensor_is_no_index(call):
    with pytest.raises(IndexError, match="not NVFP4"):
        call(torch.arange(16), quantize(torch.zeros(16, 16)))


@pytest.mark.parametrize("call", [
    lambda t: t.resize_(4), lambda t: t.t_(), lambda t: torch.sort(t), lambda t: t.as_strided((2, 2), (1, 1)),
    lambda t: torch.linalg.svd(t), lambda t: t.cumsum(0), lambda t: t.view(torch.int32), lambda t: t.triu(),
    lambda t: torch.nn.functional.conv1d(t, torch.randn(2, 130, 3)), lambda t: t.set_(),
    lambda t: torch.vmap(lambda v: v * 2)(t[0]),  # by element, which a TypeError would hide from Python
])  # fmt: skip
def test_unsupported_operators_raise_with_name_and_fix(call):
    t = matrix()
    before = t.clone()
    with pytest.raises(RuntimeError, match=r"aten\..* is not supported on an NVFP4Tensor.*dequantize\(\) first"):
        call(t)
    assert torch.equal(t, before)
    with pytest.raises(
        RuntimeError, match=r"^aten\.cumsum\.default is not supported on an NVFP4Tensor; dequantize\(\) first$"
    ):
        t.cumsum(0)


@pytest.mark.parametrize("equation", ["ij,kj->ik", "bij,kj->bik"])
def test_einsum_names_itself_and_what_to_use(equation):
    t, x = matrix(), torch.randn([5, 3, 72][-equation.index(",") :])
    with pytest.raises(RuntimeError, match=r"torch.einsum is not supported.*'.*ij,kj.*x @ w.mT.*dequantize\(\)"):
        torch.einsum(equation, x, t)
    with pytest.raises(RuntimeError, match="subscript"):
        torch.einsum("ijk->i", t)
