"""Derivatives of products that quantize activations: those of a dense mirror, of first and second order, both modes."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    ProductBackend,
    QuantizeSpec,
    calibrate,
    quantize,
    quantize_experts,
)
from nvfp4_tensor.dispatch.straight_through import _multiplied
from nvfp4_tensor.matmul import backends

K, N = 72, 32
TRANSFORMED = QuantizeSpec(hadamard_sign=True)
CONFIGS = {
    "w4a4": NVFP4Config(),
    "static": None,
    "by row": NVFP4Config(row_scaled=True),
    "transformed": NVFP4Config(weight_spec=TRANSFORMED, activation_spec=TRANSFORMED),
    "fp8": NVFP4WeightOnlyConfig(activations="fp8"),
    "w4a16": NVFP4WeightOnlyConfig(),
}
PRODUCTS = {
    "linear": lambda linear: linear,
    "linear of 3 dimensions": lambda linear: lambda x: linear(x.unflatten(0, (-1, 2))).flatten(0, 1),
    "x @ w.t()": lambda linear: lambda x: x @ linear.weight.t() + linear.bias,
    "mm": lambda linear: lambda x: torch.mm(x, linear.weight.mT) + linear.bias,
    "w @ x.t()": lambda linear: lambda x: (linear.weight @ x.t()).t() + linear.bias,
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.01}
CASES = [(config, "linear", torch.float32) for config in CONFIGS]
CASES += [("w4a4", product, torch.float32) for product in list(PRODUCTS)[1:]]
CASES += [(config, "linear", torch.bfloat16) for config in ("transformed", "fp8")]


def case(config, dtype):
    """A quantized linear, the dense weight whose product its derivatives are, an input, and a large tangent."""
    torch.manual_seed(0)
    linear = nn.Linear(K, N, dtype=dtype)
    rows = 800 if config == "fp8" else 48
    x = torch.randn(rows, K, dtype=dtype)
    if CONFIGS[config] is None:
        linear = calibrate(
            nn.Sequential(linear), [x], NVFP4Config(), filter_fn=lambda module, name: name == "0", progress=False
        )[0]
    else:
        quantize_(linear, CONFIGS[config])
    leaf = x[:N].clone().requires_grad_()
    dense = torch.autograd.grad(linear(leaf), leaf, torch.eye(N, dtype=dtype))[0].float()
    return linear, dense, x, 100 * torch.randn(x.shape, dtype=dtype)  # which a static amax would clip


def close(got, expected, limit):
    assert (got.float() - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize(("config", "product", "dtype"), CASES)
def test_forward_mode_rounds_no_tangent(config, product, dtype):
    linear, dense, x, tangent = case(config, dtype)
    function, limit = PRODUCTS[product](linear), LIMITS[dtype]
    with torch.no_grad():
        y = function(x)
    values, derivative = torch.func.jvp(function, (x,), (tangent,))
    close(derivative, tangent.float() @ dense.t(), limit)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
        close(dual.tangent, tangent.float() @ dense.t(), limit)
    assert torch.equal(values, y) and torch.equal(dual.primal, y)
    gradient = torch.func.grad(lambda x: function(x).float().square().sum() / 2)(x)
    close(gradient, y.float() @ dense, limit)


@pytest.mark.parametrize("config", CONFIGS)
def test_jacobians_and_hessians(config):
    linear, dense, x, _ = case(config, torch.float32)
    close(torch.func.jacfwd(linear)(x[0]), dense, 1e-5)
    close(torch.func.jacrev(linear)(x[0]), dense, 1e-5)
    close(torch.func.hessian(lambda x: linear(x).square().sum() / 2)(x[0]), dense.t() @ dense, 1e-5)


@pytest.mark.parametrize(("config", "product", "dtype", "trainable"), [
    *((*case, True) for case in CASES),
    ("w4a4", "mm", torch.float32, False), ("static", "linear", torch.float32, False),
])  # fmt: skip
def test_second_derivatives_round_nothing(config, product, dtype, trainable):
    """A penalty of the gradient y @ w, with respect to x and w."""
    linear, dense, x, direction = case(config, dtype)
    function, limit = PRODUCTS[product](linear), LIMITS[dtype]
    linear.weight.requires_grad_(trainable)
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    with torch.no_grad():
        assert torch.equal(y, function(x))
    u, direction = y.detach().float(), direction.float()
    (gradient,) = torch.autograd.grad((y.float() ** 2).sum() / 2, leaf, create_graph=True)
    close(gradient.detach(), u @ dense, limit)
    wanted = (leaf, linear.weight, linear.bias) if trainable else (leaf, linear.bias)
    found = dict(zip(map(id, wanted), torch.autograd.grad((gradient.float() * direction).sum(), wanted), strict=True))
    pushed = direction @ dense.t()
    close(found[id(leaf)], pushed @ dense, limit)
    close(found[id(linear.bias)], pushed.sum(0), limit)
    if trainable:
        close(found[id(linear.weight)], u.t() @ direction + pushed.t() @ x.float(), limit)


def test_products_across_the_blocks():
    linear, dense, _, _ = case("static", torch.float32)
    a = torch.randn(8, N, requires_grad=True)
    (gradient,) = torch.autograd.grad(a @ linear.weight, a, 100 * torch.ones(8, K))
    close(gradient, 100 * torch.ones(8, K) @ dense.t(), 1e-5)  # a sum along the blocks, which would clip


BIAS, OFFSETS = torch.randn(N, generator=torch.Generator().manual_seed(1)), torch.tensor([5, 9, 16], dtype=torch.int32)
OTHERS = {
    "addmm": (lambda x, w: torch.addmm(BIAS, x, w.t()), (16, K)),
    "addmm, scaled": (lambda x, w: torch.addmm(BIAS, x, w.t(), beta=0.5, alpha=2), (16, K)),
    "addmm, w first": (lambda x, w: BIAS.view(-1, 1).expand(N, 16).addmm(w, x.t()), (16, K)),
    "by names": (lambda x, w: torch.addmm(input=BIAS, mat1=x, mat2=w.t()), (16, K)),
    "mv": (lambda x, w: torch.mv(w, x), (K,)),
    "linear of a vector": (lambda x, w: nn.functional.linear(x, w[3]), (2, 5, K)),
    "a vector": (lambda x, w: x @ w.t(), (K,)),
    "w first": (lambda x, w: w @ x.t(), (16, K)),
    "a batch": (lambda x, w: x @ w.t(), (3, 7, K)),
    "w times a batch": (lambda x, w: w @ x.mT, (3, 7, K)),
    "baddbmm": (lambda x, w: torch.baddbmm(BIAS, x, w.mT, alpha=2), (3, 7, K)),
    "bmm": (lambda x, w: torch.bmm(x, w.mT), (3, 7, K)),
    "bmm, w first": (lambda x, w: torch.bmm(w, x.mT), (3, 7, K)),
    "one matrix by experts": (lambda x, w: x @ w.mT, (7, K)),
    "_grouped_mm": (lambda x, w: torch._grouped_mm(x, w.mT, offs=OFFSETS), (16, K)),
    "grouped_mm": (lambda x, w: torch.nn.functional.grouped_mm(x, w.mT, offs=OFFSETS), (16, K)),
}
OF_EXPERTS = list(OTHERS)[-6:]


@pytest.mark.parametrize(
    ("config", "product"),
    [(config, name) for i, name in enumerate(OTHERS) for config in ("w4a4", ("transformed", "fp8")[i % 2])],
)
def test_all_products_have_the_derivatives_of_the_dense_one(config, product, monkeypatch):
    """A penalty of the gradient of y^2 / 2, whose values are rounded and whose derivatives are not."""
    monkeypatch.setattr(backends, "FP8_ROWS", 1)
    torch.manual_seed(0)
    function, shape = OTHERS[product]
    spec = TRANSFORMED if config == "transformed" else QuantizeSpec()
    how = {"product_backend": ProductBackend.FP8} if config == "fp8" else {"activation_spec": spec}
    values = torch.randn(3, N, K) if product in OF_EXPERTS else torch.randn(N, K)
    w = (quantize_experts if product in OF_EXPERTS else quantize)(values, spec)._replace(**how)
    x, u = torch.randn(shape), 100 * torch.randn(shape)
    with torch.no_grad():
        expected = function(x, w)
    found = []
    for weight in (w, _multiplied(w)):
        leaf, weight = x.clone().requires_grad_(), weight.detach().requires_grad_()
        y = function(leaf, weight)
        assert torch.equal(y, expected) or not isinstance(weight, NVFP4Tensor)
        y = expected + (y - y.detach())
        (gradient,) = torch.autograd.grad(y.square().sum() / 2, leaf, create_graph=True)
        found.append([gradient.detach(), *torch.autograd.grad((gradient * u).sum(), (leaf, weight))])
    for got, wanted in zip(*found, strict=True):
        close(got, wanted, 1e-5)


def test_a_weight_under_torch_func():
    """Its class is hidden there, so torch's own dequantize() raises an error, and to_dense() decodes."""
    w = quantize(torch.randn(N, K))
    assert torch.equal(w.to_dense(), w.dequantize())
    for function in (torch.func.grad, lambda f: lambda w: torch.func.vjp(f, w)[1](torch.ones(()))[0]):
        assert torch.equal(function(lambda w: w.to_dense().square().sum())(w), 2 * w.dequantize())
        with pytest.raises(RuntimeError, match="dequantize is not implemented"):
            function(lambda w: w.dequantize().sum())(w)
    with pytest.raises(RuntimeError, match="not supported on an NVFP4Tensor"):
        torch.func.jvp(lambda w: w.to_dense(), (w,), (torch.ones(N, K),))


@pytest.mark.parametrize("product", ["linear", "addmm", "w first", "a batch", "bmm", "_grouped_mm"])
def test_a_frozen_weight_saves_neither_activations_nor_a_dense_weight(product):
    """Under autocast operands are cast once."""
    function, shape = {**OTHERS, "linear": (torch.nn.functional.linear, (16, K))}[product]
    values = torch.randn(3, N, K) if product in OF_EXPERTS else torch.randn(N, K)
    w = (quantize_experts if product in OF_EXPERTS else quantize)(values)._replace(activation_spec=QuantizeSpec())
    leaf, saved = torch.randn(shape, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        function(leaf, w)
        if product == "linear":
            with torch.autocast("cpu", torch.bfloat16):
                assert function(leaf, w).dtype == torch.bfloat16
    assert saved and all(isinstance(t, NVFP4Tensor) or t.numel() < K for t in saved)
    if product == "linear":
        with torch.autocast("cpu", torch.bfloat16):
            y = function(leaf, w := w.requires_grad_())
        close(torch.autograd.grad(y.float().sum(), w)[0], leaf.detach().sum(0).expand(N, K), 0.01)


def test_compiled():
    linear, _, x, tangent = case("w4a4", torch.float32)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    pair = [torch.autograd.grad(f(leaf).sum(), leaf)[0] for f in (compiled, linear)]
    assert torch.equal(*pair)
    jvp = torch.compile(lambda x, t: torch.func.jvp(linear, (x,), (t,))[1], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(jvp(x, tangent), torch.func.jvp(linear, (x,), (tangent,))[1])
