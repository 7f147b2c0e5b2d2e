"""The CPU's product kernels against a float64 product of what they decode, on every instruction set at hand."""

import itertools

import pytest
import torch
from helpers.instruction_sets import OF_PRODUCTS

from nvfp4_tensor import quantize
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.ops import native

if native.instruction_set() == "torch":
    pytest.skip("the CPU library is not built", allow_module_level=True)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=OF_PRODUCTS)
def isa(request):
    native.set_instruction_set(request.param)
    yield request.param
    native.set_instruction_set("")


@pytest.fixture(autouse=True)
def _one_thread():
    """The oracle's small products gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random_weight(rows, columns, *, batches=None):
    """Codes and block scales of every kind (NaN aside): qdata (rows, K/2) or (batches, rows, K/2), scale, factors."""
    leading = (rows,) if batches is None else (batches, rows)
    blocks = -(-columns // 16)
    flat = torch.Size(leading).numel()
    weight = quantize(torch.randn(flat, columns) * torch.exp(torch.randn(flat, 1)))
    qdata = weight.qdata.clone()
    random = torch.randint(0, 256, (flat, columns // 16 * 8), dtype=torch.uint8)
    qdata[:, : random.shape[1]] = torch.where(torch.rand(flat, 1) < 0.5, random, qdata[:, : random.shape[1]])
    scale = weight.scale.view(torch.uint8).clone()
    low = torch.randint(0, 16, scale.shape, dtype=torch.uint8)  # zero and the subnormals among them
    scale = torch.where((torch.rand(scale.shape) < 0.1) & (scale > 0), low, scale).view(torch.float8_e4m3fn)
    return qdata.reshape(*leading, blocks * 8), scale, (torch.rand(leading) + 0.5) / 256  # float16 must hold the sums


def decoded(qdata, scale, factors, columns):
    """(..., rows, columns), float64."""
    w = reference.dequantize(qdata, scale, None, columns, torch.float32).double()
    return w * (factors.double().unsqueeze(-1) if factors.dim() else factors.double())


def check(x, qdata, scale, factors, columns, *, x_scale=None, bias=None, transposed=False, out_dtype=None):
    """The op's result, held to one rounding of it and to float32 accumulation of what the sum adds up."""
    out_dtype = out_dtype or x.dtype
    y = torch.ops.nvfp4.matmul(x, x_scale, qdata, scale, factors, bias, columns, transposed, out_dtype)
    w = decoded(qdata, scale, factors, columns)
    w = w if transposed else w.mT
    wide = x.double()
    if x_scale is not None:
        wide = wide * (x_scale.double().reshape(*x.shape[:-1], 1) if x_scale.dim() else x_scale.double())
    expected, magnitude = wide @ w, wide.abs() @ w.abs()
    if bias is not None:
        expected, magnitude = expected + bias.double(), magnitude + bias.double().abs()
    assert y.shape == expected.shape and y.dtype == out_dtype and y.is_contiguous()
    eps = torch.finfo(out_dtype).eps
    bound = expected.abs() * eps / 2 * 1.01 + magnitude * 2**-20 + torch.finfo(out_dtype).tiny
    error = (y.double() - expected).abs()
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"
    return y


SHAPES = [  # M, N, K: each kernel's tiles, panels, chunks and groups whole, short by one and over by one
    (1, 1, 1),
    (1, 576, 576),
    (4, 1061, 80),
    (1, 35, 1600),
    (2, 33, 100),
    (3, 130, 1000),
    (5, 200, 130),
    (8, 47, 4096),
    (9, 50, 77),
    (16, 96, 272),
    (17, 97, 300),
    (19, 600, 300),
    (20, 34, 400),
    (31, 49, 128),
    (40, 65, 560),
    (41, 31, 640),
    (48, 24, 1040),
    (64, 48, 256),
    (65, 145, 257),
    (130, 300, 129),
    (513, 50, 40),
    (1030, 17, 33),
    (4097, 3, 20),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_shapes(isa, shape, transposed):
    m, n, k = shape
    qdata, scale, factors = random_weight(n, k)
    for dtype, factor in itertools.product(DTYPES, (factors, factors[0])):  # a factor a row sums across in float32
        x = torch.randn(m, n if transposed else k).to(dtype)
        check(x, qdata, scale, factor, k, transposed=transposed)


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 16), (20, 0, 16), (3, 5, 0), (20, 5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_sums_to_the_bias(isa, shape, transposed):
    m, n, k = shape
    empty = torch.empty(n, k)
    weight = quantize(empty)
    depth, width = (n, k) if transposed else (k, n)
    for dtype, bias in itertools.product(DTYPES, (None, torch.randn(width))):
        x = torch.randn(m, depth).to(dtype)
        y = torch.ops.nvfp4.matmul(
            x, None, weight.qdata, weight.scale, weight.per_tensor_scale, bias, k, transposed, dtype
        )
        assert y.shape == (m, width)
        if depth == 0:
            assert torch.equal(y, (torch.zeros(m, width) if bias is None else bias.expand(m, width)).to(dtype))


@pytest.mark.parametrize("m", [1, 7, 40])
@pytest.mark.parametrize("transposed", [False, True])
def test_epilogue(isa, m, transposed):
    """Every combination of per-tensor scales, x scales, biases and output dtypes."""
    n, k = 150, 136
    qdata, scale, factors = random_weight(n, k)
    x = torch.randn(m, n if transposed else k)
    width = k if transposed else n
    x_scales = [None, torch.tensor(0.3), torch.rand(m) + 0.5, torch.rand(m, 1) + 0.5]
    biases = [None, torch.randn(width), torch.randn(1, 1), torch.randn(m, 1), torch.randn(m, width).half()]
    kinds = itertools.product((factors, factors[0], factors[:, None][:, 0]), x_scales, biases, DTYPES)
    for (factor, x_scale, bias, out_dtype), dtype in zip(kinds, itertools.cycle(DTYPES), strict=False):
        check(x.to(dtype), qdata, scale, factor, k, x_scale=x_scale, bias=bias, transposed=transposed,
              out_dtype=out_dtype)  # fmt: skip


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 4), (3, 0, 2), (2, 3, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dimensions(isa, leading, dtype):
    weight = random_weight(40, 72)
    x = torch.randn(*leading, 72).to(dtype)
    check(x, *weight, 72, x_scale=torch.rand(leading) + 0.5)
    for size in range(len(leading) + 1):  # a bias that broadcasts along some of them
        for along in itertools.combinations(range(len(leading)), size):
            shape = [1 if i in along else leading[i] for i in range(len(leading))]
            check(x, *weight, 72, bias=torch.randn(*shape, 40))
    if len(leading) > 1:
        apart = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not apart.is_contiguous() or x.numel() == 0 or 1 in leading
        assert torch.equal(check(apart, *weight, 72), check(x, *weight, 72))


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("n", [16, 50, 128, 200])
@pytest.mark.parametrize("transposed", [False, True])
def test_batches(isa, rows, n, transposed):
    """Experts: the scales of all of them share tiles, so that an expert begins anywhere in one."""
    k = 88
    qdata, scale, factors = random_weight(n, k, batches=3)
    for dtype, factor in itertools.product(DTYPES, (factors, factors[0, 0], factors[:, :1].expand(3, n))):
        x = torch.randn(3, rows, n if transposed else k).to(dtype)
        bias = torch.randn(3, 1, k if transposed else n).to(dtype)
        check(x, qdata, scale, factor, k, transposed=transposed, bias=bias, x_scale=torch.rand(3, rows) + 0.5)


@pytest.mark.parametrize("m", [1, 4, 12, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_that_cancel(isa, m, transposed):
    """Large terms in pairs of opposite sign: what is left is 2^-10 of what is added, and still within the bound."""
    n, k = 128, 1024
    half = torch.randn(n, k // 2)
    weight = quantize(torch.cat([half, -half + torch.randn(n, k // 2) * 2**-10], dim=1))
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    for dtype in DTYPES:
        x = torch.rand(m, n if transposed else k // 2) + 1
        x = x if transposed else torch.cat([x, x], dim=1)
        x[:, 1::2] *= 256
        check(x.to(dtype), *parts, k, transposed=transposed, out_dtype=torch.float32)


@pytest.mark.parametrize("m", [1, 4, 16, 33])
def test_long_sums_of_one_sign(isa, m):
    """Every rounding of such a sum goes against the whole of it: it has to be a sum of short sums."""
    qdata, scale, factors = random_weight(20, 16384)
    qdata &= 0x77
    for dtype in DTYPES:
        check(torch.rand(m, 16384).to(dtype), qdata, scale, factors, 16384, out_dtype=torch.float32)


@pytest.mark.parametrize("m", [1, 5, 16, 40])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("exponent", [-131, -126, -110, -100, -99, 99, 100, 112])
def test_tiny_and_huge_numbers(isa, m, transposed, exponent):
    """bfloat16 instructions flush subnormals, and sums before the block scales overflow early: neither may show."""
    n, k = 60, 150
    qdata, scale, factors = random_weight(n, k)
    x_scale = torch.tensor(2.0 ** (100 if exponent < 0 else -100))
    for dtype, factor in itertools.product((torch.bfloat16, torch.float32), (factors * 256, factors[0])):
        x = torch.randn(m, n if transposed else k)
        x[:, ::3] *= 2.0**exponent
        if exponent < 0:
            x[:, 1::3], x[:, 2::3] = 0, x[:, 2::3] * 2.0 ** (exponent + 3)
        check(x.to(dtype), qdata, scale, factor, k, x_scale=x_scale, transposed=transposed, out_dtype=torch.float32)


@pytest.mark.parametrize("m", [1, 7, 40])
@pytest.mark.parametrize("k", [40, 128, 200])
def test_not_finite_stays_where_it_belongs(isa, m, k):
    n = 70
    x = torch.randn(m, k)
    weight = torch.randn(n, k)
    weight[3, k - 1] = float("nan")
    weight[69, 0] = float("inf")
    weight = quantize(weight)
    x[m // 2, k - 1] = float("nan")
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    for dtype in DTYPES:
        y = torch.ops.nvfp4.matmul(x.to(dtype), None, *parts, None, k, False, dtype)
        expected = torch.zeros(m, n, dtype=torch.bool)
        expected[m // 2] = expected[:, 3] = expected[:, 69] = True
        assert torch.equal(y.isnan(), expected)
        across = torch.randn(m, n)
        across[m // 2, 5] = float("nan")
        y = torch.ops.nvfp4.matmul(across.to(dtype), None, *parts, None, k, True, dtype)
        expected = torch.zeros(m, k, dtype=torch.bool)
        expected[m // 2] = expected[:, (k - 1) // 16 * 16 :] = expected[:, :16] = True
        assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("m", [1, 40])
def test_infinities_and_zeros_in_the_padding_do_not_meet(isa, m):
    """The columns beyond K are zeros in x and codes of zero in the weight, whatever scales lie beside them."""
    qdata, scale, factors = random_weight(30, 20)
    scale.view(torch.uint8)[..., 2:4] = 0x7F  # of blocks that a row of 20 columns does not have
    x = torch.randn(m, 20)
    check(x, qdata, scale, factors, 20)
    x[:, 19] = float("inf")
    w = decoded(qdata, scale, factors, 20)
    y = torch.ops.nvfp4.matmul(x, None, qdata, scale, factors, None, 20, False, torch.float32)
    assert torch.equal(y.isnan(), (x.double() @ w.mT).isnan().to(y.device))


@pytest.mark.parametrize("transposed", [False, True])
def test_any_number_of_threads_gives_the_same_bits(isa, transposed):
    k = 700
    weights = {n: random_weight(n, k) for n in (300, 1100)}
    for (m, n), dtype in itertools.product(((1, 1100), (6, 1100), (16, 300), (100, 300), (600, 300)), DTYPES):
        qdata, scale, factors = weights[n]
        x = torch.randn(m, n if transposed else k).to(dtype)
        results = []
        for count in (1, 2, 3, 5, 1):
            torch.set_num_threads(count)
            results.append(
                torch.ops.nvfp4.matmul(x, None, qdata, scale, factors[0], None, k, transposed, torch.float32)
            )
        assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda call: call.update(x=torch.randn(3, 65)), "64 columns"),
        (lambda call: call.update(columns=40), "columns, not 40"),
        (lambda call: call.update(bias=torch.randn(41)), "does not broadcast"),
        (lambda call: call.update(x_scale=torch.randn(4)), "x_scale"),
        (lambda call: call.update(per_tensor_scale=torch.randn(2)), "per_tensor_scale"),
        (lambda call: call.update(scale=torch.empty(0, 1, 32, 16).to(torch.float8_e4m3fn)), "scale must be swizzled"),
        (lambda call: call.update(qdata=call["qdata"].expand(2, 40, 32)), "2, M, K"),
    ],
)
def test_what_is_refused(change, message):
    weight = quantize(torch.randn(40, 64))
    call = dict(x=torch.randn(3, 64), x_scale=None, qdata=weight.qdata, scale=weight.scale,
                per_tensor_scale=weight.per_tensor_scale, bias=None, columns=64, across_blocks=False,
                out_dtype=torch.float32)  # fmt: skip
    change(call)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.nvfp4.matmul(**call)
