"""nvfp4.matmul against a float64 product of what it decodes: on each instruction set, and on a GPU."""

import itertools

import pytest
import torch
from helpers.instruction_sets import OF_PRODUCTS, displaced, each_instruction_set, needs_library
from helpers.products import check, factor, products, random_weight

from nvfp4_tensor import quantize
from nvfp4_tensor.numerics.layout import E4M3_NAN, swizzle, unswizzle

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
matmul = torch.ops.nvfp4.matmul
across = pytest.mark.parametrize("transposed", [False, True], ids=["along", "across"])


def each_way(device):
    """Select each way to multiply on a device."""
    return ("cuda",) if device == "cuda" else each_instruction_set(OF_PRODUCTS)


def weight_of(device, *shape, low=0x00, high=0x48):
    """Codes and scales of every kind but NaN, subnormal ones too, and a factor per row; float16 holds the sums."""
    return *random_weight(*shape, low=low, high=high, device=device), (
        torch.rand(shape[:-1], device=device) + 0.5
    ) / 256


SHAPES = [  # M, N, K: each CPU kernel's tiles, panels, chunks and groups whole, short by one and over by one
    (1, 1, 1), (1, 576, 576), (4, 1061, 80), (1, 35, 1600), (2, 33, 100), (3, 130, 1000), (5, 200, 130), (8, 47, 4096),
    (9, 50, 77), (16, 96, 272), (17, 97, 300), (19, 600, 300), (20, 34, 400), (31, 49, 128), (40, 65, 560),
    (41, 31, 640), (48, 24, 1040), (64, 48, 256), (65, 145, 257), (130, 300, 129), (513, 50, 40), (1030, 17, 33),
    (4097, 3, 20),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@across
def test_shapes(kernels, shape, transposed):
    m, n, k = shape
    codes, scale, factors = weight_of(kernels, n, k)
    for dtype, w_scale in itertools.product(DTYPES, (factors, factors[0])):  # a factor a row sums across in float32
        x = torch.randn(m, n if transposed else k, device=kernels).to(dtype)
        check(x, codes, scale, w_scale, columns=k, transposed=transposed)


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 16), (20, 0, 16), (3, 5, 0), (20, 5, 0), (0, 0, 0)], ids=str)
@across
def test_nothing_sums_to_the_bias(kernels, shape, transposed):
    m, n, k = shape
    weight = quantize(torch.empty(n, k, device=kernels))
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    depth, width = (n, k) if transposed else (k, n)
    for dtype, bias in itertools.product(DTYPES, (None, torch.randn(width, device=kernels))):
        for _ in each_way(kernels):
            y = matmul(torch.randn(m, depth, device=kernels).to(dtype), None, *parts, bias, k, transposed, dtype)
            assert y.shape == (m, width)
            right = torch.zeros(m, width, device=kernels) if bias is None else bias.expand(m, width)
            assert depth > 0 or torch.equal(y, right.to(dtype))


@pytest.mark.parametrize("m", [1, 7, 12, 40, 200])
@across
def test_epilogue(kernels, m, transposed):
    """Per-tensor scales, x scales, biases and output dtypes, each with each: one rounding."""
    n, k = 150, 136
    codes, scale, factors = weight_of(kernels, n, k)
    x, width = torch.randn(m, n if transposed else k, device=kernels), k if transposed else n

    def rand(*shape):
        return torch.rand(shape, device=kernels) + 0.5

    x_scales = [None, torch.tensor(0.3, device=kernels), rand(m), *([rand(m, 1)] if kernels == "cpu" else [])]
    biases = [None, rand(width), rand(width).bfloat16(), rand(1, 1), rand(m, 1), rand(m, width).half()]
    biases.append(rand(width, 2)[:, 0])
    w_scales = factors, factors[0], *([factors.repeat_interleave(2)[::2]] if kernels == "cpu" else [])
    kinds = itertools.product(w_scales, x_scales, biases)
    for (w_scale, x_scale, bias), (dtype, out_dtype) in zip(kinds, itertools.cycle(itertools.product(DTYPES, DTYPES))):
        how = {"x_scale": x_scale, "bias": bias, "transposed": transposed, "out_dtype": out_dtype}
        check(x.to(dtype), codes, scale, w_scale, columns=k, **how)


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 4), (3, 0, 2), (2, 3, 2, 3), (3, 24)], ids=str)
def test_leading_dimensions(kernels, leading):
    codes, scale, factors = weight_of(kernels, 40, 72)
    for dtype in DTYPES:
        x = torch.randn(*leading, 72, device=kernels).to(dtype)
        check(x, codes, scale, factors, x_scale=torch.rand(leading, device=kernels) + 0.5)
        for along in itertools.product((False, True), repeat=len(leading)):  # a bias that broadcasts along some
            shape = [1 if wide else size for wide, size in zip(along, leading, strict=True)]
            check(x, codes, scale, factors[0], bias=torch.randn(*shape, 40, device=kernels))
        if len(leading) > 1:
            apart = x.transpose(0, 1).contiguous().transpose(0, 1)
            assert torch.equal(check(apart, codes, scale, factors), check(x, codes, scale, factors))


@pytest.mark.parametrize("rows", [1, 3, 20, 40, 200])
@pytest.mark.parametrize("n, k", [(16, 88), (50, 88), (128, 256), (200, 512), (72, 96)])
def test_experts(kernels, rows, n, k):
    """The scales of all of them share tiles, so that an expert begins anywhere in one."""
    codes, scale, factors = weight_of(kernels, 3, n, k)
    w_scales = factors, factors[0, 0], factors[:, :1].expand(3, n).contiguous()
    for (transposed, w_scale), dtype in zip(itertools.product((False, True), w_scales), itertools.cycle(DTYPES)):
        x = torch.randn(3, rows, n if transposed else k, device=kernels).to(dtype)
        bias = torch.randn(3, 1, k if transposed else n, device=kernels).to(dtype)
        x_scale = torch.rand(3, rows, device=kernels) + 0.5
        check(x, codes, scale, w_scale, columns=k, transposed=transposed, bias=bias, x_scale=x_scale)


@pytest.mark.parametrize("device", ["cpu"])  # tensor cores truncate
@pytest.mark.parametrize("m", [1, 4, 16, 33])
def test_long_sums_of_one_sign(kernels, m):
    """Every rounding of such a sum goes against the whole of it: it has to be a sum of short sums."""
    codes, scale, factors = weight_of(kernels, 20, 16384)
    for dtype in DTYPES:
        x = torch.rand(m, 16384, device=kernels).to(dtype)
        check(x, codes & 0x77, scale, factors, out_dtype=torch.float32)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("m", [1, 5, 16, 40])
@across
def test_tiny_and_huge_numbers(kernels, m, transposed):
    """bfloat16 instructions flush subnormals, and sums before the block scales overflow early: neither may show."""
    n, k = 60, 150
    codes, scale, factors = weight_of("cpu", n, k)
    for exponent in (-131, -126, -110, -100, -99, 99, 100, 112):
        x_scale = torch.tensor(2.0 ** (100 if exponent < 0 else -100))
        for dtype, w_scale in ((torch.bfloat16, factors * 256), (torch.float32, factors[0])):
            x = torch.randn(m, n if transposed else k)
            x[:, ::3] *= 2.0**exponent
            if exponent < 0:
                x[:, 1::3], x[:, 2::3] = 0, x[:, 2::3] * 2.0 ** (exponent + 3)
            how = {"x_scale": x_scale, "transposed": transposed, "out_dtype": torch.float32}
            check(x.to(dtype), codes, scale, w_scale, columns=k, **how)


@pytest.mark.parametrize("m", [1, 8, 16, 24, 64, 150])
@pytest.mark.parametrize("k", [40, 128, 200, 1024])
def test_not_a_number_stays_where_it_belongs(kernels, m, k):
    """A row of x that is not finite is a row of y; a block of w, a column, or across the blocks its 16 columns."""
    n = 200
    x, w = torch.randn(m, k, device=kernels), torch.randn(n, k, device=kernels)
    w[3, k - 1], w[165, 0] = float("nan"), float("inf")
    weight = quantize(w)
    parts = weight.qdata, weight.scale, weight.per_tensor_scale
    across_blocks = torch.randn(m, n, device=kernels)
    x[m // 2, k - 1] = across_blocks[m // 2, 5] = float("nan")
    for dtype in DTYPES:
        for _ in each_way(kernels):
            y = matmul(x.to(dtype), None, *parts, None, k, False, dtype)
            expected = torch.zeros(m, n, dtype=torch.bool, device=kernels)
            expected[m // 2] = expected[:, 3] = expected[:, 165] = True
            assert torch.equal(y.isnan(), expected)
            y = matmul(across_blocks.to(dtype), None, *parts, None, k, True, dtype)
            expected = torch.zeros(m, k, dtype=torch.bool, device=kernels)
            expected[m // 2] = expected[:, (k - 1) // 16 * 16 :] = expected[:, :16] = True
            assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize("rows", [1, 16, 24, 64, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_scale(kernels, rows, dtype):
    """All finite ones, subnormal too; then the bytes 0x7F to 0xFF, one per row of w, at any byte of a word: NaN."""
    codes, _, _ = weight_of(kernels, 256, 512)
    x, w_scale = torch.randn(rows, 512, device=kernels).to(dtype), factor(2.0**-9, kernels)
    scale = torch.arange(2 * 8 * 512, device=kernels).remainder(E4M3_NAN).to(torch.uint8).view(2, 8, 32, 16)
    finite = scale if dtype == torch.bfloat16 else scale.clamp(max=0x48)
    check(x, codes, finite.view(torch.float8_e4m3fn), w_scale)
    clean = check(x, codes, scale.clamp(max=0x48).view(torch.float8_e4m3fn), w_scale)
    plain = unswizzle(scale.clamp(max=0x48), 256, 32)
    byte = torch.arange(E4M3_NAN, 256, device=kernels)
    plain[byte - E4M3_NAN, byte % 32] = byte.to(torch.uint8)
    other = torch.randn(rows, 256, device=kernels).to(dtype)
    for name in each_way(kernels):
        y = matmul(x, None, codes, swizzle(plain), w_scale, None, 512, False, dtype)
        assert y[:, : len(byte)].isnan().all() and not y[:, len(byte) :].isnan().any(), name
        assert kernels == "cpu" or torch.equal(y[:, len(byte) :], clean[:, len(byte) :])
        y = matmul(other, None, codes, swizzle(plain), w_scale, None, 512, True, dtype)
        assert y.isnan().all(), "each block of columns has such a row"


@pytest.mark.parametrize("m", [1, 2, 24, 40, 100])
def test_what_lies_in_the_padding_does_not_matter(kernels, m):
    """Neither NaN beside x, nor on a CPU scales of blocks that a row does not have, nor infinity in x."""
    if kernels == "cpu":
        codes, scale, factors = weight_of("cpu", 30, 20)
        scale.view(torch.uint8)[..., 2:4] = E4M3_NAN  # of blocks that a row of 20 columns does not have
        x = torch.randn(m, 20)
        check(x, codes, scale, factors)
        x[:, 19] = float("inf")
        expected, _ = products(x, None, codes, scale, factors, None, 20)
        for _ in each_way("cpu"):
            y = matmul(x, None, codes, scale, factors, None, 20, False, torch.float32)
            assert torch.equal(y.isnan(), expected.isnan())
    for columns in (200, 1096, 1100):
        wide = torch.full((m, 1280), float("nan"), device=kernels).bfloat16()
        wide[:, :columns] = torch.randn(m, columns, device=kernels)
        check(wide[:, :columns], *random_weight(128, columns, device=kernels), factor(device=kernels))


@pytest.mark.parametrize("rows", [1, 3, 16, 24, 40, 256])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_operands_at_any_address(kernels, rows, offset):
    """Views of bytes begin anywhere, and the kernels load 8 or 16 of them at a time: the same bits, on a CPU."""
    codes, scale, factors = weight_of(kernels, 256, 512)
    for dtype, transposed in zip(DTYPES, (False, True, False), strict=True):
        x = torch.randn(rows, 256 if transposed else 512, device=kernels).to(dtype)
        bias = torch.randn(512 if transposed else 256, device=kernels)
        how = {"columns": 512, "transposed": transposed}
        plain = check(x, codes, scale, factors, bias=bias, **how)
        moved_x, moved_factors, moved_bias = (displaced(t, offset, kernels) for t in (x, factors, bias))
        for first_code, first_scale in ((offset, 0), (0, offset), (offset, offset)):
            weight = displaced(codes, first_code, kernels), displaced(scale, first_scale, kernels), moved_factors
            y = check(moved_x, *weight, bias=moved_bias, **how)
            assert kernels == "cuda" or torch.equal(y, plain)


@needs_library
@across
def test_any_number_of_threads_gives_the_same_bits(transposed):
    k = 700
    weights = {n: weight_of("cpu", n, k) for n in (300, 1100)}
    for (m, n), dtype in itertools.product(((1, 1100), (6, 1100), (16, 300), (100, 300), (600, 300)), DTYPES):
        codes, scale, factors = weights[n]
        x = torch.randn(m, n if transposed else k).to(dtype)
        for _ in each_way("cpu"):
            results = []
            for count in (1, 2, 3, 5, 1):
                torch.set_num_threads(count)
                results.append(matmul(x, None, codes, scale, factors[0], None, k, transposed, torch.float32))
            assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": (7, 65)}, "64 columns|columns, not 65|x has 65 columns"),
        ({"bias": (41,)}, "bias of size 41 in dimension 1 does not broadcast to a product of size 33"),
        ({"bias": (2, 33)}, "bias of size 2 in dimension 0"),
        ({"bias": (1, 1, 33)}, "more dimensions than the product"),
        ({"x_scale": (3,)}, "x_scale"),
        ({"per_tensor_scale": (5,)}, "per_tensor_scale|one per row of w"),
        ({"scale": slice(0, 0)}, "scale must be swizzled"),
        ({"columns": 80}, "columns, not 80|80 columns|the weight has 80"),
        ({"qdata": (2, 33, 32)}, "[2E], M, K"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit(kernels, change, message):
    """Each would have been read beyond its end."""
    qdata, scale, _ = weight_of(kernels, 33, 64)
    given = {"x": torch.randn(7, 64, device=kernels).bfloat16(), "x_scale": None, "qdata": qdata, "scale": scale,
             "per_tensor_scale": factor(device=kernels), "bias": None, "columns": 64}  # fmt: skip
    for name, value in change.items():
        if name == "scale":
            given[name] = scale[value]
        elif isinstance(value, tuple):
            like = qdata.dtype if name == "qdata" else torch.bfloat16 if name == "x" else torch.float32
            given[name] = torch.ones(value, device=kernels, dtype=like)
        else:
            given[name] = value
    with pytest.raises(RuntimeError, match=message):
        matmul(**given, across_blocks=False, out_dtype=torch.bfloat16)


@pytest.mark.gpu
def test_a_bias_on_another_device_raises(cuda_library):
    codes, scale = random_weight(33, 64)
    with pytest.raises(RuntimeError, match="bias is not on the device of x"):
        matmul(torch.ones(7, 64).cuda(), None, codes, scale, factor(), torch.ones(33), 64, False, torch.float32)
