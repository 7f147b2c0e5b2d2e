"""vLLM in one process on a CPU, with our plug-in.

``pip install '.[serve-test]'`` says which vLLM. Its Python is enough, its compiled code is not used.
"""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def _cpu(tmp_path_factory):
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized

    import nvfp4_tensor.integrations.vllm as ours

    ours.register()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        if model_parallel_is_initialized():  # by other tests of this process
            yield
            return
        address = f"file://{tmp_path_factory.mktemp('vllm')}/rendezvous"
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        initialize_model_parallel(1)
        yield


@pytest.fixture(autouse=True)
def plugin(_cpu):
    """Return the plug-in, installed."""
    from nvfp4_tensor.integrations.vllm import plugin

    assert plugin._installed, "this vLLM is not the one that the plug-in was written for"
    torch.manual_seed(0)
    return plugin
