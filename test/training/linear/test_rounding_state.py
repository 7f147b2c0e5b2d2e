"""A layer that a step calls several times after seed_rounding: each call draws other bits, and repeats them."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchao.quantization import quantize_

from nvfp4_tensor import distributed, training
from nvfp4_tensor.numerics.random_state import rng_state_of, rng_state_of_call, rng_state_of_expert, rng_state_row
from nvfp4_tensor.training import NVFP4TrainingConfig

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def seeded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_(model, NVFP4TrainingConfig())
    distributed.seed_rounding(model, seed=5)
    return model


def dx_of(run):
    x = X.clone().requires_grad_()
    run(x).square().sum().backward()
    return x.grad


def test_each_call_of_a_step_draws_and_a_step_repeats():
    model = seeded()
    calls = [dx_of(model) for _ in range(3)]
    assert not any(torch.equal(calls[i], calls[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    states = [rng_state_of_call(model[0].rounding_state, call) for call in range(3)]
    alone = [functools.partial(training.linear, weight=model[0].weight, rng_state=state) for state in states]
    assert all(map(torch.equal, calls, map(dx_of, alone)))
    with torch.no_grad():
        model.eval()(X)  # trains nothing, so counts for nothing
    model.train()
    distributed.set_step(model, 0)
    assert all(torch.equal(dx_of(model), right) for right in calls)
    distributed.set_step(model, 1)
    assert not torch.equal(dx_of(model), calls[0])
    copied = copy.deepcopy(model)
    assert torch.equal(dx_of(copied), dx_of(model))


def test_a_compiled_step_has_the_bits_of_an_eager_one():
    model = seeded()

    def twice(x):
        return model(model(x))

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    for step in range(2):
        results = []
        for run in (twice, compiled):
            distributed.set_step(model, step)
            results.append(dx_of(run))
        assert torch.equal(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    """One call is repeated with its bits; of several it is not known which, so that they raise."""
    model = seeded()

    def saved(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    for step in range(2):
        distributed.set_step(model, step)
        expected = dx_of(model)
        distributed.set_step(model, step)
        assert torch.equal(dx_of(saved), expected)
    with pytest.raises(RuntimeError, match=r"set_step before each step"):
        dx_of(saved)  # of the same step


def test_keys_of_different_kinds_differ():
    model = nn.Sequential(seeded(), seeded())
    distributed.seed_rounding(model, seed=5)
    assert not torch.equal(model[0][0].rounding_state, model[1][0].rounding_state)  # of another name
    assert not any("rounding_state" in name for name in model.state_dict())
    kinds = ("layer", "adamw", "write back", "refit", "merge", "gradients")
    assert len({rng_state_row(kind, 0, "0", 1) for kind in kinds}) == len(kinds)
    state = rng_state_of("layer", 0, "0", 1, torch.device("cpu"))
    derived = [rng_state_of_call(state, call) for call in range(50)]
    derived += [rng_state_of_expert(each, expert) for each in derived for expert in range(1, 50)]
    assert len({tuple(each.tolist()) for each in derived}) == 2500
    assert torch.equal(derived[0], state)
