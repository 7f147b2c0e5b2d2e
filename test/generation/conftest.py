"""The ways in which tokens are decoded natively, and a record of the tokens that are."""

import pytest

pytest.importorskip("transformers")
from nvfp4_tensor.generation import decode_natively
from nvfp4_tensor.generation.decoder import Decoder
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
        Decoder(model, by_operators=True).install()
        return model

    return install


@pytest.fixture
def steps(monkeypatch):
    """The positions of the tokens that are decoded natively."""
    seen, launch = [], Runner.launch
    monkeypatch.setattr(Runner, "launch", lambda self, at, *a, **k: seen.append(at) or launch(self, at, *a, **k))
    return seen
