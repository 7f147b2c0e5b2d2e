"""A step of training.linear: operands with the reference's bits, products with the right sums, and nothing more."""

import functools

import pytest
import torch
from helpers.count_ops import Ops
from helpers.fp4 import decoded
from helpers.product_operands import ProductOperands
from helpers.products import ROUNDING, SMALLEST
from helpers.recipes import MORE
from helpers.reference_operands import expected_products, multiplied, wide
from helpers.refusals import refuses
from torchao.quantization import quantize_

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.matmul import scaled_mm
from nvfp4_tensor.numerics import eden
from nvfp4_tensor.training import RECIPES, WeightForDx

pytestmark = pytest.mark.slow

ALL = RECIPES | MORE


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


def results(x, w, bias, dy, recipe, seed=5):
    """y, dx, dw and db, with the random bits of one seed."""
    torch.manual_seed(seed)
    y = training.linear(x, w, bias, recipe)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, w, bias) if t is not None], dy)]


def check_operands(found, products, recipe, n, rng_state):
    """Compare with the reference's operands, bit for bit, where at least one of the two is quantized."""
    expected = []
    for name, (left, right) in products.items():
        dense_left, dense_right = (isinstance(operand, torch.Tensor) for operand in (left, right))
        (of_left, factor), (of_right, factor_right) = wide(left), wide(right)
        if name == "dgrad" and not isinstance(recipe.w_for_dx, QuantizeSpec):
            of_right = of_right.t()
            if recipe.rotates_dy_back:
                of_left = eden.rotate(of_left.float(), rng_state, inverse=True)[:, :n].bfloat16().double()
                dense_left = dense_right
        if dense_right and not dense_left:  # the op reads codes on the right
            expected.append(((of_right, 1.0), (of_left, factor)))
        elif not dense_right:
            expected.append(((of_left, factor), (of_right, factor_right)))
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        for (values, factor), (right_values, right_factor) in zip(got, wanted, strict=True):
            values, (rows, columns) = values.cpu(), right_values.shape
            common = values[:rows, :columns], right_values[: values.shape[0], : values.shape[1]]
            assert torch.equal(*common) and values.count_nonzero() == common[0].count_nonzero()
            assert torch.equal(torch.as_tensor(factor).cpu().double(), torch.as_tensor(right_factor).double())


def assert_product(got, left, right, bias=None):
    """Within the bound of one rounding and of float32 addition in any order."""
    y, magnitude = multiplied(left, right)
    if bias is not None:
        y, magnitude = y + bias.double(), magnitude + bias.double().abs()
    summands = left[0].shape[1]
    bound = magnitude * (2.0**-24 * (summands**0.5 + 4) * 4) + y.abs() * ROUNDING[got.dtype] + SMALLEST[got.dtype]
    excess = (got.detach().double() - y).abs() - bound
    assert not (excess > 0).any(), f"{int((excess > 0).sum())} of {y.numel()} beyond the bound, by {excess.max():.3g}"


def check_products(got, x, w, bias, dy, recipe, rng_state):
    """y, dx, dw and db of one step against float64 products of the reference's operands; all on the CPU."""
    y, dx, dw, *db = got
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
            values = values.to(w.dtype if isinstance(factor, float) else torch.bfloat16).double()
        of_w, w_factor = wide(right, k)
        assert_product(dx, (values[:, :n], factor), (of_w.t(), w_factor))
    assert_product(dw, *(wide(t) for t in products["wgrad"]))
    if db:
        assert_product(db[0], (torch.ones(1, len(dy), dtype=torch.float64), 1.0), (dy.double().t(), 1.0))
    return products


def check_step(x, w, bias, dy, recipe):
    """The step has the bits of the composite, op by op; the operands those of the reference; the products its sums."""
    rng_state = rng_of(5, x.device).cpu()
    got = results(x, w, bias, dy, recipe)
    with ProductOperands() as products:
        assert all(map(torch.equal, got, results(x, w, bias, dy, recipe)))
    got, (x, w, bias, dy) = [t.cpu() for t in got], (None if t is None else t.detach().cpu() for t in (x, w, bias, dy))
    expected = check_products(got, x, w, bias, dy, recipe, rng_state)
    check_operands(products.found, expected, recipe, len(w), rng_state)


SHAPES = [(5, 1, 17), (37, 70, 50), (300, 256, 400)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", ALL)
def test_a_step_has_the_references_operands_and_products(name, which, device):
    i = list(ALL).index(name) + which  # each recipe with each dtype and with each shape, not with each pair
    check_step(*case(*SHAPES[which], DTYPES[i % 3], bias=i % 2 == 0, device=device), ALL[name])


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (2, 3, 4, 64)])
def test_inputs_of_any_rank(shape):
    _, w, bias, _ = case(dtype=torch.float32)
    x = torch.randn(shape, requires_grad=True)
    y = training.linear(x, w, bias, "nvidia")
    assert y.shape == (*shape[:-1], 48)
    y.sum().backward()
    assert x.grad.shape == shape
    assert torch.equal(y.reshape(-1, 48), training.linear(x.reshape(-1, 64), w, bias, "nvidia"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert training.linear(x, w, bias).dtype == torch.bfloat16


def test_gradients_that_are_views_or_expanded():
    x, w, _, _ = case(dtype=torch.float32)
    outcomes = []
    for strided in (False, True):
        a = x.detach().t().contiguous().t() if strided else x.detach().clone()
        dy = torch.ones(()).expand(40, 48) if strided else torch.ones(40, 48)
        outcomes.append(results(a.requires_grad_(), w, None, dy, "nvidia"))
    assert all(map(torch.equal, *outcomes))


# --- what is asked for -----------------------------------------------------------------------------------------------


def test_without_a_backward_only_the_forward_is_quantized():
    x, w, bias, _ = case()
    for trained in (True, False):  # a checkpoint's first run draws without a gradient, as its second does with one
        x, w, bias = (t.requires_grad_(trained) for t in (x, w, bias))
        with torch.no_grad(), Ops() as ops:
            training.linear(x, w, bias, "nvidia")
        assert (ops.pairs, ops["quantize_activation"], ops.weights, ops["draw_rng_state"]) == (0, 1, 1, trained)


@pytest.mark.parametrize("recipe", ["nvidia", "accurate_eden"])
@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_only_needed_gradients_are_computed_and_do_not_depend_on_others(frozen, recipe):
    x, w, _, dy = case()
    _, *gradients = results(x, w, None, dy, recipe)
    x, w = (x.detach(), w) if frozen == "x" else (x, w.detach())
    torch.manual_seed(5)
    with Ops() as ops:
        training.linear(x, w, None, recipe).backward(dy)
    assert ops.products == 2 and ops.pairs == (frozen == "x")  # of x^T alone no more than of the pair
    assert (x.grad is None) == (frozen == "x") and (w.grad is None) == (frozen == "weight")
    assert torch.equal(w.grad, gradients[1]) if frozen == "x" else torch.equal(x.grad, gradients[0])


def called_before(w, recipe):
    """A module that has run, so that its next call may take a shorter way."""
    module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    quantize_(module, training.NVFP4TrainingConfig(recipe))
    module.weight, module.rounding_state = w, torch.tensor([3, 4])
    module(torch.ones(16, w.shape[1], dtype=w.dtype, requires_grad=True))
    module.calls = 0
    return lambda x, w: module(x)


@pytest.mark.parametrize("kind", ["function", "module", "compiled"])
@pytest.mark.parametrize("name", ["nvidia", "accurate_eden"])
def test_tensors_saved_for_the_backward_are_codes(name, kind):
    """Of x alone with keep_w=False: a compiler's partitioner would fold two equal calls, and keep the forward's."""
    x, w, _, dy = case(256, 384, 256)
    w, bits = torch.nn.Parameter(w.detach()), {}
    for keep_w in (True, False):
        recipe, sizes = RECIPES[name].replace(keep_w=keep_w), {}

        def count(t, sizes=sizes):
            if t.data_ptr() != w.data_ptr():  # the parameter, which lives anyway
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        call = functools.partial(training.linear, bias=None, recipe=recipe, rng_state=torch.tensor([3, 4]))
        if kind == "compiled":
            call = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
        elif kind == "module":
            call = called_before(w, recipe)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            y = call(x, w)
        assert sum(sizes.values()) <= 0.30 * 2 * (x.numel() + keep_w * w.numel())
        bits[keep_w] = y.detach(), *torch.autograd.grad(y, (x, w), dy)
    assert all(map(torch.equal, bits[True], bits[False]))


def test_a_weight_changed_before_its_backward_raises():
    x, w, _, dy = case()
    y = training.linear(x, w, None, RECIPES["nvidia"].replace(keep_w=False))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


# --- Blackwell -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, products, size, dtype",
    [
        ("nvidia", 3, (128, 256, 192), torch.bfloat16),
        ("unbiased", 3, (37, 70, 50), torch.float32),
        ("nvidia_4over6", 3, (40, 48, 33), torch.bfloat16),
        ("accurate", 2, (37, 70, 50), torch.bfloat16),
        ("accurate_eden", 2, (40, 48, 33), torch.float32),
    ],
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


@pytest.mark.parametrize("size, name", [((128, 256, 192), "nvidia"), ((37, 70, 50), "nvidia_4over6")])
def test_the_arguments_on_blackwell_decode_to_the_same_products(size, name, blackwell, monkeypatch):
    """What scaled_mm is given, multiplied by the formulas of its layout."""

    def by_formula(a, b, scale_a, _, scale_b, *rest, bias=None, output_dtype):
        y = decoded(a, scale_a[0]) @ decoded(b.t(), scale_b[0]).t() * scale_a[1].double() * scale_b[1].double()
        return (y if bias is None else y + bias.double()).to(output_dtype)

    monkeypatch.setattr(scaled_mm, "scaled_mm", by_formula)
    arguments, rng_state = case(*size), rng_of(5)
    got = results(*arguments, RECIPES[name])
    check_products(got, *(t.detach() for t in arguments), RECIPES[name], rng_state)


# --- errors ----------------------------------------------------------------------------------------------------------

X, WEIGHT = torch.ones(2, 16), torch.ones(8, 16)


def of_float64(recipe):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        training.linear(X, WEIGHT.double(), recipe=recipe)


test_invalid_arguments_raise = refuses(
    (lambda: training.linear(X.long(), WEIGHT), TypeError, "not an input of torch.int64: cast it first"),
    (lambda: training.linear(X.double(), WEIGHT), TypeError, "not an input of torch.float64"),
    (lambda: training.linear(torch.ones(2, 17), WEIGHT), r"input \(\.\.\., 16\), got \(2, 17\)"),
    (lambda: training.linear(torch.ones(()), WEIGHT), r"got \(\)"),
    (lambda: training.linear(X.bfloat16(), WEIGHT), TypeError, "cast one of them, or use torch.autocast"),
    (lambda: of_float64("nvidia"), TypeError, r"not a weight of torch\.float64"),
    (lambda: of_float64(MORE["dy alone"]), TypeError, r"not a weight of torch\.float64"),
)
