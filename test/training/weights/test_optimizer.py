"""NVFP4Optimizer: training, state and errors."""

import copy
import inspect

import pytest
import torch
from helpers.bits import stored_bits
from helpers.files import saved
from helpers.least_squares import backward, train
from helpers.refusals import refuses
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize, training
from nvfp4_tensor.numerics.random_state import rng_state_of
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters, write_back

pytestmark = pytest.mark.slow


def model():
    torch.manual_seed(1)
    return to_nvfp4_parameters(nn.Linear(48, 40))


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_error_feedback_follows_its_formula(inner):
    """m + (1 - 1 / beta) * error / (step size of m); where the rate rises, errors in the momentum do not grow.

    Against torch's optimizer on the decoded weight, with the momentum changed by hand.
    """
    net, dense, last, beta = model(), nn.Parameter(torch.empty(40, 48)), 1.0, 0.8
    is_sgd = inner is torch.optim.SGD
    options = {"lr": 0.01, "weight_decay": 0.0, **({"momentum": beta} if is_sgd else {"betas": (beta, 0.95)})}
    optimizer = NVFP4Optimizer([net.weight], inner, error_feedback="momentum", **options)
    expected, name = inner([dense], **options), "momentum_buffer" if is_sgd else "exp_avg"
    for step, lr in enumerate((0.01, 0.02, 0.005, 0.02), 1):
        dense.data.copy_(net.weight.dequantize())
        net.weight.grad = torch.randn(40, 48, generator=torch.Generator().manual_seed(step))
        dense.grad = net.weight.grad.clone()
        if last < lr:
            expected.state[dense][name] *= last / lr
        for each in (optimizer, expected):
            each.param_groups[0]["lr"] = lr
            each.step()
        state, size, last = expected.state[dense], lr, lr
        if not is_sgd:
            size = lr / (1 - beta**step) / ((state["exp_avg_sq"] / (1 - 0.95**step)).sqrt() + 1e-8)
        error = dense.detach() - net.weight.dequantize()
        state[name] += (1 - 1 / beta) * error / size
        torch.testing.assert_close(optimizer.state[net.weight][name], state[name], rtol=1e-4, atol=1e-4)
        assert error.abs().max() > 0.01


# --- every optimizer -------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adadelta": {"lr": 3.0}, "Adafactor": {"lr": 0.1}, "Adagrad": {"lr": 0.03, "initial_accumulator_value": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True}, "AdamW": {"lr": 0.01}, "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 1.0, "t0": 2.0, "lambd": 0.1}, "Muon": {"lr": 0.02, "weight_decay": 0.0}, "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01}, "RMSprop": {"lr": 3e-3, "centered": True},
    "Rprop": {"lr": 1e-3, "step_sizes": (1e-6, 0.02)}, "SGD": {"lr": 0.3, "momentum": 0.9},
}  # fmt: skip


def test_all_optimizers_are_listed():
    kinds = {each.__name__ for each in vars(torch.optim).values() if inspect.isclass(each)}
    accepted = {name for name in kinds if issubclass(getattr(torch.optim, name), torch.optim.Optimizer)}
    assert accepted - {"LBFGS", "SparseAdam", "Optimizer"} == OPTIMIZERS.keys()


def started(name, dtype, convert=True, **options):
    """A net with an NVFP4 and a dense weight, its optimizer, and a scheduler that sets all that any of torch's does."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 40, bias=False), nn.Linear(48, 32, bias=name != "Muon")).to(dtype)
    inner, options = getattr(torch.optim, name), {**OPTIMIZERS[name], **options}
    if convert:
        to_nvfp4_parameters(net, filter_fn=lambda module, name: name == "1")
        optimizer = NVFP4Optimizer(net.parameters(), inner, seed=3, **options)
    else:
        optimizer = inner(net.parameters(), **options)
    cycles = "betas" in optimizer.defaults or optimizer.defaults.get("momentum", 0) > 0
    return net, optimizer, OneCycleLR(optimizer, 2 * options["lr"], 12, cycle_momentum=cycles)


def set_gradients(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize(("name", "mode"), [*((name, "stochastic") for name in OPTIMIZERS), ("AdamW", "rne")])
def test_a_step_is_the_inner_step_written_back(name, mode):
    """Against torch's optimizer on the decoded weight and write_back with the random state that the docstring promises.

    With a scheduler, in place, and so that autograd notices.
    """
    net, optimizer, scheduler = started(name, torch.float32, round_mode=mode)
    dense, inner, inner_scheduler = started(name, torch.float32, convert=False)
    parts = net[1].weight.qdata, net[1].weight.scale, net[1].weight.per_tensor_scale
    addresses, version = [part.data_ptr() for part in parts], net[1].weight._version
    for step in range(1, 7):
        old = net[1].weight.detach().clone()
        dense[1].weight.data.copy_(old.dequantize())
        for each in (net, dense):
            set_gradients(each, step)
        for each in (optimizer, inner, scheduler, inner_scheduler):
            each.step()
        rng_state = rng_state_of("write back", 3, "1", step, torch.device("cpu"))
        update = dense[1].weight.detach() - old.dequantize()
        written = write_back(old, update, round_mode=mode, rng_state=rng_state)
        assert torch.equal(stored_bits(net[1].weight), stored_bits(written))
        assert torch.equal(net[0].weight, dense[0].weight)
    parts = net[1].weight.qdata, net[1].weight.scale, net[1].weight.per_tensor_scale
    assert addresses == [part.data_ptr() for part in parts] and net[1].weight._version > version


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(name):
    """Its scalars, too: torch casts NAdam's mu_product and ASGD's eta and mu to the dtype of a dense parameter."""
    options = {"error_feedback": "momentum"} if name == "AdamW" else {}

    def run(net, optimizer, scheduler, steps):
        for step in range(steps):
            set_gradients(net, step)
            optimizer.step()
            scheduler.step()

    whole, second = (started(name, torch.bfloat16, **options) for _ in range(2))
    run(*whole, 5)
    for part, state in zip(second, saved([part.state_dict() for part in whole]), strict=True):
        part.load_state_dict(state)
    for one in (whole, second):
        run(*one, 6)
    (net, optimizer, _), (again, resumed, _) = whole, second
    assert optimizer.param_groups[0]["lr"] == resumed.param_groups[0]["lr"]
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(stored_bits(p), stored_bits(q)) and type(p) is type(q) and p.dtype == torch.bfloat16
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
    (of(torch.optim.SparseAdam), "needs sparse gradients"),
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
    with pytest.raises(ValueError, match="not an NVFP4Optimizer's"):
        optimizer.load_state_dict(torch.optim.AdamW(nn.Linear(48, 40).parameters(), lr=2.0).state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-2
