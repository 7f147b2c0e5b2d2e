"""Copies, casts, fills, comparisons, reads and unsupported operators."""

import warnings

import pytest
import torch
from expecttest import assert_expected_inline

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts

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
def test_unsupported_casts_raise(dtype):
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
    with pytest.raises(RuntimeError, match=r"load_state_dict\(\.\.\., assign=True\).*dequantize\(\)"):
        target.load_state_dict(source.state_dict())
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 72)
    assert torch.equal(target(x), source(x))
    dense = {"weight": source.weight.dequantize()}
    target.weight = torch.nn.Parameter(matrix(), requires_grad=False)
    target.load_state_dict(dense)
    assert target.weight.per_tensor_scale.dim() == 0


CONSTANTS = [0.0, -0.0, 1.0, 3.0, -2.5, 0.1, 1 / 3, 1e-20, -1e-40, 3e4, 1e38, 1e-45]


@pytest.mark.parametrize("value", CONSTANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC, QuantizeSpec(four_over_six=True)], ids=str)
def test_a_constant_is_exact(value, dtype, spec):
    value = torch.tensor(value, dtype=dtype).item()
    if abs(value) == float("inf"):
        pytest.skip("no number of this dtype")
    t = quantize(torch.randn(130, 72).to(dtype), spec)
    expected = torch.full((130, 72), value, dtype=dtype)
    made = [t.clone().fill_(value), t.clone().fill_(torch.tensor(value)), t.new_full((130, 72), value)]
    made += [t.t().clone().fill_(value).t()]
    for new in made:
        assert isinstance(new, NVFP4Tensor) and new.spec == spec and torch.equal(new.dequantize(), expected)
        assert new.dequantize(torch.float32).unique().tolist() == [value]
    x = torch.randn(3, 72).to(dtype)
    product = x.double() @ expected.t().double()
    if value and 1e-30 < abs(value) < 1e4:
        torch.testing.assert_close((x @ made[0].t()).double(), product, rtol=1e-2, atol=1e-2 * abs(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_constant_that_is_no_number_is_nan(value):
    t = matrix()
    for new in (t.clone().fill_(value), t.new_full((5, 33), value), t.clone().fill_(torch.tensor(value))):
        assert new.dequantize().isnan().all()


def test_a_fill_keeps_what_a_product_does():
    t = matrix()._replace(activation_spec=QuantizeSpec(), activation_amax=torch.tensor(2.5))
    assert t.fill_(2.0).activation_amax == 2.5 and t.activation_spec == QuantizeSpec()


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


def test_zero():
    t = matrix()
    assert t.zero_() is t and (t.dequantize() == 0).all() and (t.qdata == 0).all()


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC, QuantizeSpec(hadamard_sign=True)], ids=str)
def test_new_tensors(spec):
    t = matrix(torch.bfloat16, spec=spec)
    for new, value in (
        (t.new_zeros(5, 33), 0), (t.new_empty(7, 20), None),
        (torch.empty_like(t), 0), (torch.empty_like(t.t()), 0),
    ):  # fmt: skip
        assert isinstance(new, NVFP4Tensor) and new.dtype == torch.bfloat16 and new.spec == t.spec
        assert value is None or (new.dequantize() == value).all()
    if spec.hadamard_sign is None:
        for new, value in ((t.new_full((4, 5), -2.0), -2), (t.new_ones(3), 1)):
            assert isinstance(new, NVFP4Tensor) and (new.dequantize() == value).all()
    assert torch.empty_like(t).shape == t.shape and torch.empty_like(t.t()).shape == (72, 130)
    assert torch.empty_like(t.t()).stride() == t.t().stride()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_to_what_it_decodes_to(dtype):
    t = matrix(dtype)
    for decoded in (t.dequantize(), t.dequantize(torch.float32), t.dequantize(torch.bfloat16)):
        assert torch.equal(t, decoded) and torch.equal(decoded, t)
        changed = decoded.clone()
        changed[5, 7] += 1
        assert not torch.equal(t, changed)
    assert torch.equal(t, t.clone()) and not torch.equal(t, t.clone().mul_(1.5))


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
def test_unsupported_operators_raise_with_name_and_fix(call):
    t = matrix()
    before = t.clone()
    with pytest.raises(RuntimeError, match=r"aten\..* is not supported on an NVFP4Tensor.*dequantize\(\) first"):
        call(t)
    assert torch.equal(t, before)


def test_the_message_of_an_unsupported_operator():
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


@pytest.mark.parametrize("call", [
    lambda x, t: x[t], lambda x, t: t[t], lambda x, t: x.index_select(0, t[0]), lambda x, t: t.index_select(0, t[0]),
])  # fmt: skip
def test_an_nvfp4_tensor_is_no_index(call):
    with pytest.raises(IndexError, match="not NVFP4"):
        call(torch.arange(16), quantize(torch.zeros(16, 16)))


def test_experts_of_a_transposed_stack_by_index():
    """As generate of transformers takes gpt-oss's experts, (E, K, N) with blocks along K."""
    dense, index = torch.randn(4, 32, 48).bfloat16(), torch.tensor([2, 0, 2])
    stack = quantize_experts(dense).transpose(-2, -1)
    chosen = stack[index]
    assert isinstance(chosen, NVFP4Tensor) and chosen.transposed
    assert torch.equal(chosen.dequantize(), stack.dequantize()[index])
    x = torch.randn(3, 5, 48).bfloat16()
    torch.testing.assert_close(torch.bmm(x, chosen), torch.bmm(x, chosen.dequantize()), rtol=0.02, atol=0.1)
    with pytest.raises(RuntimeError, match="split blocks of 16"):
        stack[:, index][index, index]


def test_embedding_takes_no_masks():
    with pytest.raises(TypeError, match="int32 or int64"):
        torch.nn.functional.embedding(torch.ones(4, dtype=torch.uint8), quantize(torch.randn(4, 32)))


@pytest.mark.parametrize("equation", ["ij,kj->ik", "bij,kj->bik"])
def test_einsum_names_itself_and_what_to_use(equation):
    t, x = matrix(), torch.randn([5, 3, 72][-equation.index(",") :])
    with pytest.raises(RuntimeError, match=r"torch.einsum is not supported.*'.*ij,kj.*x @ w.mT.*dequantize\(\)"):
        torch.einsum(equation, x, t)
    assert torch.equal(torch.einsum("ij,ij->ij", t, t), t.dequantize() ** 2)
    with pytest.raises(RuntimeError, match="subscript"):
        torch.einsum("ijk->i", t)


def test_vmap_of_a_vector_names_an_operator_or_does_it():
    """torch turns a TypeError into NotImplemented, for which Python's message lacks the operator's name."""
    t = quantize(torch.randn(32))
    with pytest.raises(RuntimeError, match=r"aten\.select\.int is not supported.*blocks of 16.*dequantize\(\)"):
        torch.vmap(lambda v: v * 2)(t)
    for call in (lambda v: v + v, lambda v: 2 - v, lambda v: v**2, lambda v: -v):
        assert torch.equal(torch.vmap(call)(t), torch.vmap(call)(t.dequantize()))


def test_padding_by_rows_of_zeros():
    t = quantize(torch.randn(5, 3, 40))
    for pad in ([0, 0, 0, 2], [0, 0, 1, 0, 0, 4]):
        padded = torch.nn.functional.pad(t, pad)
        assert isinstance(padded, NVFP4Tensor)
        assert torch.equal(padded.dequantize(), torch.nn.functional.pad(t.dequantize(), pad))
    with pytest.raises(RuntimeError, match="along the rows"):
        torch.nn.functional.pad(t, [0, 8])


def test_an_average_that_hardly_moves_warns():
    """torch.optim.swa_utils.AveragedModel calls this with 1 - decay."""
    t, other = quantize(torch.ones(16, 32)), torch.full((16, 32), 1.2)
    with pytest.warns(UserWarning, match="average decoded weights"):
        torch._foreach_lerp_([t], [other], 0.01)
    stochastic = quantize(torch.ones(16, 32), QuantizeSpec(round_mode="stochastic"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._foreach_lerp_([stochastic], [other], 0.01)
