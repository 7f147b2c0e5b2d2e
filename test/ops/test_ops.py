"""The operators' contracts with PyTorch: schema, shape inference, no gradient, randomness as data."""

import pytest
import torch
from torch.library import opcheck

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import DEFAULT_HADAMARD_SIGN
from nvfp4_tensor.ops import composite as ops

nvfp4 = torch.ops.nvfp4
STOCHASTIC = QuantizeSpec(round_mode="stochastic")


def quantized(x, spec=STOCHASTIC):
    """Scales as bytes: opcheck compares its inputs with allclose, which torch does not have for float8."""
    qdata, scale, factor = nvfp4.quantize(x, reference.amax(x), torch.tensor([1, 2], device=x.device), spec.pack())
    return qdata, scale.view(torch.uint8), factor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_opcheck(device, dtype):
    x = torch.randn(33, 50, device=device).to(dtype)
    state, amax, spec = torch.tensor([1, 2], device=device), reference.amax(x), STOCHASTIC.pack()
    opcheck(
        nvfp4.draw_rng_state.default, (x,), test_utils=("test_schema", "test_faketensor", "test_autograd_registration")
    )
    opcheck(nvfp4.amax.default, (x,))
    opcheck(nvfp4.amax.default, (x, DEFAULT_HADAMARD_SIGN))
    opcheck(nvfp4.amax_pair.default, (x, DEFAULT_HADAMARD_SIGN))
    opcheck(nvfp4.hadamard.default, (x, DEFAULT_HADAMARD_SIGN))
    opcheck(nvfp4.quantize.default, (x, amax, state, spec, 16, 32, 500, 1))
    opcheck(nvfp4.quantize.default, (x.view(3, 11, 50), amax, None, QuantizeSpec(block_rows=16).pack()))
    opcheck(nvfp4.quantize.default, (x, None, state, spec))
    opcheck(nvfp4.quantize_pair.default, (x, amax, amax, state, spec, STOCHASTIC.replace(hadamard_sign=True).pack()))
    opcheck(nvfp4.dequantize.default, (*quantized(x), 50, dtype))
    opcheck(nvfp4.dequantize.default, (*quantized(x)[:2], None, 50, dtype))


@pytest.mark.parametrize("hadamard_sign", [None, True])
@pytest.mark.parametrize("scaled", [True, False])
def test_opcheck_fake_quantize(device, hadamard_sign, scaled):
    x = torch.randn(4, 5, 50, device=device)
    spec = STOCHASTIC.replace(hadamard_sign=hadamard_sign).pack()
    state = torch.tensor([1, 2], device=device)
    opcheck(nvfp4.fake_quantize.default, (x, reference.amax(x), state, spec, torch.float32, scaled))


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC.replace(hadamard_sign=True)])
def test_opcheck_quantize_activation(device, spec):
    x = torch.randn(4, 5, 48, device=device)
    opcheck(nvfp4.quantize_activation.default, (x, torch.tensor([1, 2], device=device), spec.pack(), torch.bfloat16))


@pytest.mark.parametrize("spec", [QuantizeSpec(), STOCHASTIC.replace(hadamard_sign=True)])
def test_quantize_activation_is_fake_quantize_by_its_own_amax(device, spec):
    x, state = torch.randn(7, 48, device=device), torch.tensor([1, 2], device=device)
    amax = nvfp4.amax(x, -1 if spec.hadamard_sign is None else spec.hadamard_sign)
    expected = nvfp4.fake_quantize(x, amax, state, spec.pack(), torch.float32, False)
    got = nvfp4.quantize_activation(x, state, spec.pack(), torch.float32)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_matmul(device, transposed, dtype):
    weight = quantized(torch.randn(33, 50, device=device))
    x = torch.randn(4, 33 if transposed else 50, device=device).to(dtype)
    bias = torch.randn(50 if transposed else 33, device=device).to(dtype)
    for x_scale in (None, torch.tensor(2.0, device=device), torch.rand(4, device=device)):
        opcheck(nvfp4.matmul.default, (x, x_scale, *weight, bias, 50, transposed, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck_fp8(device, dtype):
    x, weight = torch.randn(4, 50, device=device).to(dtype), quantized(torch.randn(33, 50, device=device))
    opcheck(nvfp4.fp8_operands.default, (x, *weight))
    opcheck(nvfp4.fp8_operands.default, (x.view(2, 2, 50), *weight))
    values, x_scale, w, factor = nvfp4.fp8_operands(x, *weight)
    for bias in (None, torch.randn(33, device=device).to(dtype)):
        operands = (values.view(torch.uint8), x_scale, w.view(torch.uint8), factor)
        opcheck(nvfp4.fp8_matmul.default, (*operands, bias, dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_grouped_matmul(device, transposed):
    qdata, scale, factor = quantized(torch.randn(2, 40, 50, device=device))
    x = torch.randn(6, 40 if transposed else 50, device=device)
    offs = torch.tensor([2, 5], dtype=torch.int32, device=device)
    for x_scale in (None, torch.rand(6, device=device)):
        opcheck(nvfp4.grouped_matmul.default, (x, x_scale, qdata, scale, factor, offs, 50, transposed, torch.float32))
        if not transposed:
            rows = x.bfloat16()
            opcheck(nvfp4.grouped_linear.default, (rows, x_scale, qdata, scale, factor, offs, torch.float32))


def test_no_op_runs_python_for_autograd():
    """A graph would pass through it at each call, 5 us of a CPU, whether there is a gradient or not."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key
    ops = [name for name in registered("CompositeExplicitAutograd") if name.startswith("nvfp4::")]
    assert {"nvfp4::matmul", "nvfp4::fake_quantize", "nvfp4::quantize_activation"} < set(ops)
    # Those of training's experts are made for a gradient, and are there where another test has imported them.
    assert not [name for name in registered("Autograd") if name in ops and not name.startswith("nvfp4::train_")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hadamard_sign", [None, True])
@pytest.mark.parametrize("shape", [(3,), (5, 7, 50), (300, 1000), (0, 16), (4, 0)], ids=str)
def test_amax_is_that_of_x_by_default(device, dtype, hadamard_sign, shape):
    x = torch.randn(shape, device=device).to(dtype)
    if x.numel() > 3:
        x.view(-1)[1], x.view(-1)[2] = torch.inf, torch.nan
    spec = STOCHASTIC.replace(hadamard_sign=hadamard_sign)
    state = torch.tensor([1, 2], device=device)
    own = nvfp4.quantize(x, None, state, spec.pack())
    given = nvfp4.quantize(x, nvfp4.amax(x, -1 if hadamard_sign is None else spec.hadamard_sign), state, spec.pack())
    for part, expected in zip(own, given, strict=True):
        assert torch.equal(part.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def test_stochastic_without_a_state_raises(device):
    x = torch.randn(4, 16, device=device)
    with pytest.raises((ValueError, RuntimeError), match="rng_state"):
        nvfp4.quantize(x, reference.amax(x), None, STOCHASTIC.pack())


def test_draws_differ_and_follow_the_seed(device):
    like = torch.empty(2, device=device)
    torch.manual_seed(5)
    first, second = nvfp4.draw_rng_state(like), nvfp4.draw_rng_state(like)
    torch.manual_seed(5)
    assert torch.equal(first, nvfp4.draw_rng_state(like)) and not torch.equal(first, second)
    assert first.dtype == torch.int64 and first.shape == (2,) and first.device.type == device


def test_pair_is_both_quantizations(device):
    x, state = torch.randn(40, 72, device=device), torch.tensor([8, 9], device=device)
    spec, spec_t = STOCHASTIC, STOCHASTIC.replace(hadamard_sign=True)
    amax, amax_t = nvfp4.amax_pair(x, DEFAULT_HADAMARD_SIGN)
    assert amax == nvfp4.amax(x) and amax_t == nvfp4.amax(x.t(), DEFAULT_HADAMARD_SIGN)
    got = nvfp4.quantize_pair(x, amax, amax_t, state, spec.pack(), spec_t.pack(), 16, 32, 100, 200)
    row = reference.quantize(x, amax, state, spec, 16, 32, 200, 0)
    column = reference.quantize(x.t(), amax_t, state, spec_t, 32, 16, 100, 1)
    for a, b in zip(got, (*row, *column), strict=True):
        assert torch.equal(a.view(torch.uint8) if a.dim() == 4 else a, b.view(torch.uint8) if b.dim() == 4 else b)


@pytest.mark.parametrize("sign", [1 << 16, 1 << 31, -2])
def test_a_sign_that_is_no_mask_raises(device, sign):
    """By each implementation; -1 alone means no transform."""
    x = torch.ones(16, 16, device=device)
    for amax in (nvfp4.amax, nvfp4.amax_pair, ops.amax, ops.amax_pair):
        with pytest.raises((RuntimeError, ValueError), match=f"mask from 0 to 0xFFFF, not {sign}"):
            amax(x, sign)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "ends", [[3, 2], [-1, 4], [2, 6], [[2, 5]], [2, 5, 5], [5], torch.tensor([2, 5]), torch.tensor([2.0, 5.0])], ids=str
)
def test_offsets_that_are_no_ends_of_groups_raise(device, transposed, ends):
    """Rows that two experts multiply, or none: from the end, where Python counts those below zero."""
    qdata, scale, factor = quantized(torch.randn(2, 40, 48, device=device))
    x = torch.randn(5, 40 if transposed else 48, device=device)
    offs = ends.to(device) if isinstance(ends, torch.Tensor) else torch.tensor(ends, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"offs must be (int32 \(2,\)|ascending ends of groups from 0 to the 5)"):
        nvfp4.grouped_matmul(x, None, qdata, scale, factor, offs, 48, transposed, torch.float32)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_of_no_rows(transposed):
    qdata, scale, factor = quantized(torch.randn(2, 0, 48))
    x, offs = torch.randn(5, 0 if transposed else 48), torch.tensor([2, 5], dtype=torch.int32)
    y = nvfp4.grouped_matmul(x, None, qdata, scale, factor, offs, 48, transposed, torch.float32)
    assert torch.equal(y, torch.zeros(5, 48 if transposed else 0))
