"""torch's optimizers over NVFP4 parameters: dense states, dense steps that are rounded, and a warning."""

import functools
import inspect

import pytest
import torch
from helpers.files import saved
from helpers.user_warnings import user_warnings
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, training

QUANTIZES = "quantizes NVFP4 weights again"
count = functools.partial(user_warnings, file=__file__)


def net(quantized=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16))
    return training.to_nvfp4_parameters(model) if quantized else model


def steps(optimizer, model, n=3):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()


class Own(torch.optim.Optimizer):
    """An optimizer of the user's, with states like its parameters, that copies new values."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                largest = self.state[p].setdefault("largest", torch.full_like(p, 1e-3))
                torch.maximum(largest, p.grad.abs(), out=largest)
                p.data.copy_(p - group["lr"] * p.grad / largest)


@pytest.mark.parametrize(("make", "instead"), [
    (torch.optim.AdamW, "NVFP4AdamW"), (functools.partial(torch.optim.Adam, foreach=True), "NVFP4AdamW"),
    (functools.partial(torch.optim.SGD, momentum=0.9), "NVFP4Optimizer(parameters, SGD"),
    (torch.optim.Adagrad, "NVFP4Optimizer(parameters, Adagrad"), (Own, "NVFP4Optimizer(parameters, Own"),
])  # fmt: skip
def test_an_optimizer_of_torch_is_told_once_what_to_use(make, instead):
    model = net()
    optimizer = make(model.parameters(), lr=1e-3)
    assert count(lambda: steps(optimizer, model), match=QUANTIZES) == 1
    assert count(lambda: steps(optimizer, model), match=QUANTIZES) == 0
    assert count(lambda: steps(make(model.parameters(), lr=1e-3), model), match=instead) == 1


SGD = {"inner": torch.optim.SGD, "momentum": 0.9, "error_feedback": "momentum"}


@pytest.mark.parametrize("make", [training.NVFP4AdamW, functools.partial(training.NVFP4Optimizer, **SGD)])
def test_our_optimizers_dense_parameters_and_users_are_not_told(make):
    model = net()
    assert count(lambda: steps(make(model.parameters(), lr=1e-3), model), match="NVFP4") == 0
    model = nn.Sequential(model.requires_grad_(False), nn.Linear(16, 16))
    assert count(lambda: steps(torch.optim.AdamW(model.parameters()), model), match=QUANTIZES) == 0
    w = quantize(torch.randn(32, 64))
    assert count(lambda: (w.mul_(2.0), w.copy_(torch.ones(32, 64))), match="NVFP4") == 0


def test_load_state_dict_says_once_that_it_decodes():
    model, state = net(quantized=False), net().state_dict()
    decodes = "are decoded to torch.float32"
    assert count(lambda: model.load_state_dict(state), match=decodes, action="default") == 1  # of two weights
    assert not isinstance(model[0].weight, NVFP4Tensor)
    assert torch.equal(model[0].weight, net()[0].weight.dequantize())
    for model, assign in ((net(quantized=False), True), (net(), False), (net(), True)):  # it keeps NVFP4
        assert count(lambda model=model, assign=assign: model.load_state_dict(state, assign=assign), match="NVFP4") == 0
        assert isinstance(model[0].weight, NVFP4Tensor)
    assert count(lambda: net().load_state_dict(net(quantized=False).state_dict()), match="NVFP4") == 0
    dense = torch.zeros(48, 64)
    assert count(lambda: dense.copy_(state["0.weight"]), match="NVFP4") == 0  # of no module


OPTIMIZERS = [
    cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
]
OPTIONS = {"foreach": True, "fused": True, "amsgrad": True, "centered": True, "maximize": True, "weight_decay": 0.1}


@pytest.mark.parametrize("cls", [*OPTIMIZERS, Own])
def test_three_steps_stay_near_the_dense_ones(cls):
    """Plain, and with each option that the optimizer has."""
    generator, needed = torch.Generator().manual_seed(0), {"momentum": 0.9} if cls is torch.optim.SGD else {}
    known = [name for name in OPTIONS if name in inspect.signature(cls).parameters]
    for option in [None, *known]:
        arguments = needed | ({} if option is None else {option: OPTIONS[option]})
        spec = QuantizeSpec(row_scaled=option is not None)
        p = nn.Parameter(quantize(torch.randn(64, 96, generator=generator), spec))
        dense = nn.Parameter(p.detach().dequantize())
        start = dense.detach().clone()
        pairs = [(each, cls([each], **arguments)) for each in (p, dense)]
        for step in range(3):
            grad = torch.randn(64, 96, generator=generator)
            for each, optimizer in pairs:
                each.grad = grad.clone()
                optimizer.step((lambda: torch.tensor(1.0)) if cls is torch.optim.LBFGS else None)
                optimizer.load_state_dict(saved(optimizer.state_dict()))  # which stays dense
            states = [optimizer.state[each] for each, optimizer in pairs]
            for name, value in states[0].items():
                assert not isinstance(value, torch.Tensor) or type(value) is torch.Tensor, name
                is_comparable = option != "weight_decay" and name not in ("ax", "d")
                if step == 0 and isinstance(value, torch.Tensor) and is_comparable:
                    assert torch.allclose(value, states[1][name], rtol=1e-5, atol=1e-7), name
        moved = (dense.detach() - start).abs().max()
        # Steps of less than half a code are lost, as they are when written to nearest, and others become a whole one.
        largest = dense.detach().abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
        error = (p.detach().dequantize() - dense.detach()).abs()
        assert moved > 0 and (error <= 0.4 * largest + 1.5 * moved).all(), option
