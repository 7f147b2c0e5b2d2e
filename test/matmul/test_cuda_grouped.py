"""Products of groups of rows, one an expert, on CUDA, against each expert's own in float64."""

import pytest
import torch
from helpers.instruction_sets import displaced
from helpers.products import ROUNDING, random_weight
from helpers.repeats import captured

from nvfp4_tensor import QuantizeSpec, quantize_experts
from nvfp4_tensor.numerics import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_library")]


def random_experts(experts, rows, columns):
    """Random codes (E, N, K/2) and swizzled scales, of which float16 holds the sums."""
    return random_weight(experts, rows, columns, low=0x28, high=0x58)


def factors(kind, experts, rows):
    shape = {"one": (), "expert": (experts, 1), "row": (experts * rows,)}[kind]
    return torch.rand(shape, device="cuda") * 0.1 + 0.01


def group_ends(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)


def check(x, codes, scale, factor, offs, x_scale=None, out_dtype=None):
    """Each group within the bound of float32 addition and one rounding; the same bits twice; zeros behind the last."""
    out_dtype = out_dtype or x.dtype
    arguments = (x, x_scale, codes, scale, factor, offs, out_dtype)
    y = torch.ops.nvfp4.grouped_linear(*arguments)
    assert torch.equal(y, torch.ops.nvfp4.grouped_linear(*arguments)), "not deterministic"
    experts, rows, _ = codes.shape
    assert y.shape == (x.shape[0], rows) and y.dtype == out_dtype
    w = reference.dequantize(codes, scale, None, x.shape[1], torch.float32).double()
    alpha = factor.double().expand(experts, rows) if factor.dim() != 1 else factor.double().view(experts, rows)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        own = x[start:end].double()
        if x_scale is not None:
            own = own * (x_scale[start:end, None] if x_scale.dim() else x_scale).double()
        expected, magnitude = own @ w[expert].T * alpha[expert], own.abs() @ w[expert].abs().T * alpha[expert]
        bound = magnitude * (2.0**-22 * (x.shape[1] ** 0.5 + 4)) + expected.abs() * ROUNDING[out_dtype] + 2.0**-24
        excess = (y[start:end].double() - expected).abs() - bound
        assert not (excess > 0).any(), f"expert {expert}, rows {start} to {end}: {excess.max()} beyond the bound"
        start = end
    assert (y[start:] == 0).all()
    return y


SIZES = {
    "decode": [1, 0, 2, 0, 0, 1, 3, 1],
    "some": [5, 17, 0, 33, 1, 8, 16, 7],
    "empty": [0] * 8,
    "one expert": [0, 0, 0, 300, 0, 0, 0, 0],
    "last": [0, 0, 0, 0, 0, 0, 0, 70],
    "many": [130, 1, 257, 0, 64, 128, 300, 31],
    "very many": [1000, 3, 0, 517, 256, 700, 1, 999],
}


@pytest.mark.parametrize("shape", [(256, 512), (384, 4096), (128, 2304), (200, 272), (77, 50)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_groups(sizes, shape):
    codes, scale = random_experts(len(sizes), *shape)
    for dtype, beyond in ((torch.bfloat16, 0), (torch.bfloat16, 9), (torch.float16, 0), (torch.float16, 9)):
        x = torch.randn(sum(sizes) + beyond, shape[1], device="cuda").to(dtype)
        check(x, codes, scale, factors("expert", len(sizes), shape[0]), group_ends(sizes))


@pytest.mark.parametrize(
    "experts, rows, columns, tokens, sizes",
    [
        (16, 256, 512, 80, [80]),
        (16, 2048, 512, 96, [48, 48]),
        (8, 2048, 1024, 128, [20]),
        (16, 2048, 768, 512, [8]),
        (16, 1536, 2048, 512, [8]),
        (32, 256, 1024, 2048, [0, 3, 1]),
    ],
)
def test_fewer_stages_than_blocks_were_launched_for(experts, rows, columns, tokens, sizes):
    """Few rows of many are used, or few experts: what is left to cut is less than a run for each block."""
    codes, scale = random_experts(experts, rows, columns)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    check(x, codes, scale, factors("expert", experts, rows), group_ends(sizes + [0] * (experts - len(sizes))))


def test_offsets_below_zero_touch_nothing_else():
    codes, scale = random_experts(4, 128, 256)
    x = torch.randn(200, 256, device="cuda").bfloat16()
    given, meant = (torch.tensor([first, 50, 90, 190], dtype=torch.int32, device="cuda") for first in (-40, 0))
    factor = factors("one", 4, 128)
    for rows in (x, x[:20]):  # many rows an expert, and few
        y = [torch.ops.nvfp4.grouped_linear(rows, None, codes, scale, factor, offs, x.dtype) for offs in (given, meant)]
        assert torch.equal(*y)


@pytest.mark.parametrize("kind", ["one", "expert", "row"])
@pytest.mark.parametrize("sizes", [SIZES["some"], SIZES["many"]], ids=["some", "many"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_scales(sizes, kind, out_dtype):
    codes, scale = random_experts(8, 256, 512)
    x = torch.randn(sum(sizes), 512, device="cuda").bfloat16()
    factor = factors(kind, 8, 256)
    for x_scale in (None, torch.tensor(0.3, device="cuda"), torch.rand(len(x), device="cuda")):
        check(x, codes, scale, factor, group_ends(sizes), x_scale, out_dtype)


@pytest.mark.parametrize("experts", [1, 2, 31, 33, 64, 256, 512])
@pytest.mark.parametrize("tokens", [1, 40, 700, 5000])
def test_numbers_of_experts(experts, tokens):
    codes, scale = random_experts(experts, 128, 256)
    sizes = torch.bincount(torch.randint(0, experts, (tokens,)), minlength=experts).tolist()
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    check(x, codes, scale, factors("expert", experts, 128), group_ends(sizes))


@pytest.mark.parametrize("tokens", [8, 1000])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_experts_at_any_address(tokens, offset):
    codes, scale = random_experts(4, 256, 512)
    x, factor = torch.randn(tokens, 512, device="cuda").bfloat16(), factors("expert", 4, 256)
    offs = group_ends([tokens // 4] * 4)
    for first_code, first_scale in ((offset, 0), (0, offset), (offset, offset)):
        moved = zip((x, codes, scale, factor, offs), (offset, first_code, first_scale, offset, offset), strict=True)
        check(*(displaced(t, by, "cuda") for t, by in moved))


def test_scales_of_other_counts_are_refused():
    codes, scale = random_experts(2, 128, 256)
    x, offs = torch.randn(10, 256, device="cuda").bfloat16(), group_ends([4, 6])
    for x_scale, factor, message in (((3,), (), "x_scale must be one"), ((), (5,), "per_tensor_scale must be")):
        given = torch.ones(x_scale, device="cuda"), codes, scale, torch.ones(factor, device="cuda")
        with pytest.raises(RuntimeError, match=message):
            torch.ops.nvfp4.grouped_linear(x, *given, offs, x.dtype)


def test_rows_that_are_not_contiguous():
    codes, scale = random_experts(4, 128, 256)
    x = torch.randn(40, 300, device="cuda").bfloat16()
    for part in (x[:, 20:276], x[:, 8:264], torch.randn(256, 40, device="cuda").bfloat16().t()):
        check(part, codes, scale, factors("expert", 4, 128), group_ends([10, 0, 29, 1]))


@pytest.mark.parametrize("tokens", [8, 100, 400, 1000])
def test_a_replayed_graph_sees_new_offsets(tokens):
    """Those that the kernel before writes: products begin before it is done."""
    codes, scale = random_experts(8, 256, 1024)
    x, factor = torch.randn(tokens, 1024, device="cuda").bfloat16(), factors("expert", 8, 256)
    offs = group_ends([tokens] + [0] * 7)
    given = offs.clone()
    arguments = (x, None, codes, scale, factor, offs, torch.bfloat16)
    torch.ops.nvfp4.grouped_linear(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.bitwise_or(given, given, out=offs)  # by a kernel: nothing begins before a copy's end
        y = torch.ops.nvfp4.grouped_linear(*arguments)
    for _ in range(5):
        ends = torch.randint(0, tokens + 1, (8,), device="cuda", dtype=torch.int32).sort().values
        given.copy_(ends)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(offs, ends) and torch.equal(y, check(*arguments[:1], codes, scale, factor, offs))


def test_not_a_number_stays_in_its_group():
    codes, scale = random_experts(4, 128, 256)
    x = torch.randn(200, 256, device="cuda").bfloat16()
    offs, factor = group_ends([40, 50, 60, 50]), factors("expert", 4, 128)
    clean = torch.ops.nvfp4.grouped_linear(x, None, codes, scale, factor, offs, torch.bfloat16)
    scale.view(torch.uint8)[1] = 0x7F  # expert 1
    x[100, 3] = float("inf")  # a row of expert 2
    x[100, 4] = float("nan")
    y = torch.ops.nvfp4.grouped_linear(x, None, codes, scale, factor, offs, torch.bfloat16)
    clean[40:90] = clean[100] = float("nan")
    assert torch.equal(y.isnan(), clean.isnan()) and torch.equal(y[~y.isnan()], clean[~y.isnan()])


@pytest.mark.parametrize("activation", [None, QuantizeSpec()], ids=["weight only", "w4a4"])
def test_a_mixture_of_experts_in_a_graph(activation):
    w = quantize_experts(torch.randn(4, 256, 512, device="cuda").bfloat16(), activation_spec=activation)
    x, offs = torch.randn(30, 512, device="cuda").bfloat16(), group_ends([3, 20, 0, 7])
    compiled = torch.compile(lambda x, offs: torch._grouped_mm(x, w.mT, offs=offs), fullgraph=True)
    eager = torch._grouped_mm(x, w.mT, offs=offs)
    assert torch.equal(compiled(x, offs), eager)
    graph, y = captured(lambda: torch._grouped_mm(x, w.mT, offs=offs))
    graph.replay()
    assert torch.equal(y, eager)
