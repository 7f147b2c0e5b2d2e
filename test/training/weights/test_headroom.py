"""Headroom of the block scales of NVFP4 weights that NVFP4AdamW steps: after writes, and in copies."""

import copy
import random

import pytest
import torch
from helpers.bits import stored_bits
from helpers.files import saved
from torch import nn

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.training import NVFP4AdamW, to_nvfp4_parameters
from nvfp4_tensor.training.weights.headroom import make_headroom

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("change", "copied"), [(write, "not"), (set_data, "deep"), (swap, "file"), (load, "not"), (load, "file")]
)
def test_a_weight_that_was_replaced_may_grow_as_well(change, copied):
    """The first step after a write makes room, also in copies of weight and optimizer; copying alone does not."""
    net, new = small(), torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) / 8
    optimizer = NVFP4AdamW(net.parameters(), lr=new.abs().max().item() / 4, weight_decay=0.0)
    grow(net, optimizer)
    if copied != "not":
        grown = net.weight.per_tensor_scale.clone()
        net, optimizer = copy.deepcopy((net, optimizer)) if copied == "deep" else through_a_file(net, optimizer, (0, 1))
        net.weight.grad = torch.zeros(32, 32)
        optimizer.step()
        assert torch.equal(net.weight.per_tensor_scale, grown)
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


@pytest.mark.parametrize("seed", range(12))
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
