"""Optimizers with coded moments after steps: copied, pickled and saved, they continue bit for bit."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from nvfp4_tensor import NVFP4Tensor
from nvfp4_tensor.training import NVFP4AdamW, NVFP4Optimizer, to_nvfp4_parameters

MAKE = {
    "NVFP4AdamW": lambda p: NVFP4AdamW(p, lr=1e-2, seed=3),
    "NVFP4Optimizer": lambda p: NVFP4Optimizer(p, states="nvfp4", lr=1e-2, seed=3),
}


def network(codes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    return to_nvfp4_parameters(model) if codes else model


def train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.dequantize() if isinstance(p, NVFP4Tensor) else p.detach().clone() for p in model.parameters()]


def saved(value, weights_only):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


WHOLE = {
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda pair: saved(pair, weights_only=False),
}
STATE = {"torch.save": lambda state: saved(state, weights_only=True), "pickle": WHOLE["pickle"]}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("codes", [False, True], ids=["dense", "codes"])
@pytest.mark.parametrize("copied", WHOLE.values(), ids=WHOLE)
def test_copies_of_an_optimizer_continue(copied, codes, make):
    model = network(codes)
    optimizer = make(model.parameters())
    train(model, optimizer)
    model_copy, optimizer_copy = copied((model, optimizer))
    for mine, right in zip(train(model_copy, optimizer_copy), train(model, optimizer), strict=True):
        assert torch.equal(mine, right)
    scales = [s["ratio_scale"] for s in optimizer_copy.state.values() if "ratio_scale" in s]
    assert len(scales) == 2 and all(scale.dtype == torch.float8_e4m3fn for scale in scales)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("codes", [False, True], ids=["dense", "codes"])
@pytest.mark.parametrize("copied", STATE.values(), ids=STATE)
def test_state_dicts_continue(copied, codes, make):
    model = network(codes)
    optimizer = make(model.parameters())
    train(model, optimizer)
    again = copy.deepcopy(model)
    other = make(again.parameters())
    other.load_state_dict(copied(optimizer.state_dict()))
    for mine, right in zip(train(again, other), train(model, optimizer), strict=True):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("codes", [False, True], ids=["dense", "codes"])
def test_accelerate_saves_and_resumes(codes, tmp_path):
    """By default its model is a safetensors file, which has no NVFP4 weights: the error names the option."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = network(codes)
    model, optimizer = accelerator.prepare(model, NVFP4AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer)
    if codes:
        with pytest.raises(TypeError, match=r"accelerator\.save_state\(folder, safe_serialization=False\)"):
            accelerator.save_state(tmp_path / "safe")
    accelerator.save_state(tmp_path / "state", safe_serialization=not codes)
    right = train(model, optimizer)
    accelerator.load_state(tmp_path / "state")
    for mine, expected in zip(train(model, optimizer), right, strict=True):
        assert torch.equal(mine, expected)
