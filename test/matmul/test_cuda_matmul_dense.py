"""Products of a weight decoded first, by cuBLASLt: forward ones of small weights and many rows, and gradients."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.products import check, factor, random_weight, zero_padding

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape, rows, transposed",
    [
        *[((512, 3584), 2048, False), ((520, 3592), 1030, False), ((1024, 4096), 1024, False)],
        *[((384, 1024), 300, True), ((384, 1024), 1, True), ((100, 200), 40, True), ((1024, 4096), 1000, True)],
        *[((80, 17), 130, True), ((80, 24), 130, True), ((33, 41), 7, True), ((136, 264), 24, True)],
    ],
)
def test_every_epilogue(shape, rows, transposed, dtype):
    """Over memory that holds NaN; x of any alignment and distance between rows."""
    inner, outer = shape if transposed else shape[::-1]
    codes, scale = random_weight(*shape, high=0x48)
    codes = zero_padding(codes, shape[1])
    wide = torch.randn(rows, inner + 24, device="cuda").to(dtype) * 0.1
    x, x_factor = wide[:, :inner].contiguous(), factor(0.5)
    bias = torch.randn(outer, device="cuda").to(dtype)

    def product(x, per_tensor_scale=None, **options):
        torch.full((rows, outer), float("nan"), device="cuda", dtype=x.dtype)  # freed at once: the result's memory
        scales = factor() if per_tensor_scale is None else per_tensor_scale
        return check(x, codes, scale, scales, columns=shape[1], transposed=transposed, **options)

    plain = product(x, repeats=5)
    for left, right in ((x_factor, factor()), (None, factor() * 0.5)):
        assert torch.equal(product(x, right, x_scale=left), product(x, factor(0.0123 * 0.5)))
    product(x, bias=bias, repeats=5)
    product(x, x_scale=x_factor, bias=bias)
    product(x, bias=bias.float())
    product(x, bias=torch.randn(outer + 1, device="cuda").to(dtype)[1:])
    product(x, bias=torch.randn(rows, 1, device="cuda"))
    product(x, x_scale=torch.rand(rows, device="cuda"))
    product(x, out_dtype=torch.float32)
    product(x, torch.rand(shape[0], device="cuda"), bias=bias)
    product(x, torch.rand(shape[0] + 1, device="cuda")[1:])
    product(x, torch.rand(shape[0], device="cuda"), x_scale=x_factor)
    for offset in (1, 2, 8):
        product(wide[:, offset : offset + inner])
    assert torch.equal(product(x), plain)


@pytest.mark.parametrize("transposed", [False, True])
def test_biases_of_threads(transposed):
    """cuBLASLt's descriptor of a product holds its bias: each thread has its own."""
    codes, scale = random_weight(512, 3584)
    inner, outer = (512, 3584) if transposed else (3584, 512)
    x = torch.randn(1024, inner, device="cuda").bfloat16()
    biases = [torch.full((outer,), 1000.0 * i, device="cuda").bfloat16() for i in range(4)]

    def multiply(bias):
        arguments = (x, None, codes, scale, factor(), bias, 3584, transposed, x.dtype)
        return [torch.ops.nvfp4.matmul(*arguments) for _ in range(50)]

    alone = [multiply(bias)[0] for bias in biases]
    with ThreadPoolExecutor(len(biases)) as pool:
        for expected, found in zip(alone, pool.map(multiply, biases), strict=True):
            assert all(torch.equal(y, expected) for y in found)


FIRST_IN_A_CAPTURE = """
import torch, nvfp4_tensor
layer = nvfp4_tensor.quantize(torch.randn(512, 3584, device="cuda").bfloat16())
x, g = torch.randn(2048, 3584, device="cuda").bfloat16(), torch.randn(2048, 512, device="cuda").bfloat16()
torch.mm(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))  # torch's own library
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y, dx = x @ layer.t(), g @ layer
for _ in range(3):
    y.fill_(1), dx.fill_(1)
    graph.replay()
    assert torch.equal(y, x @ layer.t()) and torch.equal(dx, g @ layer)
"""


def test_the_first_product_is_captured():
    """What it needs once for a process is made although a capture is under way."""
    done = subprocess.run([sys.executable, "-c", FIRST_IN_A_CAPTURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
