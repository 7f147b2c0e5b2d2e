"""A call that is refused, fails or is interrupted leaves the model as it was."""

import dataclasses
from collections import OrderedDict

import pytest
import torch
from helpers.model_states import state_of
from quantization.test_experts import chosen, mixture
from quantization.test_quantize_model import gpt2
from quantization.test_trained import trained_mixture
from torch import nn
from torch.nn import utils
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torchao.core.config import AOBaseConfig
from torchao.quantization import quantize_
from torchao.quantization.qat import FakeQuantizedLinear
from torchao.quantization.transform_module import register_quantize_module_handler

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, QuantizeSpec, calibrate, quantize_model
from nvfp4_tensor.quantization import ObservedLinear, gptq, sensitivity
from nvfp4_tensor.quantization.observed_experts import observed_weights
from nvfp4_tensor.training import NVFP4TrainingConfig

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(1, 33)[None]
TRANSFORM = {name: QuantizeSpec(hadamard_sign=True) for name in ("weight_spec", "activation_spec")}
WEIGHTED = NVFP4WeightOnlyConfig(scale_search="mse", weighted=True)
PREPARE, EXPERTS = NVFP4Config(step="prepare"), NVFP4Config(experts=True)
CONVERTED, SQUARES = (dataclasses.replace(each, step="convert", experts=True) for each in (EXPERTS, WEIGHTED))


class TooLarge(nn.Module):
    """A layer whose inputs have squares beyond float32."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        return self.proj(1e25 * x)


class Doubled(nn.Linear):
    """A linear whose forward calls super()."""

    def forward(self, x):
        return super().forward(x) * 2


class Unused(nn.Module):
    """A layer whose linear no batch reaches."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        return x


@dataclasses.dataclass
class OneByOne(AOBaseConfig):
    """A config whose handler refuses a linear when it is its turn."""


@register_quantize_module_handler(OneByOne)
def _one_by_one(module, config):
    if module.bias is None:
        raise ValueError("a bias is needed")
    module.weight = nn.Parameter(-module.weight.detach())
    return module


def behind(last, trains=False):
    """A model whose last layer is the one that is refused."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), last)
    if trains:
        quantize_(model[:2], NVFP4TrainingConfig("weight_only"))
    return model


def quantized(linear):
    quantize_(linear, NVFP4WeightOnlyConfig())
    return linear


def prepared(model, config=PREPARE, data=X, filter_fn=None):
    quantize_(model, config, **{} if filter_fn is None else {"filter_fn": filter_fn})
    with torch.no_grad():
        model(data)
    return model


def with_squares(value):
    """A mixture whose experts were observed, and one of whose sums of squares is set."""
    config = dataclasses.replace(WEIGHTED, step="prepare", experts=True)
    model = prepared(mixture("Mixtral").float(), config, IDS, chosen)
    observed_weights(model)["model.layers.1.mlp.experts.down_proj"].activation_squares[1, 2] = value
    return model


def linears_alone(**options):
    """A prepared mixture of whose experts nothing was observed."""
    model = mixture("Mixtral")
    quantize_(model, NVFP4Config(step="prepare", **options), filter_fn=chosen)
    for linear in model.modules():
        if isinstance(linear, ObservedLinear):
            linear(torch.ones(1, linear.in_features).bfloat16())
    return model


def interrupted(batch):
    yield batch
    raise KeyboardInterrupt


def by_quantize_(*configs):
    return [lambda m, config=config: quantize_(m, config) for config in configs]


def by_all(batches, calls=(calibrate, gptq, sensitivity), **options):
    """Calls that run the model on batches."""
    return [lambda m, call=call: call(m, batches(), progress=False, **options) for call in calls]


def by_calibrate(batch, config=None, **options):
    return by_all(lambda: [batch], [calibrate], config=config, **options)


CONVERT = by_quantize_(NVFP4Config(step="convert"))
SILENT = {"filter_fn": lambda module, name: name == "x"}
IS_LINEAR = lambda module, name: isinstance(module, nn.Linear)  # noqa: E731
TRAIN = by_quantize_(NVFP4TrainingConfig())[0]
OURS = by_quantize_(NVFP4WeightOnlyConfig(), NVFP4Config(), PREPARE)
CASES = {
    # refused before the first change
    "float64": (lambda: behind(nn.Linear(32, 32).double()), OURS, "float64"),
    **{
        how.__name__: (lambda how=how: behind(how(nn.Linear(32, 32), "weight")), [*OURS, TRAIN], f"ted from {source}: ")
        for how, source in ((prune.identity, "weight_orig"), (utils.spectral_norm, "weight_orig"),
                            (utils.weight_norm, "weight_g and weight_v"))
    },
    "parametrized": (lambda: behind(weight_norm(nn.Linear(32, 32))), [*OURS, TRAIN], r"^2: (.|\n)* is parametrized"),
    "quantized": (
        lambda: behind(quantized(nn.Linear(32, 32))), [*OURS, TRAIN, *by_all(lambda: [X], filter_fn=IS_LINEAR)],
        "^2: .*NVFP4 already",
    ),
    "torchao's": (lambda: behind(FakeQuantizedLinear(32, 32)), [*OURS, quantize_model], "QATConfig"),
    "a subclass": (
        lambda: behind(Doubled(32, 32)), [*OURS[2:], *by_all(lambda: [X], [calibrate, gptq])],
        "^2: only a plain nn.Linear can be observed",
    ),
    "one by one": (
        lambda: behind(nn.Linear(32, 32, bias=False)), [lambda m: quantize_model(m, OneByOne())], "bias is needed"
    ),
    "nothing": (
        lambda: nn.Sequential(nn.Conv1d(32, 32, 1)), [*by_all(lambda: [X]), quantize_model],
        "nothing to quantize in Sequential.*it has no linear",
    ),
    "nothing selected": (
        lambda: behind(nn.ReLU()), [*by_all(lambda: [X], **SILENT), lambda m: quantize_model(m, **SILENT)],
        "nothing to quantize.*filter_fn",
    ),
    "only the head": (
        lambda: nn.Sequential(OrderedDict(lm_head=nn.Linear(32, 32))), [quantize_model], r"dense \(output layer\): lm_"
    ),
    "a pattern": (
        lambda: behind(nn.ReLU()), [lambda m: quantize_model(m, exclude="lm_head")], "'lm_head' matches no linear of S"
    ),
    # while batches run
    "a ReLU": (
        lambda: behind(nn.ReLU()), by_calibrate(X, filter_fn=lambda module, name: name in ("1", "2")), "not ReLU"
    ),
    "too large squares": (lambda: behind(TooLarge(), True), by_calibrate(X, WEIGHTED), "of 2.proj are not finite"),
    "too large Hessian": (lambda: behind(TooLarge(), True), by_all(lambda: [X], [gptq], layers=[]), "2.proj.weight"),
    "unused": (lambda: behind(Unused()), by_all(lambda: [X], [calibrate, gptq]), "no .* reached 2.proj.*filter_fn"),
    "NaN": (lambda: behind(nn.ReLU()), by_calibrate(X * float("nan")), "all inputs of 0, 1 were NaN or infinite"),
    "infinity": (lambda: behind(nn.ReLU()), by_calibrate(X / 0), "all inputs of 0, 1 were NaN or infinite"),
    "NaN in a Hessian": (lambda: behind(nn.ReLU()), by_all(lambda: [X / 0], [gptq]), "0.weight: the inputs have NaN"),
    "another width": (lambda: behind(nn.ReLU(), True), by_all(lambda: [X, X[:, :16]]), "shape|size|match"),
    "an interrupt": (lambda: behind(nn.ReLU(), True), by_all(lambda: interrupted(X)), "^$"),
    "an interrupt of experts": (trained_mixture, by_all(lambda: interrupted(IDS), [calibrate], config=EXPERTS), "^$"),
    "positions of a Conv1D": (gpt2, by_all(lambda: [IDS, IDS.repeat(1, 2)]), "out of range"),  # which end at 32
    # in the second of two steps
    "prepared": (lambda: prepared(behind(nn.ReLU())), OURS, r'is prepared.*step="convert".*stop_observing\(\)'),
    "not observed": (lambda: prepared(behind(Unused())), CONVERT, r"no input reached 2.proj, .*stop_observing\(\)"),
    "observed NaN": (lambda: prepared(behind(nn.ReLU()), data=X / 0), CONVERT, "all inputs of 0, 1 were NaN"),
    "a transform": (
        lambda: prepared(behind(nn.ReLU())), by_quantize_(NVFP4Config(step="convert", **TRANSFORM)),
        "prepared with hadamard_sign None.*0xd7e8: convert with",
    ),
    "no transform": (
        lambda: prepared(behind(nn.ReLU()), NVFP4Config(step="prepare", **TRANSFORM)), CONVERT,
        "prepared with hadamard_sign 0xd7e8.*None: convert with",
    ),
    "squares": (
        lambda: prepared(behind(TooLarge()), dataclasses.replace(WEIGHTED, step="prepare")),
        by_quantize_(dataclasses.replace(WEIGHTED, step="convert")), "of 2.proj are not finite, and no weight",
    ),
    "experts that were not prepared": (
        linears_alone, by_quantize_(CONVERTED), "layers.0.mlp.experts.gate_up_proj was not prepared.*experts=True"
    ),
    "experts that were not observed": (
        lambda: linears_alone(experts=True), by_quantize_(CONVERTED), "reached model.layers.0.mlp.experts.gate_up_proj"
    ),
    "squares of experts": (
        lambda: with_squares(float("inf")),
        [lambda m, call=call: call(m, SQUARES) for call in (quantize_, quantize_model)],
        "layers.1.mlp.experts.down_proj are not finite",
    ),
}  # fmt: skip
ERRORS = (TypeError, ValueError, RuntimeError, IndexError, KeyboardInterrupt)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("case", CASES)
def test_the_model_is_as_it_was(case):
    make, calls, match = CASES[case]
    torch.manual_seed(0)
    model = make()
    before, values = state_of(model), {name: each.clone() for name, each in model.state_dict().items()}
    for call in calls * 2:  # also if it is asked again
        with pytest.raises(ERRORS, match=match):
            call(model)
        assert state_of(model) == before
    for name, each in model.state_dict().items():
        assert torch.equal(each, values[name]), name


def test_a_config_of_another_handler_is_applied():
    model = behind(nn.Linear(32, 32))
    expected = -model[2].weight.detach()
    assert len(quantize_model(model, OneByOne()).quantized) == 3
    assert torch.equal(model[2].weight, expected)
