"""Importing and first using the package prints nothing, and does not load torchao too early."""

import json
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
    "training": "nvfp4_tensor.training",
    "transformers": "import nvfp4_tensor.integrations.transformers",
    "quantize_": (
        "from nvfp4_tensor import NVFP4WeightOnlyConfig; from torchao.quantization import quantize_;"
        "quantize_(torch.nn.Linear(32, 4), NVFP4WeightOnlyConfig())"
    ),
}
FIRST_USES = """
import json, os, sys, torch, nvfp4_tensor
nvfp4_tensor.QuantizeSpec(), nvfp4_tensor.info(), dir(nvfp4_tensor)
print([name for name in ("torchao", "torch._dynamo", "transformers") if name in sys.modules], flush=True)
for name, code in json.loads(sys.argv[1]).items():
    if (child := os.fork()) == 0:  # which has imported what a fresh interpreter has
        exec(code)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name, "failed", flush=True)
"""


@pytest.mark.smoke
def test_neither_the_import_nor_a_first_use_prints_anything():
    """The import alone loads neither torchao, whose import takes longer than torch's, nor its dependencies.

    Without what may silence torchao in this interpreter, and whether libraries are built or not.
    """
    silent = ("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "PYTHONWARNINGS", "TORCH_LOGS")
    env = {name: value for name, value in os.environ.items() if name not in silent} | {"NVFP4_TENSOR_NATIVE": "0"}
    command = [sys.executable, "-c", FIRST_USES, json.dumps(USES)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


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
