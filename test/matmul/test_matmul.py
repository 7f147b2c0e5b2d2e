"""Products compared with a float64 product of the decoded operands, and torch's validation of the FP4 call."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, quantize_experts

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = QuantizeSpec(row_scaled=True)


def wide(t):
    return (t.dequantize(torch.float32) if isinstance(t, NVFP4Tensor) else t).double()


def check(y, a, b, bias=None, alpha=1.0, beta=1.0):
    """y against a float64 product: one rounding to its dtype, and float32 accumulation of what adds up to magnitude."""
    expected = alpha * wide(a) @ wide(b)
    magnitude = abs(alpha) * wide(a).abs() @ wide(b).abs()
    if bias is not None:
        expected, magnitude = expected + beta * bias.double(), magnitude + (beta * bias.double()).abs()
    bound = expected.abs() * torch.finfo(y.dtype).eps / 2 * 1.01 + magnitude * 2**-20 + torch.finfo(y.dtype).tiny
    assert ((y.double() - expected).abs() <= bound).all(), ((y.double() - expected).abs() - bound).max()


def operands(m, k, n, dtype, device, kinds):
    """a (m, k) and b (k, n), each dense, stored along k ("along") or across it ("across")."""
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    make = {
        "dense": lambda x, last_is_k: x,
        "along": lambda x, last_is_k: quantize(x) if last_is_k else quantize(x.t()).t(),
        "across": lambda x, last_is_k: quantize(x.t()).t() if last_is_k else quantize(x),
    }
    return make[kinds[0]](a, True), make[kinds[1]](b, False)


KINDS = [kinds for kinds in itertools.product(("dense", "along", "across"), repeat=2) if kinds != ("dense", "dense")]


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("shape", [(1, 64, 48), (7, 33, 41), (130, 80, 17), (0, 16, 16), (3, 0, 5), (3, 16, 0)])
def test_mm_and_addmm(device, shape, kinds):
    (m, k, n), dtype = shape, DTYPES[(KINDS.index(kinds) + sum(shape)) % 3]
    a, b = operands(m, k, n, dtype, device, kinds)
    y = a @ b
    assert y.shape == (m, n) and y.dtype == dtype and not isinstance(y, NVFP4Tensor)
    check(y, a, b)
    for bias in (torch.randn(n, device=device).to(dtype), torch.randn(m, n, device=device).to(dtype)):
        check(torch.addmm(bias, a, b), a, b, bias)
        check(torch.addmm(bias, a, b, alpha=2, beta=0.5), a, b, bias, 2.0, 0.5)
    nan = torch.full((n,), float("nan"), device=device).to(dtype)
    check(torch.addmm(nan, a, b, beta=0), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 4), (0,)])
def test_linear_of_any_leading_shape_and_bias(device, leading, dtype):
    """A bias broadcasts as a dense one does, or raises where that does."""
    x, w = torch.randn(*leading, 72, device=device).to(dtype), quantize(torch.randn(40, 72, device=device).to(dtype))
    for shape in (None, (40,), (1,), *(((1, 40), (3, 40), (4, 40), (2, 1, 40), (1, 1)) if leading else ())):
        bias = None if shape is None else torch.randn(shape, device=device).to(dtype)
        try:
            expected = F.linear(x.float(), w.dequantize(torch.float32), None if bias is None else bias.float())
        except RuntimeError:
            with pytest.raises(RuntimeError):
                F.linear(x, w, bias)
            continue
        y = F.linear(x, w, bias)
        assert y.shape == expected.shape and y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=2**-7, atol=1e-3)
        if bias is None or bias.shape == (40,):
            check(y.reshape(-1, 40), x.reshape(-1, 72), w.t(), bias)
        if leading:
            swapped = x.transpose(0, -2).contiguous().transpose(0, -2)
            assert torch.equal(F.linear(swapped, w, bias), y)
    check(torch.matmul(x, w.t()).reshape(-1, 40), x.reshape(-1, 72), w.t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["along", "across", "left"])
def test_batches(device, dtype, kind):
    x, w = torch.randn(3, 5, 48, device=device).to(dtype), quantize(torch.randn(3, 20, 48, device=device).to(dtype))
    a, b = {"along": (x, w.mT), "across": (x[..., :20], w), "left": (w, x.mT)}[kind]
    bias = torch.randn(3, 1, b.shape[-1], device=device).to(dtype)
    y = torch.bmm(a, b)
    assert y.dtype == dtype and torch.equal(y, a @ b)
    check(y, a, b)
    check(torch.baddbmm(bias, a, b, beta=3, alpha=0.5), a, b, bias, 0.5, 3.0)


def test_matrix_times_vector():
    w, x = quantize(torch.randn(20, 40)), torch.randn(40)
    check((w @ x).unsqueeze(-1), w, x.unsqueeze(-1))
    check((x @ w.t()).unsqueeze(0), x.unsqueeze(0), w.t())


@pytest.mark.parametrize("activation, dtype", [*zip(
    [QuantizeSpec(), QuantizeSpec(four_over_six=True), QuantizeSpec(scale_rounding="up"), *[ROWS] * 3], DTYPES * 2,
    strict=True,
)], ids=str)  # fmt: skip
def test_w4a4_is_the_product_of_both_quantized(device, dtype, activation):
    x, w = torch.randn(9, 70, device=device), quantize(torch.randn(33, 70, device=device).to(dtype))
    x = (x * torch.logspace(-3, 3, 9, device=device)[:, None]).to(dtype)
    bias = torch.randn(33, device=device).to(dtype)
    both = w._replace(activation_spec=activation)
    check(F.linear(x, both, bias), quantize(x, activation), w.t(), bias)
    assert torch.equal(F.linear(x, both), F.linear(quantize(x, activation), w))
    check(torch.mm(x[:, :33], both), x[:, :33], w)  # across the blocks, as its gradient goes: not quantized


@pytest.mark.parametrize("columns, row_scaled", [(64, False), (50, False), (50, True)])
def test_hadamard_transforms_cancel(columns, row_scaled):
    """The product is that of the transformed values, whose own transform is taken back by the other's."""
    spec = QuantizeSpec(hadamard_sign=True, row_scaled=row_scaled)
    x, w = torch.randn(20, columns), torch.randn(24, columns)
    exact, expected = x @ w.t(), quantize(x, spec) @ quantize(w, spec).t()
    y = F.linear(x, quantize(w, spec)._replace(activation_spec=spec))
    assert torch.equal(y, expected) and (y - exact).norm() / exact.norm() < 0.2
    decoded = quantize(w, spec).dequantize(torch.float32)
    check(F.linear(x, quantize(w, spec)), x, decoded.t())


def test_w4a4_draws_afresh_and_repeats_under_a_seed():
    x, spec = torch.randn(9, 64), QuantizeSpec(round_mode="stochastic")
    w = quantize(torch.randn(32, 64))._replace(activation_spec=spec)
    torch.manual_seed(1)
    first, second = F.linear(x, w), F.linear(x, w)
    torch.manual_seed(1)
    assert torch.equal(F.linear(x, w), first) and not torch.equal(first, second)


def test_linear_at_its_edges():
    assert torch.equal(F.linear(torch.ones(2, 3, 0), quantize(torch.ones(4, 0))), torch.zeros(2, 3, 4))
    row, one = quantize(torch.ones(32)), quantize(torch.ones(4))
    assert torch.equal(F.linear(torch.ones(3, 32), row), torch.full((3,), 32.0))
    assert torch.equal(F.linear(torch.ones(32), quantize(torch.ones(4, 32)), one), torch.full((4,), 33.0))
    with pytest.raises(RuntimeError, match=r"input \(..., K\)"):
        F.linear(torch.ones(()), quantize(torch.ones(4, 32)))


@pytest.mark.smoke
def test_one_rounding_only():
    """torchao multiplies by the per-tensor scale in bfloat16 after the product: up to 0.39 % systematic error."""
    x, w = torch.randn(64, 256).bfloat16(), quantize(torch.randn(64, 256).bfloat16())
    w.per_tensor_scale.mul_(1 + 2**-9)  # a bfloat16 factor would lose it
    check(F.linear(x, w, torch.randn(64).bfloat16() * 0), x, w.t())


def test_per_row_scales_multiply_in_float32(device):
    w = torch.cat([quantize(torch.randn(20, 48, device=device)), quantize(torch.randn(13, 48, device=device) * 30)])
    x = torch.randn(6, 48, device=device)
    check(F.linear(x, w), x, w.t())
    check(x[:, :33] @ w, x[:, :33], w)
    check(w @ x.t(), w, x.t())
    check(w.t() @ torch.ones(33, 4, device=device), w.t(), torch.ones(33, 4, device=device))
    check(w @ w.t(), w, w.t())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        # An op with one argument on the meta device infers a shape: its result is memory that nothing has written.
        (lambda x, w: F.linear(x, w, torch.ones(8, device="meta")), "torch.float32 on meta: move it"),
        (lambda x, w: torch.addmm(torch.ones(8, device="meta"), x, w.t()), "torch.float32 on meta: move it"),
        (lambda x, w: F.linear(x, w, torch.ones(8, dtype=torch.complex64)), "got torch.complex64 on cpu"),
        (lambda x, w: x[:, :47] @ w.t(), "cannot be multiplied"),
        (lambda x, w: x.bfloat16() @ w.t(), "the same dtype"),
        (lambda x, w: F.linear(x.bfloat16(), w), "the same dtype"),  # the op itself would multiply them
        (lambda x, w: torch.bmm(x.expand(2, 3, 48), torch.stack([w, w, w]).mT), "cannot be multiplied"),
    ],
)
def test_invalid_operands_of_a_product_raise(call, message):
    w = quantize(torch.randn(8, 48))
    for weight in (w, w._replace(activation_spec=QuantizeSpec())):
        with pytest.raises(RuntimeError, match=message):
            call(torch.randn(3, 48), weight)


@pytest.mark.parametrize("rows, dtype", [(128, torch.bfloat16), (40, torch.float16), (40, torch.float32)], ids=str)
@pytest.mark.parametrize("activation", [None, QuantizeSpec(), ROWS], ids=["weight only", "w4a4", "rows"])
def test_experts(device, rows, dtype, activation):
    sizes = torch.tensor([1.0, 30, 0.01, 5], device=device).view(4, 1, 1)
    experts = (torch.randn(4, rows, 64, device=device) * sizes).to(dtype)
    w = quantize_experts(experts, activation_spec=activation)
    assert torch.equal(w[1].dequantize(), quantize(experts[1]).dequantize())
    x = torch.randn(20, 64, device=device).to(dtype)
    offs = torch.tensor([3, 3, 11, 18], dtype=torch.int32, device=device)
    x[18:] = 1000  # behind the last group: in no product, and not in the amax of those
    y = torch._grouped_mm(x, w.mT, offs=offs)
    assert y.shape == (20, rows) and y.dtype == dtype and (y[18:] == 0).all()
    seen = x if activation is None else quantize(x[:18], activation).dequantize(torch.float32)
    for expert, (start, end) in enumerate(((0, 3), (3, 3), (3, 11), (11, 18))):
        check(y[start:end], seen[start:end], w[expert].t())
    back = torch._grouped_mm(y, w, offs=offs)
    check(back[11:18], y[11:18], w[3])
    with pytest.raises(RuntimeError, match="to one device"):
        torch._grouped_mm(x, w.mT, offs=offs.to("meta"))


@pytest.mark.slow
def test_gradient_of_experts():
    w = quantize_experts(torch.randn(3, 32, 48).bfloat16())
    x, offs = torch.randn(10, 48).bfloat16().requires_grad_(), torch.tensor([4, 4, 10], dtype=torch.int32)
    y = torch._grouped_mm(x, w.mT, offs=offs)
    upstream = torch.randn(10, 32).bfloat16()
    (grad,) = torch.autograd.grad(y, x, upstream)
    check(grad[:4], upstream[:4], w[0])
    check(grad[4:], upstream[4:], w[2])
    compiled = torch.compile(lambda x: torch._grouped_mm(x, w.mT, offs=offs), fullgraph=True)
    assert torch.equal(compiled(x), y)


def test_an_nvfp4_bias_is_decoded(device):
    bias, row = quantize(torch.randn(5, 40, device=device)), quantize(torch.randn(40, device=device))
    a, b, w = (torch.randn(shape, device=device) for shape in ((5, 16), (16, 40), (40, 16)))
    assert torch.equal(
        torch.addmm(bias, a, b, beta=0.5, alpha=2), torch.addmm(bias.dequantize(), a, b, beta=0.5, alpha=2)
    )
    assert torch.equal(F.linear(a, w, row), F.linear(a, w, row.dequantize()))
    t = quantize(w)
    assert torch.equal(F.linear(a, t, row), F.linear(a, t, row.dequantize()))
    assert torch.equal(torch.addmm(bias, a, t.t()), torch.addmm(bias.dequantize(), a, t.t()))
    batches = torch.baddbmm(bias.view(1, 5, 40), a[None], b[None])
    assert torch.equal(batches, torch.baddbmm(bias.dequantize()[None], a[None], b[None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alpha_and_beta_of_zero_leave_out_what_they_multiply(device, dtype):
    """Including NaN, as in BLAS and in torch for float32."""
    w, bias = quantize(torch.randn(40, 16, device=device).to(dtype)), torch.randn(40, device=device).to(dtype)
    nan = torch.full((3, 16), torch.nan, device=device, dtype=dtype)
    x = torch.randn(3, 16, device=device).to(dtype)
    for beta in (1, 0.5, 0):
        y = torch.addmm(bias, nan, w.t(), alpha=0, beta=beta)
        assert torch.equal(y, (bias * beta).expand(3, 40)) and y.dtype == dtype
        if dtype == torch.float32 and device == "cpu":  # on CUDA torch lets the NaN through
            assert torch.equal(y, torch.addmm(bias, nan, w.dequantize().t(), alpha=0, beta=beta))
    assert torch.equal(torch.addmm(bias * torch.nan, x, w.t(), beta=0), x @ w.t())
    left = torch.addmm(bias[:3], w, nan.t(), alpha=0)
    assert torch.equal(left, bias[:3].expand(40, 3)) and left.is_contiguous()
    batch = torch.baddbmm(bias, nan[None], w.unsqueeze(0).mT, alpha=0)
    assert torch.equal(batch, bias.expand(1, 3, 40))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.addmm(bias, nan[:, :8], w.t(), alpha=0)
