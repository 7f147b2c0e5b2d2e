"""Test all blocks of a Llama as one op: which models it takes, and its values against the step op by op."""

import pytest
import torch

pytest.importorskip("transformers")
from helpers.tiny_models import tiny_model

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.generation.families import FAMILIES, describe
from nvfp4_tensor.generation.fused_layers import FusedLayers, fits
from nvfp4_tensor.generation.token_step import TokenStep
from nvfp4_tensor.ops.composite import decode_layers

FUSED = {
    "Llama": {"attention_bias": False, "mlp_bias": False}, "Mistral": {"sliding_window": None},
    "Qwen2": {"use_sliding_window": False}, "Qwen3": {},
}  # fmt: skip
"""Families, and what their tiny models do without."""


def step_arguments(model, length, position):
    """Return position, rotations and filled caches for one token of a described model."""
    generator = torch.Generator().manual_seed(position)
    shapes = [(1, block.attention.kv_heads, length, block.attention.head_dim) for block in model.blocks]
    caches = [[torch.randn(shape, generator=generator).bfloat16() for shape in shapes] for _ in range(2)]
    at = torch.tensor([position])
    rotations = [tuple(t[0] for t in each.cos_sin(caches[0][0], at[None])) for each in model.rotaries]
    return at, rotations, *caches


@pytest.mark.parametrize("family", [family.name for family in FAMILIES.values()])
def test_which_models_are_one_kernel(family):
    assert fits(describe(tiny_model(family, **FUSED.get(family, {})))) == (family in FUSED)


@pytest.mark.parametrize("changes", [
    {"hidden_act": "gelu_pytorch_tanh"}, {"mlp_bias": True}, {"rms_norm_eps": None}, {"dense": True},
], ids=str)  # fmt: skip
def test_variants_that_are_not(changes):
    tiny = tiny_model("Llama", **FUSED["Llama"] | {k: v for k, v in changes.items() if k in ("hidden_act", "mlp_bias")})
    if "rms_norm_eps" in changes:
        tiny.model.layers[1].input_layernorm.variance_epsilon = 0.25
    if "dense" in changes:
        linear = tiny.model.layers[0].mlp.up_proj
        linear.weight = torch.nn.Parameter(linear.weight.dequantize(), requires_grad=False)
    assert not fits(describe(tiny))


@torch.no_grad()
@pytest.mark.parametrize("position", [0, 7, 31])
@pytest.mark.parametrize("family", FUSED)
def test_values_are_those_of_the_step(family, position):
    model = describe(tiny_model(family, **FUSED[family]))
    step, token = TokenStep(model), torch.tensor([5])
    at, rotations, keys, values = step_arguments(model, 32, position)
    own_keys, own_values = ([each.clone() for each in caches] for caches in (keys, values))
    expected = step(token, at, rotations, keys, values)
    fused = FusedLayers(model, own_keys, own_values)
    assert FusedLayers.of(model, own_keys, own_values) is None  # no kernel on a CPU
    got = step(token, at, rotations, own_keys, own_values, fused)
    assert (got.float() - expected.float()).norm() < 0.01 * expected.float().norm()
    for mine, its in zip((*own_keys, *own_values), (*keys, *values), strict=True):
        assert (mine.float() - its.float()).norm() < 0.002 * its.float().norm()


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
    )


def neighbours(x, count):
    """Yield copies of x (1, columns), each with another element moved by one last bit."""
    for column in range(0, x.shape[1], x.shape[1] // count):
        moved = x.clone()
        moved.view(torch.int16)[0, column] += 1
        yield moved


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("sizes", "options", "positions"), [
    ((1, 512, 4, 2, 128, 1024, 256), {}, [0, 5, 100, 255]),
    ((2, 1024, 8, 2, 64, 2816, 2048), {"biases": True, "head_norms": True}, [0, 1000, 2047]),
    ((3, 896, 14, 2, 64, 4864, 512), {"biases": True}, [63, 64, 300]),
    ((3, 2048, 32, 8, 64, 8192, 512), {}, [63, 128, 511]),
    ((2, 4096, 32, 8, 128, 14336, 1024), {}, [0, 17, 640, 1023]),
    ((2, 5120, 40, 8, 128, 17408, 4096), {"head_norms": True}, [3, 4095]),
    ((2, 3072, 24, 8, 128, 8192, 8192), {}, [31, 32, 33, 8191]),
], ids=str)  # fmt: skip
def test_the_kernel(sizes, options, positions):
    """Against the op in plain torch: equal, until a sum in attention rounds to another last bit, which spreads through
    the layers. So the kernel may be as far from plain torch as plain torch is from itself where one element of x has
    another last bit. Launched again, in a stream of launches, it gives the same bits."""
    torch.manual_seed(0)
    layers = random_layers(*sizes, **options)
    columns, dim, (keys, values) = sizes[1], sizes[4], layers[-2:]
    plan = torch.ops.nvfp4.decode_layers_plan(layers[0][0], *layers)
    if not plan.numel():
        pytest.skip("no such kernel for this GPU")
    for position in positions:
        x = torch.randn(1, columns, device="cuda").bfloat16()
        angles = position * 10000.0 ** (-torch.arange(0, dim, 2, device="cuda") / dim)
        cos, sin = (f(torch.cat((angles, angles))).bfloat16() for f in (torch.cos, torch.sin))
        last = (cos, sin, torch.tensor([position], device="cuda"), 1e-5, dim**-0.5)

        def in_torch(x, plan=plan, last=last):
            own = [each.clone() for each in keys], [each.clone() for each in values]
            return decode_layers(x, plan, *layers[:-2], *own, *last).float(), own

        expected, own = in_torch(x)
        apart = max((in_torch(moved)[0] - expected).norm() for moved in neighbours(x, 8))
        got = [torch.ops.nvfp4.decode_layers(x, plan, *layers, *last) for _ in range(20)]
        assert (got[0].float() - expected).norm() <= apart
        assert apart < 0.02 * sizes[0] * expected.norm()
        assert all(torch.equal(each, got[0]) for each in got)
        for mine, its in zip((*keys, *values), (*own[0], *own[1]), strict=True):
            assert (mine.float() - its.float()).norm() < 1e-3 * its.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 576, 9, 3, 64, 1536, 64), (1, 512, 4, 2, 96, 1024, 64)], ids=str)
def test_sizes_without_a_kernel(sizes):
    """Rows that are no multiple of 128, and other head dimensions: no plan, and an error instead of a wrong number."""
    layers = random_layers(*sizes)
    plan = torch.ops.nvfp4.decode_layers_plan(layers[0][0], *layers)
    assert plan.numel() == 0
    x, cos = layers[0][0][None], torch.ones(sizes[4], device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="does not take this model"):
        torch.ops.nvfp4.decode_layers(
            x, plan, *layers, cos, cos, torch.zeros(1, dtype=torch.int64, device="cuda"), 1e-5, 0.1
        )
