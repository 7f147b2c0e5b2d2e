"""Calls that were checked once: the bits of the general path, whatever changes between two calls."""

import contextlib
import copy
import pickle
import random

import pytest
import torch
import torch.nn.utils.prune
from expecttest import assert_expected_inline
from helpers.count_ops import Ops
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.training import NVFP4TrainingLinear
from nvfp4_tensor.training.linear.prepared import SCALAR_TYPES, Prepared

RECIPES = ["nvidia", "nvidia_4over6", "unbiased", "accurate", "accurate_eden"]


def linear_by(recipe="nvidia", bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    linear = nn.Linear(48, 32, bias=bias, dtype=dtype)
    return NVFP4TrainingLinear.convert(linear, training.RECIPES[recipe])


def gradients(linears, x, computed=True, autocast=None):
    """y and all gradients of linears that read one input, which autograd has computed or not."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        given = x * 1 if computed else x
        y = sum(linear(given) for linear in linears)
    parameters = [p for linear in linears for p in linear.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *parameters])]


def equal(a, b):
    return all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(a, b, strict=True))


@pytest.fixture
def general(monkeypatch):
    """Call f with no call prepared."""

    def call(f, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(Prepared, "fits", lambda *args: False)
            return f(*args, **kwargs)

    return call


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48), (48,)], ids=str)
@pytest.mark.parametrize("computed", [True, False])
def test_the_second_call_has_the_bits_of_the_general_path(general, recipe, shape, computed):
    linears = [linear_by(recipe), linear_by(recipe, bias=False)]
    x = torch.randn(shape)
    expected = general(gradients, linears, x, computed)
    assert equal(gradients(linears, x, computed), expected)
    assert all(linear._prepared is not None for linear in linears)
    assert equal(gradients(linears, x, computed), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(general, dtype):
    linear, x = linear_by(), torch.randn(5, 48, dtype=dtype)
    expected = general(gradients, [linear], x, autocast=torch.bfloat16)
    for _ in range(2):
        assert equal(gradients([linear], x, autocast=torch.bfloat16), expected)
    assert linear._prepared is not None and linear._prepared.autocast == torch.bfloat16


CHANGES = {
    "recipe": lambda linear: training.set_recipe(linear, "accurate"),
    "dense backward": lambda linear: training.set_recipe(linear, backward="bf16"),
    "dtype": lambda linear: linear.bfloat16(),
    "frozen weight": lambda linear: linear.weight.requires_grad_(False),
    "frozen bias": lambda linear: linear.bias.requires_grad_(False),
    "rounding state": lambda linear: setattr(linear, "rounding_state", torch.tensor([3, 4])),
    "weight": lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(32, 48))),
    "parametrized weight": lambda linear: nn.utils.parametrizations.weight_norm(linear),
    "pruned weight": lambda linear: nn.utils.prune.random_unstructured(linear, "weight", 0.5),
    "pruned bias": lambda linear: nn.utils.prune.random_unstructured(linear, "bias", 0.5),
    "parametrized bias": lambda linear: nn.utils.parametrize.register_parametrization(linear, "bias", nn.Tanh()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_seen(general, change):
    linear, x = linear_by(), torch.randn(5, 48)
    gradients([linear], x)
    change(linear)
    x = x.to(linear.weight.dtype)
    linear.calls = 0
    expected = general(gradients, [linear], x)
    for _ in range(2):
        linear.calls = 0
        assert equal(gradients([linear], x), expected)


@pytest.mark.parametrize("dtype", SCALAR_TYPES, ids=str)
def test_the_number_of_a_dtype_is_the_dtype_to_an_op(dtype):
    codes = torch.ops.nvfp4.quantize(torch.ones(16, 16), None, None, QuantizeSpec().pack())
    assert torch.ops.nvfp4.dequantize(*codes, 16, SCALAR_TYPES[dtype]).dtype == dtype


def test_errors_and_modes_after_a_prepared_call():
    linear, x = linear_by(), torch.randn(5, 48)
    gradients([linear], x)
    prepared = linear._prepared
    assert prepared is not None
    with pytest.raises(ValueError, match=r"takes an input \(\.\.\., 48\), got \(5, 32\)"):
        linear(torch.randn(5, 32, requires_grad=True))
    with pytest.raises(TypeError, match=r"cast one of them"):
        linear(torch.randn(5, 48, dtype=torch.bfloat16, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"does not support transforms"):
        torch.func.grad(lambda x: linear(x).sum())(x.requires_grad_())
    y = linear(x)
    with pytest.raises(RuntimeError, match=r"no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with torch.no_grad():
        assert not linear(x).requires_grad
    assert linear._prepared is prepared
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert other._prepared is None
        assert equal(gradients([other], x.detach()), gradients([linear], x.detach()))
    assert "_prepared" not in linear.to_dense().__dict__


def test_the_ops_of_an_eager_step():
    """Each costs the host as much as a small kernel takes."""
    linear, x, dy = linear_by("nvidia", bias=False), torch.randn(5, 48, requires_grad=True), torch.ones(5, 32)
    linear(x)
    with Ops() as ops:
        torch.autograd.grad(linear(x), (x, linear.weight), dy)
    assert_expected_inline(
        "\n".join(f"{name}: {count}" for name, count in ops.counts.items()),
        """\
nvfp4::train_linear_forward: 1
nvfp4::train_linear_backward: 1""",
    )


def test_the_ops_of_linears_with_one_input():
    """The first quantizes the input; each draws its own random state."""
    linears, x = [linear_by("nvidia", bias=False) for _ in range(3)], torch.randn(2, 5, 48, requires_grad=True)
    gradients(linears, x)
    with Ops() as ops:
        h = x * 1
        _ = [linear(h) for linear in linears]
    counts = {name: count for name, count in ops.counts.items() if name.startswith("nvfp4::")}
    assert counts == {"nvfp4::train_linear_forward": 1, "nvfp4::draw_rng_state": 2, "nvfp4::train_linear": 2}


def without_random_bits():
    nearest = training.RECIPES["nvidia"].dy.replace(round_mode="rne")
    recipe = training.RECIPES["nvidia"].replace(dy=nearest, dy_t=nearest.replace(hadamard_sign=True))
    return NVFP4TrainingLinear.convert(nn.Linear(48, 32), recipe)


def test_a_recipe_without_random_bits_draws_none():
    linear, x = without_random_bits(), torch.randn(5, 48, requires_grad=True)
    state, outcomes = torch.get_rng_state(), []
    for _ in range(2):
        y = linear(x)
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *linear.parameters()])])
    assert linear._prepared is not None and torch.equal(torch.get_rng_state(), state)
    assert equal(*outcomes)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("make", [linear_by, without_random_bits])
def test_a_checkpoint_of_the_first_calls(make, given):
    """The first run is checked in full and the second is prepared: a checkpoint compares what they save."""
    linears, x = [make(), make()], torch.randn(5, 48, requires_grad=True)
    outcomes = []
    for recomputes in (True, False):
        torch.manual_seed(2)
        for linear in linears:
            linear.rounding_state, linear.calls = torch.tensor([3, 4]) if given else None, 0

        def both(x):
            h = x * 1
            return linears[0](h) + linears[1](h)

        y = checkpoint(both, x, use_reentrant=False) if recomputes else both(x)
        parameters = [p for linear in linears for p in linear.parameters()]
        outcomes.append([y, *torch.autograd.grad(y.square().sum(), [x, *parameters])])
    assert equal(*outcomes)


class Drawn(nn.Module):
    """A parametrization with random bits of its own, which counts its calls."""

    calls = 0

    def forward(self, w):
        self.calls += 1
        return w * torch.rand(())


@pytest.mark.parametrize("mode", ["prepared", "no_grad", "no gradient of x", "another dtype"])
def test_a_call_reads_a_parametrized_weight_once(general, mode):
    linear, x, drawn = linear_by(), torch.randn(5, 48), Drawn()
    nn.utils.parametrize.register_parametrization(linear, "weight", drawn)
    linear(x.clone().requires_grad_())
    assert linear._prepared is not None
    x = x.requires_grad_(mode != "no gradient of x")
    x = x.bfloat16() if mode == "another dtype" else x

    def call():
        torch.manual_seed(3)
        with torch.set_grad_enabled(mode != "no_grad"), torch.autocast("cpu", enabled=mode == "another dtype"):
            return [linear(x)]

    expected, before = general(call), drawn.calls
    assert equal(call(), expected) and drawn.calls == before + 1


@pytest.mark.parametrize("prepared", [True, False])
def test_a_call_has_one_recipe(prepared):
    """Another thread may change the recipe at any time; here, a parametrization does while the weight is read."""
    linear, x = linear_by(), torch.randn(5, 48)
    expected = gradients([linear], x)

    class Changes(nn.Module):
        def forward(self, w):
            linear.set_recipe(training.RECIPES["accurate"], False, False)
            return w

    nn.utils.parametrize.register_parametrization(linear, "weight", Changes())
    linear.set_recipe(training.RECIPES["nvidia"], False, False)
    linear._prepared = linear._prepared if prepared else None
    y, dx, db, dw = gradients([linear], x)
    assert equal([y, dx, dw, db], expected)


def test_no_outputs():
    linear, x = linear_by(bias=False), torch.randn(2, 3, 48, requires_grad=True)
    linear.weight = nn.Parameter(torch.empty(0, 48))
    for _ in range(2):
        y = linear(x)
        dx, dw = torch.autograd.grad(y.sum(), [x, linear.weight])
        assert y.shape == (2, 3, 0) and dx.shape == x.shape and not dx.any() and dw.shape == (0, 48)


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_a_tangent_is_not_dropped(prepared, trains):
    """Forward-mode derivatives are not supported: with nothing to train, the ops would return y without a tangent."""
    linear, x = linear_by(), torch.randn(5, 48)
    if prepared:
        linear(x.clone().requires_grad_())
    linear.requires_grad_(trains)
    with forward_ad.dual_level():
        for input in (x, x.clone().requires_grad_(trains)):
            with pytest.raises(RuntimeError, match=r"does not support transforms|implement the jvp function"):
                linear(forward_ad.make_dual(input, torch.ones_like(x)))
        assert torch.equal(linear(x), linear(x))  # without a tangent


def test_a_weight_on_the_meta_device_after_a_prepared_call():
    linear, x = linear_by(), torch.randn(5, 48, requires_grad=True)
    linear(x)
    linear.weight = nn.Parameter(torch.empty(32, 48, device="meta"))
    with pytest.raises(RuntimeError, match="takes tensors on one device, got cpu and meta"):
        linear(x)


# --- random calls ----------------------------------------------------------------------------------------------------


def random_input(choice, columns, dtype):
    """An input of any shape and layout, its columns and dtype mostly those given, with a NaN now and then."""
    columns += 16 * (choice.random() < 0.1)
    if choice.random() < 0.2:
        dtype = choice.choice([torch.float64, torch.float16, torch.float32, torch.bfloat16])
    rows = choice.choice([(17,), (17,), (choice.randint(0, 9),), (2, choice.randint(0, 3)), ()])
    x = torch.randn(*rows, 2 * columns).to(dtype)
    x = x[..., ::2] if choice.random() < 0.2 else x[..., :columns].contiguous()
    if choice.random() < 0.1 and x.numel():
        x.view(-1)[0] = torch.nan
    return x


def outcome(linear, x, mode, autocast, seed):
    """y, gradients and the generator's state after a call; or the error."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_(mode != "no gradient of x")
    given = x if mode == "leaf" else x * 1
    calls = {
        "checkpoint": lambda: checkpoint(linear, given, use_reentrant=False),
        "reentrant": lambda: checkpoint(linear, given, use_reentrant=True),
        "twice": lambda: linear(given) + linear(given),
        "functional": lambda: torch.func.functional_call(linear, {"weight": linear.weight * 1.0}, (given,)),
    }
    quiet = torch.no_grad() if mode == "no_grad" else contextlib.nullcontext()
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), quiet:
            y = calls.get(mode, lambda: linear(given))()
        wanted = [p for p in (x, *linear.parameters()) if p.requires_grad] if y.requires_grad else []
        results = torch.autograd.grad(y.float().square().sum(), wanted, allow_unused=True) if wanted else ()
    except (RuntimeError, TypeError, ValueError) as error:
        return [type(error).__name__, str(error)]
    bytes_of = [None if t is None else t.detach().contiguous().flatten().view(torch.uint8) for t in (y, *results)]
    return [*bytes_of, torch.get_rng_state()]


@pytest.mark.parametrize("seed", range(24))
def test_random_calls_have_the_outcome_of_the_general_path(general, seed):
    choice = random.Random(seed)
    columns, dtype = choice.choice([16, 48, 64]), choice.choice([torch.float32, torch.bfloat16])
    torch.manual_seed(seed)
    linear = nn.Linear(columns, choice.choice([1, 16, 32]), bias=choice.random() < 0.5, dtype=dtype)
    linear = NVFP4TrainingLinear.convert(linear, training.RECIPES[choice.choice(RECIPES)])
    modes = ["", "", "", "leaf", "no_grad", "no gradient of x", "checkpoint", "reentrant", "twice", "functional"]
    for call in range(12):
        if choice.random() < 0.1:
            with torch.no_grad():
                linear.weight.add_(0.01)
        if choice.random() < 0.1:
            training.set_recipe(linear, choice.choice(RECIPES))
        linear.weight.requires_grad_(choice.random() < 0.9)
        arguments = (
            random_input(choice, columns, dtype),
            choice.choice(modes),
            choice.random() < 0.25,
            100 * seed + call,
        )
        expected = general(outcome, copy.deepcopy(linear), *arguments)
        got = outcome(linear, *arguments)
        assert len(got) == len(expected)
        for mine, right in zip(got, expected, strict=True):
            assert torch.equal(mine, right) if isinstance(right, torch.Tensor) else mine == right, arguments[1:]
