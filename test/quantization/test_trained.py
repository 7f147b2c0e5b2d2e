"""A model that trained is quantized, calibrated, fitted and saved as if it had been made dense first."""

import copy
import itertools
import warnings

import pytest
import torch
from helpers.bits import stored_bits
from helpers.model_states import state_of
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    calibrate,
    quantize_model,
)
from nvfp4_tensor.quantization import NVFP4Linear, gptq, sensitivity
from nvfp4_tensor.quantization.experts import is_experts
from nvfp4_tensor.quantization.weights import dense_experts
from nvfp4_tensor.training import (
    RECIPES,
    NVFP4AdamW,
    NVFP4TrainingConfig,
    NVFP4TrainingLinear,
    set_recipe,
    to_dense,
    to_nvfp4_parameters,
)

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


def trained(prepare=None, tied=False, **forward):
    """A model that took two steps of training, with a recipe by default."""
    torch.manual_seed(0)
    width = 96 if tied else 64
    model = nn.Sequential(nn.Linear(96, width), nn.GELU(), nn.Linear(width, 96 if tied else 48, bias=False)).bfloat16()
    if tied:
        model[2].weight = model[0].weight
    quantize_(model, prepare or NVFP4TrainingConfig("nvidia"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
    if forward:
        set_recipe(model, **forward)
    return model.eval()


def assert_same(a, b):
    """Two models have the same modules, codes, dense tensors and outputs."""
    modules = [[(type(m), sorted(m.__dict__), len(m._forward_pre_hooks)) for m in model.modules()] for model in (a, b)]
    assert modules[0] == modules[1]
    first, second = a.state_dict(), b.state_dict()
    assert first.keys() == second.keys()
    for name, own in first.items():
        assert torch.equal(stored_bits(own), stored_bits(second[name])), name
        assert not isinstance(own, NVFP4Tensor) or own.describe() == second[name].describe()
    with torch.no_grad():
        assert torch.equal(a(X), b(X))


def in_two_steps(model, **arguments):
    quantize_(model, NVFP4Config(step="prepare"))
    model(X)
    quantize_(model, NVFP4Config(step="convert", **arguments))


TRANSFORM = QuantizeSpec(hadamard_sign=True)
ROUTES = {
    "weight-only": lambda m: quantize_(m, NVFP4WeightOnlyConfig(four_over_six=True)),
    "transform": lambda m: quantize_(m, NVFP4Config(weight_spec=TRANSFORM, activation_spec=TRANSFORM)),
    "two steps": in_two_steps,
    "headroom": lambda m: calibrate(m, [X], NVFP4Config(headroom=True), progress=False),
    "weighted": lambda m: calibrate(
        m, [X], NVFP4WeightOnlyConfig(scale_search="mse", weighted=True), progress=False
    ),
    "part": lambda m: calibrate(m, [X], filter_fn=lambda module, name: name == "2", progress=False),
    "gptq": lambda m: gptq(m, [X], progress=False),
}  # fmt: skip
TRAINED = {
    "recipe": trained,
    "other recipe": lambda: trained(NVFP4TrainingConfig("accurate_eden")),
    "dense forward": lambda: trained(NVFP4TrainingConfig("nvidia"), forward="bf16"),  # with which fine-tuning ends
    "tied": lambda: trained(tied=True),
}


@pytest.mark.parametrize(("route", "kind"), [*zip(ROUTES, itertools.cycle(TRAINED))])
def test_as_if_dense_first(kind, route):
    model = TRAINED[kind]()
    assert isinstance(model[0], NVFP4TrainingLinear)
    dense = to_dense(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ROUTES[route](model)
    ROUTES[route](dense)
    assert isinstance(model[2].weight, NVFP4Tensor) and not model[2].weight.requires_grad
    assert (model[0].weight is model[2].weight) == (kind == "tied")
    assert_same(model, dense)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_deployed_without_a_loss(name):
    """The config of its specs multiplies what the training forward multiplied, so the loss is equal to the bit."""
    model, recipe = trained(NVFP4TrainingConfig(name)), RECIPES[name]
    config = NVFP4WeightOnlyConfig(weight_spec=recipe.w)
    if recipe.x is not None:
        config = NVFP4Config(weight_spec=recipe.w, activation_spec=recipe.x)
    with torch.no_grad():
        loss, of_dense = (each(X).float().square().mean() for each in (model, to_dense(copy.deepcopy(model))))
        quantize_model(model, config)
        assert model(X).float().square().mean() == loss != of_dense


def test_sensitivity_measures_the_dense_model():
    model = trained()
    before = repr(model), state_of(model)
    found = sensitivity(model, [X], progress=False)
    assert found == sensitivity(to_dense(copy.deepcopy(model)), [X], progress=False)
    assert (repr(model), state_of(model)) == before


def test_linears_that_still_train_are_named_at_the_users_line():
    model = trained()
    with pytest.warns(UserWarning, match=r"^2 still train in NVFP4.*training.to_dense") as caught:
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    assert len(caught) == 1 and caught[0].filename == __file__
    assert type(model[0]) is NVFP4Linear and isinstance(model[2], NVFP4TrainingLinear)


# --- weights that trained in NVFP4 -----------------------------------------------------------------------------------


def held():
    torch.manual_seed(0)
    model = to_nvfp4_parameters(nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 48)).bfloat16())
    optimizer = NVFP4AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("route", ["weight-only", "two steps"])
def test_codes_that_trained_are_kept(route):
    """By every other kind of config: test_combinations.py."""
    model = held()
    expected, y = copy.deepcopy(model), model(X)
    ROUTES[route](model)
    for i in (0, 2):
        w, own = (m[i].weight for m in (model, expected))
        assert not w.requires_grad and torch.equal(stored_bits(w), stored_bits(own))
        assert (w.activation_amax is None) == (route == "weight-only")
    if route == "weight-only":
        assert torch.equal(model(X), y)
    else:
        torch.testing.assert_close(model[0].weight.activation_amax, X.abs().amax().float(), rtol=2**-23, atol=0)


def test_settings_that_trained_codes_ignore_are_named():
    model = held()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=lambda module, name: name == "0")
    with pytest.warns(UserWarning, match="1 weights trained in NVFP4 and keep their codes") as caught:
        quantize_(model, NVFP4WeightOnlyConfig(four_over_six=True), filter_fn=lambda module, name: name == "2")
    assert caught[0].filename == __file__
    for route, message in {
        "transform": "keeps its codes.*Hadamard transform",
        "weighted": "keeps its codes.*scale search",
        "gptq": "takes the codes that it trained",
    }.items():
        model = held()
        with pytest.raises(ValueError, match=message):
            ROUTES[route](model)
        assert model[0].weight.requires_grad and type(model[0]) is NVFP4Linear


# --- experts ---------------------------------------------------------------------------------------------------------

IDS = torch.arange(1, 33)[None]


def trained_mixture(kind="Mixtral"):
    pytest.importorskip("transformers")
    from quantization.test_experts import mixture

    from nvfp4_tensor.integrations.transformers import train_experts

    model = mixture(kind)
    quantize_(model.model, NVFP4TrainingConfig(), filter_fn=_linears)
    train_experts(model, "nvidia")
    model(IDS, labels=IDS).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.eval()


def _linears(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


EXPERT_ROUTES = {
    "weight-only": lambda m: quantize_(m, NVFP4WeightOnlyConfig(experts=True), filter_fn=_linears),
    "w4a4": lambda m: quantize_(m, NVFP4Config(experts=True), filter_fn=_linears),
    "calibrate": lambda m: calibrate(m, [IDS], NVFP4Config(experts=True), filter_fn=_linears, progress=False),
    "gptq": lambda m: gptq(
        m, [IDS], filter_fn=lambda module, name: _linears(module, name) or is_experts(module), progress=False
    ),
}  # fmt: skip


@pytest.mark.parametrize(("route", "kind"), [*zip(EXPERT_ROUTES, ["Mixtral", "GptOss"] * 2, strict=True)])
def test_experts_that_trained(kind, route):
    model = trained_mixture(kind)
    dense = to_dense(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EXPERT_ROUTES[route](model)
    EXPERT_ROUTES[route](dense)
    assert not list(dense_experts(model))
    assert model.config._experts_implementation == dense.config._experts_implementation == "grouped_mm"
    for name, p in model.named_parameters():
        if isinstance(p, NVFP4Tensor):
            assert torch.equal(p.dequantize(), dense.get_parameter(name).dequantize()), name
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, dense(IDS).logits)


def test_experts_that_still_train_are_named():
    model = trained_mixture()
    with pytest.warns(UserWarning, match="mlp.experts and 1 more modules still train in NVFP4"):
        quantize_(model, NVFP4WeightOnlyConfig(experts=False), filter_fn=_linears)
    assert model.config._experts_implementation == "nvfp4_nvidia"
    assert to_dense(model).config._experts_implementation == "grouped_mm"
