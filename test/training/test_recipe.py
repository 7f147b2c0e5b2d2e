"""Recipes, filters of layers, set_recipe and summary."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.refusals import refuses
from helpers.user_warnings import user_warnings
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import QuantizeSpec, training
from nvfp4_tensor.training import RECIPES, NVFP4TrainingConfig, NVFP4TrainingLinear, Recipe, WeightForDx

pytestmark = pytest.mark.slow

TILES = QuantizeSpec(block_rows=16)
STOCHASTIC = QuantizeSpec(round_mode="stochastic")
HADAMARD = QuantizeSpec(hadamard_sign=True)
EDEN = QuantizeSpec(round_mode="eden")


def test_the_named_recipes():
    assert_expected_inline(
        "\n".join(map(str, RECIPES.values())),
        """\
nvidia: x rne, 1x16; w rne, 16x16; dy stochastic, 1x16; w_for_dx codes; dy_t stochastic, 1x16, hadamard 0xd7e8; x_t rne, 1x16, hadamard 0xd7e8
nvidia_4over6: x rne, 1x16, 4/6 mse; w rne, 16x16, 4/6 mse; dy stochastic, 1x16; w_for_dx codes; dy_t stochastic, 1x16, hadamard 0xd7e8; x_t rne, 1x16, hadamard 0xd7e8
unbiased: x rne, 1x16; w rne, 16x16; dy stochastic, 1x16, scales up; w_for_dx codes; dy_t stochastic, 1x16, scales up, hadamard 0xd7e8; x_t rne, 1x16, hadamard 0xd7e8
accurate: x rne, 1x16, search mse; w rne, 1x16, search mse; dy stochastic, 1x16, scales up; w_for_dx exact; dy_t stochastic, 1x16, scales up, hadamard 0xd7e8; x_t rne, 1x16, hadamard 0xd7e8
accurate_eden: x rne, 1x16, search mse; w rne, 1x16, search mse; dy eden, 1x16; w_for_dx exact; dy_t eden, 1x16; x_t eden, 1x16
forward_only: x rne, 1x16; w rne, 1x16; dy dense; w_for_dx exact; dy_t dense; x_t dense
weight_only: x dense; w rne, 1x16; dy dense; w_for_dx exact; dy_t dense; x_t dense""",  # noqa: E501
    )


@pytest.mark.parametrize("name", ["accurate_eden", "nvidia", "forward_only"])
def test_recipes_are_values(name):
    recipe = RECIPES[name]
    assert Recipe.unpack(recipe.packed, name=name) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe == copy.deepcopy(recipe) == recipe.replace()
    assert hash(recipe) == hash(recipe.replace()) and recipe != recipe.replace(name="other")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.x = None


CODES, EXACT = WeightForDx.CODES, WeightForDx.EXACT
test_invalid_recipes_raise = refuses(
    (lambda: Recipe(w_for_dx=CODES), "no spec for w, so dgrad has no codes to read"),
    (lambda: Recipe(w=QuantizeSpec(), w_for_dx=CODES), "needs 16x16 blocks: give w block_rows=16, or .*EXACT"),
    (lambda: Recipe(x=TILES), "x of recipe 'custom' needs 1x16 blocks"),
    (lambda: Recipe(dy_t=HADAMARD), "dy_t and x_t .* need the same transform.*got 0xd7e8 and None"),
    (lambda: Recipe(dy_t=HADAMARD, x_t=QuantizeSpec(hadamard_sign=1)), "got 0xd7e8 and 0x0001"),
    (lambda: Recipe(x=HADAMARD), "x and w .* need the same transform"),
    (lambda: Recipe(dy_t=EDEN, x_t=QuantizeSpec()), "got EDEN and None"),
    (lambda: Recipe(dy=EDEN, w=TILES, w_for_dx=CODES), "dy and w_for_dx .* need the same transform"),
    (lambda: Recipe(dy=HADAMARD), "dy and w_for_dx .* need the same transform"),
    (lambda: Recipe(x=HADAMARD, w=HADAMARD, w_for_dx=EXACT), "transformed along its rows.*w_for_dx=DENSE"),
    (lambda: Recipe(x="nearest"), TypeError, "x of recipe 'custom' is a "),
    (lambda: Recipe(w_for_dx="codes"), TypeError, "w_for_dx of recipe 'custom' is a "),
)


# --- which layers ----------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 32), "router": nn.Linear(16, 4)}) for _ in range(blocks)
        )
        self.heads = nn.ModuleList([nn.Linear(16, 16)])
        self.lm_head = nn.Linear(16, 50)


def quantized(model, filter_fn):
    quantize_(model, NVFP4TrainingConfig(), filter_fn=filter_fn)
    return [name for name, module in model.named_modules() if isinstance(module, NVFP4TrainingLinear)]


@pytest.mark.parametrize(
    "share, blocks, dense", [(0.15, 8, 2), (0.15, 20, 3), (0.2, 5, 1), (0, 3, 0), (1, 3, 3), (0.01, 3, 1)]
)
def test_keep_last(share, blocks, dense):
    model = Model(blocks)
    names = quantized(model, training.keep_last_blocks_dense(model, share))
    kept = {f"layers.{i}" for i in range(blocks)} - {name.rsplit(".", 1)[0] for name in names}
    assert kept == {f"layers.{i}" for i in range(blocks - dense, blocks)}
    assert {"heads.0", "lm_head"} <= set(names)


@pytest.mark.parametrize(
    "which, names",
    [
        (("lm_head", "heads"), ["layers.0.up", "layers.0.router", "layers.1.up", "layers.1.router"]),
        (("router", "layers.1"), ["layers.0.up", "heads.0", "lm_head"]),
        (("layers.*.up",), ["layers.0.router", "layers.1.router", "heads.0", "lm_head"]),
        ((lambda module, name: module.out_features != 32,), ["layers.0.up", "layers.1.up"]),
    ],
)
def test_keep_dense(which, names):
    assert quantized(Model(2), training.keep_dense(*which)) == names


def test_filters_combine():
    model = Model(4)
    both = training.keep_last_blocks_dense(model, 0.5) & training.keep_dense("router", "lm_head", "heads")
    assert quantized(model, both & (lambda module, name: "0" not in name)) == ["layers.1.up"]


@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize(("which", "missing"), [(["lm_heads"], "lm_heads"), (["lm_head", "*.gat"], "*.gat")])
def test_names_that_the_model_does_not_have_are_warned_of(which, missing, combined):
    def warned(names, match):
        model, chosen = Model(2), training.keep_dense(*names)
        every = training.keep_last_blocks_dense(model, 0.0) & chosen if combined else chosen
        return user_warnings(lambda: quantized(model, every), __file__, match, action="default")

    assert warned(which, f"keep_dense({missing!r}) keeps nothing dense: no module of the Model") == 1
    assert (warned(which, "keep_dense("), warned(["lm_head"], "keep_dense(")) == (1, 0)


test_filters_and_configs_are_checked = refuses(
    (lambda: training.keep_last_blocks_dense(nn.Linear(2, 2), 0.1), r"Linear has no ModuleList of blocks.*keep_dense"),
    (lambda: training.keep_last_blocks_dense(Model(2), 15), "from 0 to 1, got 15"),
    (lambda: training.keep_dense(3), TypeError, "names and functions"),
    (lambda: NVFP4TrainingConfig("fast"), "unknown recipe 'fast': use a Recipe or one of 'nvidia'"),
    (lambda: NVFP4TrainingConfig(QuantizeSpec()), TypeError, "recipe is a Recipe or the name of one"),
)


# --- a live model ----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_set_recipe_switches_each_half_alone_and_back():
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    quantize_(model, NVFP4TrainingConfig())
    (linear,) = model
    x = torch.randn(8, 32)
    nvidia = RECIPES["nvidia"]

    def dense_halves():
        y = model(x)
        linear.weight.grad = None
        torch.manual_seed(0)
        y.backward(x)
        return torch.equal(y, x @ linear.weight.t()), torch.equal(linear.weight.grad, x.t() @ x)

    assert dense_halves() == (False, False)
    training.set_recipe(model, forward="bf16")
    assert dense_halves() == (True, False) and linear.recipe == nvidia
    training.set_recipe(model, backward="bf16")
    assert dense_halves() == (True, True)
    training.set_recipe(model, "unbiased")
    assert dense_halves() == (True, True), "the halves stay as they are"
    training.set_recipe(model, forward="nvfp4")
    assert dense_halves() == (False, True)
    training.set_recipe(model, "nvidia", backward="nvfp4")
    assert dense_halves() == (False, False) and linear.active_recipe == nvidia


def test_set_recipe_is_checked():
    model = Model(1)
    with pytest.raises(ValueError, match=r"Model has no linear that trains.*quantize_\(model, NVFP4TrainingConfig"):
        training.set_recipe(model, "nvidia")
    quantize_(model, NVFP4TrainingConfig())
    for arguments in (dict(forward="fp16"), dict(backward=True), dict(recipe="nvida")):
        with pytest.raises(ValueError, match=r"'bf16', 'nvfp4' or None|unknown recipe"):
            training.set_recipe(model, **arguments)
    assert model.lm_head.recipe == RECIPES["nvidia"]


def test_summary():
    model = Model(2)
    quantize_(
        model,
        NVFP4TrainingConfig(),
        filter_fn=training.keep_last_blocks_dense(model, 0.5) & training.keep_dense("router"),
    )
    training.set_recipe(model.heads, "accurate_eden", forward="bf16")
    training.set_recipe(model.lm_head, "weight_only")
    assert_expected_inline(
        str(training.summary(model)),
        """\
linear           N x K    recipe         forward          backward
layers.0.up      32 x 16  nvidia         rne x rne+16x16  dx: stochastic x w codes; dw: stochastic+hadamard x rne+hadamard
layers.0.router  4 x 16   dense          -                -
layers.1.up      32 x 16  dense          -                -
layers.1.router  4 x 16   dense          -                -
heads.0          16 x 16  accurate_eden  bf16             dx: eden x w dense; dw: eden x eden
lm_head          50 x 16  weight_only    dense x rne      dx: dense x w exact; dw: dense x dense
1 accurate_eden (11.6% of the weights)
3 dense (29.0% of the weights)
1 nvidia (23.2% of the weights)
1 weight_only (36.2% of the weights)""",  # noqa: E501
    )


def test_importing_the_package_does_not_load_this_one():
    code = "import sys, nvfp4_tensor as n; print('nvfp4_tensor.training' in sys.modules, n.training.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "False nvfp4_tensor.training\n", result.stderr
