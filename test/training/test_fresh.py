"""What a training linear multiplies is what its weight and its input are now, by whatever way they were written."""

import ctypes

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import training
from nvfp4_tensor.training import NVFP4TrainingConfig


def linear_of(weight=None):
    linear = nn.Linear(32, 32, bias=False)
    quantize_(linear, NVFP4TrainingConfig())
    if weight is not None:
        linear.weight = nn.Parameter(weight.detach().clone())
    return linear


def raw_copy(t, new):
    """As a kernel that torch knows nothing of."""
    ctypes.memmove(t.data_ptr(), new.contiguous().data_ptr(), t.numel() * t.element_size())


def twice(t, new):
    """The first new storage frees the address of the old one, and the second may get it."""
    t.data = torch.zeros_like(t)
    t.data = new.clone()


@torch.no_grad()
def transposed_in_data(t, new):
    t.copy_(new.t())
    t.data = t.data.t()


WRITES = {
    "copy_": torch.no_grad()(lambda t, new: t.copy_(new)),
    "foreach": torch.no_grad()(lambda t, new: torch._foreach_copy_([t], [new])),
    "data =": lambda t, new: setattr(t, "data", new.clone()),
    "data = twice": twice,
    "data = data.t()": transposed_in_data,
    "set_": torch.no_grad()(lambda t, new: t.set_(new.clone())),
}
"""Those that a tensor shows: a version, an address, a shape."""
UNSEEN = {
    "data.copy_": lambda t, new: t.data.copy_(new),
    "raw": raw_copy,
}
"""Those that it does not show."""


# --- weights ---------------------------------------------------------------------------------------------------------


def fused_step(linear, new):
    linear.weight.grad = linear.weight.detach() - new
    torch.optim.SGD([linear.weight], lr=1.0, fused=True).step()


def swapped(linear, new):
    torch.utils.swap_tensors(linear.weight, nn.Parameter(new.clone()))


OF_MODULES = {
    "new parameter": lambda linear, new: setattr(linear, "weight", nn.Parameter(new.clone())),
    "new parameter of the same memory": lambda linear, new: (
        linear.weight.data.copy_(new),
        setattr(linear, "weight", nn.Parameter(linear.weight.data)),
    ),
    "swap_tensors": swapped,
    "apply": lambda linear, new: linear._apply(lambda t: new.clone()),
    "fused SGD": fused_step,
}
OF_WEIGHTS = OF_MODULES | {name: lambda linear, new, w=write: w(linear.weight, new) for name, write in WRITES.items()}


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_as_they_are_now_while_codes_are_reused(name):
    torch.manual_seed(0)
    write, x, linear = OF_WEIGHTS[name], torch.randn(16, 32), linear_of()
    with training.reuse_weight_codes(linear):
        for _ in range(30 if name == "data = twice" else 3):  # an allocator may give out an old address
            linear(x)
            write(linear, torch.randn(32, 32))
            assert torch.equal(linear(x), linear_of(linear.weight)(x))


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", (WRITES | UNSEEN).values(), ids=WRITES | UNSEEN)
def test_inputs_as_they_are_now(write):
    """A buffer of an actor and a critic; and an activation, whose write torch must show, or of which a view is given.

    That is the guide's: another tensor object. A dense layer before such a write has a wrong gradient, unnoticed.
    """
    torch.manual_seed(0)
    first, second = linear_of(), linear_of()
    for kind in ("buffer", "buffer without gradients", "activation"):
        x = torch.randn(32, 32)
        for _ in range(3):
            with torch.set_grad_enabled(kind != "buffer without gradients"):
                given = x if kind != "activation" else torch.randn(32, 32, requires_grad=True) * 1
                first(given)
                write(given, torch.randn(32, 32))
                again = given.view_as(given) if kind == "activation" and write in UNSEEN.values() else given
                assert torch.equal(second(again), linear_of(second.weight)(given.detach().clone())), kind
