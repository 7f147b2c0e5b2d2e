"""fbgemm's f4f4bf16 as far as it can be checked without the hardware: stand-ins with its schemas and its checks.

They compute the product from the bytes of their arguments, so that a wrong layout gives wrong numbers.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers.files import saved
from helpers.fp4 import decoded, in_bfloat16, wide
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, ProductBackend, QuantizeSpec, info, quantize
from nvfp4_tensor.matmul import fbgemm

pytestmark = pytest.mark.slow

SCHEMAS = {
    "fbgemm": "f4f4bf16(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? output=None,"
    " Tensor? global_scale=None) -> Tensor",  # fbgemm-gpu-genai 1.9
    "older fbgemm": "f4f4bf16(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? global_scale=None,"
    " bool use_mx=True) -> Tensor",
    "mslk": "f4f4bf16(Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale, Tensor? output=None,"
    " Tensor? global_scale=None, int mxfp4_block_size=32) -> Tensor",  # mslk-cuda 1.1
}


def f4f4bf16(XQ, WQ, x_scale, w_scale, output=None, global_scale=None, use_mx=False, **_):
    """The op's checks (csrc/gemm/cutlass/f4f4bf16.cu), CUTLASS's alignments, and its product."""
    assert all(t.is_contiguous() for t in (XQ, WQ, x_scale, w_scale)) and output is None and not use_mx
    assert XQ.shape[1] == WQ.shape[1] and XQ.shape[1] % 16 == 0 and WQ.shape[0] % 16 == 0
    assert global_scale.dtype == torch.float32 and global_scale.numel() == 1
    for t, scale in ((XQ, x_scale), (WQ, w_scale)):
        assert scale.numel() == -(-t.shape[0] // 128) * 128 * -(-t.shape[1] // 32) * 4
    return (decoded(XQ, x_scale) @ decoded(WQ, w_scale).T * global_scale.double()).to(torch.bfloat16)


@pytest.fixture(params=SCHEMAS)
def fbgemm_op(request):
    namespace = request.param.split()[-1]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(SCHEMAS[request.param])
    if request.param == "older fbgemm":
        function = lambda XQ, WQ, x_scale, w_scale, global_scale=None, use_mx=True: f4f4bf16(  # noqa: E731
            XQ, WQ, x_scale, w_scale, None, global_scale, use_mx
        )
    else:
        function = f4f4bf16 if namespace == "fbgemm" else lambda *a, mxfp4_block_size=32: f4f4bf16(*a[:6])
    library.impl("f4f4bf16", function, "CPU")
    torch.library.register_fake(
        f"{namespace}::f4f4bf16",
        lambda XQ, WQ, *_, **__: XQ.new_empty((XQ.shape[0], WQ.shape[0]), dtype=torch.bfloat16),
        lib=library,
    )
    fbgemm.product.cache_clear()
    yield
    library._destroy()
    if hasattr(getattr(torch.ops, namespace), "f4f4bf16"):
        delattr(getattr(torch.ops, namespace), "f4f4bf16")
    fbgemm.product.cache_clear()


@pytest.fixture
def no_fbgemm():
    fbgemm.product.cache_clear()
    if fbgemm.product().op is not None:
        pytest.skip("fbgemm is installed")
    yield
    fbgemm.product.cache_clear()


def w4a4(n, k):
    return quantize(torch.randn(n, k).bfloat16() * 3)._replace(
        activation_spec=QuantizeSpec(), product_backend=ProductBackend.FBGEMM
    )


def test_fbgemm_computes_the_product(fbgemm_op, blackwell):
    for m, n, k in [(1, 16, 16), (128, 128, 64), (37, 40, 48), (5, 33, 100), (300, 200, 272)]:
        x, w, bias = torch.randn(m, k).bfloat16(), w4a4(n, k), torch.randn(n).bfloat16()
        a, y = wide(quantize(x)), F.linear(x, w)
        assert y.is_contiguous()
        expected, magnitude = a @ wide(w).T, a.abs() @ wide(w).abs().T
        in_bfloat16(y, expected, magnitude)
        in_bfloat16(torch.addmm(bias, x, w.t(), beta=0, alpha=-2), -2 * expected, magnitude)
        # with a bias the op's bfloat16 and the sum's: rounded twice
        in_bfloat16(F.linear(x, w, bias), expected + bias.double(), magnitude + expected.abs() * 2**12)


only_fbgemm = pytest.mark.parametrize("fbgemm_op", ["fbgemm"], indirect=True)


@only_fbgemm
def test_fbgemm_compiles(fbgemm_op, blackwell):
    w, x = w4a4(40, 48), torch.randn(5, 48).bfloat16()
    assert torch.equal(torch.compile(lambda x: F.linear(x, w), fullgraph=True)(x), F.linear(x, w))


@only_fbgemm
def test_the_backend_is_carried(fbgemm_op, blackwell):
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    quantize_(linear, NVFP4Config(product_backend="fbgemm"))
    assert "by fbgemm" in repr(linear)
    loaded = nn.Linear(64, 32, dtype=torch.bfloat16, device="meta")
    loaded.load_state_dict(saved(linear.state_dict()), assign=True)
    x = torch.randn(4, 64).bfloat16()
    for kept in (loaded, copy.deepcopy(linear), linear.to("cpu")):
        assert kept.weight.product_backend == ProductBackend.FBGEMM and torch.equal(kept(x), linear(x))
    weight = linear.weight
    for view in (weight.t(), weight.detach(), weight[:16], weight.new_zeros(3, 64), torch.cat([weight, weight])):
        assert view.product_backend == ProductBackend.FBGEMM
    (grad,) = torch.autograd.grad(linear(x.requires_grad_()).sum(), x)  # sums across the blocks: decoded
    assert grad.isfinite().all()


def test_info_names_the_product(fbgemm_op):
    assert "f4f4bf16 of " in info().fbgemm and "f4f4bf16" in str(info())


def test_where_fbgemm_is_missing(no_fbgemm, blackwell):
    assert "not installed" in info().fbgemm or "does not import" in info().fbgemm
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"pip install 'nvfp4-tensor\[fbgemm\]'"):
        quantize_(linear, NVFP4Config(product_backend=ProductBackend.FBGEMM))
    quantize_(linear, NVFP4Config())
    with pytest.raises(RuntimeError, match=r"ProductBackend.AUTO"):
        F.linear(torch.randn(2, 64).bfloat16(), linear.weight._replace(product_backend=ProductBackend.FBGEMM))


@only_fbgemm
def test_where_the_device_has_no_fp4_tensor_cores(fbgemm_op):
    for backend in ("fbgemm", "scaled_mm"):
        linear = nn.Linear(64, 32, dtype=torch.bfloat16)
        quantize_(linear, NVFP4Config(product_backend=backend))  # a CPU's weight may yet move
        with pytest.raises(RuntimeError, match=r"cpu does not have: use ProductBackend\.AUTO"):
            linear(torch.randn(2, 64).bfloat16())


@only_fbgemm
def test_fbgemm_gives_bfloat16_only(fbgemm_op, blackwell):
    linear = nn.Linear(64, 32)
    quantize_(linear, NVFP4Config(product_backend="fbgemm"))
    with pytest.raises(RuntimeError, match="cast the model"):
        linear(torch.randn(2, 64))
