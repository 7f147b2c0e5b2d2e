"""Files of earlier versions load, and new files contain only the package's public names."""

import pickle
import pickletools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, ProductBackend, QuantizeSpec, quantize

pytestmark = pytest.mark.slow

RELEASES = sorted(path for path in (Path(__file__).parents[1] / "data").glob("v*") if path.is_dir())
VALUES = {release.name: np.load(release / "values.npz") for release in RELEASES}


def assert_values(release, loaded, prefix=""):
    for name, t in loaded.items():
        values = t.dequantize(torch.float32) if isinstance(t, NVFP4Tensor) else t.float()
        expected = torch.from_numpy(VALUES[release.name][prefix + name])
        assert torch.equal(values.detach(), expected), name


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_files_of_earlier_versions(release):
    tensors = torch.load(release / "tensors.pt", weights_only=True)
    for loaded in (tensors, pickle.loads((release / "tensors.pickle").read_bytes())):
        assert len(loaded) == 13
        assert_values(release, loaded)
    assert tensors["stochastic_fp32"].spec == QuantizeSpec(round_mode="stochastic", random_bits=8)
    w4a4 = tensors["w4a4"]
    assert w4a4.activation_amax == 2.5 and w4a4.product_backend is ProductBackend.FBGEMM
    assert tensors["transposed"].transposed and isinstance(tensors["parameter"], torch.nn.Parameter)
    assert tensors["window"].window is not None
    state = torch.load(release / "state_dict.pt", weights_only=True)
    model = torch.load(release / "model.pt", weights_only=False)
    for found in (state, model.state_dict()):
        assert_values(release, found, "state_dict/")
    config = pickle.loads((release / "config.pickle").read_bytes())
    assert config == NVFP4Config(round_mode="stochastic", percentile=99.9, step="convert")


def test_a_fresh_interpreter_loads_them():
    """Importing the package is enough, without accessing any name in it; each file in a process of its own."""
    code = (
        "import os, sys, torch, nvfp4_tensor; child = os.fork(); name = 'model.pt' if child else 'tensors.pt';"
        "print(name, len(torch.load(f'{sys.argv[1]}/{name}', weights_only=not child)), flush=True);"
        "child and os.waitpid(child, 0)"
    )
    command = [sys.executable, "-c", code, str(RELEASES[0])]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert sorted(printed.splitlines()) == ["model.pt 2", "tensors.pt 13"]


@pytest.mark.parametrize("what", ["tensor", "config", "model"])
def test_what_is_written_names_the_package_alone(what):
    t = quantize(torch.randn(4, 32), QuantizeSpec(round_mode="stochastic"), rng_state=torch.tensor([1, 2]))
    linear = torch.nn.Linear(16, 16)
    linear.weight = torch.nn.Parameter(quantize(linear.weight.detach()), requires_grad=False)
    held = {"tensor": t, "config": NVFP4Config(four_over_six=True), "model": linear}[what]
    named = {argument for opcode, argument, _ in pickletools.genops(pickle.dumps(held, 2)) if opcode.name == "GLOBAL"}
    ours = {name for name in named if name.startswith("nvfp4_tensor")}
    assert ours and all(name.startswith("nvfp4_tensor ") for name in ours), ours
