"""NVFP4AdamW and NVFP4Optimizer(states="nvfp4"): training, resuming, steps inside the backward, errors."""

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from nvfp4_tensor import NVFP4Tensor, QuantizeSpec, training
from nvfp4_tensor.numerics import optimizer_step
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters
from nvfp4_tensor.training.weights import coded_moments

pytestmark = pytest.mark.slow


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 48, generator=generator)
    return x.to(dtype), x @ torch.randn(48, 40, generator=generator) / 7


def make(kind, bias=True):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(48, 64, bias=bias), nn.Tanh(), nn.Linear(64, 40, bias=bias))
    return to_nvfp4_parameters(net) if kind == "codes" else net.to(kind)


def backward(net, part=slice(None)):
    x, y = problem(next(net.parameters()).dtype)
    loss = nn.functional.mse_loss(net(x[part]).float(), y[part])
    loss.backward()
    return loss.item()


def train(net, optimizer, steps):
    losses = []
    for _ in range(steps):
        losses.append(backward(net))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def bits(net):
    """Bytes of all parameters, codes and scales of NVFP4 ones."""
    tensors = []
    for p in net.parameters():
        parts = (p.qdata, p.scale, p.per_tensor_scale) if isinstance(p, NVFP4Tensor) else (p.detach(),)
        tensors += [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat(tensors)


KINDS = ["codes", torch.bfloat16, torch.float32]


def test_coded_moments_train_as_float32_ones_do():
    options = {"lr": 2e-3, "weight_decay": 0.0}
    final = {}
    for name, kind, cls in (
        ("float32", torch.float32, torch.optim.AdamW),
        ("coded", torch.float32, NVFP4AdamW),
        ("bfloat16 by torch", torch.bfloat16, torch.optim.AdamW),
        ("coded bfloat16", torch.bfloat16, NVFP4AdamW),
    ):
        net = make(kind)
        losses = train(net, cls(net.parameters(), **options), 200)
        final[name] = sum(losses[-20:]) / 20 / losses[0]
    assert final["float32"] < 0.1
    assert final["coded"] < 1.25 * final["float32"] + 0.005
    assert final["coded bfloat16"] < 1.25 * final["float32"] + 0.01


def test_nvfp4_weights_train_with_coded_moments():
    net, float32 = make("codes"), make("codes")
    coded = train(net, NVFP4AdamW(net.parameters(), lr=1e-3, weight_decay=0.0), 200)
    states = train(float32, NVFP4Optimizer(float32.parameters(), lr=1e-3, weight_decay=0.0), 200)
    assert isinstance(net[0].weight, NVFP4Tensor)
    assert sum(coded[-20:]) < 0.35 * 20 * coded[0]
    assert sum(coded[-20:]) < 1.25 * sum(states[-20:])


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_the_optimizer_are_those_of_the_class(kind):
    """NVFP4Optimizer(states="nvfp4") and NVFP4AdamW write equal bits."""
    nets = make(kind), make(kind)
    optimizers = (
        NVFP4Optimizer(nets[0].parameters(), torch.optim.AdamW, states="nvfp4", lr=1e-3, seed=3),
        NVFP4AdamW(nets[1].parameters(), lr=1e-3, seed=3),
    )
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 3)
    assert torch.equal(bits(nets[0]), bits(nets[1]))
    state = optimizers[0].state[nets[0][0].weight]
    elements = sum(state[name].nbytes for name in coded_moments.CODES) / (64 * 48)
    assert elements == 1.125 and set(optimizers[0].state[nets[0][0].bias]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("by", ["NVFP4AdamW", "NVFP4Optimizer", "in backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_is_uninterrupted_bit_for_bit(kind, by):
    def optimizer_of(net):
        if by == "NVFP4Optimizer":
            return NVFP4Optimizer(net.parameters(), states="nvfp4", lr=1e-3)
        optimizer = NVFP4AdamW(net.parameters(), lr=1e-3)
        if by == "in backward":
            optimizer.step_in_backward(clip_norm=0.05)
        return optimizer

    for steps in (1, 4):
        whole = make(kind)
        optimizer = optimizer_of(whole)
        train(whole, optimizer, steps)
        file = io.BytesIO()
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(whole, optimizer, 3)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        again = make(kind)
        its = optimizer_of(again)
        again.load_state_dict(saved["model"])
        its.load_state_dict(saved["optimizer"])
        train(again, its, 3)
        assert torch.equal(bits(whole), bits(again))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_the_backward_is_a_step_after_it(kind):
    nets = make(kind), make(kind)
    after, inside = (NVFP4AdamW(net.parameters(), lr=1e-3) for net in nets)
    inside.step_in_backward()
    for _ in range(3):
        for net, optimizer in ((nets[0], after), (nets[1], inside)):
            backward(net)
            assert all((p.grad is None) == (optimizer is inside) for p in net.parameters())
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


def test_tied_weights_step_once_in_the_backward():
    nets = []
    for inside in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 32, bias=False))
        net[2].weight = net[0].weight
        optimizer = NVFP4AdamW(net.parameters(), lr=1e-2)
        if inside:
            optimizer.step_in_backward()
        for step in range(2):
            net(torch.randn(8, 32, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    assert torch.equal(bits(nets[0]), bits(nets[1]))


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


def test_gradients_do_not_accumulate_in_the_backward():
    net = make(torch.float32)
    optimizer = NVFP4AdamW(net.parameters(), lr=1e-3)
    optimizer.step_in_backward()
    backward(net, slice(0, 64))
    with pytest.raises(RuntimeError, match=r"gradients cannot accumulate with step_in_backward"):
        backward(net, slice(64, 128))


def test_gradients_accumulate_before_a_step():
    nets = make(torch.float32), make(torch.float32)
    for net, parts in zip(nets, ([slice(None)], [slice(0, 64), slice(64, 128)]), strict=True):
        optimizer = NVFP4AdamW(net.parameters(), lr=1e-3)
        for part in parts:
            backward(net, part)
        if len(parts) == 2:
            for p in net.parameters():
                p.grad /= 2
        optimizer.step()
    for mine, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.allclose(mine, right, atol=2.1e-3)


def test_groups_and_schedulers():
    """A group's learning rate of 0 moves nothing; a scheduler's change reaches the step in the backward."""
    net = make(torch.float32)
    optimizer = NVFP4AdamW(
        [{"params": net[0].parameters(), "lr": 0.0, "weight_decay": 0.0}, {"params": net[2].parameters()}], lr=1e-2
    )
    optimizer.step_in_backward()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    start = copy.deepcopy(net)
    backward(net)
    optimizer.step()
    scheduler.step()
    moved = copy.deepcopy(net)
    assert torch.equal(start[0].weight, net[0].weight) and not torch.equal(start[2].weight, net[2].weight)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    backward(net)
    optimizer.step()
    assert torch.equal(moved[2].weight, net[2].weight)


def test_a_graph_that_needs_the_weight_of_before_says_so():
    net, x = nn.Linear(32, 32), torch.ones(2, 32, requires_grad=True)
    optimizer = NVFP4AdamW(net.parameters(), lr=1e-2)
    later = net(x).square().sum()
    net(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


def test_what_is_unfrozen_later_is_stepped():
    nets = make(torch.float32), make(torch.float32)
    after, inside = (NVFP4AdamW(net.parameters(), lr=1e-2) for net in nets)
    for net in nets:
        net[0].weight.requires_grad_(False)
    inside.step_in_backward()
    for step in range(4):
        if step == 2:
            for net in nets:
                net[0].weight.requires_grad_(True)
        for net, optimizer in zip(nets, (after, inside), strict=True):
            backward(net)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in nets[1].parameters())
    for mine, right in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("optimizer", [NVFP4AdamW, NVFP4Optimizer])
def test_a_compiled_step_steps(optimizer):
    """A graph ends where the optimizer steps: Dynamo would lose what it makes of the state."""
    nets = make("codes"), make("codes")
    for net, compiled in zip(nets, (False, True), strict=True):
        steps = optimizer(net.parameters(), lr=1e-2)

        def once(net=net, steps=steps):
            x, y = problem()
            nn.functional.mse_loss(net(x), y).backward()
            steps.step()
            steps.zero_grad()

        call = torch.compile(once, backend="eager") if compiled else once
        for _ in range(3):
            call()
        assert int(steps.state[net[0].weight]["step"]) == 3
    assert torch.equal(nets[0][0].weight.qdata, nets[1][0].weight.qdata)


def test_a_copy_of_the_optimizer_says_that_it_does_not_step_in_the_backward():
    optimizer = NVFP4AdamW(make(torch.float32).parameters())
    optimizer.step_in_backward()
    with pytest.warns(UserWarning, match="call its step_in_backward"):
        copy.deepcopy(optimizer)


@pytest.mark.parametrize(
    "eps, exponent", [(1e-8, 74), (0.0, 16), (1.0, 127), (2.0, 129), (1e-30, 16), (1e30, 240), (2.0**-20, 87)]
)
def test_eps_is_a_floor_of_the_second_moment(eps, exponent):
    assert coded_moments.least_exponent(eps) == exponent


@pytest.mark.parametrize(
    "options, message",
    [
        ({"inner": torch.optim.SGD}, "supports AdamW, not SGD"),
        ({"error_feedback": "momentum"}, "error_feedback needs a float32 momentum"),
        ({"round_mode": "rne"}, "round_mode='rne' needs states='float32'"),
        ({"amsgrad": True}, "do not support amsgrad=True"),
        ({"states": "int8"}, "states is 'float32' or 'nvfp4'"),
    ],
)
def test_options_that_do_not_fit_coded_states(options, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Optimizer(make("codes").parameters(), **{"states": "nvfp4", "lr": 1e-3, **options})


@pytest.mark.parametrize(
    "parameter, message",
    [
        (nn.Parameter(torch.zeros(32, 32, dtype=torch.float16)), "need bfloat16, float32 or NVFP4 weights"),
        (nn.Parameter(torch.zeros(32, 32).t()[:16]), "is not contiguous"),
    ],
)
def test_parameters_that_do_not_fit(parameter, message):
    with pytest.raises(ValueError, match=message):
        NVFP4AdamW([parameter])


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


def test_what_a_group_asks_for_is_not_ignored():
    with pytest.raises(ValueError, match="do not support maximize=True"):
        NVFP4AdamW([{"params": make(torch.float32).parameters(), "maximize": True}])
    embedding = nn.Embedding(64, 32, sparse=True)
    optimizer = NVFP4AdamW(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="need dense gradients"):
        optimizer.step()


def test_tiles_are_refused():
    net = to_nvfp4_parameters(nn.Linear(32, 32), QuantizeSpec(block_rows=16))
    with pytest.raises(ValueError, match="quantize it with block_rows=1"):
        NVFP4AdamW(net.parameters())


@pytest.mark.parametrize(
    "arguments, error, message",
    [({"clip": "all"}, ValueError, "'late' or 'parameter'"), ({"clip_norm": 0.0}, ValueError, "above 0")],
)
def test_arguments_of_step_in_backward(arguments, error, message):
    optimizer = NVFP4AdamW(make(torch.float32).parameters())
    with pytest.raises(error, match=message):
        optimizer.step_in_backward(**arguments)
    optimizer.step_in_backward()
    with pytest.raises(RuntimeError, match="was called before"):
        optimizer.step_in_backward()
    with pytest.raises(RuntimeError, match="cannot be added after"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.gpu
def test_a_capture_is_refused():
    net = make(torch.bfloat16).cuda()
    optimizer = training.NVFP4AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    with (
        pytest.raises(RuntimeError, match="capture only forward and backward"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()


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
            np.float32, coded_moments.numbers_of(optimizer.param_groups[0], step)
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


def saved_and_loaded(objects):
    file = io.BytesIO()
    torch.save(objects, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])
def test_a_copy_clips_by_the_norm_of_its_last_step(copied):
    torch.manual_seed(0)
    net, x = nn.Linear(32, 32).bfloat16(), torch.randn(8, 32).bfloat16()
    optimizer = NVFP4AdamW(net.parameters(), lr=1e-2)
    optimizer.step_in_backward(clip_norm=0.1)

    def step(net, optimizer):
        (100 * net(x).float().square().mean()).backward()
        optimizer.step()

    for _ in range(3):
        step(net, optimizer)
    with pytest.warns(UserWarning, match="does not step in the backward"):
        again, its_optimizer = copied((net, optimizer))
    its_optimizer.step_in_backward(clip_norm=0.1)
    step(net, optimizer)
    step(again, its_optimizer)
    assert torch.equal(again.weight, net.weight) and torch.equal(again.bias, net.bias)
