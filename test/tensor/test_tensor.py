"""quantize and fake_quantize: arguments, fields, bits, gradients and copies."""

import copy
import math
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.files import saved
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_tensor import (
    NVFP4Tensor,
    ProductBackend,
    QuantizeSpec,
    RoundingMode,
    fake_quantize,
    quantize,
    quantize_experts,
)
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.hadamard import float_hadamard

SPECS = [
    QuantizeSpec(),
    QuantizeSpec(round_mode="stochastic", scale_rounding="up"),
    QuantizeSpec(block_rows=16, four_over_six=True),
    QuantizeSpec(hadamard_sign=True, random_bits=8, round_mode="stochastic"),
]
ROWS = QuantizeSpec(row_scaled=True)
SAME_FIELDS = NVFP4Tensor.tensor_attribute_names


def assert_same(a: NVFP4Tensor, b: NVFP4Tensor) -> None:
    for name in NVFP4Tensor.tensor_data_names:
        x, y = (part.view(torch.uint8) if name == "scale" else part for part in (getattr(a, name), getattr(b, name)))
        assert torch.equal(x, y), name
    assert [getattr(a, name) for name in SAME_FIELDS] == [getattr(b, name) for name in SAME_FIELDS]
    assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


SHAPES = [(1,), (16,), (37,), (5, 16), (130, 72), (3, 5, 33), (2, 3, 4, 64), (0,), (32, 0), (0, 64), (2, 0, 7)]


@pytest.mark.parametrize("shape", SHAPES)
def test_shape_dtype_and_fields(device, shape):
    columns, rows = -(-shape[-1] // 16) * 16, math.prod(shape[:-1])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(shape, device=device).to(dtype)
        t = NVFP4Tensor.to_nvfp4(x)
        assert t.shape == shape and t.dtype == dtype and t.device == x.device and t.numel() == x.numel()
        assert t.qdata.shape == (*shape[:-1], columns // 2) and t.qdata.dtype == torch.uint8
        assert t.scale.shape == (-(-rows // 128), -(-columns // 64), 32, 16) and t.scale.dtype == torch.float8_e4m3fn
        assert t.per_tensor_scale.shape == () and t.per_tensor_scale.dtype == torch.float32
        assert t.unswizzled_scale().shape == (*shape[:-1], columns // 16)
        decoded = t.dequantize()
        assert decoded.shape == shape and decoded.dtype == dtype and t.dequantize(torch.float32).dtype == torch.float32
        if x.numel():
            assert (decoded.float() - x.float()).abs().max() <= x.float().abs().max() * 0.18
            expected = reference.quantize(x.cpu(), reference.amax(x.cpu()), None, QuantizeSpec())
            assert torch.equal(t.qdata.cpu(), expected[0])


def test_round_mode_by_name_and_enum_replaces_that_of_the_spec():
    x, spec = torch.randn(4, 32), QuantizeSpec(block_rows=16, round_mode="zero")
    for mode in ("rne", "even", "away", "zero", "stochastic", *list(RoundingMode)[:4]):
        assert NVFP4Tensor.to_nvfp4(x, round_mode=mode).spec == QuantizeSpec(round_mode=RoundingMode.of(mode))
        assert NVFP4Tensor.to_nvfp4(x, spec=spec, round_mode=mode).spec == spec.replace(round_mode=mode)
    assert NVFP4Tensor.to_nvfp4(x, spec=spec).spec == spec


test_invalid_arguments_raise = refuses(
    (lambda: quantize(torch.tensor(1.0)), ValueError, "0-d"),
    (lambda: quantize(torch.zeros(4, dtype=torch.float64)), TypeError, r"float64.*x.to\(torch.float32\)"),
    (lambda: quantize([1.0]), TypeError, "as_tensor"),
    (lambda: quantize(quantize(torch.zeros(4))), TypeError, r"dequantize\(\)"),
    (lambda: NVFP4Tensor.to_nvfp4(torch.zeros(4), round_mode="up"), ValueError, "'stochastic'"),
    (lambda: quantize(torch.zeros(4), amax=-1.0), ValueError, "amax"),
    (lambda: quantize(torch.zeros(4), amax=torch.ones(2)), ValueError, "amax"),
    (lambda: quantize(torch.zeros(4), amax=torch.ones((), dtype=torch.int64)), ValueError, "amax"),
    (lambda: quantize(torch.zeros(4), amax=[3.0]), ValueError, r"amax must be a finite.*got \[3.0\]"),
    (lambda: quantize(torch.zeros(4), generator=42), TypeError, r"torch.Generator\(\).manual_seed\(42\)"),
    (lambda: quantize(torch.ones(4, 32).to_sparse()), TypeError, r"torch.sparse_coo: use x.to_dense\(\)"),
    (lambda: quantize(torch.nested.nested_tensor([torch.ones(2, 32)])), TypeError, "x.to_padded_tensor"),
    (lambda: quantize(torch.zeros(4), rng_state=torch.zeros(2)), ValueError, "int64"),
    (lambda: quantize(torch.zeros(4), rng_state=torch.zeros(3, dtype=torch.int64)), ValueError, "rng_state"),
    (
        lambda: quantize(torch.zeros(4), SPECS[1], rng_state=torch.zeros(2).long(), generator=torch.Generator()),
        ValueError,
        "mutually exclusive",
    ),
    (lambda: quantize(torch.zeros(4), origin=(0, 8), full_width=64), ValueError, "multiple of 16"),
    (lambda: quantize(torch.zeros(4), origin=(0, -16), full_width=64), ValueError, "multiple of 16"),
    (lambda: quantize(torch.zeros(4), origin=(-16, 0)), ValueError, "block_rows"),
    (lambda: quantize(torch.zeros(4), origin=(0, 16)), ValueError, "full_width"),
    (lambda: quantize(torch.zeros(4), origin=(0, 16), full_width=19), ValueError, "full_width"),
    (lambda: quantize(torch.zeros(4), QuantizeSpec(block_rows=16), origin=(8, 0)), ValueError, "block_rows"),
    (lambda: quantize(torch.zeros(4)).dequantize(torch.int8), TypeError, "int8"),
    (lambda: fake_quantize(torch.zeros(4), dtype=torch.float64), TypeError, "float64"),
    (lambda: fake_quantize(quantize(torch.zeros(4))), TypeError, r"dequantize\(\)"),
    (lambda: quantize(torch.zeros(4), "stochastic"), TypeError, "spec must be a QuantizeSpec"),
    (lambda: fake_quantize(torch.zeros(4), "rne"), TypeError, "spec must be a QuantizeSpec"),
    (lambda: quantize(torch.zeros(4), QuantizeSpec(round_mode="eden")), ValueError, r"fake_quantize\(x, spec\)"),
    (lambda: quantize(torch.zeros(4), SPECS[1], rng_state=(1, 2)), TypeError, r"torch.tensor\(\[seed, offset\]\)"),
    (lambda: quantize(torch.zeros(4), rng_state=torch.zeros(2, device="meta").long()), ValueError, "is on meta"),
    (lambda: quantize_experts([1]), ValueError, r"experts must be a tensor \(E, N, K\).*got list"),
    (lambda: quantize_experts(torch.ones(0, 16, 16)), ValueError, "at least one"),
    (lambda: quantize_experts(torch.ones(1, 4, 32), activation_spec=SPECS[3]), ValueError, "same hadamard_sign"),
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_state_fixes_the_bits_and_a_seed_fixes_the_state(device, spec):
    x, state = torch.randn(33, 80, device=device), torch.tensor([7, 8], device=device)
    assert_same(quantize(x, spec, rng_state=state), quantize(x, spec, rng_state=state))
    assert_same(quantize(x, spec, rng_state=state), quantize(x, spec, rng_state=torch.stack([state, -state], 1)[:, 0]))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws += [quantize(x, spec), quantize(x, spec)]
    assert_same(draws[0], draws[2])
    assert_same(draws[1], draws[3])
    assert torch.equal(draws[0].qdata, draws[1].qdata) != spec.is_stochastic
    generators = [torch.Generator(device).manual_seed(11) for _ in range(2)]
    first, second = (quantize(x, spec, generator=generator) for generator in generators)
    assert_same(first, second)


def test_amax_given_is_the_amax_used():
    x = torch.randn(16, 64)
    assert_same(quantize(x, amax=10.0), quantize(x, amax=torch.tensor([10.0], dtype=torch.float64)))
    assert_same(quantize(x), quantize(x, amax=x.abs().max()))
    assert quantize(x, amax=10.0).per_tensor_scale == torch.tensor(10.0) / 2688
    assert quantize(x, amax=0.5).dequantize().abs().max() <= 0.5


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.sampled_from([*SPECS, ROWS]), st.integers(0, 2**40))
def test_fake_quantize_is_quantize_and_dequantize(shape, spec, seed):
    x, state = torch.randn(shape), torch.tensor([seed, 1])
    fake = fake_quantize(x, spec, rng_state=state)
    assert torch.equal(fake[..., : shape[-1]], quantize(x, spec, rng_state=state).dequantize())


TRANSFORMED = QuantizeSpec(hadamard_sign=0x1234)


@pytest.mark.parametrize(
    ("spec", "compile"), [(ROWS, False), (QuantizeSpec(), True), (TRANSFORMED, False), (TRANSFORMED, True)]
)
def test_gradient_of_fake_quantize_is_that_of_what_it_approximates(device, spec, compile):
    x, state, sign = torch.randn(6, 40, device=device), torch.tensor([1, 2], device=device), spec.hadamard_sign
    spec = spec.replace(round_mode="stochastic")
    transform = torch.eye(16) if sign is None else reference.hadamard(torch.eye(16), sign).float()

    def function(x):
        return fake_quantize(x, spec, rng_state=state) * 2

    def smooth(x):
        blocks = torch.nn.functional.pad(x, (0, 8)).unflatten(-1, (-1, 16)) @ transform.to(device)
        return blocks.flatten(-2)[..., : 40 if sign is None else 48] * 2

    leaf = x.clone().requires_grad_()
    values = torch.compile(function, fullgraph=True, backend="aot_eager")(leaf) if compile else function(leaf)
    assert torch.equal(values, function(x))
    upstream = torch.randn_like(values)
    (grad,) = torch.autograd.grad(values, leaf, upstream)
    torch.testing.assert_close(grad, torch.autograd.functional.vjp(smooth, x, upstream)[1])
    with torch.no_grad():
        assert not function(leaf).requires_grad


@pytest.mark.parametrize(("hadamard_sign", "compile"), [(None, True), (0x1234, False)])
def test_fake_quantize_under_transforms_of_functions(hadamard_sign, compile):
    """torch.func and forward-mode AD return the derivatives of the approximated function, and the same bits."""
    x, tangent, spec = torch.randn(3, 5, 32), torch.randn(3, 5, 32), QuantizeSpec(hadamard_sign=hadamard_sign)
    x[0, 0, :4] = torch.tensor([-0.0, torch.inf, -torch.inf, 1e-30])

    def maybe_compile(f):
        return torch.compile(f, backend="aot_eager") if compile else f

    def function(x):
        return fake_quantize(x, spec, amax=4.0)

    def smooth(x):
        return x if hadamard_sign is None else float_hadamard(x, hadamard_sign)

    values = maybe_compile(torch.func.vmap(function))(x)
    assert torch.equal(values.view(torch.int32), function(x).view(torch.int32))
    finite = torch.randn(3, 5, 32)
    for of in (function, torch.func.vmap(function)):
        grad = maybe_compile(torch.func.grad(lambda x, of=of: (of(x) * tangent).sum()))(finite)
        expected = torch.func.grad(lambda x: (smooth(x) * tangent).sum())(finite)
        torch.testing.assert_close(grad, expected)
    values, derivative = torch.func.jvp(function, (finite,), (tangent,))
    assert torch.equal(values, function(finite))
    torch.testing.assert_close(derivative, smooth(tangent))
    with torch.autograd.forward_ad.dual_level():
        dual = function(torch.autograd.forward_ad.make_dual(finite, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, smooth(tangent))


def test_gradient_of_fake_quantize_does_not_depend_on_the_default_dtype_or_on_autocast():
    spec, grads = QuantizeSpec(hadamard_sign=True), []
    x, upstream = torch.randn(4, 32), torch.randn(4, 32)
    for default, autocast in ((torch.float32, False), (torch.float64, False), (torch.float32, True)):
        leaf = x.clone().requires_grad_()
        torch.set_default_dtype(default)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            fake_quantize(leaf, spec).backward(upstream)
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert not quantize(leaf).requires_grad  # quantize takes no gradient, and says nothing of one


def test_hardware_rounding_is_eight_bits_where_there_is_none(device):
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("this device rounds by cvt.rs")
    x, state = torch.randn(40, 96, device=device), torch.tensor([3, 4], device=device)
    spec = QuantizeSpec(round_mode="stochastic", random_bits=8)
    hardware = quantize(x, spec.replace(hardware_rounding=True), rng_state=state)
    assert torch.equal(hardware.qdata, quantize(x, spec, rng_state=state).qdata)
    assert not torch.equal(hardware.qdata, quantize(x, spec.replace(random_bits=16), rng_state=state).qdata)


def test_repr_shows_what_it_is_and_no_values():
    t = quantize(torch.randn(256, 256).bfloat16(), SPECS[1])
    assert_expected_inline(
        repr(t),
        """NVFP4Tensor(shape=(256, 256), dtype=torch.bfloat16, device=cpu, spec=(stochastic, 1x16, scales up), 4.50 bits/element)""",  # noqa: E501
    )
    assert_expected_inline(
        repr(torch.nn.Parameter(t.t()._replace(activation_spec=SPECS[0]))),
        """NVFP4Tensor(shape=(256, 256), dtype=torch.bfloat16, device=cpu, spec=(stochastic, 1x16, scales up), transposed, activation_spec=(rne, 1x16), 4.50 bits/element, requires_grad=True)""",  # noqa: E501
    )


@pytest.mark.parametrize(("spec", "transposed", "parameter"), [
    (SPECS[0], False, False), (SPECS[1], True, False), (SPECS[2], False, True), (SPECS[3], True, True),
])  # fmt: skip
def test_copies_through_every_door(device, spec, transposed, parameter):
    activation = SPECS[0].replace(hadamard_sign=spec.hadamard_sign)
    t = quantize(torch.randn(130, 70, device=device), spec)._replace(activation_spec=activation)
    t = t.t() if transposed else t
    t = torch.nn.Parameter(t, requires_grad=False) if parameter else t
    deep = [copy.deepcopy(t), pickle.loads(pickle.dumps(t)), *(saved({"t": t}, only)["t"] for only in (True, False))]
    for other in (t.clone(), copy.copy(t), t.detach(), t.contiguous(), *deep):
        assert_same(t, other)
    for other in deep:
        assert isinstance(other, torch.nn.Parameter) == parameter and other.qdata.data_ptr() != t.qdata.data_ptr()


def test_it_describes_how_it_multiplies_and_all_that_it_stores():
    t = quantize(torch.randn(256, 256))
    assert t.stored_bytes == 256 * 128 + 256 * 16 + 4 and t.bits_per_element == 8 * t.stored_bytes / 256**2
    assert quantize(torch.empty(0, 64)).bits_per_element == 32
    static = t._replace(activation_spec=SPECS[0], activation_amax=torch.tensor(2.0))
    for each, activation in (
        (t, ""), (static._replace(activation_amax=None), ", activation (rne, 1x16)"),
        (static, ", activation (rne, 1x16, static)"),
        (static._replace(product_backend=ProductBackend.SCALED_MM), ", activation (rne, 1x16, static, by scaled_mm)"),
        (t._replace(product_backend=ProductBackend.FP8), ", activation (fp8)"),
    ):  # fmt: skip
        assert each.describe() == f"rne, 1x16{activation}, 4.50 bits/element"


@pytest.mark.parametrize("experts", [1, 3])
def test_experts_have_a_scale_each_where_all_are_equal(experts):
    w = torch.randn(4, 32)
    t = quantize_experts(w.expand(experts, 4, 32))
    alone = quantize(w)
    assert t.per_tensor_scale.shape == (experts, 1) and (t.per_tensor_scale == alone.per_tensor_scale).all()
    assert torch.equal(t.dequantize(), alone.dequantize().expand(experts, 4, 32))


@pytest.mark.parametrize(("block_rows", "rows"), [(1, 20), (16, 32)])
def test_experts_draw_apart_from_one_state(block_rows, rows):
    """Expert e has the bits of rows e * N and further, N rounded up to its tiles."""
    x, state = torch.randn(1, 20, 32).expand(3, 20, 32), torch.tensor([7, 8])
    spec = QuantizeSpec(round_mode="stochastic", block_rows=block_rows)
    experts = quantize_experts(x, spec, rng_state=state)
    for e, expert in enumerate(experts.unbind()):
        alone = quantize(x[e], spec, rng_state=state, origin=(e * rows, 0))
        assert torch.equal(expert.qdata, alone.qdata) and torch.equal(expert.dequantize(), alone.dequantize())
    assert not torch.equal(experts[0].qdata, experts[1].qdata)
