"""Every optimizer that NVFP4Optimizer accepts, under schedulers of torch, against dense masters.

A scheduler sets numbers of groups, and of torch's sixteen these set all that any does: jumps of the learning rate, of
momentum too, by the loss, and from a state of their own.
"""

import inspect
import itertools

import pytest
import torch
from helpers.least_squares import problem
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from nvfp4_tensor.training import NVFP4Optimizer, to_nvfp4_parameters

STEPS = 150
NOISE = 0.09
"""What weights in 4 bits lose at most, but for Muon: the loss starts at 1.34, and ends 0.02 to 0.07 above masters'."""
MUON_NOISE = 0.164
"""Of Muon: an update is lr times an orthogonal matrix, with entries of mean sqrt(2 / (pi K)), however small the error,
so a write adds step * |update| to the variance of an element. With the momentum's lag of 20 steps of lr 0.02."""

OPTIMIZERS = {
    "Adadelta": {"lr": 3.0}, "Adafactor": {"lr": 0.1}, "Adagrad": {"lr": 0.03}, "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01}, "Adamax": {"lr": 0.01}, "ASGD": {"lr": 1.0}, "Muon": {"lr": 0.02, "weight_decay": 0.0},
    "NAdam": {"lr": 0.01}, "RAdam": {"lr": 0.01}, "RMSprop": {"lr": 3e-3},
    "Rprop": {"lr": 1e-3, "step_sizes": (1e-6, 0.02)}, "SGD": {"lr": 0.3, "momentum": 0.9},
}  # fmt: skip
NOT_ACCEPTED = {"LBFGS", "SparseAdam", "Optimizer"}
FEEDBACK = ("Adam", "AdamW", "SGD")


def lr_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def cycles_momentum(optimizer):
    return "betas" in optimizer.defaults or ("momentum" in optimizer.defaults and optimizer.defaults["momentum"] > 0)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1e-5 if step // 25 % 2 else 1.0),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, lr_of(o), STEPS + 1, cycle_momentum=cycles_momentum(o)),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=5, factor=0.3),
    "SWALR": lambda o: SWALR(o, lr_of(o) * 0.1, 20),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 1e-4, 30), schedulers.CosineAnnealingLR(o, 40)], [20]
    ),
}


def losses(optimizer_name, scheduler_name, error_feedback=None):
    """Of least squares by a linear layer. error_feedback: None for dense masters."""
    x, y, _ = problem()
    torch.manual_seed(1)
    net = nn.Linear(48, 40, bias=optimizer_name != "Muon")
    inner, options = getattr(torch.optim, optimizer_name), OPTIMIZERS[optimizer_name]
    if error_feedback is None:
        optimizer = inner(net.parameters(), **options)
    else:
        to_nvfp4_parameters(net)
        optimizer = NVFP4Optimizer(net.parameters(), inner, error_feedback=error_feedback, **options)
    scheduler, found = SCHEDULERS[scheduler_name](optimizer), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        scheduler.step(*([found[-1]] if scheduler_name == "ReduceLROnPlateau" else []))
    return torch.tensor(found)


PAIRS = [
    *zip(sorted(OPTIMIZERS), itertools.cycle(SCHEDULERS), strict=False),
    *(("AdamW", name) for name in SCHEDULERS),
    ("SGD", "LambdaLR"),
    ("SGD", "OneCycleLR"),
]


@pytest.mark.parametrize(("optimizer", "scheduler"), dict.fromkeys(PAIRS))
def test_each_optimizer_and_each_scheduler(optimizer, scheduler):
    """With error feedback too, whose errors a jump of the learning rate once made 40,000 of a loss of 85."""
    dense = losses(optimizer, scheduler)
    noise = MUON_NOISE if optimizer == "Muon" else NOISE
    for error_feedback in (False, "momentum") if optimizer in FEEDBACK else (False,):
        found = losses(optimizer, scheduler, error_feedback)
        assert found.max() < 1.05 * max(found[0], dense.max())
        assert found[-10:].mean() < dense[-10:].mean() + noise


def test_all_optimizers_are_listed():
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    assert kinds - NOT_ACCEPTED == OPTIMIZERS.keys()
