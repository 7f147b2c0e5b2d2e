"""train_linear, its forward and its backward: the bits of the ops that they are made of."""

import pytest
import torch
from helpers.bits import assert_same_bits

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.ops.schemas import plain

N = torch.ops.nvfp4
NEAREST, TILES, EDEN = QuantizeSpec(), QuantizeSpec(block_rows=16), QuantizeSpec(round_mode="eden")
STOCHASTIC = QuantizeSpec(round_mode="stochastic")
SEARCHED = QuantizeSpec(scale_search="mse")
SHAPES = [(40, 48, 64), (37, 70, 50), (300, 144, 272)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def transformed(spec):
    return spec.replace(hadamard_sign=True)


def assert_equal(got, expected):
    assert_same_bits(got, expected)
    assert [t.stride() for t in got] == [t.stride() for t in expected]


def case(shape, dtype, device):
    m, n, k = shape
    generator = torch.Generator().manual_seed(m)
    x, w, dy = (torch.randn(size, generator=generator).to(device, dtype) for size in ((m, k), (n, k), (m, n)))
    return x, w, dy, torch.tensor([7, 9], device=device)


def backward_arguments(shape, dtype, device, spec, spec_t, spec_w, x_t=None, keeps=True, transposes=False):
    x, w, dy, state = case(shape, dtype, device)
    x_t = transformed(NEAREST) if x_t is None else x_t
    codes_x = N.quantize_pair(x, None, None, state, NEAREST.pack(), x_t.pack(), stream_t=3)[3:]
    codes = N.quantize(w, None, state, spec_w.pack(), stream=4) if keeps else (None, None, None)
    dense = None if keeps else w
    packed = spec.pack(), spec_t.pack(), spec_w.pack()
    return dy, state, *codes_x, dense, *codes, *packed, transposes, dtype, torch.float32


@pytest.mark.parametrize("spec", [NEAREST, TILES, STOCHASTIC, SEARCHED], ids=str)
@pytest.mark.parametrize("shape, dtype, quantized", [
    (SHAPES[0], torch.bfloat16, True), (SHAPES[1], torch.float32, True), (SHAPES[2], torch.bfloat16, False),
    (SHAPES[1], torch.bfloat16, False), (SHAPES[2], torch.float32, True),
], ids=str)  # fmt: skip
def test_train_linear_is_a_quantization_and_a_product(device, shape, dtype, quantized, spec):
    x, w, _, state = case(shape, dtype, device)
    bias = torch.randn(shape[1], device=device).to(dtype)
    x, factor = N.quantize_activation(x, None, NEAREST.pack(), torch.bfloat16) if quantized else (x, None)
    arguments = x, factor, w, bias, state, spec.pack(), dtype
    assert_equal(N.train_linear(*arguments), plain.train_linear(*arguments))


FORWARDS = {
    "nvidia": (NEAREST, transformed(NEAREST), TILES),
    "accurate": (SEARCHED, transformed(NEAREST), SEARCHED),
    "accurate_eden": (SEARCHED, EDEN, SEARCHED),
    "stochastic": (STOCHASTIC, transformed(STOCHASTIC), STOCHASTIC),
}


LEADING = [(40,), (37,), (3, 5), (2, 0), (2, 3, 4), ()]


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("name", FORWARDS)
def test_train_linear_forward_is_its_parts(device, leading, name):
    case = LEADING.index(leading) + list(FORWARDS).index(name)
    dtype, how = DTYPES[case // 2 % 3], ("", "strided", "bias, drawn")[case % 3]
    x = torch.randn(*leading, 96, device=device).to(dtype)
    x = x[..., ::2] if how == "strided" else x[..., :48].contiguous()
    w, bias, state = torch.randn(32, 48, device=device).to(dtype), None, torch.tensor([7, 9], device=device)
    if how == "bias, drawn":
        bias, state = torch.randn(32, device=device).to(dtype), None
    arguments = x, w, bias, state, *(spec.pack() for spec in FORWARDS[name]), dtype
    results = []
    for forward in (N.train_linear_forward, plain.train_linear_forward):
        torch.manual_seed(5)
        results.append(forward(*arguments))
    assert_equal(*results)
    assert results[0][0].shape == (*leading, 32) and not results[0][0]._is_view()
    assert state is None or (torch.equal(results[0][1], state) and results[0][1].data_ptr() != state.data_ptr())


BACKWARDS = {
    "nvidia": (STOCHASTIC, transformed(STOCHASTIC), TILES, None, True, False),
    "nvidia, transposed": (STOCHASTIC, transformed(STOCHASTIC), TILES, None, True, True),
    "w quantized again": (STOCHASTIC, transformed(STOCHASTIC), TILES, None, False, True),
    "w searched": (STOCHASTIC.replace(scale_rounding="up"), transformed(STOCHASTIC), SEARCHED, None, True, False),
    "EDEN": (EDEN, EDEN, NEAREST, EDEN, True, False),
}


@pytest.mark.parametrize("shape, dtype", [*zip(SHAPES, DTYPES, strict=True)], ids=str)
@pytest.mark.parametrize("name", BACKWARDS)
def test_train_linear_backward_is_its_parts(device, shape, dtype, name):
    arguments = backward_arguments(shape, dtype, device, *BACKWARDS[name])
    assert_equal(N.train_linear_backward(*arguments), plain.train_linear_backward(*arguments))
