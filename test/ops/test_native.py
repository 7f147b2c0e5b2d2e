"""Which kernels serve: what info() says of the CPU library, what switches it off, what is said where it is missing."""

import os
import subprocess
import sys

import pytest
from helpers.instruction_sets import needs_library

from nvfp4_tensor import info
from nvfp4_tensor.ops import native


@needs_library
def test_info_tells_what_serves():
    now = info()
    assert now.cpu == "native" and now.cpu_instruction_set == native.instruction_set()
    assert "torch" in now.versions and f"native, {now.cpu_instruction_set}" in str(now)
    with pytest.raises(ValueError, match=r"'mmx' is not available, .* is in use"):
        native.set_instruction_set("mmx")
    assert native.instruction_set() == now.cpu_instruction_set


def run_with(**environment: str) -> list[str]:
    """What a fresh interpreter prints: what serves, on which instructions, and a hash of what it quantizes."""
    code = (
        "import hashlib, torch, nvfp4_tensor\n"
        "x = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))\n"
        "q = torch.ops.nvfp4.quantize(x, torch.ops.nvfp4.amax(x), None, 0)\n"
        "print(nvfp4_tensor.info().cpu); print(nvfp4_tensor.info().cpu_instruction_set)\n"
        "print(hashlib.sha256(b''.join(t.view(torch.uint8).numpy().tobytes() for t in q[:2])).hexdigest())"
    )
    command = [sys.executable, "-W", "error::UserWarning:nvfp4_tensor", "-c", code]
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@needs_library
@pytest.mark.slow
def test_switched_off_plain_torch_serves_the_same_bits():
    off, portable = run_with(NVFP4_TENSOR_NATIVE="0"), run_with(NVFP4_TENSOR_ISA="portable")
    assert off[:2] == ["plain torch (disabled by NVFP4_TENSOR_NATIVE=0)", "torch"]
    assert portable == ["native", "portable", off[2]]


def test_without_a_library_it_warns_once(monkeypatch):
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "find", lambda name: None)
    with pytest.warns(UserWarning, match="libnvfp4_cpu.so was not built.*pip install") as seen:
        native.load()
        native.load()
    assert len(seen) == 1
    assert not native.library("cpu").loaded and native.instruction_set() == "torch"


def test_a_library_that_does_not_load_says_why(monkeypatch, tmp_path):
    (tmp_path / "libnvfp4_cpu.so").write_bytes(b"no library")
    monkeypatch.setenv("NVFP4_TENSOR_LIB", str(tmp_path))
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "_torch_has_cuda", lambda: False)
    with pytest.warns(UserWarning, match="cpu: libnvfp4_cpu.so could not be loaded: "):
        native.load()
    assert str(native.library("cuda")) == "plain torch (this torch has no CUDA)"
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setenv("NVFP4_TENSOR_NATIVE", "0")
    native.load()  # without a warning: it is what was asked for
    assert native.library("cpu").reason == "disabled by NVFP4_TENSOR_NATIVE=0"
