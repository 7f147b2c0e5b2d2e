"""Products of rows of activations and a weight rounded to e4m3 (numerics contract, section 13)."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers.bits import assert_same_bits
from helpers.products import ROUNDING
from helpers.repeats import captured, times
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import Activations, NVFP4WeightOnlyConfig, ProductBackend, QuantizeSpec, quantize
from nvfp4_tensor.matmul import backends
from nvfp4_tensor.matmul import fp8 as fp8_products
from nvfp4_tensor.matmul.backends import FP8_ROWS, Backend
from nvfp4_tensor.numerics import fp8 as reference
from nvfp4_tensor.numerics.codes import Codes
from nvfp4_tensor.numerics.layout import swizzle

nvfp4 = torch.ops.nvfp4
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = FP8_ROWS + 3


def fp8(w, **options):
    return quantize(w, **options)._replace(product_backend=ProductBackend.FP8)


# --- operands --------------------------------------------------------------------------------------------------------


def weight_of(columns, rows=7):
    blocks = -(-columns // 16)
    qdata = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8)
    return qdata, swizzle(torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)).view(torch.float8_e4m3fn)


SHAPES = [(1, 16), (3, 1), (5, 33), (9, 4104), (64, 4096), (7, 8192), (3, 16384), (2, 28672), (0, 32), (3, 0)]
VIEWS = [
    lambda t: t[:, 1:70], lambda t: t.t(), lambda t: t[::2, :64], lambda t: t[:, 8:72], lambda t: t.view(2, 3, 80),
    lambda t: t[0],
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_on_cuda(cuda_library, dtype):
    """Of x of any shape and view, and of weights of any rows and scales, with a factor per tensor and per row."""

    def check(x, x_cuda, qdata, scale, per_tensor_scale):
        got = nvfp4.fp8_operands(x_cuda, qdata.cuda(), scale.cuda(), per_tensor_scale.cuda())
        expected = *reference.quantize_rows(x), *reference.of_codes(qdata, scale, per_tensor_scale)
        assert_same_bits(got, expected, f"{tuple(x.shape)}, {tuple(qdata.shape)}")

    for shape in SHAPES:
        x = torch.randn(shape).to(dtype) * torch.randn(shape[0], 1).mul(6).exp2().to(dtype)
        if shape[0] > 4 and shape[1] > 5:
            x[0], x[1, 3], x[2, 4], x[3, 5] = 0, torch.nan, torch.inf, -torch.inf
        check(x, x.cuda(), *weight_of(shape[1]), torch.tensor(0.0123))
    x = torch.randn(6, 80).to(dtype)
    for view in VIEWS:
        check(view(x), view(x.cuda()), *weight_of(view(x).shape[-1]), torch.tensor(0.5))
    for rows, columns in itertools.product((0, 1, 2, 127, 130, 300), (16, 48, 8192, 14336)):
        x = torch.randn(5, columns).to(dtype)
        check(x, x.cuda(), *weight_of(columns, rows), torch.rand(rows))
    x = torch.randn(1, 512).to(dtype)
    check(x, x.cuda(), *weight_of(512, 256), torch.tensor(1.0))


def test_refused_arguments(device):
    x = torch.ones(2, 16, device=device)
    w = quantize(x)
    codes = w.qdata, w.scale, w.per_tensor_scale
    for bad, message in (
        ((x[0, 0], *codes), "at least one dimension"),
        ((x.double(), *codes), "must be bfloat16, float16 or float32"),
        ((x, codes[0], codes[1].view(1, 1, 16, 32), codes[2]), "scale must be swizzled"),
        ((torch.ones(2, 32, device=device), *codes), "qdata of .* columns"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            nvfp4.fp8_operands(*bad)


# --- products --------------------------------------------------------------------------------------------------------


SUM_ON_TENSOR_CORES = 2.0**-10  # of random summands of either sign; of any: 2^-5
PRODUCTS = [(ROWS, 48, 64), (FP8_ROWS, 33, 50), (900, 256, 1024), (FP8_ROWS, 7, 4096), (1024, 1536, 2048)]


@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
@pytest.mark.parametrize("with_bias", [None, "row", "column", "float32"])
def test_products(device, shape, with_bias):
    """Two dtypes with each bias."""
    m, n, k = shape if device == "cuda" else (shape[0], min(shape[1], 256), min(shape[2], 1024))
    for dtype in DTYPES[1:] if with_bias in (None, "column") else DTYPES[::2]:
        bias = {
            None: None,
            "row": torch.randn(n, device=device).to(dtype),
            "column": torch.randn(m, 1, device=device).to(dtype),
            "float32": torch.randn(n, device=device),
        }[with_bias]
        check_product(torch.randn(m, k, device=device).to(dtype), fp8(torch.randn(n, k, device=device).to(dtype)), bias)


def check_product(x, w, bias):
    """The contract's bound: of sums, relative to the sum of magnitudes, and one rounding."""
    y = F.linear(x, w) if bias is None else torch.addmm(bias, x, w.t())
    on_tensor_cores = backends.choose(x, w, True) == Backend.FP8_SCALED_MM
    assert on_tensor_cores == (backends.capability(x.device) == (9, 0))
    a, s = (t.double() for t in reference.quantize_rows(x.cpu()))
    b, f = (t.double() for t in reference.of_codes(w.qdata.cpu(), w.scale.cpu(), w.row_scale().cpu()))
    a, b = a * s.unsqueeze(1), b * f.unsqueeze(1)
    of_sum = SUM_ON_TENSOR_CORES if on_tensor_cores else 2.0**-24 * 4 * (x.shape[-1] ** 0.5 + 4)
    exact, of_sum, of_rounding = a @ b.mT, a.abs() @ b.abs().mT * of_sum, ROUNDING[x.dtype]
    exact = exact if bias is None else exact + bias.double().cpu()
    assert y.dtype == x.dtype and y.shape == exact.shape
    bound = of_sum * (1 + of_rounding) + exact.abs() * of_rounding + 2.0**-24 * 3 * (of_sum + exact.abs())
    assert ((y.double().cpu() - exact).abs() <= bound).all()
    for _ in times(3):
        assert torch.equal(y, F.linear(x, w) if bias is None else torch.addmm(bias, x, w.t())), "not deterministic"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(64, 16, 16), (48, 24)])
def test_products_side_by_side(device, dtype, rows):
    """Have the bits of each alone: without a bias, with one, and where not all begin on 16 bytes."""
    x = torch.randn(9, 96, device=device).to(dtype)
    weights = [quantize(torch.randn(n, 96, device=device).to(dtype)) for n in rows]
    codes = [Codes(w.qdata, w.scale, w.per_tensor_scale) for w in weights]
    on_tensor_cores = backends.has_fp8_tensor_cores(x.device)
    for biases in ([None] * len(rows), [torch.randn(n, device=device).to(dtype) for n in rows]):
        both = zip(codes, biases, strict=True)
        each = [fp8_products.product(x, w, bias, 1, dtype, on_tensor_cores) for w, bias in both]
        found = fp8_products.products(x, codes, biases, on_tensor_cores)
        assert_same_bits([found], [torch.cat(each, 1)], f"{rows}, {dtype}")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("small", "least", "most"), [(15.0, 2.0**-8, 2.0**-5), (0.5, 0, 2.0**-10), (None, 2.0**-13, 2.0**-9)], ids=str
)
def test_sums_on_tensor_cores(cuda_library, small, least, most):
    """One product of 448^2 and 127 small ones, or 8192 of one sign: without promotion the latter would be 7 % off."""
    if small is None:
        a, b = torch.rand(FP8_ROWS, 8192, device="cuda"), torch.rand(64, 8192, device="cuda")
    else:
        a, b = torch.ones(FP8_ROWS, 1024, device="cuda"), torch.full((64, 1024), small, device="cuda")
        a[:, ::128], b[:, ::128] = 448, 448
    a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    factors = torch.ones(FP8_ROWS, device="cuda"), torch.ones(64, device="cuda")
    y = fp8_products.scaled_mm(a, factors[0], b, factors[1], None, torch.float32)
    exact = a.double() @ b.double().mT  # no summand is negative
    error = ((y.double() - exact).abs() / exact).max().item()
    assert least <= error <= most, error


def test_few_rows_are_w4a16_and_leading_dimensions_are_rows(device):
    w = quantize(torch.randn(48, 64, device=device))
    w8 = w._replace(product_backend=ProductBackend.FP8)
    for rows in (1, 7, FP8_ROWS - 1):
        x = torch.randn(rows, 64, device=device)
        assert torch.equal(F.linear(x, w8), F.linear(x, w))
    x = torch.randn(3, FP8_ROWS // 2, 64, device=device)
    y, bias = F.linear(x.flatten(0, 1), w8), torch.randn(48, device=device)
    assert torch.equal(F.linear(x, w8), y.view(3, -1, 48)) and not torch.equal(y.view(3, -1, 48), F.linear(x, w))
    scaled = torch.addmm(bias, x.flatten(0, 1), w8.t(), alpha=0.5, beta=3)
    torch.testing.assert_close(scaled, 0.5 * y + 3 * bias, rtol=1e-5, atol=1e-5)


def test_a_row_with_a_nan_or_a_zero_row(device):
    x, w = torch.randn(ROWS, 64, device=device), fp8(torch.randn(48, 64, device=device))
    plain = F.linear(x, w)
    x[3, 5], x[7] = torch.inf, 0
    y = F.linear(x, w)
    assert y[3].isnan().all() and not y[7].any()
    assert torch.equal(y[8:], plain[8:]) and torch.equal(y[:3], plain[:3])


def test_weights_with_a_scale_per_row(device):
    w = torch.cat([quantize(torch.randn(32, 64, device=device) * s) for s in (0.1, 7.0)])
    assert w.per_tensor_scale.dim() == 1
    x = torch.randn(ROWS, 64, device=device)
    w8 = w._replace(product_backend=ProductBackend.FP8)
    expected = torch.cat([F.linear(x, part) for part in w8.split(32)], dim=1)
    torch.testing.assert_close(F.linear(x, w8), expected, rtol=1e-5, atol=1e-5)


def test_a_product_with_an_nvfp4_left_operand_or_experts_is_w4a16(device):
    x, w = quantize(torch.randn(ROWS, 64, device=device)), quantize(torch.randn(48, 64, device=device))
    w8 = w._replace(product_backend=ProductBackend.FP8)
    assert torch.equal(F.linear(x, w8), F.linear(x, w))
    batch = torch.randn(2, ROWS, 64, device=device)
    experts = quantize(torch.randn(2, 48, 64, device=device))
    assert torch.equal(
        torch.bmm(batch, experts._replace(product_backend=ProductBackend.FP8).mT), torch.bmm(batch, experts.mT)
    )


# --- models ----------------------------------------------------------------------------------------------------------


def model(device, config=None):
    torch.manual_seed(1)
    m = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)).to(device)
    quantize_(m, config or NVFP4WeightOnlyConfig(activations="fp8"))
    return m


@pytest.mark.slow
def test_compiled(device):
    m = model(device)
    compiled = torch.compile(m, fullgraph=True)
    for rows in (3, ROWS, ROWS + 100):
        x = torch.randn(rows, 64, device=device)
        torch.testing.assert_close(compiled(x), m(x), rtol=1e-5, atol=1e-5)


def test_the_config():
    for activations in ("fp8", "FP8", Activations.FP8, 1):
        config = NVFP4WeightOnlyConfig(activations=activations)
        assert config.activations is Activations.FP8 and config.weight == QuantizeSpec()
        assert model("cpu", config)[2].weight.product_backend is ProductBackend.FP8
    assert model("cpu", NVFP4WeightOnlyConfig())[2].weight.product_backend is ProductBackend.AUTO


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(cuda_library):
    m, x = model("cuda").bfloat16(), torch.randn(ROWS, 64, device="cuda").bfloat16()
    with torch.no_grad():
        m(x)
        graph, y = captured(lambda: m(x))
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, m(x))
