"""What other libraries wrote is decoded as they do."""

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN
from helpers.coded_folders import write_coded
from safetensors.torch import load_file

from nvfp4_tensor.checkpoints.sources.reading import open_source

WRITTEN = load_file(GOLDEN / "other_quantizations.safetensors")
"""By GPTQModel, AutoAWQ and bitsandbytes, with what they decode; see make_other_quantizations.py."""
SETTINGS = {
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq_v2": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"},
    "gptq_8": {"quant_method": "gptq", "checkpoint_format": "gptq"},
    "awq": {"quant_method": "awq", "version": "gemm"},
    **{layout: {"quant_method": "bitsandbytes"} for layout in ("nf4", "nf4_nested", "fp4", "int8")},
}


@pytest.mark.parametrize("layout", SETTINGS)
def test_as_their_writers_decode(tmp_path, layout):
    tensors = {name.removeprefix(f"{layout}."): t for name, t in WRITTEN.items() if name.startswith(f"{layout}.")}
    decoded = tensors.pop("decoded")
    dtype = str(decoded.dtype).removeprefix("torch.")
    with open_source(write_coded(tmp_path / "a", tensors, SETTINGS[layout], dtype=dtype)) as source:
        source.check_values()
        assert source.entries.keys() == {"m.weight"} and source.entries["m.weight"].shape == decoded.shape
        assert torch.equal(source.dense("m.weight"), decoded)
