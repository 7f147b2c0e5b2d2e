"""Each product's operands have the reference's bits, and the products the right sums."""

import hypothesis.strategies as st
import pytest
import torch
from helpers.count_ops import Ops
from helpers.fp4 import decoded
from helpers.products import ROUNDING, SMALLEST
from helpers.reference_operands import Stored, expected_products, multiplied, wide
from hypothesis import given, settings

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.matmul import scaled_mm
from nvfp4_tensor.numerics import eden
from nvfp4_tensor.training import RECIPES, Recipe, WeightForDx
from nvfp4_tensor.training.linear import function, fused

pytestmark = pytest.mark.slow

STOCHASTIC = QuantizeSpec(round_mode="stochastic")
EDEN = QuantizeSpec(round_mode="eden")
MORE = (
    RECIPES["nvidia"].dense_forward(),
    RECIPES["nvidia"].dense_backward(),
    RECIPES["accurate_eden"].dense_forward(),
    Recipe(name="all stochastic", x=STOCHASTIC, w=STOCHASTIC, dy=STOCHASTIC, w_for_dx=STOCHASTIC, dy_t=STOCHASTIC,
           x_t=STOCHASTIC.replace(scale_rounding="up")),
    Recipe(name="all EDEN", dy=EDEN, w_for_dx=EDEN, dy_t=EDEN, x_t=EDEN),
    Recipe(name="dy alone", dy=STOCHASTIC),
    Recipe(name="dy^T alone", x=QuantizeSpec(), dy_t=STOCHASTIC),
    Recipe(name="x^T alone", x_t=QuantizeSpec()),
    Recipe(name="EDEN with a dense weight", dy=EDEN),
)  # fmt: skip
ALL = [*RECIPES.values(), *MORE]


def by_name(recipe):
    return recipe.name.replace(" ", "_")


def case(m=40, n=48, k=64, dtype=torch.bfloat16, bias=True, device="cpu"):
    generator = torch.Generator().manual_seed(m * 10007 + n * 101 + k)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    x, w = normal(m, k).requires_grad_(), (normal(n, k) / 8).requires_grad_()
    return x, w, normal(n).requires_grad_() if bias else None, normal(m, n)


def rng_of(seed, device="cpu"):
    """The (seed, offset) that the next call draws from torch's generator, which is then as it was."""
    torch.manual_seed(seed)
    state = torch.ops.nvfp4.draw_rng_state(torch.empty(2, dtype=torch.int64, device=device))
    torch.manual_seed(seed)
    return state


def bytes_equal(a, b):
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.fixture
def op_by_op(monkeypatch):
    """Call an op for each operand and each product, as sharded linears and linears on FP4 tensor cores do."""
    monkeypatch.setattr(function, "quantizes_in_product", lambda *arguments: False)
    for name in ("fits", "quantizes_input"):
        monkeypatch.setattr(fused, name, lambda *arguments: False)


@pytest.fixture
def captured(monkeypatch, op_by_op):
    """Arguments of the products, in the order in which they ran."""
    seen = []
    product, across = function.multiply, function.multiply_across_blocks

    def spy(left, right, *rest, **more):
        seen.append((left, right))
        return product(left, right, *rest, **more)

    def spy_across(left, factor, right, *rest):
        seen.append((left if factor is None else (left, factor), right))
        return across(left, factor, right, *rest)

    monkeypatch.setattr(function, "multiply", spy)
    monkeypatch.setattr(function, "multiply_across_blocks", spy_across)
    return seen


def same_operand(got, expected, rng_state=None):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(got, expected)
    elif isinstance(got, tuple) and len(got) == 2:  # decoded for a sum across the blocks of the other
        values, factor = got
        want = expected.values()
        if rng_state is not None:
            want = eden.rotate(want.float(), rng_state, inverse=True).bfloat16()
        assert torch.equal(values.double(), want[:, : values.shape[1]].double())
        assert bytes_equal(factor, expected.per_tensor_scale)
    else:
        assert isinstance(expected, Stored)
        for part, of_reference in zip(got, expected, strict=True):
            assert bytes_equal(part, of_reference)


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_the_operands_of_every_product_have_the_references_bits(recipe, captured):
    x, w, bias, dy = case()
    rng_state = rng_of(7)
    training.linear(x, w, bias, recipe).backward(dy)
    expected = expected_products(x.detach(), w.detach(), dy, recipe, rng_state)
    if recipe.rotates_dy_back and recipe.w_for_dx == WeightForDx.DENSE:
        expected["dgrad"] = None  # of dense operands
    assert len(captured) == len(expected)
    for (left, right), (name, wanted) in zip(captured, expected.items(), strict=True):
        if wanted is None:
            assert left.dtype == dy.dtype and torch.equal(right, w.detach().t())
            continue
        want_left, want_right = wanted
        if isinstance(right, torch.Tensor) and isinstance(want_right, torch.Tensor) and name == "dgrad":
            want_right = want_right.t()
        same_operand(left, want_left, rng_state if name == "dgrad" and recipe.rotates_dy_back else None)
        same_operand(right, want_right)


def results(x, w, bias, dy, recipe):
    """y, dx, dw and db, with the random bits of one seed."""
    torch.manual_seed(5)
    y = training.linear(x, w, bias, recipe)
    return [y.detach(), *torch.autograd.grad(y, [x, w, *([] if bias is None else [bias])], dy)]


def in_one_op_and_op_by_op(request, recipe, *shape, **options):
    x, w, bias, dy = case(*shape, **options)
    in_one = results(x, w, bias, dy, recipe)
    request.getfixturevalue("op_by_op")
    for a, b in zip(in_one, results(x, w, bias, dy, recipe), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", [*ALL, RECIPES["nvidia"].replace(name="w again", keep_w=False)], ids=by_name)
@pytest.mark.parametrize("shape", [(40, 48, 64), (37, 70, 50), (256, 128, 144)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_one_op_has_the_bits_of_an_op_for_each_step(request, recipe, shape, dtype):
    in_one_op_and_op_by_op(request, recipe, *shape, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [*ALL, RECIPES["nvidia"].replace(name="w again", keep_w=False)], ids=by_name)
@pytest.mark.parametrize("shape", [(40, 48, 64), (37, 70, 50), (520, 384, 256), (300, 256, 400)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_op_has_the_bits_of_an_op_for_each_step_on_a_gpu(request, recipe, shape, dtype):
    in_one_op_and_op_by_op(request, recipe, *shape, dtype=dtype, device="cuda")


def assert_product(got, left, right, bias=None):
    """Within the bound of one rounding and of float32 addition in any order."""
    y, magnitude = multiplied(left, right)
    if bias is not None:
        y, magnitude = y + bias.double(), magnitude + bias.double().abs()
    summands = left[0].shape[1]
    bound = magnitude * (2.0**-24 * (summands**0.5 + 4) * 4) + y.abs() * ROUNDING[got.dtype] + SMALLEST[got.dtype]
    excess = (got.detach().double() - y).abs() - bound
    assert not (excess > 0).any(), f"{int((excess > 0).sum())} of {y.numel()} beyond the bound, by {excess.max():.3g}"


def check_products(x, w, bias, dy, recipe, seed=3):
    """y, dx, dw and db of one call against float64 products of the reference's operands, on the CPU."""
    rng_state = rng_of(seed, x.device).cpu()
    y = training.linear(x, w, bias, recipe)
    y.backward(dy)
    dx, dw, db = (None if t is None else t.grad.cpu() for t in (x, w, bias))
    y, x, w, bias, dy = (None if t is None else t.detach().cpu() for t in (y, x, w, bias, dy))
    products = expected_products(x, w, dy, recipe, rng_state)
    n, k = w.shape
    assert_product(y, *(wide(t) for t in products["fprop"]), bias)
    left, right = products["dgrad"]
    if isinstance(recipe.w_for_dx, QuantizeSpec):
        assert_product(dx, wide(left), wide(right))
    else:
        values, factor = wide(left)
        if recipe.rotates_dy_back:
            values = eden.rotate(values.float(), rng_state, inverse=True)
            if recipe.w_for_dx == WeightForDx.DENSE:
                values, factor = (values * factor.float()).to(w.dtype), 1.0
            values = values.to(w.dtype if factor == 1.0 else torch.bfloat16).double()
        of_w, w_factor = wide(right, k)
        assert_product(dx, (values[:, :n], factor), (of_w.t(), w_factor))
    assert_product(dw, *(wide(t) for t in products["wgrad"]))
    if bias is not None:
        assert_product(db, (torch.ones(1, len(dy), dtype=torch.float64), 1.0), (dy.double().t(), 1.0))


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_right(recipe, dtype):
    check_products(*case(dtype=dtype), recipe)


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_products_of_odd_sizes_are_right(recipe):
    check_products(*case(37, 70, 50), recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_products_are_right_on_a_gpu(recipe):
    check_products(*case(200, 272, 144, device="cuda"), recipe)


SIZE = st.integers(1, 70)


@settings(max_examples=30, deadline=None)
@given(m=SIZE, n=SIZE, k=SIZE, name=st.sampled_from(sorted(RECIPES)), bias=st.booleans())
def test_sizes_of_any_kind(m, n, k, name, bias):
    check_products(*case(m, n, k, torch.float32, bias), RECIPES[name])


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_inputs_of_any_rank(shape):
    x, w, bias, _ = case()
    x = torch.randn(shape, requires_grad=True)
    y = training.linear(x, w.float().detach().requires_grad_(), bias.float(), "nvidia")
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad.shape == shape
    rows = training.linear(x.reshape(-1, 64), w.float(), bias.float(), "nvidia")
    assert torch.equal(y.reshape(-1, 48), rows)


def test_gradients_that_are_views_or_expanded():
    x, w, _, _ = case(dtype=torch.float32)
    results = []
    for strided in (False, True):
        torch.manual_seed(0)
        a = x.detach().t().contiguous().t() if strided else x.detach().clone()
        a.requires_grad_()
        y = training.linear(a, w, None, "nvidia")
        y.backward(torch.ones(()).expand_as(y) if strided else torch.ones_like(y))
        results.append((y, a.grad))
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_without_a_backward_only_the_forward_is_quantized():
    x, w, bias, _ = case()
    for trained in (True, False):  # a checkpoint's first run draws without a gradient, as its second does with one
        x, w, bias = (t.requires_grad_(trained) for t in (x, w, bias))
        with torch.no_grad(), Ops() as ops:
            training.linear(x, w, bias, "nvidia")
        assert (ops.pairs, ops["quantize_activation"], ops.weights, ops["draw_rng_state"]) == (0, 1, 1, trained)


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_needed_gradients_are_computed(frozen):
    x, w, _, dy = case()
    x, w = (x.detach(), w) if frozen == "x" else (x, w.detach())
    with Ops() as ops:
        training.linear(x, w, None, "nvidia").backward(dy)
    assert ops.products == 2
    # with x frozen x^T is needed and dy^T alone; with the weight frozen neither
    assert ops.pairs == (1 if frozen == "x" else 0)
    assert (x.grad is None) == (frozen == "x") and (w.grad is None) == (frozen == "weight")


def test_freezing_one_tensor_does_not_change_the_other_gradient():
    x, w, _, dy = case()
    torch.manual_seed(5)
    training.linear(x, w, None, "nvidia").backward(dy)
    gradients = x.grad, w.grad
    for keep, leave, expected in ((x, w, gradients[0]), (w, x, gradients[1])):
        keep.grad = None
        torch.manual_seed(5)
        arguments = (keep, leave.detach()) if keep is x else (leave.detach(), keep)
        training.linear(*arguments, None, "nvidia").backward(dy)
        assert torch.equal(keep.grad, expected)


def saved_bytes(recipe, x, w, bias):
    sizes = {}

    def count(t):
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        training.linear(x, w, bias, recipe)
    return sizes


READ_CODES = ["nvidia", "nvidia_4over6", "unbiased", "accurate", "accurate_eden"]


@pytest.mark.parametrize("name", READ_CODES)
def test_tensors_saved_for_backward_are_nvfp4(name):
    x, w, bias, _ = case(256, 384, 256)
    dense = 2 * (x.numel() + w.numel())
    assert sum(saved_bytes(name, x, w, bias).values()) <= 0.30 * dense


@pytest.mark.parametrize("name", READ_CODES)
def test_a_weight_quantized_again_saves_its_codes(name):
    x, w, bias, _ = case(256, 384, 256)
    sizes = saved_bytes(training.RECIPES[name].replace(keep_w=False), x, w, bias)
    assert sizes.pop(w.untyped_storage().data_ptr()) == w.nbytes  # the parameter, which lives anyway
    assert sum(sizes.values()) <= 0.30 * 2 * x.numel()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", [*READ_CODES, "forward_only", "weight_only", "stochastic w"])
def test_a_weight_quantized_again_has_the_same_bits(name, compiled):
    if name == "stochastic w":
        nvidia = training.RECIPES["nvidia"]
        kept = nvidia.replace(w=nvidia.w.replace(round_mode="stochastic"))
    else:
        kept = training.RECIPES[name]
    x, w, _, dy = case()
    expected = ()
    for recipe in (kept, kept.replace(keep_w=False)):

        def call(x, w, recipe=recipe):
            return training.linear(x, w, None, recipe, rng_state=torch.tensor([3, 4]))

        y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(x, w)
        results = y.detach(), *torch.autograd.grad(y, (x, w), dy)
        expected = expected or results
        assert all(map(torch.equal, results, expected))


def test_a_compiled_graph_does_not_save_the_codes_either():
    """Its partitioner folds equal calls of an op, and would keep the result of the forward's."""
    x, w, _, dy = case(256, 384, 256)
    sizes = {}
    for keep_w in (True, False):
        recipe, saved = training.RECIPES["nvidia"].replace(keep_w=keep_w), []

        def count(t, saved=saved):
            saved.append(t)
            return t

        call = torch.compile(
            lambda x, w, recipe=recipe: training.linear(x, w, None, recipe),
            fullgraph=True,
            backend="aot_eager_decomp_partition",
        )
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            call(x, w).backward(dy)
        sizes[keep_w] = sum(t.nbytes for t in saved if t.data_ptr() != w.data_ptr())
    assert sizes[True] - sizes[False] >= w.numel() // 2
    assert sizes[False] <= 0.30 * 2 * x.numel()


def test_a_weight_changed_before_its_backward_raises():
    x, w, _, dy = case()
    y = training.linear(x, w, None, training.RECIPES["nvidia"].replace(keep_w=False))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_a_second_derivative_raises():
    x, w, _, _ = case()
    y = training.linear(x, w).square().sum()
    with pytest.raises(RuntimeError, match=r'no second derivative.*set_recipe\(model, forward="bf16"'):
        torch.autograd.grad(y, x, create_graph=True)


# --- Blackwell -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(128, 256, 192), (37, 70, 50), (40, 48, 33)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name, products", [("nvidia", 3), ("unbiased", 3), ("nvidia_4over6", 3), ("accurate", 2), ("accurate_eden", 2)]
)
def test_codes_go_to_scaled_mm_on_blackwell(size, dtype, name, products, blackwell, monkeypatch):
    """torch's meta function checks dtypes, strides, sizes of scales and alignments of each call."""
    calls = []
    scaled = scaled_mm.scaled_mm
    monkeypatch.setattr(scaled_mm, "scaled_mm", lambda *args, **more: calls.append(args) or scaled(*args, **more))
    m, n, k = size
    x, w = (torch.empty(s, device="meta", dtype=dtype, requires_grad=True) for s in ((m, k), (n, k)))
    y = training.linear(x, w, None, name)
    y.backward(torch.empty_like(y))
    assert len(calls) == products
    assert (y.shape, x.grad.shape, w.grad.shape) == ((m, n), x.shape, w.shape)


@pytest.mark.parametrize("size", [(128, 256, 192), (37, 70, 50)])
@pytest.mark.parametrize("name", ["nvidia", "nvidia_4over6"])
def test_the_arguments_on_blackwell_decode_to_the_same_products(size, name, blackwell, monkeypatch):
    """What scaled_mm is given, multiplied by the formulas of its layout."""

    def by_formula(a, b, scale_a, _, scale_b, *rest, bias=None, output_dtype):
        y = decoded(a, scale_a[0]) @ decoded(b.t(), scale_b[0]).t() * scale_a[1].double() * scale_b[1].double()
        return (y if bias is None else y + bias.double()).to(output_dtype)

    monkeypatch.setattr(scaled_mm, "scaled_mm", by_formula)
    check_products(*case(*size), RECIPES[name])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, kind, message",
    [
        (torch.ones(2, 16, dtype=torch.int64), TypeError, "not an input of torch.int64: cast it first"),
        (torch.ones(2, 16, dtype=torch.float64), TypeError, "not an input of torch.float64"),
        (torch.ones(2, 17), ValueError, r"input \(\.\.\., 16\), got \(2, 17\)"),
        (torch.ones(()), ValueError, r"got \(\)"),
        (torch.ones(2, 16).bfloat16(), TypeError, "cast one of them, or use torch.autocast"),
    ],
)
def test_invalid_inputs_raise(x, kind, message):
    with pytest.raises(kind, match=message):
        training.linear(x, torch.ones(8, 16))


def test_a_weight_of_another_dtype_raises_under_autocast():
    weight, dy_alone = torch.ones(8, 16).double(), training.Recipe(dy=QuantizeSpec(round_mode="stochastic"))
    for recipe in ("nvidia", dy_alone):
        bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
        with bf16, pytest.raises(TypeError, match="not a weight of torch\\.float64"):
            training.linear(torch.ones(2, 16), weight, recipe=recipe)


def test_unknown_recipes():
    with pytest.raises(ValueError, match="unknown recipe 'nvda': use a Recipe or one of 'nvidia'"):
        training.linear(torch.ones(2, 16), torch.ones(8, 16), recipe="nvda")
    with pytest.raises(TypeError, match="recipe is a Recipe or the name of one"):
        training.linear(torch.ones(2, 16), torch.ones(8, 16), recipe=3)


def test_dgrad_multiplies_by_weight_for_dx():
    """EXACT multiplies by the very values of fprop, CODES too; DENSE by the weight."""
    x, w, _, dy = case(dtype=torch.float32)
    plain = Recipe(w=QuantizeSpec(block_rows=16), w_for_dx=WeightForDx.CODES)
    gradients = []
    for how in WeightForDx:
        x.grad = None
        training.linear(x, w, None, plain.replace(w_for_dx=how)).backward(dy)
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[2], dy @ w.detach())
