"""Calls that were checked once: the bits of the general path, whatever changes between two calls."""

import copy
import pickle

import pytest
import torch
import torch.nn.utils.prune
from expecttest import assert_expected_inline
from helpers.count_ops import Ops
from torch import nn

from nvfp4_tensor import training
from nvfp4_tensor.training import NVFP4TrainingLinear
from nvfp4_tensor.training.linear.prepared import Prepared

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
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_between_two_calls_is_seen(general, change):
    linear, x = linear_by(), torch.randn(5, 48)
    gradients([linear], x)
    change(linear)
    x = x.to(linear.weight.dtype)
    expected = general(gradients, [linear], x)
    for _ in range(2):
        assert equal(gradients([linear], x), expected)


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
nvfp4::draw_rng_state: 1
aten::detach: 1
nvfp4::quantize_pair_values: 1
nvfp4::train_linear: 1
nvfp4::train_linear_backward: 1""",
    )
