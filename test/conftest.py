"""Shared fixtures: the devices at hand, and the seed that every test starts from."""

import hashlib
import os
import platform
import re
from pathlib import Path

import hypothesis
import pytest
import torch
from helpers import instruction_sets

from nvfp4_tensor import info

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def inductor_cache() -> Path:
    """Where this checkout keeps what Inductor compiles for CPUs with the instructions of this one.

    Inductor compiles for the CPU at hand and does not ask, when it finds a result, which one that was. A machine that
    is moved to another host would run instructions that it no longer has.
    """
    cpuinfo = Path("/proc/cpuinfo")
    known = re.findall(r"^(?:flags|Features|model name)\s*:.*$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else []
    digest = hashlib.sha256("".join([platform.machine(), *sorted(set(known))]).encode()).hexdigest()
    return Path(__file__).parents[1] / "build" / f"inductor-{digest[:8]}"


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(inductor_cache()))


# Under an emulator a draw takes seconds.
hypothesis.settings.register_profile(
    "emulated", suppress_health_check=[hypothesis.HealthCheck.too_slow], deadline=None, max_examples=10
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)  # no worker ends with a long one
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(instruction_sets.summary())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def kernels(device):
    """A device whose native kernels are in use: without them, plain torch would be compared with itself."""
    if (serves := getattr(info(), device)) != "native":
        pytest.skip(f"the {device} library is not in use: {serves}")
    return device


@pytest.fixture
def cuda_library():
    """Skip tests of the CUDA kernels if these are not in use."""

    if info().cuda != "native":
        pytest.skip(f"the CUDA library is not in use: {info().cuda}")


@pytest.fixture(autouse=True)
def _fresh():
    """A test has its seed, and leaves threads and the default dtype as they were."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # else the recompilations of all tests count towards one limit
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(params=["bfloat16", "float64", "meta"])
def other_defaults(request):
    """Another default dtype, or another default device, than what the package expects: neither may change a bit.

    What the fixture gives calls a function under torch's own defaults: for inputs.
    """

    def under_usual(make):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            with torch.device("cpu"):
                return make()
        finally:
            torch.set_default_dtype(before)

    with torch.device("meta" if request.param == "meta" else "cpu"):
        if request.param != "meta":
            torch.set_default_dtype(getattr(torch, request.param))
        yield under_usual


@pytest.fixture
def blackwell(monkeypatch):
    """Make every device report FP4 tensor cores."""
    monkeypatch.setattr("nvfp4_tensor.matmul.backends.capability", lambda device: (10, 0))
