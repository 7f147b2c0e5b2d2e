"""Shared fixtures: the devices at hand, and the seed that every test starts from."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()  # else the recompilations of all tests count towards one limit


@pytest.fixture
def blackwell(monkeypatch):
    """Every device says that it has FP4 tensor cores."""
    monkeypatch.setattr("nvfp4_tensor.fp4_products.capability", lambda device: (10, 0))
