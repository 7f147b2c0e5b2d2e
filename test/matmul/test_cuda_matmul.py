"""What only some sizes reach on CUDA: divisions of the work, tiles that blocks share, overlaps of kernels.

The oracle is the reference's decoded operands in float64, as in test_products.py, which has what every size must do.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.products import check, factor, random_weight, zero_padding
from helpers.repeats import captured, times

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]
matmul = torch.ops.nvfp4.matmul
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def high(dtype):
    """The largest scale byte for which the sums are within the dtype."""
    return 0x48 if dtype == torch.float16 else 0x70


EDGES = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300)
SIZES = [  # (N, K) of a weight, and the rows of x
    *(((n, k), EDGES) for n, k in ((256, 512), (384, 4096), (128, 8192), (1024, 1280), (130, 144), (77, 48), (1, 16))),
    *(((200, columns), (1, 5, 16, 24, 40, 100)) for columns in (1, 3, 15, 17, 100, 250, 1000, 4097)),
    *(((n, k), (1, 3, 8, 9, 16)) for n, k in (
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
    )),
    ((128 * 300, 256), (3, 12, 20)),  # more rows of w than one block's partial sums hold
    ((128, 40000), (4, 16)),  # more of K than the slices of a cluster cover
    *((shape, (1000, 4097)) for shape in ((2176, 4096), (640, 1024))),  # fused, decoded first
]  # fmt: skip


@dtypes
@pytest.mark.parametrize(("shape", "rows"), SIZES, ids=str)
def test_divisions_of_the_work(shape, rows, dtype):
    codes, scale = random_weight(*shape, high=high(dtype))
    for m in rows:
        check(torch.randn(m, shape[1], device="cuda").to(dtype), codes, scale, factor())


# --- few rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 9, 16])
@pytest.mark.parametrize("shape", [(14336, 8192), (8192, 14336)])
def test_the_same_bits_many_times(shape, rows):
    """Many tiles a cluster: copies, sums and what blocks send one another use their places again and again."""
    codes, scale = random_weight(*shape)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    check(x, codes, scale, factor(), repeats=50)


@pytest.mark.parametrize("rows, shape", [
    (2, (6, 384, 8192)), (11, (6, 384, 8192)), (12, (2, 1024, 4096)), (40, (2, 1024, 4096)), (12, (3, 200, 2048)),
    (40, (3, 200, 2048)), (300, (3, 3000, 512)), (520, (3, 3000, 512)),
], ids=str)  # fmt: skip
def test_experts(rows, shape):
    """Few rows; tiles that blocks share; wide tiles."""
    experts, n, k = shape
    codes, scale = random_weight(*shape)
    x = torch.randn(experts, rows, k, device="cuda").bfloat16()
    x_scale = torch.rand(experts, rows, device="cuda")
    check(x, codes, scale, torch.rand(experts, device="cuda"), x_scale=x_scale, repeats=20)
    check(x, codes, scale, torch.rand(experts, n, device="cuda"), bias=torch.randn(experts, 1, n, device="cuda"))


def check_epilogues(x, codes, scale):
    """With scales of rows of x and of w, a bias, and rows of w that are no whole tile."""
    row_scales, n = torch.rand(len(x), device="cuda"), len(codes)
    check(x, codes, scale, torch.rand(n, device="cuda"), x_scale=row_scales)
    check(x, codes, scale, factor(), x_scale=row_scales, bias=torch.randn(n, device="cuda"))
    check(x, codes[:-3], scale, factor(), bias=torch.randn(n - 3, device="cuda"))


# --- many rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, rows",
    [
        ((8960, 1024), 600),  # tiles, whole on 132 multiprocessors
        ((8960, 4096), 600),  # 148 in 132 runs
        ((11008, 4096), 128),  # 86 in 132 runs, some within a tile
        ((28672, 8192), 64),  # 112 of 256 rows of w
        ((18944, 3584), 32),  # 74
        ((11008, 8192), 256),  # 86 so wide that their first block finishes them alone
    ],
)
def test_tiles_cut_along_k(shape, rows):
    """Tiles of several blocks: the same bits each time, in replays of a graph too, whoever comes last."""
    codes, scale = random_weight(*shape)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    alpha = factor()
    y = check(x, codes, scale, alpha, repeats=20)
    graph, again = captured(lambda: matmul(x, None, codes, scale, alpha, None, shape[1], False, x.dtype))
    for _ in times(20):
        again.zero_()
        graph.replay()
        assert torch.equal(again, y)
    check_epilogues(x, codes, scale)


@pytest.mark.parametrize(
    "shape, rows",
    [((4096, 4096), 16), ((4096, 4096), 24), ((4096, 4096), 100), ((4096, 4096), 300)]
    + [((14336, 8192), 16), ((10240, 4096), 24), ((10240, 4096), 64)]  # tiles of 256 rows of w
    + [
        (s, m)
        for s in [(576, 7168), (1024, 4096), (2048, 272), (128, 128)]
        for m in (12, 24, 64, 90, 128, 150, 192, 250, 500)
    ],
)
def test_tiles_that_blocks_share(shape, rows):
    """Few tiles, each of up to eight blocks that add their sums: the same bits each time, every epilogue, any N, K."""
    codes, scale = random_weight(*shape)
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    check(x, codes, scale, factor(), repeats=20)
    check_epilogues(x, codes, scale)
    check(x, codes, scale, factor(), bias=torch.randn(rows, 1, device="cuda"), out_dtype=torch.float32)
    columns, blocks = shape[1] - 40, shape[1] // 16 - 2
    cut = zero_padding(codes, columns)[:, : blocks * 8].contiguous()
    check(x[:, :columns], cut, scale[:, : -(-blocks // 4)].contiguous(), factor(), columns=columns)


@pytest.mark.parametrize("rows", [520, 1024])
def test_wide_tiles(rows):
    """Many rows of x and of w: x of any alignment and width, N of any width, every epilogue."""
    codes, scale = random_weight(8960, 1024)
    x = torch.randn(rows, 1031, device="cuda").bfloat16()
    check(x[:, :1024], codes, scale, factor())
    check(
        x[:, 5:1029].half() * 0.01, codes, scale, factor(), x_scale=factor(0.5), bias=torch.randn(8960, device="cuda")
    )
    check(x[:, :1024].contiguous(), codes, scale, factor(), x_scale=torch.rand(rows, device="cuda"))
    check(x[:, :1024].contiguous(), codes, scale, torch.rand(8960, device="cuda"), bias=torch.randn(rows, 1).cuda())
    check(x[:, :1024].contiguous(), codes, scale, factor(), out_dtype=torch.float32)
    check(x[:, :1020], zero_padding(codes, 1020), scale, factor(), columns=1020)
    check(x[:, :1024].contiguous(), codes[:8952], scale, factor())
    check(x[:, :1024].contiguous(), codes[:8956], scale, factor())
    check(x[:, :1024].contiguous(), codes[:8957], scale, factor())


# --- kernels that begin before the one before them is done -----------------------------------------------------------


@pytest.mark.parametrize("quantized", ["dense", "fake_quantize", "quantize_activation"])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 24, 40, 64, 200, 600])
def test_products_in_a_chain(rows, quantized):
    """Each product of a chain, in a graph or not, is what it is alone, and writes where others read."""
    shapes = [(1024, 4096), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336)]  # (N, K)
    weights = [random_weight(*shape, low=0x20, high=0x28) for shape in shapes]
    x, per_tensor_scale, amax = torch.randn(rows, 4096, device="cuda").bfloat16(), factor(), factor(4.0)

    def chain(wait=lambda: None):
        results, x_scale = [x], None
        for codes, scale in weights:
            if quantized == "fake_quantize":
                results.append(torch.ops.nvfp4.fake_quantize(results[-1], amax, None, 0, x.dtype)[0])
            elif quantized == "quantize_activation":
                values, x_scale = torch.ops.nvfp4.quantize_activation(results[-1], None, 0, x.dtype)
                results.append(values)
            wait()
            columns = codes.shape[-1] * 2
            results.append(matmul(results[-1], x_scale, codes, scale, per_tensor_scale, None, columns, False, x.dtype))
            wait()
        return results[1:]

    alone = chain(torch.cuda.synchronize)
    assert all(y.isfinite().all() and y.abs().max() > 0 for y in alone)
    for _ in times(5):
        assert all(map(torch.equal, chain(), alone))
    graph, together = captured(chain)
    for _ in times(20):
        for y in together:
            y.zero_()
        graph.replay()
        assert all(map(torch.equal, together, alone))


@pytest.mark.parametrize("rows", [2, 4, 16, 24, 64, 96, 128, 160, 200, 600])
def test_weights_that_the_kernel_before_writes(rows):
    """Products multiply by what it wrote, though they begin before it is done."""
    given = [random_weight(4096, 4096, low=0x20, high=0x28) for _ in range(3)]
    x, codes, scale = torch.randn(rows, 4096, device="cuda").bfloat16(), *map(torch.empty_like, given[0])
    per_tensor_scale = factor()

    def multiply(codes, scale):
        return matmul(x, None, codes, scale, per_tensor_scale, None, 4096, False, x.dtype)

    def multiply_all():
        results = []
        for new_codes, new_scale in given:
            for to, new in ((scale.view(torch.uint8), new_scale.view(torch.uint8)), (codes, new_codes)):
                torch.bitwise_or(new, new, out=to)  # by a kernel: nothing begins before a copy's end
            results.append(multiply(codes, scale))
        return results

    alone = [multiply(*weight) for weight in given]
    graph, together = captured(multiply_all)
    for _ in times(20):
        graph.replay()
        assert all(map(torch.equal, together, alone))
        assert all(map(torch.equal, multiply_all(), alone))
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, together, [multiply(*weight) for weight in given]))


# --- decoded first, then by cuBLASLt: small weights and many rows, and gradients -------------------------------------


@dtypes
@pytest.mark.parametrize(
    "shape, rows, transposed",
    [
        *[((512, 3584), 2048, False), ((520, 3592), 1030, False), ((1024, 4096), 1024, False)],
        *[((384, 1024), 300, True), ((384, 1024), 1, True), ((100, 200), 40, True), ((1024, 4096), 1000, True)],
        *[((80, 17), 130, True), ((80, 24), 130, True), ((33, 41), 7, True), ((136, 264), 24, True)],
    ],
)
def test_every_epilogue_of_dense_products(shape, rows, transposed, dtype):
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
        return [matmul(*arguments) for _ in range(50)]

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
