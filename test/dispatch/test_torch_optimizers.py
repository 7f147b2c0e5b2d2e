"""torch's own optimizers over NVFP4 parameters: their state is dense, and each step is the dense one, rounded."""

import inspect

import pytest
import torch
from torch import nn

from nvfp4_tensor import QuantizeSpec, quantize

OPTIMIZERS = [
    cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
]
OPTIONS = {"foreach": True, "fused": True, "amsgrad": True, "centered": True, "maximize": True, "weight_decay": 0.1}


class HandWritten(torch.optim.Optimizer):
    """An optimizer written like many third-party ones."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p.data)
                    state["square"] = torch.zeros_like(p, dtype=torch.float32, memory_format=torch.preserve_format)
                    state["largest"] = torch.full_like(p, 1e-3)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                torch.maximum(state["largest"], p.grad.abs(), out=state["largest"])
                p.data.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-8), value=-group["lr"])


@pytest.mark.parametrize("cls", [*OPTIMIZERS, HandWritten])
def test_three_steps_stay_near_the_dense_ones(cls):
    """Plain, and with each option that the optimizer has."""
    generator, needed = torch.Generator().manual_seed(0), {"momentum": 0.9} if cls is torch.optim.SGD else {}
    known = [name for name in OPTIONS if name in inspect.signature(cls).parameters]
    for option in [None, *known]:
        arguments = needed | ({} if option is None else {option: OPTIONS[option]})
        p = nn.Parameter(
            quantize(torch.randn(64, 96, generator=generator), QuantizeSpec(row_scaled=option is not None))
        )
        dense = nn.Parameter(p.detach().dequantize())
        start = dense.detach().clone()
        pairs = [(each, cls([each], **arguments)) for each in (p, dense)]
        for step in range(3):
            grad = torch.randn(64, 96, generator=generator)
            for each, optimizer in pairs:
                each.grad = grad.clone()
                optimizer.step((lambda: torch.tensor(1.0)) if cls is torch.optim.LBFGS else None)
            states = [optimizer.state[each] for each, optimizer in pairs]
            for name, value in states[0].items():
                assert not isinstance(value, torch.Tensor) or type(value) is torch.Tensor, name
                if (
                    step == 0
                    and isinstance(value, torch.Tensor)
                    and option != "weight_decay"
                    and name not in ("ax", "d")
                ):
                    assert torch.allclose(value, states[1][name], rtol=1e-5, atol=1e-7), name
        moved = (dense.detach() - start).abs().max()
        # Steps of less than half a code are lost, as they are when written to nearest, and others become a whole one.
        largest = dense.detach().abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
        error = (p.detach().dequantize() - dense.detach()).abs()
        assert moved > 0 and (error <= 0.4 * largest + 1.5 * moved).all(), option


def test_a_state_is_saved_and_loaded_dense():
    p = nn.Parameter(quantize(torch.randn(64, 96)))
    optimizer = torch.optim.AdamW([p])
    p.grad = torch.randn(64, 96)
    optimizer.step()
    again = torch.optim.AdamW([p])
    again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again.state[p]["exp_avg"], p.grad * 0.1) and type(again.state[p]["exp_avg"]) is torch.Tensor
