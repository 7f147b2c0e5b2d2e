"""What several files of this folder start from."""

import pytest
import torch
from helpers.checkpoints import quantized, tiny_tensors


@pytest.fixture(scope="module")
def tensors():
    """Of a small Llama, by name, its projections in NVFP4."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    return quantized(tiny_tensors())
