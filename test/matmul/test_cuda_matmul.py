"""The CUDA products against the reference's decoded operands, in float64 and within the bound of float32 addition."""

import pytest
import torch
from helpers.products import check, factor, random_weight, zero_padding
from helpers.repeats import times

from nvfp4_tensor.numerics.layout import E4M3_NAN, swizzle, unswizzle

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 256, 300])
@pytest.mark.parametrize("shape", [(256, 512), (384, 4096), (128, 8192), (1024, 1280), (130, 144), (77, 48), (1, 16)])
def test_product(shape, rows, dtype):
    codes, scale = random_weight(*shape, high=0x48 if dtype == torch.float16 else 0x70)
    check(torch.randn(rows, shape[1], device="cuda").to(dtype), codes, scale, factor())


@pytest.mark.parametrize("columns", [1, 3, 15, 17, 100, 250, 1000, 4097])
@pytest.mark.parametrize("rows", [1, 5, 16, 24, 40, 100])
def test_columns_not_multiples_of_anything(columns, rows):
    codes, scale = random_weight(200, columns)
    check(torch.randn(rows, columns, device="cuda").bfloat16(), zero_padding(codes, columns), scale, factor())


@pytest.mark.parametrize("shape", [(2176, 4096), (640, 1024)], ids=["fused", "decoded first"])
@pytest.mark.parametrize("rows", [1000, 4097])
def test_many_rows(shape, rows):
    codes, scale = random_weight(*shape)
    check(torch.randn(rows, shape[1], device="cuda").bfloat16(), codes, scale, factor())


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
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = torch.ops.nvfp4.matmul(x, None, codes, scale, alpha, None, shape[1], False, x.dtype)
    for _ in times(20):
        again.zero_()
        graph.replay()
        assert torch.equal(again, y)
    row_scales = torch.rand(rows, device="cuda")
    check(x, codes, scale, torch.rand(shape[0], device="cuda"), x_scale=row_scales)
    check(x, codes, scale, factor(), x_scale=row_scales, bias=torch.randn(shape[0], device="cuda"))
    check(x, codes[:-3], scale, factor(), bias=torch.randn(shape[0] - 3, device="cuda"))


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
    row_scales = torch.rand(rows, device="cuda")
    check(x, codes, scale, torch.rand(shape[0], device="cuda"), x_scale=row_scales)
    check(x, codes, scale, factor(), x_scale=row_scales, bias=torch.randn(shape[0], device="cuda"))
    check(x, codes, scale, factor(), bias=torch.randn(rows, 1, device="cuda"), out_dtype=torch.float32)
    columns, blocks = shape[1] - 40, shape[1] // 16 - 2
    cut = zero_padding(codes, columns)[:, : blocks * 8].contiguous()
    check(x[:, :columns], cut, scale[:, : -(-blocks // 4)].contiguous(), factor(), columns=columns)
    check(x, codes[:-3], scale, factor(), bias=torch.randn(shape[0] - 3, device="cuda"))


@pytest.mark.parametrize(
    "shape, rows",
    [((4096, 4096), m) for m in (16, 24, 64)]
    + [((14336, 8192), 16), ((10240, 4096), 24), ((10240, 4096), 64), ((11008, 4096), 128)],
)
def test_tiles_of_several_blocks_in_float16(shape, rows):
    codes, scale = random_weight(*shape, high=0x48)
    check(torch.randn(rows, shape[1], device="cuda").half(), codes, scale, factor(), repeats=20)


@pytest.mark.parametrize("shape", [(2, 1024, 4096), (3, 200, 2048)])
@pytest.mark.parametrize("rows", [12, 40])
def test_tiles_of_experts_that_blocks_share(shape, rows):
    codes, scale = random_weight(*shape)
    x = torch.randn(shape[0], rows, shape[2], device="cuda").bfloat16()
    check(x, codes, scale, torch.rand(shape[0], device="cuda"), repeats=20)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("rows", [4, 24, 64, 200, 600])
def test_products_in_a_chain(rows, quantized):
    """Kernels that begin before the one before them is done: each product of a chain in a graph is what it is alone."""
    shapes = [(1024, 4096), (4096, 1024), (4096, 4096), (14336, 4096), (4096, 14336)]  # (N, K)
    weights = [random_weight(*shape, low=0x20, high=0x28) for shape in shapes]
    x, per_tensor_scale, amax = torch.randn(rows, 4096, device="cuda").bfloat16(), factor(), factor(4.0)

    def chain(wait):
        results = [x]
        for codes, scale in weights:
            if quantized:
                results.append(torch.ops.nvfp4.fake_quantize(results[-1], amax, None, 0, x.dtype)[0])
                wait()
            columns = codes.shape[-1] * 2
            arguments = (None, codes, scale, per_tensor_scale, None, columns, False, x.dtype)
            results.append(torch.ops.nvfp4.matmul(results[-1], *arguments))
            wait()
        return results[1:]

    alone = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = chain(lambda: None)
    for _ in range(20):
        for y in together:
            y.zero_()
        graph.replay()
        for y, expected in zip(together, alone, strict=True):
            assert expected.isfinite().all() and expected.abs().max() > 0
            assert torch.equal(y, expected)


@pytest.mark.parametrize("rows", [2, 16, 24, 64, 96, 128, 160, 200, 600])
def test_weights_that_the_kernel_before_writes(rows):
    """Products begin before the kernel before them is done, and multiply by what it wrote."""
    given = [random_weight(4096, 4096, low=0x20, high=0x28) for _ in range(3)]
    x, codes, scale = torch.randn(rows, 4096, device="cuda").bfloat16(), *map(torch.empty_like, given[0])
    per_tensor_scale = factor()

    def multiply(codes, scale):
        return torch.ops.nvfp4.matmul(x, None, codes, scale, per_tensor_scale, None, 4096, False, x.dtype)

    def multiply_all():
        results = []
        for new_codes, new_scale in given:
            for to, new in ((scale.view(torch.uint8), new_scale.view(torch.uint8)), (codes, new_codes)):
                torch.bitwise_or(new, new, out=to)  # by a kernel: nothing begins before a copy's end
            results.append(multiply(codes, scale))
        return results

    alone = [multiply(*weight) for weight in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        together = multiply_all()
    for _ in times(20):
        graph.replay()
        assert all(map(torch.equal, together, alone))


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


@pytest.mark.parametrize("rows", [300, 520])
def test_wide_tiles_of_experts(rows):
    codes, scale = random_weight(3, 3000, 512)
    x = torch.randn(3, rows, 512, device="cuda").bfloat16()
    check(x, codes, scale, torch.rand(3, device="cuda"), bias=torch.randn(3, 1, 3000, device="cuda"))


def test_wide_weight():
    """More rows of w than one block's partial sums hold."""
    codes, scale = random_weight(128 * 300, 256)
    for rows in (3, 12, 20):
        check(torch.randn(rows, 256, device="cuda").bfloat16(), codes, scale, factor())


@pytest.mark.parametrize("rows", [4, 16])
def test_long_rows(rows):
    """More of K than the slices of a cluster cover."""
    codes, scale = random_weight(128, 40000)
    check(torch.randn(rows, 40000, device="cuda").bfloat16(), codes, scale, factor())


@pytest.mark.parametrize("rows", [0, 3, 50])
def test_empty(rows):
    codes, scale = random_weight(32, 64)
    x = torch.randn(rows, 64, device="cuda").bfloat16()
    assert torch.ops.nvfp4.matmul(x[:0], None, codes, scale, factor(), None, 64, False, x.dtype).shape == (0, 32)
    y = torch.ops.nvfp4.matmul(x, None, codes[:0], scale[:0], factor(), None, 64, False, x.dtype)
    assert y.shape == (rows, 0)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 12, 48, 200])
def test_epilogue(rows, out_dtype):
    """A scale for each row of x and of w, every form of bias, every output dtype: one rounding."""
    codes, scale = random_weight(256, 512, high=0x48)
    x = torch.randn(rows, 512, device="cuda").bfloat16()
    w_scale, x_scale = torch.rand(256, device="cuda") * 0.01, torch.rand(rows, device="cuda")
    for bias in (
        None,
        torch.randn(256, device="cuda"),
        torch.randn(256, device="cuda").bfloat16(),
        torch.randn(rows, 1, device="cuda"),
        torch.randn(rows, 256, device="cuda").half(),
        torch.randn(512, 2, device="cuda")[:256, 0],
    ):
        check(x, codes, scale, w_scale, x_scale=x_scale, bias=bias, out_dtype=out_dtype)
        check(x, codes, scale, factor(), x_scale=factor(0.5), bias=bias, out_dtype=out_dtype)


@pytest.mark.parametrize("rows", [2, 24, 40])
def test_activation_shapes(rows):
    codes, scale = random_weight(128, 256)
    x = torch.randn(3, rows, 256, device="cuda").bfloat16()
    bias = torch.randn(3, rows, 128, device="cuda")
    check(x, codes, scale, factor(), bias=bias)
    check(x[0, 0], codes, scale, factor())
    check(x.transpose(0, 1), codes, scale, factor())
    check(x.reshape(3, 1, rows, 256), codes, scale, factor())
    check(torch.randn(rows, 300, device="cuda").bfloat16()[:, 20:276], codes, scale, factor())
    check(torch.randn(rows, 264, device="cuda").bfloat16()[:, 8:], codes, scale, factor())


@pytest.mark.parametrize("columns", [200, 1096, 1100])
@pytest.mark.parametrize("rows", [2, 24, 40, 100])
def test_nan_in_the_padding_of_a_stage(rows, columns):
    """Not a number, which a code of zero would not take out of the sums."""
    x = torch.full((rows, 1280), float("nan"), device="cuda").bfloat16()
    x[:, :columns] = torch.randn(rows, columns, device="cuda")
    codes, scale = random_weight(128, columns)
    check(x[:, :columns], zero_padding(codes, columns), scale, factor())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_decoded(dtype, transposed):
    """float32 activations, and products along the other dimension."""
    codes, scale = random_weight(96, 160)
    x = torch.randn(20, 96 if transposed else 160, device="cuda").to(dtype)
    check(x, codes, scale, factor(), transposed=transposed, bias=torch.randn(160 if transposed else 96, device="cuda"))
    check(x, codes, scale, torch.rand(96, device="cuda"), transposed=transposed)


@pytest.mark.parametrize("rows", [1, 16, 24, 40, 200])
@pytest.mark.parametrize("shape", [(4, 128, 256), (3, 200, 512), (5, 72, 96)])
def test_experts(shape, rows):
    codes, scale = random_weight(*shape)
    x = torch.randn(shape[0], rows, shape[2], device="cuda").bfloat16()
    check(x, codes, scale, factor())
    check(x, codes, scale, torch.rand(shape[0], device="cuda"), x_scale=torch.rand(shape[0], rows, device="cuda"))
    check(x, codes, scale, torch.rand(shape[:2], device="cuda"), bias=torch.randn(shape[0], 1, shape[1], device="cuda"))


@pytest.mark.parametrize("rows", [1, 8, 16, 24, 64, 150])
def test_not_a_number_stays_in_its_row(rows):
    codes, scale = random_weight(256, 1024)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    clean = torch.ops.nvfp4.matmul(x, None, codes, scale, factor(), None, 1024, False, torch.float32)
    scale.view(torch.uint8)[1, 3, 5, 6] = E4M3_NAN  # row 128 + 5 + 32, block 14
    x[rows // 2, 7] = float("nan")
    y = torch.ops.nvfp4.matmul(x, None, codes, scale, factor(), None, 1024, False, torch.float32)
    clean[rows // 2], clean[:, 165] = float("nan"), float("nan")
    assert torch.equal(y.isnan(), clean.isnan()) and torch.equal(y[~y.isnan()], clean[~y.isnan()])


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256])
def test_every_scale(rows):
    """All finite scales, subnormal ones too."""
    codes, _ = random_weight(256, 512)
    scale = torch.arange(2 * 8 * 512, device="cuda").remainder(E4M3_NAN).to(torch.uint8).view(2, 8, 32, 16)
    check(torch.randn(rows, 512, device="cuda").bfloat16(), codes, scale.view(torch.float8_e4m3fn), factor())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256, 1000])
def test_every_scale_that_is_no_number(rows, dtype):
    """The bytes 0x7F to 0xFF, one per row of w, at any byte of a four-byte word."""
    codes, scale = random_weight(256, 512, high=0x48)
    x = torch.randn(rows, 512, device="cuda").to(dtype)
    clean = check(x, codes, scale, factor())
    plain = unswizzle(scale, 256, 32).view(torch.uint8)
    byte = torch.arange(E4M3_NAN, 256, device="cuda")
    plain[byte - E4M3_NAN, byte % 32] = byte.to(torch.uint8)
    y = torch.ops.nvfp4.matmul(x, None, codes, swizzle(plain), factor(), None, 512, False, dtype)
    assert y[:, : len(byte)].isnan().all() and torch.equal(y[:, len(byte) :], clean[:, len(byte) :])
    across = torch.randn(rows, 256, device="cuda").to(dtype)
    y = torch.ops.nvfp4.matmul(across, None, codes, swizzle(plain), factor(), None, 512, True, dtype)
    assert y.isnan().all(), "each block of columns has such a row"


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256])
def test_cancellation(rows):
    """Sums far smaller than their summands: the second half of K undoes the first."""
    codes, scale = random_weight(256, 2048)
    codes[:, 512:] = codes[:, :512]
    scale.view(torch.uint8)[:, 16:] = scale.view(torch.uint8)[:, :16]
    x = torch.randn(rows, 2048, device="cuda").bfloat16()
    x[:, 1024:] = -x[:, :1024]
    check(x, codes, scale, factor(), out_dtype=torch.float32)


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_weights_at_any_address(at_offset, rows, offset):
    """Views of bytes begin anywhere, and the kernels load 8 or 16 of them at a time."""
    codes, scale = random_weight(256, 512)
    x, across = torch.randn(rows, 512, device="cuda").bfloat16(), torch.randn(rows, 256, device="cuda").bfloat16()
    for first_code, first_scale in ((offset, 0), (0, offset), (offset, offset)):
        weight = at_offset(codes, first_code), at_offset(scale, first_scale), at_offset(factor(), offset)
        check(at_offset(x, offset), *weight)
        check(across, *weight, transposed=True)


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256])
def test_cuda_graph(rows):
    codes, scale = random_weight(512, 1024)
    x = torch.randn(rows, 1024, device="cuda").bfloat16()
    arguments = (x, None, codes, scale, factor(), None, 1024, False, x.dtype)
    torch.ops.nvfp4.matmul(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.ops.nvfp4.matmul(*arguments)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, torch.ops.nvfp4.matmul(*arguments))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bias": torch.ones(33)}, "bias is not on the device of x"),
        ({"bias": (40,)}, "bias of size 40 in dimension 1"),
        ({"bias": (16,)}, "bias of size 16 in dimension 1"),
        ({"bias": (2, 33)}, "bias of size 2 in dimension 0"),
        ({"bias": (1, 1, 33)}, "more dimensions than the product"),
        ({"x_scale": (3,)}, "x_scale must be one number, or one per row: 1 or 7, not 3"),
        ({"per_tensor_scale": (5,)}, "one per row of w"),
        ({"scale": slice(0, 0)}, "scale must be swizzled"),
        ({"columns": 80}, "columns, not 80"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    """Each would have been read beyond its end, or on the host."""
    codes, scale = random_weight(33, 64)
    x = torch.randn(7, change.get("columns", 64), device="cuda").bfloat16()
    given = {"x_scale": None, "scale": scale, "per_tensor_scale": factor(), "bias": None, "columns": 64}
    for name, value in change.items():
        shaped = isinstance(value, tuple)
        given[name] = torch.ones(value, device="cuda") if shaped else scale[value] if name == "scale" else value
    tail = (given["per_tensor_scale"], given["bias"], given["columns"], False, torch.bfloat16)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.nvfp4.matmul(x, given["x_scale"], codes, given["scale"], *tail)
