"""The ways in which tokens are decoded natively, and a record of the tokens that are."""

import pytest
import torch

pytest.importorskip("transformers")
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.graph_decoder import GraphDecoder
from nvfp4_tensor.generation.runner import Runner


@pytest.fixture(params=["step", "graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request):
    """One op for each token on a CPU; the step of graphs, operator by operator on a CPU; and that step in a graph."""
    return request.param


@pytest.fixture
def natively(way):
    """Let a model decode in this way."""

    def install(model):
        if way != "graph":
            return decode_natively(model.to("cuda" if way == "cuda" else "cpu"))
        GraphDecoder(model).install()
        return model

    return install


@pytest.fixture
def steps(monkeypatch):
    """The positions of the tokens that are decoded natively."""
    seen, op, launch = [], torch.ops.nvfp4.decode_step, Runner.launch
    monkeypatch.setattr(torch.ops.nvfp4, "decode_step", lambda *args: seen.append(args[8]) or op(*args))
    monkeypatch.setattr(Runner, "launch", lambda self, at, *more: seen.append(at) or launch(self, at, *more))
    return seen
