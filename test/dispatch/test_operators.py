"""Copies, casts, fills, comparisons and reads, and what is refused."""

import pytest
import torch
from expecttest import assert_expected_inline

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize

STOCHASTIC = QuantizeSpec(round_mode="stochastic")


def matrix(dtype=torch.float32, **arguments) -> NVFP4Tensor:
    return quantize(torch.randn(130, 72).to(dtype), **arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cast_changes_what_it_decodes_to_and_no_code(dtype):
    t = matrix()
    cast = t.to(dtype)
    assert cast.dtype == dtype and torch.equal(cast.qdata, t.qdata)
    assert torch.equal(cast.dequantize(), t.dequantize(dtype))
    assert t.to(t.dtype) is t


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.bool])
def test_casts_that_are_refused(dtype):
    with pytest.raises(RuntimeError, match=r"_to_copy.*dequantize\(\) first"):
        matrix().to(dtype)


def test_moving_between_devices(device):
    t = matrix()
    there = t.to(device)
    assert there.device.type == device and torch.equal(there.cpu().dequantize(), t.dequantize())
    meta = t.to("meta")
    assert meta.device.type == "meta" and meta.shape == t.shape and meta.dequantize().shape == t.shape


@pytest.mark.gpu
def test_pin_memory():
    t = matrix()
    pinned = t.pin_memory()
    assert pinned.is_pinned() and not t.is_pinned()
    assert torch.equal(pinned.dequantize(), t.dequantize())


def test_copy_from_nvfp4_takes_the_codes():
    t, source = matrix(), matrix()
    pointer = t.qdata.data_ptr()
    assert t.copy_(source) is t
    assert t.qdata.data_ptr() == pointer and torch.equal(t.dequantize(), source.dequantize())
    t.t().copy_(matrix().t())
    assert not torch.equal(t.dequantize(), source.dequantize())


def test_copy_from_dense_quantizes_by_the_spec_of_the_destination():
    t, x = matrix(spec=QuantizeSpec(block_rows=16)), torch.randn(130, 72)
    t.copy_(x)
    assert torch.equal(t.dequantize(), quantize(x, t.spec).dequantize())
    y = torch.randn(72, 130)
    t.t().copy_(y)
    assert torch.equal(t.dequantize(), quantize(y.t(), t.spec).dequantize())
    t.copy_(torch.arange(72.0))
    assert torch.equal(t.dequantize(), quantize(torch.arange(72.0).expand(130, 72), t.spec).dequantize())
    dense = torch.empty(130, 72, dtype=torch.bfloat16)
    assert torch.equal(dense.copy_(t), t.dequantize(torch.bfloat16))
    draws = matrix(spec=STOCHASTIC).copy_(x), matrix(spec=STOCHASTIC).copy_(x)
    assert not torch.equal(draws[0].qdata, draws[1].qdata)


def test_copies_that_do_not_fit_change_nothing():
    t = matrix()
    before = t.clone()
    joined = torch.cat([quantize(torch.randn(100, 72)), quantize(torch.randn(30, 72))])
    for source in (matrix().t(), quantize(torch.randn(130, 80)), matrix(spec=QuantizeSpec(hadamard_sign=1)), joined):
        with pytest.raises(RuntimeError, match="copy_"):
            t.copy_(source)
    with pytest.raises(RuntimeError):
        t.copy_(torch.randn(130, 80))
    assert torch.equal(t.dequantize(), before.dequantize())


def test_a_scale_a_row_is_loaded_by_assigning():
    source, target = torch.nn.Linear(72, 130, bias=False), torch.nn.Linear(72, 130, bias=False)
    joined = torch.cat([quantize(torch.randn(100, 72)), quantize(torch.randn(30, 72))])
    source.weight, target.weight = (torch.nn.Parameter(t, requires_grad=False) for t in (joined, matrix()))
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\.\.\., assign=True\) takes it.*dequantize\(\)"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 72)
    assert torch.equal(target(x), source(x))
    dense = {"weight": source.weight.dequantize()}
    target.weight = torch.nn.Parameter(matrix(), requires_grad=False)
    target.load_state_dict(dense)
    assert target.weight.per_tensor_scale.dim() == 0


@pytest.mark.parametrize("value", [0, 1, -2.5, 1e-20])
def test_fill(value):
    t = matrix()
    t.fill_(value)
    torch.testing.assert_close(t.dequantize(), torch.full((130, 72), float(value)), rtol=1e-6, atol=0)
    t = matrix()
    t.fill_(torch.tensor(float(value)))
    torch.testing.assert_close(t.dequantize(), torch.full((130, 72), float(value)), rtol=1e-6, atol=0)


def test_zero():
    t = matrix()
    assert t.zero_() is t and (t.dequantize() == 0).all() and (t.qdata == 0).all()


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC, QuantizeSpec(hadamard_sign=True)], ids=str)
def test_new_tensors(spec):
    t = matrix(torch.bfloat16, spec=spec)
    for new, value in (
        (torch.zeros_like(t), 0), (t.new_zeros(5, 33), 0), (torch.empty_like(t), None), (t.new_empty(7, 20), None),
        (torch.zeros_like(t.t()), 0),
    ):  # fmt: skip
        assert isinstance(new, NVFP4Tensor) and new.dtype == torch.bfloat16 and new.spec == t.spec
        assert value is None or (new.dequantize() == value).all()
    if spec.hadamard_sign is None:
        for new, value in (
            (torch.ones_like(t), 1),
            (torch.full_like(t, 3.0), 3),
            (t.new_full((4, 5), -2.0), -2),
            (t.new_ones(3), 1),
        ):
            assert isinstance(new, NVFP4Tensor) and (new.dequantize() == value).all()
    assert torch.empty_like(t).shape == t.shape and torch.zeros_like(t.t()).shape == (72, 130)
    assert torch.empty_like(t.t()).stride() == t.t().stride()
    assert torch.zeros_like(t, dtype=torch.bool).dtype == torch.bool
    assert torch.empty_like(t, device="meta").device.type == "meta"


def test_swap_tensors():
    a, b = matrix(), quantize(torch.randn(3, 5).bfloat16())
    values = a.dequantize(), b.dequantize()
    torch.utils.swap_tensors(a, b)
    assert torch.equal(a.dequantize(), values[1]) and torch.equal(b.dequantize(), values[0])
    assert a.shape == (3, 5) and a.dtype == torch.bfloat16


READS = {
    "abs max": lambda t: t.abs().max(),
    "amax dim": lambda t: t.amax(dim=1),
    "sum": lambda t: t.sum(),
    "mean dim": lambda t: t.mean(0),
    "norm": lambda t: t.norm(),
    "vector_norm": lambda t: torch.linalg.vector_norm(t),
    "std": lambda t: t.std(),
    "isnan": lambda t: t.isnan(),
    "isfinite": lambda t: torch.isfinite(t).all(),
    "isinf any": lambda t: torch.isinf(t).any(),
    "add": lambda t: t + 1,
    "radd": lambda t: torch.ones(72) + t,
    "mul": lambda t: 2 * t,
    "sub self": lambda t: t - t,
    "gt": lambda t: t > 0.5,
    "where": lambda t: torch.where(t > 0, t, 0.0),
    "relu": lambda t: torch.relu(t),
    "neg": lambda t: -t,
    "argmax": lambda t: t.argmax(),
    "min dim": lambda t: t.min(dim=0).values,
    "item": lambda t: t.abs().amax().item(),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("transposed", [False, True])
def test_reads_decode(read, transposed):
    t = matrix() if not transposed else quantize(torch.randn(72, 130)).t()
    got, expected = READS[read](t), READS[read](t.dequantize())
    assert not isinstance(got, NVFP4Tensor)
    assert torch.equal(got, expected) if isinstance(expected, torch.Tensor) else got == expected


def test_comparison():
    x = torch.randn(40, 50)
    t = quantize(x)
    assert torch.equal(t, quantize(x)) and torch.equal(t, t.dequantize()) and torch.equal(t.dequantize(), t)
    assert not torch.equal(t, quantize(x * 2)) and not torch.equal(t, t.t())
    assert torch.allclose(t, t.dequantize()) and torch.allclose(t, x, atol=0.6) and not torch.allclose(t, x, atol=1e-3)


def test_embedding():
    t = quantize(torch.randn(50, 40).bfloat16())
    indices = torch.tensor([[3, 49], [0, 3]])
    rows = torch.nn.functional.embedding(indices, t)
    assert not isinstance(rows, NVFP4Tensor) and torch.equal(
        rows, torch.nn.functional.embedding(indices, t.dequantize())
    )
    joined = torch.cat([t, quantize(torch.randn(50, 40).bfloat16() * 9)])
    assert torch.equal(torch.nn.functional.embedding(indices + 48, joined), joined.dequantize()[indices + 48])


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.resize_(4), lambda t: t.t_(), lambda t: torch.sort(t), lambda t: t.as_strided((2, 2), (1, 1)),
        lambda t: torch.linalg.svd(t), lambda t: t.cumsum(0), lambda t: t.view(torch.int32), lambda t: t.triu(),
        lambda t: torch.nn.functional.conv1d(t, torch.randn(2, 130, 3)), lambda t: t.set_(),
    ],
)  # fmt: skip
def test_everything_else_names_the_operator_and_the_way_out(call):
    t = matrix()
    before = t.clone()
    with pytest.raises(RuntimeError, match=r"aten\..* is not supported on an NVFP4Tensor.*dequantize\(\) first"):
        call(t)
    assert torch.equal(t, before)


def test_the_words_of_a_refusal():
    with pytest.raises(RuntimeError) as error:
        matrix().cumsum(0)
    assert_expected_inline(
        str(error.value), """aten.cumsum.default is not supported on an NVFP4Tensor; dequantize() first"""
    )


@pytest.mark.parametrize(
    "function",
    [lambda t: t.to(torch.bfloat16), lambda t: t.reshape(-1), lambda t: t.chunk(2)[0], lambda t: t.isfinite()],
)
def test_inference_mode(function):
    with torch.inference_mode():
        t = quantize(torch.randn(64, 64))
        got, expected = function(t), function(t.dequantize())
        assert torch.equal(got.dequantize() if isinstance(got, NVFP4Tensor) else got, expected)


@pytest.mark.parametrize("indices", [[-1], [4]])
def test_embedding_of_indices_out_of_range(indices):
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        torch.nn.functional.embedding(torch.tensor(indices), quantize(torch.randn(4, 32)))


def test_embedding_takes_no_masks():
    with pytest.raises(TypeError, match="int32 or int64"):
        torch.nn.functional.embedding(torch.ones(4, dtype=torch.uint8), quantize(torch.randn(4, 32)))
