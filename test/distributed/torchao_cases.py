"""torchao's own tests of tensor parallelism on a subclass, as they stand: a script, for they start their own processes.

python test/distributed/torchao_cases.py        # two GPUs and NCCL
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal import common_utils
from torchao.testing import utils as torchao_tests

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig


class WeightOnly(torchao_tests.TorchAOTensorParallelTestCase):
    TENSOR_SUBCLASS = NVFP4Tensor
    QUANT_METHOD_FN = staticmethod(NVFP4WeightOnlyConfig)


class W4A4(torchao_tests.TorchAOTensorParallelTestCase):
    TENSOR_SUBCLASS = NVFP4Tensor
    QUANT_METHOD_FN = staticmethod(NVFP4Config)


def _is(mesh: DeviceMesh, device_type: str) -> None:
    assert mesh.device_type == device_type


# torchao 0.18 writes to it what it holds; since torch 2.11 it is a property that nobody can write to.
DeviceMesh.device_type = DeviceMesh.device_type.setter(_is)

if __name__ == "__main__":
    common_utils.run_tests()
