"""MXFP4 against fbgemm's plain-torch reference, if fbgemm-gpu or fbgemm-gpu-cpu is installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nvfp4_tensor import emulation

pytestmark = pytest.mark.slow

MODES = {"floor": 1, "ceil": 4}
"""Our mode -> fbgemm's number. Its other modes round the exponent itself, or resolve ties differently."""


@pytest.fixture(scope="module")
def fbgemm():
    """Load two files of the package; the full package loads only with the torch that it was built for."""
    found = importlib.util.find_spec("fbgemm_gpu")  # which does not import it
    if found is None or found.origin is None:
        pytest.skip("fbgemm-gpu is not installed")
    package = ModuleType("fbgemm_reference")
    package.__path__ = [str(Path(found.origin).parent / "triton")]
    sys.modules["fbgemm_reference"] = package
    return importlib.import_module("fbgemm_reference.quantize_ref")


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=generator) * (20 * torch.randn(512, 1, generator=generator)).exp2()
    x[0, 1:] = 0
    x[1] = torch.linspace(-7, 7, 32)
    x[2] = torch.arange(32) / 4  # ties, which both round away from zero
    return x


@pytest.mark.parametrize("mode", MODES)
def test_codes_and_scales(fbgemm, mode):
    x = inputs()
    rows = fbgemm.py_quantize_mx4(x, group_size=32, rounding_mode=MODES[mode]).view(512, 17)
    t = emulation.cast(x, "mxfp4", scale_mode=mode, round_mode="away", cast_mode="actual")
    assert torch.equal(t.scale.view(torch.uint8).view(512), rows[:, 16])
    assert torch.equal(t.data[:, ::2], rows[:, :16] & 0xF) and torch.equal(t.data[:, 1::2], rows[:, :16] >> 4)
    theirs = fbgemm.py_dequantize_mx4(rows, group_size=32).view(512, 32)
    assert torch.equal(emulation.upcast(t), theirs)
