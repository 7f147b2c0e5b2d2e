"""What distill trained and compressed-tensors reads in plain transformers, without a reader of ours."""

import pytest
import torch
from helpers.distillation import batches, trained, weights_of
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, checkpoints
from nvfp4_tensor.checkpoints.models.opening import open_model
from nvfp4_tensor.integrations.transformers.quantizer import decode_weights
from nvfp4_tensor.training import DistillConfig

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
IDS = batches()[0]


@pytest.mark.parametrize("base", [NVFP4WeightOnlyConfig(), NVFP4Config()], ids=["w4a16", "w4a4"])
@torch.no_grad()
def test_compressed_tensors_reads_the_saved_folder(base, tmp_path):
    """The weights to the bit, and W4A16's logits too; a W4A4 linear but for the rounding of 1 in 200 activation scales,
    which compressed-tensors computes in bfloat16.
    """
    static = type(base) is NVFP4Config
    with torch.enable_grad():
        model, _ = trained(config=DistillConfig(base_config=base, static=static, learning_rate=5e-4), steps=4)
    checkpoints.save(model, tmp_path, format="compressed-tensors", mismatched_scales="refuse", progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    logits, ours, errors = theirs(IDS).logits, open_model(tmp_path), []  # the first call decompresses
    assert len(weights_of(ours)) == 14
    for name, weight in weights_of(ours).items():
        assert torch.equal(theirs.get_parameter(name), weight.dequantize()), name
        assert torch.equal(weight.qdata, model.get_parameter(name).qdata), name
        linear = theirs.get_submodule(name.removesuffix(".weight"))

        def compare(_, inputs, output, linear=linear):
            errors.append((linear(*inputs) - output).norm() / output.norm())

        ours.get_submodule(name.removesuffix(".weight")).register_forward_hook(compare)
    ours(IDS)
    assert max(errors) < (0.03 if static else 0.005)
    if not static:
        decode_weights(ours)
        assert torch.equal(logits, ours(IDS).logits)
