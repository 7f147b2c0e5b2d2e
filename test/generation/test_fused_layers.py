"""Test all blocks of a Llama as one op: which models it takes, and its values against the step op by op."""

import pytest
import torch

pytest.importorskip("transformers")
from helpers.tiny_models import tiny_model

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.generation import nvfp4_cache
from nvfp4_tensor.generation.cache_argument import cache_argument
from nvfp4_tensor.generation.families import FAMILIES, describe
from nvfp4_tensor.generation.fixed_cache import buffers_of
from nvfp4_tensor.generation.fused_layers import FusedLayers, fits
from nvfp4_tensor.generation.ring import DenseBuffers
from nvfp4_tensor.generation.token_step import TokenStep
from nvfp4_tensor.numerics.spec import QuantizeSpec, ScaleSearch
from nvfp4_tensor.ops.schemas import plain

CACHE_SPEC = QuantizeSpec(scale_search=ScaleSearch.MSE)

FUSED = {
    "Llama": {"attention_bias": False, "mlp_bias": False}, "Mistral": {"sliding_window": None},
    "Qwen2": {"use_sliding_window": False}, "Qwen3": {},
}  # fmt: skip
"""Families, and what their tiny models do without."""


def set_eps(tiny):
    tiny.model.layers[1].input_layernorm.variance_epsilon = 0.25


def make_dense(tiny):
    linear = tiny.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.dequantize(), requires_grad=False)


def test_which_models_are_one_kernel():
    for family in FAMILIES.values():
        assert fits(describe(tiny_model(family.name, **FUSED.get(family.name, {})))) == (family.name in FUSED)
    for changes, change in (
        ({"hidden_act": "gelu_pytorch_tanh"}, None), ({"mlp_bias": True}, None), ({}, set_eps), ({}, make_dense),
    ):  # fmt: skip
        tiny = tiny_model("Llama", **FUSED["Llama"] | changes)
        if change is not None:
            change(tiny)
        assert not fits(describe(tiny))


@torch.no_grad()
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_values_are_those_of_the_step(family, has_codes):
    tiny = tiny_model(family, **FUSED[family])
    model, tokens = describe(tiny), 40
    if has_codes:
        cache = nvfp4_cache(tiny.config, recent=4, sink=1, max_tokens=64)
        tiny(torch.arange(tokens)[None] % 50, **{cache_argument(tiny): cache})
        buffers = buffers_of(cache)
        written = [t for each in buffers for t in (*each.coded, *each.dense)]
    else:
        shapes = [(1, block.kinds["kv_heads"], tokens + 1, block.kinds["dim"]) for block in model.blocks]
        buffers = [DenseBuffers(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for shape in shapes]
        written = [t for each in buffers for t in each]
    at, place = torch.tensor([[tokens]]), buffers[0].place_of(torch.tensor([tokens]), None)
    rotations = [tuple(t[0] for t in each.cos_sin(model.norm.weight, at)) for each in model.rotaries]
    step, token, before = TokenStep(model), torch.tensor([5]), [t.clone() for t in written]
    expected = step(token, place, rotations, buffers)
    after = [t.clone() for t in written]
    for t, old in zip(written, before, strict=True):
        t.copy_(old)
    assert FusedLayers.of(model, buffers) is None  # no kernel on a CPU
    got = step(token, place, rotations, buffers, FusedLayers(model, buffers))
    assert (got.float() - expected.float()).norm() < 0.01 * expected.float().norm()
    for i, (mine, its) in enumerate(zip(written, after, strict=True)):
        if mine.dtype != torch.uint8:
            assert (mine.float() - its.float()).norm() < 0.002 * its.float().norm()
        elif i < 6:  # the first layer's are of tokens that both have
            assert torch.equal(mine, its)


def random_layers(layers, columns, heads, kv_heads, dim, inner, length, biases=False, head_norms=False):
    """Return the weights and caches of ``nvfp4::decode_layers`` on the GPU, in the order of its arguments."""

    def uniform(*shape):
        return (torch.rand(shape, device="cuda") + 0.5).bfloat16()

    shapes = [(heads * dim, columns), *2 * [(kv_heads * dim, columns)], (columns, heads * dim)]
    shapes += [(inner, columns), (inner, columns), (columns, inner)]
    weights = [
        NVFP4Tensor.to_nvfp4(torch.randn(shape, device="cuda").bfloat16() / shape[1] ** 0.5)
        for _ in range(layers) for shape in shapes
    ]  # fmt: skip
    caches = [
        [torch.randn(1, kv_heads, length, dim, device="cuda").bfloat16() for _ in range(layers)] for _ in range(2)
    ]
    return (
        [uniform(columns) for _ in range(2 * layers + 1)],
        *([getattr(each, name) for each in weights] for name in ("qdata", "scale", "per_tensor_scale")),
        [uniform(n) - 1 for _ in range(layers) for n, _ in shapes[:3]] if biases else [],
        [uniform(dim) for _ in range(2 * layers)] if head_norms else [],
        *caches,
    )  # fmt: skip


def neighbours(x, count):
    """Yield copies of x (1, columns), each with another element moved by one last bit."""
    for column in range(0, x.shape[1], x.shape[1] // count):
        moved = x.clone()
        moved.view(torch.int16)[0, column] += 1
        yield moved


def compare(layers, codes, dense, plan, position, how):
    """Compare a kernel with the op in plain torch: its result, and what it writes.

    They are equal, until a sum in attention rounds to another last bit, which spreads through the layers. So the kernel
    may be as far from plain torch as plain torch is from itself where one element of x has another last bit, also in
    keys and values of later layers. Launched again, in a stream of launches, it gives the same bits.
    """
    columns, dim, count = layers[0][0].numel(), layers[-1][0].shape[-1], len(layers[-1])
    x = torch.randn(1, columns, device="cuda").bfloat16()
    angles = position * 10000.0 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
    cos, sin = (f(torch.cat((angles, angles))).bfloat16() for f in (torch.cos, torch.sin))
    last = (cos, sin, torch.tensor([position], device="cuda"), 1e-5, dim**-0.5, *how)
    caches = *layers[-2:], codes

    def in_torch(x):
        own = [[t.clone() for t in each] for each in caches]
        return plain.decode_layers(x, plan, *layers[:-2], *own, dense, *last).float(), own

    expected, own = in_torch(x)
    moved = [in_torch(each) for each in neighbours(x, 8)]
    apart = max((each - expected).norm() for each, _ in moved)
    got = [torch.ops.nvfp4.decode_layers(x, plan, *layers, codes, dense, *last) for _ in range(20)]
    assert (got[0].float() - expected).norm() <= apart
    assert apart < 0.02 * count * expected.norm()
    assert all(torch.equal(each, got[0]) for each in got)
    written = [[*each[0], *each[1]] for each in (caches, own, *(each for _, each in moved))]
    for mine, its, *others in zip(*written, strict=True):
        apart = max((each.float() - its.float()).norm() for each in others)
        assert (mine.float() - its.float()).norm() <= max(apart, 1e-3 * its.float().norm())
    for mine, its in zip(codes, own[2], strict=True):  # of tokens that both have
        assert torch.equal(mine, its)


def random_codes(layers, kv_heads, dim, capacity, front):
    """Return the arguments ``codes`` and ``front`` of ``nvfp4::decode_layers``, full of random tokens."""
    codes = []
    for _ in range(layers):
        parts = [
            torch.empty((1, kv_heads, capacity, *last), dtype=torch.uint8, device="cuda")
            for last in 2 * [(dim // 2,), (dim // 16,), ()]
        ]
        tokens = [torch.randn(1, kv_heads, capacity, dim, device="cuda").bfloat16() for _ in range(2)]
        start = torch.zeros(1, dtype=torch.int64, device="cuda")
        torch.ops.nvfp4.append_codes(*tokens, CACHE_SPEC.pack(), *parts, start, True)
        codes += parts
    dense = [torch.randn(1, kv_heads, front, dim, device="cuda").bfloat16() for _ in range(2 * layers)] if front else []
    return codes, dense


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("sizes", "options", "codes", "counts"), [
    ((1, 512, 4, 2, 128, 1024, 256), {}, None, [0, 5, 100, 255]),
    ((2, 1024, 8, 2, 64, 2816, 2048), {"biases": True, "head_norms": True}, None, [0, 1000, 2047]),
    ((3, 896, 14, 2, 64, 4864, 512), {"biases": True}, None, [63, 64, 300]),
    ((3, 2048, 32, 8, 64, 8192, 512), {}, None, [63, 128, 511]),
    ((2, 4096, 32, 8, 128, 14336, 1024), {}, None, [0, 17, 640, 1023]),
    ((2, 5120, 40, 8, 128, 17408, 4096), {"head_norms": True}, None, [3, 4095]),
    ((2, 5120, 32, 8, 128, 14336, 1024), {}, None, [0, 17, 1023]),  # o's columns are a warp's own, those of q, k, v not
    ((2, 3072, 24, 8, 128, 8192, 8192), {}, None, [31, 32, 33, 8191]),
    ((1, 512, 4, 2, 128, 1024, 65), {}, (128, 0, True), [0, 1, 15, 16, 17, 127]),
    ((2, 1024, 8, 2, 64, 2816, 33), {"biases": True, "head_norms": True}, (1024, 4, False), [0, 16, 999, 1023]),
    ((2, 896, 14, 2, 64, 4864, 2), {"biases": True}, (512, 1, True), [63, 64, 300]),
    ((2, 2048, 32, 8, 64, 8192, 65), {}, (16384, 4, False), [31, 32, 500, 16000]),
    ((2, 4096, 32, 8, 128, 14336, 65), {}, (33024, 4, True), [0, 17, 640, 7679, 7681, 32768]),
    ((2, 5120, 32, 8, 128, 14336, 65), {}, (1024, 0, True), [0, 17, 1000]),
    ((1, 512, 4, 2, 128, 1024, 253), {}, (8192, 3, False), [0, 4000, 8191]),
    ((2, 2048, 32, 32, 64, 4096, 129), {"head_norms": True}, (4096, 0, True), [3, 4000]),
    ((2, 2048, 8, 1, 128, 4096, 65), {}, (8192, 4, True), [100, 8000]),
], ids=str)  # fmt: skip
def test_the_kernel(sizes, options, codes, counts):
    """At these positions, or after so many codes (room, front, whether rotated), behind which nothing is read."""
    torch.manual_seed(0)
    room, front, rotated = codes or (0, 0, False)
    layers, ring = random_layers(*sizes, **options), sizes[6]
    codes, dense = random_codes(sizes[0], sizes[3], sizes[4], room, front) if room else ([], [])
    plan = torch.ops.nvfp4.decode_layers_plan(layers[0][0], *layers, codes, dense)
    if not plan.numel():
        pytest.skip("no such kernel for this GPU")
    for count in counts:
        behind = [t[:, :, count + 1 :] for t in codes]
        kept = [t.clone() for t in behind]
        for i, t in enumerate(behind):
            t.fill_(0x7F if i % 3 == 1 else 0xFF)  # NaN for scales
        how = (CACHE_SPEC.pack(), rotated) if room else (0, False)
        compare(layers, codes, dense, plan, count + ring - 1 if room else count, how)
        for t, old in zip(behind, kept, strict=True):
            t.copy_(old)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 576, 9, 3, 64, 1536, 64), (1, 512, 4, 2, 96, 1024, 64)], ids=str)
def test_sizes_without_a_kernel(sizes):
    """Rows that are no multiple of 128, and other head dimensions: no plan, and an error instead of a wrong number."""
    layers = random_layers(*sizes)
    plan = torch.ops.nvfp4.decode_layers_plan(layers[0][0], *layers, [], [])
    assert plan.numel() == 0
    x, cos = layers[0][0][None], torch.ones(sizes[4], device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="does not take this model"):
        torch.ops.nvfp4.decode_layers(
            x, plan, *layers, [], [], cos, cos, torch.zeros(1, dtype=torch.int64, device="cuda"), 1e-5, 0.1, 0, False
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("ring", "front", "capacity"), [(254, 3, 1024), (65, 192, 1024), (65, 0, 98432)])
def test_caches_of_codes_without_a_kernel(ring, front, capacity):
    """Where one block would attend to too many dense tokens, or all to too many codes."""
    layers = random_layers(1, 512, 4, 2, 128, 1024, ring)
    codes, dense = random_codes(1, 2, 128, capacity, front)
    assert torch.ops.nvfp4.decode_layers_plan(layers[0][0], *layers, codes, dense).numel() == 0
