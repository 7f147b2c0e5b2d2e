"""Few rows on CUDA: every division of the work, kernels that overlap their neighbours, and the activation's own op."""

import pytest
import torch
from helpers.products import check, factor, random_weight
from helpers.repeats import times

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import reference
from nvfp4_tensor.numerics.layout import E4M3_NAN

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize(
    "shape",
    [
        (128, 64),  # one slice of K, 16 tiles at a time
        (384, 320),
        (1024, 1280),  # 5 warps in K, 3 tiles at a time
        (256, 4096),
        (1152, 4160),  # a slice that K fills in part
        (4096, 4096),
        (2176, 8192),  # two blocks in K at 9 rows
        (4096, 14336),
        (640, 16384),
        (256, 32768),  # eight blocks in K at 9 rows
        (128, 33024),  # more of K than a cluster covers at 9 rows
    ],
)
def test_division_of_work(shape, rows, dtype):
    codes, scale = random_weight(*shape, high=0x48 if dtype == torch.float16 else 0x70)
    check(torch.randn(rows, shape[1], device="cuda").to(dtype), codes, scale, factor())


@pytest.mark.parametrize("rows", [8, 9, 16])
@pytest.mark.parametrize("shape", [(14336, 8192), (8192, 14336)])
def test_the_same_bits_many_times(shape, rows):
    """Many tiles a cluster: copies, sums and what blocks send one another use their places again and again."""
    codes, scale = random_weight(*shape)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    check(x, codes, scale, factor(), repeats=50)


@pytest.mark.parametrize("rows", [1, 16])
def test_rows_of_x_at_any_address(rows):
    """Strided, and aligned to less than the kernel of Hopper takes."""
    codes, scale = random_weight(256, 4096)
    x = torch.randn(rows, 4200, device="cuda").bfloat16()
    for first in (0, 8, 1, 12):
        check(x[:, first : first + 4096], codes, scale, factor())


@pytest.mark.parametrize("rows", [2, 11])
def test_experts(rows):
    codes, scale = random_weight(6, 384, 8192)
    x = torch.randn(6, rows, 8192, device="cuda").bfloat16()
    check(x, codes, scale, torch.rand(6, device="cuda"), x_scale=torch.rand(6, rows, device="cuda"))
    check(x, codes, scale, torch.rand(6, 384, device="cuda"), bias=torch.randn(6, 1, 384, device="cuda"))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("byte", [E4M3_NAN, 0x80, 0x90, 0xFE, 0xFF])
def test_a_scale_that_is_no_number(rows, byte):
    codes, scale = random_weight(256, 8192)
    x = torch.randn(rows, 8192, device="cuda").bfloat16()
    clean = check(x, codes, scale, factor(), out_dtype=torch.float32)
    scale.view(torch.uint8)[1, 70, 9, 7] = byte  # row 128 + 9 + 32
    y = torch.ops.nvfp4.matmul(x, None, codes, scale, factor(), None, 8192, False, torch.float32)
    assert y[:, 169].isnan().all() and torch.equal(y.isnan().sum(), torch.tensor(rows, device="cuda"))
    assert torch.equal(y[:, :169], clean[:, :169]) and torch.equal(y[:, 170:], clean[:, 170:])


@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("captured", [False, True])
def test_chain_of_products(rows, captured):
    """Each begins before the one whose result it reads is done, and writes where that one reads."""
    weights = [random_weight(4096, 4096, high=0x38) for _ in range(4)]
    x = torch.randn(rows, 4096, device="cuda").bfloat16()

    one = factor(1.0)

    def product(x, weight):
        return torch.ops.nvfp4.matmul(x, None, *weight, one, None, 4096, False, torch.bfloat16)

    def chain(synchronize):
        y = x
        for _ in times(5):
            for weight in weights:
                y = product(y, weight) * 0.01
                y = product(product(y, weight) * 1e-4, weight)
                y = (y / y.abs().amax()).contiguous()
                if synchronize:
                    torch.cuda.synchronize()
        return y

    expected = chain(True)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(False)
        graph.replay()
    else:
        y = chain(False)
    assert y.isfinite().all() and torch.equal(y, expected)


def test_a_weight_that_the_kernel_before_wrote():
    """What is copied ahead of x is never older than the stream has it."""
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    versions = [random_weight(4096, 4096) for _ in range(6)]
    other = random_weight(4096, 4096)
    codes, scale = (t.clone() for t in versions[0])

    def product(codes, scale):
        return torch.ops.nvfp4.matmul(x, None, codes, scale, factor(), None, 4096, False, torch.bfloat16)

    expected = [product(*version) for version in versions]
    for _ in range(5):
        for version, y in zip(versions, expected, strict=True):
            codes.copy_(version[0])
            scale.view(torch.uint8).copy_(version[1].view(torch.uint8))
            product(*other)
            assert torch.equal(product(codes, scale), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 16),
        (1, 4096),
        (2, 8192),  # a cluster of two thread blocks
        (3, 8192),  # of four
        (8, 8192),  # of eight, which it fills
        (9, 8192),  # two kernels
        (5, 7, 48),
        (63, 14336),
        (512, 8192),
        (513, 8192),  # too many for these
        (4, 50),
    ],
)
def test_activation_is_fake_quantize_by_its_own_amax(shape, dtype):
    x = torch.randn(shape, device="cuda").to(dtype) * torch.rand(shape[-1], device="cuda").to(dtype)
    for spec in (QuantizeSpec(), QuantizeSpec(scale_rounding="up", scale_ceiling=256)):
        for special in (None, float("nan"), float("inf"), 0.0):
            if special is not None:
                x[..., -5] = special
            if special == 0.0:
                x.zero_()
            values, scale = torch.ops.nvfp4.quantize_activation(x, None, spec.pack(), dtype)
            qdata, s, expected = reference.quantize(x, reference.amax(x), None, spec)
            decoded = reference.dequantize(qdata, s, None, x.shape[-1], dtype)
            assert torch.equal(scale, expected)
            assert torch.equal(values.nan_to_num(7.0), decoded.nan_to_num(7.0))


@pytest.mark.parametrize("rows", [1, 9, 63, 300])
def test_largest_of_an_activation_anywhere(rows):
    """In strided rows; at positions that all warps, loads and thread blocks of the search read."""
    wide = torch.randn(rows, 8192 + 16, device="cuda").bfloat16()
    x, spec = wide[:, :8192], QuantizeSpec()
    wide[:, 8192:] = 1e30  # not of x
    blocks = rows * 512  # of 16
    places = {0, blocks - 1, *range(blocks - 9 * 32, blocks, 32), *range(77, blocks, blocks // 40)}
    for n, block in enumerate(sorted(place for place in places if place >= 0)):
        at = block // 512, block % 512 * 16 + n % 16
        kept = x[at].clone()
        x[at] = -100 - n
        values, scale = torch.ops.nvfp4.quantize_activation(x, None, spec.pack(), torch.bfloat16)
        expected = reference.quantize(x, reference.amax(x), None, spec)
        assert torch.equal(scale, expected[2])
        assert torch.equal(values, reference.dequantize(*expected[:2], None, 8192, torch.bfloat16))
        x[at] = kept


def test_activation_in_a_chain():
    """Its amax is of what the kernel before wrote, and the product after it reads what it wrote."""
    codes, scale = random_weight(4096, 4096, high=0x38)
    spec = QuantizeSpec().pack()

    def chain(y, synchronize):
        for _ in range(20):
            y, own = torch.ops.nvfp4.quantize_activation(y, None, spec, torch.bfloat16)
            y = torch.ops.nvfp4.matmul(y, own, codes, scale, factor(1e-3), None, 4096, False, torch.bfloat16)
            if synchronize:
                torch.cuda.synchronize()
        return y

    for rows in (1, 16, 40, 200):
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        expected = chain(x, True)
        assert expected.isfinite().all() and torch.equal(chain(x, False), expected)
