"""Products on FP4 tensor cores, as far as they can be checked without the hardware.

scaled_mm: torch's own validation of shapes and layouts. scaled_grouped_mm: a replacement with its schema and checks
computes the product from the bytes of its arguments, so that a wrong layout gives wrong numbers.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers.fp4 import decoded, in_bfloat16, wide
from torch.nn.functional import ScalingType, SwizzleType

from nvfp4_tensor import QuantizeSpec, quantize
from nvfp4_tensor import quantize_experts as make_experts
from nvfp4_tensor.matmul import scaled_mm
from nvfp4_tensor.ops.composite import products

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FP4 = torch.float4_e2m1fn_x2


# --- scaled_mm -------------------------------------------------------------------------------------------------------


def fp4_operands(m, n, k, device):
    return [quantize(torch.empty(rows, k, dtype=torch.bfloat16, device=device)) for rows in (m, n)]


@pytest.mark.parametrize(
    "shape", [(1, 16, 16), (128, 128, 64), (37, 40, 48), (5, 33, 100), (1000, 2000, 4096), (300, 8, 30)]
)
def test_scaled_mm_passes_torchs_validation(shape):
    """torch's meta function checks dtypes, strides, sizes of scales, recipes, swizzles and alignments of the call."""
    m, n, k = shape
    a, b = fp4_operands(m, n, k, "meta")
    for dtype in DTYPES:
        for bias in (None, torch.empty(n, dtype=dtype, device="meta")):
            y = scaled_mm.scaled_mm_product(a, b, bias, 1, dtype)
            assert y.shape == (m, n) and y.dtype == dtype and y.is_contiguous()


def test_on_fp4_hardware_products_take_the_tensor_cores(monkeypatch, blackwell):
    calls = []
    monkeypatch.setattr(
        scaled_mm, "scaled_mm", lambda *a, **k: calls.append((a, k)) or torch.zeros(a[0].shape[0], a[1].shape[1])
    )
    x, w = torch.randn(5, 64), quantize(torch.randn(16, 64))
    w4a4 = w._replace(activation_spec=QuantizeSpec())
    F.linear(x, w4a4)
    quantize(x) @ w.t()
    assert len(calls) == 2
    (a, b, scale_a, *_), _ = calls[0]
    quantized = quantize(x)
    assert torch.equal(a.view(torch.uint8), quantized.qdata) and b.shape == (32, 16) and b.stride() == (1, 32)
    assert torch.equal(scale_a[0].view(torch.uint8), quantized.scale.flatten().view(torch.uint8))
    assert torch.equal(scale_a[1], quantized.per_tensor_scale)
    for dtype, fused in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        bias = torch.randn(16).to(dtype)
        F.linear(x.to(dtype), w4a4.to(dtype), bias)
        arguments = calls.pop()[1]
        assert arguments["output_dtype"] == dtype
        assert torch.equal(arguments["bias"], bias) if fused else arguments["bias"] is None
    other = quantize(torch.randn(20, 64).bfloat16())._replace(activation_spec=QuantizeSpec())
    F.linear(x.bfloat16(), other, torch.ones(20).bfloat16())
    assert torch.equal(calls.pop()[1]["bias"], torch.tensor([1.0] * 20 + [0.0] * 12).bfloat16())  # N in multiples of 16
    F.linear(x.bfloat16(), other, torch.ones(20))  # a wider bias is added to what has not been rounded yet
    arguments = calls.pop()[1]
    assert arguments["bias"] is None and arguments["output_dtype"] == torch.float32
    F.linear(x, w)  # bf16 x NVFP4 has no FP4 instruction
    torch.mm(x[:, :16], w4a4)  # nor has a sum across the blocks
    assert len(calls) == 2


# --- scaled_grouped_mm -----------------------------------------------------------------------------------------------


def scaled_grouped_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, offs, output_dtype):
    """torch's checks (aten/src/ATen/native/cuda/GroupedBlas.cpp, 2.11 to 2.13) and the kernel's way to find a group."""
    assert a.dtype == b.dtype == FP4 and a.is_contiguous() and b.mT.is_contiguous() and output_dtype == torch.bfloat16
    assert a.shape[1] == b.shape[1] and a.shape[1] % 16 == 0 and b.shape[2] % 16 == 0
    assert offs.dim() == 1 and offs.dtype == torch.int32 and len(offs) == b.shape[0]
    assert recipe_a == recipe_b == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    assert swizzle_a[0] == swizzle_b[0] == SwizzleType.SWIZZLE_32_4_4
    columns = -(-(a.shape[1] // 8) // 4) * 4
    n128 = -(-b.shape[2] // 128) * 128
    assert all(s.dtype == torch.float8_e4m3fn and s.is_contiguous() for s in (scale_a[0], scale_b[0]))
    assert scale_a[0].dim() == 2 and scale_a[0].shape[0] >= a.shape[0]
    assert scale_b[0].shape == (b.shape[0], columns * n128)
    factor = scale_a[1] * scale_b[1]
    assert factor.dtype == torch.float32 and factor.shape == offs.shape and factor.is_contiguous()
    y = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=torch.bfloat16)
    start = tile_row = 0
    for group, end in enumerate(offs.tolist()):
        padded = -(-(end - start) // 128) * 128
        scale = scale_a[0].flatten()[tile_row * columns : (tile_row + padded) * columns]
        assert scale.numel() == padded * columns
        if end > start:
            w = decoded(b[group].mT, scale_b[0][group])
            y[start:end] = (decoded(a[start:end], scale) @ w.T * factor[group].double()).to(torch.bfloat16)
        start, tile_row = end, tile_row + padded
    return y


@pytest.fixture
def grouped(monkeypatch, blackwell):
    monkeypatch.setattr(products, "scaled_grouped_mm", scaled_grouped_mm)


GROUPS = [(3, 3, 11, 18), (0, 0, 0, 0), (300, 300, 300, 300), (0, 130, 131, 300), (128, 256, 257, 290), (0, 0, 0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(128, 64), (256, 272), (40, 48), (200, 100)])
def test_grouped_product_by_tensor_cores(grouped, shape):
    weight = torch.randn(4, *shape).bfloat16() * torch.tensor([1.0, 30, 0.01, 5]).view(4, 1, 1).bfloat16()
    w = make_experts(weight, activation_spec=QuantizeSpec())
    for groups in GROUPS:
        x, offs = torch.randn(300, shape[1]).bfloat16(), torch.tensor(groups, dtype=torch.int32)
        of_groups = torch.where(torch.arange(300)[:, None] < offs[-1], x, 0)
        y, a = torch._grouped_mm(x, w.mT, offs=offs), wide(quantize(of_groups))
        assert y.shape == (300, shape[0])
        start = 0
        for expert, end in enumerate(groups):
            b = wide(w[expert])
            in_bfloat16(y[start:end], a[start:end] @ b.T, a[start:end].abs() @ b.abs().T)
            start = end
    if shape == (128, 64):
        compiled = torch.compile(lambda x, offs: torch._grouped_mm(x, w.mT, offs=offs), fullgraph=True)
        assert torch.equal(compiled(x, offs)[: offs[-1]], y[: offs[-1]])


ON_HOPPER = """
import sys, torch
from nvfp4_tensor import QuantizeSpec, quantize, quantize_experts
from nvfp4_tensor.matmul import scaled_mm
w = quantize_experts(torch.randn(4, 200, 528, device="cuda").bfloat16())
x, offs = quantize(torch.randn(30, 528, device="cuda").bfloat16()), torch.tensor([3, 20, 20, 30], device="cuda")
if sys.argv[1] == "wrong":
    scaled_mm.grouped_scale = lambda x, offs: x.scale.reshape(-1)
print("accepted", scaled_mm.scaled_grouped_product(x, w.mT, offs.int()).shape)
"""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper"
)
def test_torchs_own_checks_of_the_grouped_product():
    """A Hopper passes torch's check of the device, so that all of its checks of arguments run.

    It runs in a subprocess, because the Blackwell kernel that is then launched leaves the CUDA context unusable.
    """
    for scales, accepted in (("right", True), ("wrong", False)):
        command = [sys.executable, "-c", ON_HOPPER, scales]
        printed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ("accepted torch.Size([30, 200])" in printed.stdout) == accepted, printed.stderr
        assert accepted or "must have same number of dimensions" in printed.stderr
