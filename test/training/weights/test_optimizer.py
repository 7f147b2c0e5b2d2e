"""NVFP4Optimizer: training, state and errors."""

import copy
import inspect
import itertools

import pytest
import torch
from helpers.bits import stored_bits
from helpers.files import saved
from helpers.least_squares import backward, train
from helpers.refusals import refuses
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, training
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters, write_back
from nvfp4_tensor.training.weights import error_feedback

pytestmark = pytest.mark.slow

STEPS = 120


def model(dtype=torch.float32, spec=None):
    torch.manual_seed(1)
    return to_nvfp4_parameters(nn.Linear(48, 40).to(dtype), spec)


def final(losses):
    return sum(losses[-20:]) / 20 / losses[0]


def adamw(net, **options):
    return NVFP4Optimizer(net.parameters(), torch.optim.AdamW, **{"lr": 1e-3, "weight_decay": 0.0, **options})


@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(block_rows=16)])
def test_stochastic_writes_train_and_nearest_stalls(spec):
    """Steps of 1e-3 on weights whose codes are 0.01 to 0.05 apart: to nearest they vanish, all of them."""
    net = model(spec=spec)
    before = net.weight.dequantize()
    nearest = final(train(net, adamw(net, round_mode="rne"), STEPS))
    moved = (net.weight.dequantize() != before).float().mean()
    net = model(spec=spec)
    stochastic = final(train(net, adamw(net), STEPS))
    assert nearest > 0.95 and moved < 0.05
    assert stochastic < 0.35


def test_error_feedback_trains_with_rounding_to_nearest_and_better_than_without():
    rounded, fed_back, plain = (model() for _ in range(3))
    assert final(train(rounded, adamw(rounded, error_feedback="momentum", round_mode="rne"), 200)) < 0.6
    with_errors = final(train(fed_back, adamw(fed_back, lr=3e-4, error_feedback="momentum"), 200))
    assert with_errors < final(train(plain, adamw(plain, lr=3e-4), 200))


def test_a_step_is_the_inner_step_written_back():
    """Against AdamW on the decoded weight and write_back with the random state that the docstring promises."""
    net = model()
    dense = nn.Linear(48, 40)
    with torch.no_grad():
        dense.weight.copy_(net.weight.dequantize())
        dense.bias.copy_(net.bias)
    optimizer, expected = adamw(net, seed=7), torch.optim.AdamW(dense.parameters(), lr=1e-3, weight_decay=0.0)
    backward(net)
    for ours, theirs in zip(net.parameters(), dense.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    parts = net.weight.qdata, net.weight.scale, net.weight.per_tensor_scale
    addresses = [part.data_ptr() for part in parts]
    old, version = net.weight.detach().clone(), net.weight._version
    optimizer.step()
    expected.step()
    update = dense.weight.detach() - old.dequantize()
    written = write_back(old, update, rng_state=rng_state_of("write back", 7, "0", 1, torch.device("cpu")))
    assert torch.equal(stored_bits(net.weight), stored_bits(written)) and torch.equal(net.bias, dense.bias)
    parts = net.weight.qdata, net.weight.scale, net.weight.per_tensor_scale
    assert addresses == [part.data_ptr() for part in parts]
    assert net.weight._version > version  # autograd notices


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_error_feedback_follows_its_formula(inner):
    """One SGD or Adam step by hand: m + (1 - 1 / beta) * error / (step size of m)."""
    net = model()
    options = {"lr": 0.01, "momentum": 0.8} if inner is torch.optim.SGD else {"lr": 0.01, "betas": (0.8, 0.95)}
    options["weight_decay"] = 0.0
    optimizer = NVFP4Optimizer(net.parameters(), inner, error_feedback="momentum", **options)
    before = net.weight.dequantize()
    backward(net)
    g = net.weight.grad.clone()
    optimizer.step()
    if inner is torch.optim.SGD:
        m, h, name = g, torch.tensor(0.01), "momentum_buffer"
    else:  # t = 1: m / (1 - beta1) = g, v / (1 - beta2) = g^2
        m, h, name = 0.2 * g, 0.01 / 0.2 / (g.abs() + 1e-8), "exp_avg"
    error = before - h * m - net.weight.dequantize()
    torch.testing.assert_close(optimizer.state[net.weight][name], m + (1 - 1 / 0.8) * error / h, rtol=1e-4, atol=1e-5)
    assert error.abs().max() > 0.01


# --- every optimizer -------------------------------------------------------------------------------------------------

# A scheduler sets numbers of groups, and of torch's sixteen these set all that any does: jumps of the learning rate, of
# momentum too, by the loss, and from a state of their own.

SCHEDULED_STEPS = 150
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
FEEDBACK = ("Adam", "AdamW", "SGD")


def lr_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def cycles_momentum(optimizer):
    return "betas" in optimizer.defaults or ("momentum" in optimizer.defaults and optimizer.defaults["momentum"] > 0)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1e-5 if step // 25 % 2 else 1.0),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, lr_of(o), SCHEDULED_STEPS + 1, cycle_momentum=cycles_momentum(o)),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=5, factor=0.3),
    "SWALR": lambda o: SWALR(o, lr_of(o) * 0.1, 20),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 1e-4, 30), schedulers.CosineAnnealingLR(o, 40)], [20]
    ),
}


def losses(optimizer_name, scheduler_name, error_feedback=None):
    """Of least squares by a linear layer. error_feedback: None for dense masters."""
    torch.manual_seed(1)
    net = nn.Linear(48, 40, bias=optimizer_name != "Muon")
    inner, options = getattr(torch.optim, optimizer_name), OPTIMIZERS[optimizer_name]
    if error_feedback is None:
        optimizer = inner(net.parameters(), **options)
    else:
        to_nvfp4_parameters(net)
        optimizer = NVFP4Optimizer(net.parameters(), inner, error_feedback=error_feedback, **options)
    scheduler, found = SCHEDULERS[scheduler_name](optimizer), []
    for _ in range(SCHEDULED_STEPS):
        found += train(net, optimizer, 1)
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
    for feedback in (False, "momentum") if optimizer in FEEDBACK else (False,):
        found = losses(optimizer, scheduler, feedback)
        assert found.max() < 1.05 * max(found[0], dense.max())
        assert found[-10:].mean() < dense[-10:].mean() + noise


def test_all_optimizers_are_listed():
    kinds = {each.__name__ for each in vars(torch.optim).values() if inspect.isclass(each)}
    accepted = {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    assert accepted - {"LBFGS", "SparseAdam", "Optimizer"} == OPTIMIZERS.keys()


MORE_STATE = {
    "Adam": {"amsgrad": True}, "AdamW": {"error_feedback": "momentum"}, "ASGD": {"t0": 2.0, "lambd": 0.1},
    "RMSprop": {"centered": True},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name, dtype):
    """Its scalars, too: torch casts NAdam's mu_product and ASGD's eta and mu to the dtype of a dense parameter."""
    options = {**OPTIMIZERS[name], **MORE_STATE.get(name, {}), "lr": 0.03}

    def start():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(48, 32, bias=False), nn.Linear(32, 40, bias=name != "Muon"))
        to_nvfp4_parameters(net.to(dtype), filter_fn=lambda module, name: name == "0")
        optimizer = NVFP4Optimizer(net.parameters(), getattr(torch.optim, name), seed=3, **options)
        return net, optimizer, schedulers.CosineAnnealingLR(optimizer, 12)

    def run(net, optimizer, scheduler, steps):
        generator = torch.Generator().manual_seed(steps)
        for _ in range(steps):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
            scheduler.step()

    whole, second = start(), start()
    run(*whole, 5)
    for part, state in zip(second, saved([part.state_dict() for part in whole]), strict=True):
        part.load_state_dict(state)
    for one in (whole, second):
        run(*one, 6)
    (net, optimizer, _), (again, resumed, _) = whole, second
    assert optimizer.param_groups[0]["lr"] == resumed.param_groups[0]["lr"] < 0.03
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(stored_bits(p), stored_bits(q)) and type(p) is type(q) and p.dtype == dtype
        assert optimizer.state[p].keys() == resumed.state[q].keys()
        for name, value in optimizer.state[p].items():
            other = resumed.state[q][name]
            assert value.dtype == other.dtype and torch.equal(value, other) and value.data_ptr() != other.data_ptr()
            assert not isinstance(p, NVFP4Tensor) or value.dtype == torch.float32


def test_groups_closures_and_parameters_without_gradient():
    net = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 40))
    to_nvfp4_parameters(net)
    groups = [{"params": [net[0].weight], "lr": 0.0}, {"params": [net[1].weight], "round_mode": "rne"}]
    optimizer = NVFP4Optimizer(groups, torch.optim.AdamW, lr=0.05, weight_decay=0.0)
    optimizer.add_param_group({"params": [net[0].bias, net[1].bias], "lr": 0.01})
    before = copy.deepcopy(net.state_dict())

    def closure():
        optimizer.zero_grad()
        return backward(net)

    assert optimizer.step(closure) > optimizer.step(closure)
    assert torch.equal(before["0.weight"].dequantize(), net[0].weight.dequantize())  # lr 0: nothing moves
    assert not torch.equal(before["1.weight"].qdata, net[1].weight.qdata)
    assert [group["writes"] for group in optimizer.param_groups] == [2, 2, 2]
    optimizer.zero_grad()
    codes = net[1].weight.qdata.clone()
    optimizer.step()
    assert torch.equal(codes, net[1].weight.qdata)


def rotated():
    return nn.Parameter(quantize(torch.randn(4, 32), QuantizeSpec(hadamard_sign=True)))


def of(inner, named=False, **options):
    net = model()
    return lambda: NVFP4Optimizer(net.named_parameters() if named else net.parameters(), inner, **options)


test_errors = refuses(
    (of("adamw"), "class of optimizer"),
    (of(torch.optim.LBFGS), "LBFGS does not update"),
    (of(torch.optim.Muon, named=True), "bias has 1 dimensions"),
    (of(torch.optim.AdamW, round_mode="away"), "'stochastic' or 'rne'"),
    (of(torch.optim.AdamW, error_feedback="gradient"), "False or 'momentum'"),
    (of(torch.optim.AdamW, error_feedback="momentum", amsgrad=True), "without amsgrad"),
    (of(torch.optim.AdamW, seed=0.5), "seed is an integer"),
    (of(torch.optim.AdamW, states="nvfp4"), r"no option states: NVFP4AdamW\(model.parameters\(\), lr=...\)"),
    (of(torch.optim.AdamW, lr=-1.0), "Invalid learning rate"),
    (lambda: NVFP4Optimizer([("layer.weight", rotated())]), "layer.weight holds Hadamard"),
    (of(torch.optim.SGD, lr=0.1, error_feedback="momentum"), "momentum above 0"),
    (of(torch.optim.Adagrad, error_feedback="momentum"), "not Adagrad"),
    error=(TypeError, ValueError),
)


@pytest.mark.parametrize("optimizer", [NVFP4AdamW, NVFP4Optimizer])
def test_a_step_with_a_sparse_gradient_writes_nothing(optimizer):
    first, second = model(), model()
    steps, before = optimizer([*first.parameters(), second.weight]), first.weight.qdata.clone()
    first.weight.grad, second.weight.grad = torch.ones(40, 48), torch.ones(40, 48).to_sparse()
    with pytest.raises(RuntimeError, match=r"dense tensor.*sparse=False"):
        steps.step()
    assert torch.equal(first.weight.qdata, before) and not steps.state


def test_an_invalid_group_is_not_added():
    net = model()
    optimizer = NVFP4Optimizer([net.weight], torch.optim.SGD, lr=0.1)
    for option, message in (({"error_feedback": "momentum"}, "momentum above 0"), ({"states": 4}, "no option states")):
        with pytest.raises((TypeError, ValueError), match=message):
            optimizer.add_param_group({"params": [net.bias], **option})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [net.bias]})


def test_to_nvfp4_parameters():
    net = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 40), nn.Linear(40, 8))
    net[1].weight.requires_grad_(False)
    assert to_nvfp4_parameters(net) is net
    assert [isinstance(layer.weight, NVFP4Tensor) for layer in net] == [True, False, True]
    assert [layer.weight.requires_grad for layer in net] == [True, False, True]
    net(torch.randn(4, 48)).sum().backward()
    assert type(net[0].weight.grad) is torch.Tensor and net[0].weight.grad.shape == (32, 48)
    with pytest.raises(ValueError, match="no linear"):
        to_nvfp4_parameters(nn.Sequential(nn.ReLU()))
    named = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 40))
    to_nvfp4_parameters(named, QuantizeSpec(block_rows=16), training.keep_dense("1"))
    assert named[0].weight.spec.block_rows == 16 and not isinstance(named[1].weight, NVFP4Tensor)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [NVFP4AdamW, NVFP4Optimizer])
def test_capturing_a_step_raises(optimizer):
    net = model().cuda()
    optimizer = optimizer(net.parameters(), lr=0.25)
    for p in net.parameters():
        p.grad = torch.ones(p.shape, device="cuda")
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="after each replay"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()
    assert int(optimizer.state[net.weight]["step"]) == 1


@pytest.mark.parametrize("optimizer", [NVFP4AdamW, NVFP4Optimizer])
def test_a_compiled_step_steps(optimizer):
    """A graph ends where the optimizer steps: Dynamo would lose what it makes of the state."""
    nets = model(), model()
    for net, call in zip(nets, (train, torch.compile(train, backend="eager")), strict=True):
        steps = optimizer(net.parameters(), lr=1e-2)
        call(net, steps, 3)
        assert int(steps.state[net.weight]["step"]) == 3
    assert torch.equal(nets[0].weight.qdata, nets[1].weight.qdata)


def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded():
    net = model()
    optimizer = NVFP4Optimizer(net.parameters(), lr=1e-2)
    train(net, optimizer, 2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="not an NVFP4Optimizer's"):
        optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(48, 40).parameters()).state_dict())
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert torch.equal(after["state"][0]["exp_avg"], before["state"][0]["exp_avg"])


@pytest.mark.parametrize("lr, factor", [(0.2, 0.5), (0.05, 1.0)])
def test_errors_in_the_momentum_shrink_where_the_rate_rises(lr, factor):
    group, state = {"lr": 0.1, "momentum": 0.5}, {"momentum_buffer": torch.zeros(2)}
    error_feedback.add_error(state, torch.ones(2), group)
    assert torch.equal(state["momentum_buffer"], torch.full((2,), (1 - 1 / 0.5) / 0.1))
    error_feedback.shrink_momentum(state, {**group, "lr": lr})
    assert torch.allclose(state["momentum_buffer"], torch.full((2,), -10 * factor))
