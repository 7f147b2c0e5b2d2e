"""torchao's own test of tensor parallelism on a subclass, as it stands: for two GPUs and NCCL."""

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from torch.testing._internal import common_utils
from torchao.testing import utils as torchao_tests

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig

pytestmark = pytest.mark.gpu


class TestWeightOnly(torchao_tests.TorchAOTensorParallelTestCase):
    TENSOR_SUBCLASS = NVFP4Tensor
    QUANT_METHOD_FN = staticmethod(NVFP4WeightOnlyConfig)


class TestW4A4(torchao_tests.TorchAOTensorParallelTestCase):
    TENSOR_SUBCLASS = NVFP4Tensor
    QUANT_METHOD_FN = staticmethod(NVFP4Config)


for _case in (TestWeightOnly, TestW4A4):
    common_utils.instantiate_parametrized_tests(_case)
