"""Importing and first using the package prints nothing, and does not load torchao too early."""

import logging
import os
import subprocess
import sys
import warnings

import pytest

from nvfp4_tensor._compat.torchao_import import quietly

pytestmark = pytest.mark.slow

USES = {
    "product": "torch.nn.functional.linear(torch.ones(1, 32), nvfp4_tensor.quantize(torch.ones(4, 32)))",
    "config": "nvfp4_tensor.NVFP4Config()",
    "observer": "import nvfp4_tensor.quantization.observer",
    "demo": "import nvfp4_cli.demo.table",
    "training": "nvfp4_tensor.training",
    "generation": "import nvfp4_tensor.generation",
    "transformers": "import nvfp4_tensor.integrations.transformers",
    "quantize_": (
        "from nvfp4_tensor import NVFP4WeightOnlyConfig; from torchao.quantization import quantize_;"
        "quantize_(torch.nn.Linear(32, 4), NVFP4WeightOnlyConfig())"
    ),
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter, without what may silence torchao in this one, and whether libraries are built or not."""
    silent = ("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "PYTHONWARNINGS", "TORCH_LOGS")
    env = {name: value for name, value in os.environ.items() if name not in silent} | {"NVFP4_TENSOR_NATIVE": "0"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


@pytest.mark.parametrize("use", USES)
def test_nothing_is_printed(use):
    done = run(f"import torch, nvfp4_tensor; {USES[use]}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.smoke
def test_the_import_alone_loads_no_torchao():
    """Nor torchao's dependencies: its import takes longer than torch's."""
    done = run(
        "import sys, nvfp4_tensor; nvfp4_tensor.QuantizeSpec(), nvfp4_tensor.info(), dir(nvfp4_tensor);"
        "print([name for name in ('torchao', 'torch._dynamo', 'transformers') if name in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_quietly_drops_what_is_below_errors_and_puts_all_back(caplog):
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for name in ("torchao", "torchao.ops", "torch.utils._pytree"):
            with quietly():
                logging.getLogger(name).warning("inside")
                warnings.warn("inside", stacklevel=1)
                logging.getLogger(name).error("an error")
            logging.getLogger(name).warning("outside")
        warnings.warn("outside", stacklevel=1)
    messages = [record.message for record in caplog.records if record.name.startswith("torchao")]
    assert messages == ["an error", "outside"] * 2
    assert [str(warning.message) for warning in shown] == ["outside"]
