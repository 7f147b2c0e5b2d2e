"""NVFP4AdamW: training, resuming, steps inside the backward, errors; its bits, and headroom, at random."""

import contextlib
import copy
import gc
import math
import random
import weakref

import numpy as np
import pytest
import torch
from helpers.bits import assert_same_bits, stored_bits
from helpers.files import saved
from helpers.least_squares import backward, train
from helpers.optimizer_steps import moments
from helpers.refusals import refuses
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, quantize
from nvfp4_tensor.numerics import optimizer_step
from nvfp4_tensor.numerics.random_state import rng_state_row
from nvfp4_tensor.ops.schemas import plain
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters
from nvfp4_tensor.training.weights import adamw
from nvfp4_tensor.training.weights.headroom import make_headroom
from nvfp4_tensor.training.weights.step_tensors import least_exponent, numbers_of

pytestmark = pytest.mark.slow


def make(kind):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 40))
    if kind == "tied":
        net = nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 40))
        net[2].weight = net[0].weight
        return net
    return to_nvfp4_parameters(net) if kind == "codes" else net.to(kind)


def bits(net):
    return stored_bits(*net.parameters())


KINDS = ["codes", torch.bfloat16, torch.float32]


def test_coded_moments_train_as_float32_ones_do():
    net, right, options = make(torch.bfloat16), make(torch.float32), {"lr": 2e-3, "weight_decay": 0.0}
    optimizer = NVFP4AdamW(net.parameters(), **options)
    losses = train(net, optimizer, 200)
    expected = sum(train(right, torch.optim.AdamW(right.parameters(), **options), 200)[-20:]) / 20
    assert expected < 0.1 * losses[0] and sum(losses[-20:]) / 20 < 1.25 * expected + 0.01 * losses[0]
    weight, bias = optimizer.state[net[0].weight], optimizer.state[net[0].bias]
    assert sum(weight[name].nbytes for name in adamw.CODES) == 1.125 * 64 * 48 and bias.keys() == {"step", *adamw.DENSE}


@pytest.mark.parametrize(("kind", "in_backward"), [("codes", False), (torch.bfloat16, True)])
def test_what_is_copied_or_resumed_has_the_bits_of_an_uninterrupted_run(kind, in_backward):
    """The norm of the last step, by which the next one clips, is part of the state."""

    def started(optimizer):
        if in_backward:
            optimizer.step_in_backward(clip_norm=0.05)
        return optimizer

    net, again = make(kind), make(kind)
    optimizer, resumed = (started(NVFP4AdamW(each.parameters(), lr=1e-3, seed=3)) for each in (net, again))
    train(net, optimizer, 3)
    with pytest.warns(match="call its step_in_backward") if in_backward else contextlib.nullcontext():
        runs = [copy.deepcopy((net, optimizer)), saved((net, optimizer), weights_only=False)]
    for _, copied in runs:
        started(copied)
    state = saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    train(net, optimizer, 3)
    for which, run in enumerate([*runs, (again, resumed)]):
        train(*run, 3)
        assert torch.equal(bits(run[0]), bits(net)), which


def test_accelerate_saves_and_resumes(tmp_path):
    """By default its model is a safetensors file, which has no NVFP4 weights: the error names the option."""
    accelerate = pytest.importorskip("accelerate")
    accelerator, model = accelerate.Accelerator(cpu=True), make("codes")
    model, optimizer = accelerator.prepare(model, NVFP4AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, 2)
    with pytest.raises(TypeError, match=r"accelerator\.save_state\(folder, safe_serialization=False\)"):
        accelerator.save_state(tmp_path / "safe")
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    train(model, optimizer, 2)
    right = bits(model)
    accelerator.load_state(tmp_path / "state")
    train(model, optimizer, 2)
    assert torch.equal(bits(model), right)


@pytest.mark.parametrize("kind", ["codes", "tied"])
def test_a_step_in_the_backward_is_a_step_after_it(kind):
    nets = make(kind), make(kind)
    after, inside = (NVFP4AdamW(net.parameters(), lr=1e-3) for net in nets)
    for net in nets:
        net[0].bias.requires_grad_(False)
    inside.step_in_backward()
    for step in range(4):
        for net, optimizer in ((nets[0], after), (nets[1], inside)):
            net[0].bias.requires_grad_(step > 1)  # what is unfrozen later is stepped as well
            backward(net)
            if step != 2:
                assert all((p.grad is None) == (optimizer is inside) for p in net.parameters() if p.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(bits(nets[0]), bits(nets[1]))


def test_a_step_in_the_backward_keeps_nothing_alive():
    """A hook that holds its optimizer would keep all weights and moments of a model that is gone."""
    net = make("codes")
    optimizer = NVFP4AdamW(net.parameters(), lr=1e-3)
    optimizer.step_in_backward()
    backward(net)
    optimizer.step()
    left = [weakref.ref(net[0].weight), weakref.ref(optimizer.state[net[0].weight]["ratio_codes"])]
    del net, optimizer
    gc.collect()
    assert all(reference() is None for reference in left)


@pytest.mark.parametrize("clip", ["late", "parameter"])
def test_clipping_uses_the_norm_that_it_says(clip):
    """Against a step after the backward, of gradients that are scaled by hand."""
    nets = make(torch.float32), make(torch.float32)
    after, inside = (NVFP4AdamW(net.parameters(), lr=1e-2) for net in nets)
    inside.step_in_backward(clip_norm=0.01, clip=clip)
    late = None
    for _ in range(4):
        backward(nets[1])
        inside.step()
        backward(nets[0])
        norms = [torch.linalg.vector_norm(p.grad) for p in nets[0].parameters()]
        for p, norm in zip(nets[0].parameters(), norms, strict=True):
            used = norm if clip == "parameter" else late
            if used is not None:
                p.grad *= (0.01 / (used + 1e-6)).clamp(max=1.0)
        late = torch.linalg.vector_norm(torch.stack(norms[::-1]))  # in the order of the backward
        after.step()
        after.zero_grad()
    assert late > 0.02
    for mine, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(mine, right)


def test_a_graph_that_needs_the_weight_of_before_says_so():
    net, x = nn.Linear(32, 32), torch.ones(2, 32, requires_grad=True)
    optimizer = NVFP4AdamW(net.parameters(), lr=1e-2)
    later = net(x).square().sum()
    net(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


def test_eps_is_a_floor_of_the_second_moment():
    floors = {1e-8: 74, 0.0: 16, 1.0: 127, 2.0: 129, 1e-30: 16, 1e30: 240, 2.0**-20: 87}
    assert {eps: least_exponent(eps) for eps in floors} == floors


def test_states_of_other_optimizers_are_refused():
    net, again = make(torch.float32), make(torch.float32)
    dense = torch.optim.AdamW(net.parameters(), lr=1e-3)
    train(net, dense, 1)
    with pytest.raises(ValueError, match="of another optimizer, without coded moments"):
        NVFP4AdamW(again.parameters()).load_state_dict(dense.state_dict())
    coded = NVFP4AdamW(net.parameters())
    train(net, coded, 1)
    state = coded.state_dict()
    state["state"][0] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(64, 48), "exp_avg_sq": torch.zeros(64, 48)}
    with pytest.raises(ValueError, match="has exp_avg, exp_avg_sq, step of parameter 0, whose moments in codes are"):
        NVFP4AdamW(again.parameters()).load_state_dict(state)


TILES = QuantizeSpec(block_rows=16)


test_parameters_that_do_not_fit = refuses(
    (lambda: NVFP4AdamW([nn.Parameter(torch.zeros(32, 32).half())]), "need bfloat16, float32 or NVFP4 weights"),
    (lambda: NVFP4AdamW([nn.Parameter(torch.zeros(32, 32).t()[:16])]), "is not contiguous"),
    (
        lambda: NVFP4AdamW([{"params": [nn.Parameter(torch.zeros(2))], "maximize": True}]),
        "do not support maximize=True",
    ),
    (lambda: NVFP4AdamW(to_nvfp4_parameters(make("tied"), TILES).parameters()), "quantize it with block_rows=1"),
)


def test_what_step_in_backward_refuses():
    net = make(torch.float32)
    optimizer = NVFP4AdamW(net.parameters())
    for arguments, message in (({"clip": "all"}, "'late' or 'parameter'"), ({"clip_norm": 0.0}, "above 0")):
        with pytest.raises(ValueError, match=message):
            optimizer.step_in_backward(**arguments)
    optimizer.step_in_backward()
    with pytest.raises(RuntimeError, match="was called before"):
        optimizer.step_in_backward()
    with pytest.raises(RuntimeError, match="cannot be added after"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    backward(net)
    with pytest.raises(RuntimeError, match=r"gradients cannot accumulate with step_in_backward"):
        backward(net)


def test_small_parameters_take_steps_in_exact_float32():
    """Each operation is correctly rounded: the bits are numpy's, so they can be those of every device."""
    bias = nn.Parameter(torch.randn(4099, generator=torch.Generator().manual_seed(1)))
    optimizer = NVFP4AdamW([bias], lr=1e-2, weight_decay=0.01)
    w = bias.detach().numpy().copy()
    m = v = np.zeros_like(w)
    for step in range(1, 4):
        g = torch.randn(bias.shape, generator=torch.Generator().manual_seed(step))
        bias.grad = g.clone()
        optimizer.step()
        _, beta1, rest1, beta2, rest2, step_size, decay, _ = map(
            np.float32, numbers_of(optimizer.param_groups[0], step)
        )
        m, v = beta1 * m + rest1 * g.numpy(), beta2 * v + rest2 * g.numpy() * g.numpy()
        w = decay * w - step_size / np.float32(optimizer_step.UNBIASED) * (m / np.sqrt(v))
    assert np.array_equal(w, bias.detach().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_equal_gradients_give_equal_bits_on_both_devices(kind):
    nets = make(kind), make(kind).cuda()
    optimizers = [NVFP4AdamW(net.parameters(), lr=1e-2) for net in nets]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for mine, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator).to(mine.dtype)
            theirs.grad = mine.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(bits(nets[0]), bits(nets[1]).cpu())


# --- any parameters, bit by bit ---------------------------------------------------------------------------------------


def parameters(generator):
    """Dense and NVFP4 parameters of any shape, with and without coded moments, one of them rows of a larger tensor."""
    shapes = [(1, 16), (3, 40), (7, 17), (2, 3, 16), (4, 2, 3, 3), (33, 64), (5,), (16, 8), (0, 32), ()]
    values = [torch.randn(shape, generator=generator) * 10.0 ** (i % 4 - 3) for i, shape in enumerate(shapes)]
    dense = [v.to([torch.bfloat16, torch.float32][i % 2]) for i, v in enumerate(values)]
    coded = [quantize(torch.randn(shape, generator=generator), QuantizeSpec()) for shape in ((130, 48), (7, 17))]
    return [nn.Parameter(t) for t in (*dense, *coded, torch.cat([values[5]] * 3)[33:66])]


def gradient(which, p, generator):
    """None, zeros, or normal values from tiny to huge ones, and some of many decades."""
    grad = torch.randn(p.shape, generator=generator)
    if which == "decades":
        grad = grad * 10 ** (torch.rand(p.shape, generator=generator) * 12 - 6)
        return (grad * (torch.rand(p.shape, generator=generator) < 0.5)).to(p.dtype)
    return None if which is None else (grad * which).to(p.dtype)


def parts(p, state):
    """Copies of the weight and the moments of a parameter, as the operators take them."""
    columns = math.prod(p.shape[1:]) if adamw.is_coded(p) else p.numel()
    if not adamw.is_coded(p):
        zeros = torch.zeros(columns)
        return [t.detach().flatten().clone() for t in (p, *(state.get(name, zeros) for name in adamw.DENSE))]
    weight = p.detach()
    weight = (
        [weight.qdata, weight.scale, weight.per_tensor_scale] if isinstance(p, NVFP4Tensor) else [weight.flatten(1)]
    )
    held = [state[name] for name in adamw.CODES] if state else moments(len(p), columns)
    return [t.clone() for t in (*weight, held[0], held[1].view(torch.float8_e4m3fn), *held[2:])]


def stepped(p, old, group, index, count):
    """The parts after a step by the numbers and the random state that the contract has."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    size = optimizer_step.UNBIASED * lr * math.sqrt(1 - beta2**count) / (1 - beta1**count)
    least = least_exponent(group["eps"])
    numbers = torch.tensor([1, beta1, 1 - beta1, beta2, 1 - beta2, size, 1 - lr * decay, least], dtype=torch.float32)
    op = {3: plain.adamw_step_vector, 5: plain.adamw_step, 7: plain.adamw_step_codes}[len(old)]
    grad = p.grad.flatten() if len(old) == 3 else p.grad.flatten(1)
    weights = len(old) - (2 if len(old) == 3 else 4)
    rng_state = torch.tensor(rng_state_row("adamw", 3, str(index), count))
    op(*old[:weights], grad, *old[weights:], numbers, rng_state, 0)
    return old


@pytest.mark.parametrize("eps, betas", [(1e-8, (0.9, 0.999)), (0.0, (0.0, 0.9)), (1e-3, (0.5, 0.0))])
def test_steps_of_any_parameters(eps, betas):
    """Two groups, any gradients and a reload: each step has the bits of the plain operator on the same state."""
    generator = torch.Generator().manual_seed(0)
    given = parameters(generator)
    assert [i for i, p in enumerate(given) if not adamw.is_coded(p)] == [6, 7, 9]  # a vector, 8 columns, a number
    groups = [{"params": given[:6], "lr": 0.05, "weight_decay": 0.1}, {"params": given[6:], "lr": 1e-4}]

    def new():
        return NVFP4AdamW([dict(group) for group in groups], eps=eps, betas=betas, weight_decay=0.0, seed=3)

    optimizer = new()
    for p in given:
        if isinstance(p, NVFP4Tensor):
            make_headroom(p)  # as the first step would
    kinds = [None, 0.0, 1e-18, 1e-3, "decades", 1.0, 1e15]
    for step in range(7):
        if step == 4:
            state, optimizer = saved(optimizer.state_dict()), new()
            optimizer.load_state_dict(state)
        optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler does
        before = [parts(p, optimizer.state.get(p, {})) for p in given]
        for i, p in enumerate(given):
            p.grad = gradient(kinds[(step + i) % len(kinds)], p, generator)
        optimizer.step()
        for index, (p, old) in enumerate(zip(given, before, strict=True)):
            state = optimizer.state.get(p, {})
            if p.grad is not None and p.numel():
                old = stepped(p, old, optimizer.param_groups[index >= 6], index, int(state["step"]))
            assert_same_bits(parts(p, state), old)


# --- headroom ---------------------------------------------------------------------------------------------------------


def small():
    return to_nvfp4_parameters(nn.Linear(32, 32, bias=False))


def grow(net, optimizer):
    """By a quarter of the largest of the start in each step."""
    for _ in range(40):
        net.weight.grad = -net.weight.detach().dequantize().sign()
        optimizer.step()


def test_headroom_keeps_the_values_and_lets_a_weight_grow_eightfold_by_each_optimizer():
    net = small()
    before = net.weight.dequantize(torch.float32)
    make_headroom(net.weight)
    assert torch.equal(net.weight.dequantize(torch.float32), before) and net.weight.scale.float().max() == 56
    for largest, after in ((256, 32), (16, 16)):  # 64 could not grow eightfold; 16 has room
        other = small().weight
        other.data.scale.copy_(other.scale.float().clamp(max=largest))
        make_headroom(other)
        assert other.scale.float().max() == after
    for optimizer in (NVFP4AdamW(net.parameters(), lr=before.abs().max().item() / 4, weight_decay=0.0) for _ in "12"):
        grow(net, optimizer)  # a new optimizer makes room for what another one has grown
    assert 48 < net.weight.dequantize().abs().max() / before.abs().max() < 65


def write(net, new):
    with torch.no_grad():
        net.weight.copy_(new)


def set_data(net, new):
    net.weight.data = NVFP4Tensor.to_nvfp4(new)


def swap(net, new):
    torch.utils.swap_tensors(net.weight, nn.Parameter(NVFP4Tensor.to_nvfp4(new)))


def load(net, new):
    dense = nn.Linear(32, 32, bias=False)
    dense.weight = nn.Parameter(NVFP4Tensor.to_nvfp4(new))
    net.load_state_dict(dense.state_dict())


@pytest.mark.parametrize("change", [write, set_data, swap, load])
def test_a_weight_that_was_replaced_may_grow_as_well(change):
    """The first step after a write makes room."""
    net, new = small(), torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 8
    optimizer = NVFP4AdamW(net.parameters(), lr=new.abs().max().item() / 4, weight_decay=0.0)
    grow(net, optimizer)
    change(net, new)
    grow(net, optimizer)
    assert 6 * new.abs().max() < net.weight.dequantize().abs().max() < 16 * new.abs().max()


def through_a_file(net, optimizer, order):
    """A new model and optimizer with what the others would save, loaded in this order."""
    states, net = saved((net.state_dict(), optimizer.state_dict())), small()
    optimizer = NVFP4AdamW(net.parameters(), lr=1.0)
    for which in order:
        (net, optimizer)[which].load_state_dict(states[which])
    return net, optimizer


@pytest.mark.parametrize("make", [NVFP4AdamW, NVFP4Optimizer])
def test_a_state_that_torch_sets_after_the_weights_resumes_bit_for_bit(make):
    """torch makes the states of a new optimizer by a step of zeros at a learning rate of 0."""
    runs = []
    for resumes in (False, True):
        torch.manual_seed(0)
        net = small()
        optimizer = make(net.parameters(), lr=0.02)
        for step in range(8):
            if resumes and step == 4:
                states, net = saved((net.state_dict(), get_optimizer_state_dict(net, optimizer))), small()
                net.load_state_dict(states[0])
                optimizer = make(net.parameters(), lr=0.02)
                set_optimizer_state_dict(net, optimizer, states[1])
                assert torch.equal(stored_bits(net.weight), stored_bits(states[0]["weight"]))
            net.weight.grad = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        runs.append(stored_bits(net.weight))
    assert torch.equal(*runs)


@pytest.mark.parametrize("seed", range(8))
def test_random_copies_between_writes_and_steps_change_no_bit(seed):
    """A run that is copied, saved and loaded at random beside one that is not, with the same writes and steps."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    net = small()
    runs = [(net, NVFP4AdamW(net.parameters(), lr=0.05, weight_decay=0.0))]
    runs.append(copy.deepcopy(runs[0]))
    for _ in range(60):
        kind = draw.choice(["step"] * 4 + ["write", "copy", "file"])
        if kind == "step":
            grad = -runs[0][0].weight.detach().dequantize().sign() + torch.randn(32, 32, generator=generator) / 4
            for net, optimizer in runs:
                net.weight.grad = grad.clone()
                optimizer.step()
            assert torch.equal(*(stored_bits(net.weight) for net, _ in runs))
        elif kind == "write":
            new = torch.randn(32, 32, generator=generator) * 10 ** draw.uniform(-2, 1)
            change = draw.choice([write, set_data, swap])
            for net, _ in runs:
                change(net, new)
        elif kind == "copy":
            runs[1] = copy.deepcopy(runs[1])
        else:
            runs[1] = through_a_file(*runs[1], draw.choice([(0, 1), (1, 0)]))
