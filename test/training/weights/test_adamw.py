"""NVFP4AdamW: training, resuming, steps inside the backward, errors."""

import contextlib
import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from helpers.bits import stored_bits
from helpers.files import saved
from helpers.least_squares import backward, train
from helpers.refusals import refuses
from torch import nn

from nvfp4_tensor import QuantizeSpec
from nvfp4_tensor.numerics import optimizer_step
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters
from nvfp4_tensor.training.weights import adamw
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


@pytest.mark.parametrize("kind", KINDS)
def test_coded_moments_train_as_float32_ones_do(kind):
    options = {"lr": 2e-3, "weight_decay": 0.0}
    net, right = make(kind), make("codes" if kind == "codes" else torch.float32)
    optimizer = NVFP4AdamW(net.parameters(), **options)
    losses = train(net, optimizer, 200)
    float32 = NVFP4Optimizer if kind == "codes" else torch.optim.AdamW
    expected = sum(train(right, float32(right.parameters(), **options), 200)[-20:]) / 20
    assert expected < (0.35 if kind == "codes" else 0.1) * losses[0]
    assert sum(losses[-20:]) / 20 < 1.25 * expected + (0.0 if kind == "codes" else 0.01 * losses[0])
    weight, bias = optimizer.state[net[0].weight], optimizer.state[net[0].bias]
    assert sum(weight[name].nbytes for name in adamw.CODES) == 1.125 * 64 * 48 and bias.keys() == {"step", *adamw.DENSE}


COPIES = {
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)), "deepcopy": copy.deepcopy,
    "torch.save": lambda pair: saved(pair, weights_only=False),
}  # fmt: skip


@pytest.mark.parametrize("in_backward", [False, True], ids=["after", "inside"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_copied_or_resumed_has_the_bits_of_an_uninterrupted_run(kind, in_backward):
    """After one step and after some: the norm of the last step, by which the next one clips, is part of the state."""

    def started(optimizer):
        if in_backward:
            optimizer.step_in_backward(clip_norm=0.05)
        return optimizer

    for steps in (1, 4):
        net, again = make(kind), make(kind)
        optimizer, resumed = (started(NVFP4AdamW(each.parameters(), lr=1e-3, seed=3)) for each in (net, again))
        train(net, optimizer, steps)
        with pytest.warns(match="call its step_in_backward") if in_backward else contextlib.nullcontext():
            runs = {name: copied((net, optimizer)) for name, copied in COPIES.items()}
        for _, copied in runs.values():
            started(copied)
        state = saved({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        again.load_state_dict(state["model"])
        resumed.load_state_dict(state["optimizer"])
        train(net, optimizer, 3)
        for name, run in {**runs, "state": (again, resumed)}.items():
            train(*run, 3)
            assert torch.equal(bits(run[0]), bits(net)), (name, steps)


@pytest.mark.parametrize("kind", ["codes", torch.float32], ids=["codes", "dense"])
def test_accelerate_saves_and_resumes(kind, tmp_path):
    """By default its model is a safetensors file, which has no NVFP4 weights: the error names the option."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = make(kind)
    model, optimizer = accelerator.prepare(model, NVFP4AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, 2)
    if kind == "codes":
        with pytest.raises(TypeError, match=r"accelerator\.save_state\(folder, safe_serialization=False\)"):
            accelerator.save_state(tmp_path / "safe")
    accelerator.save_state(tmp_path / "state", safe_serialization=kind != "codes")
    train(model, optimizer, 2)
    right = bits(model)
    accelerator.load_state(tmp_path / "state")
    train(model, optimizer, 2)
    assert torch.equal(bits(model), right)


@pytest.mark.parametrize("kind", [*KINDS, "tied"])
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
