"""On a GPU: loading, offloading, compiled generation, and the same file as from a CPU."""

import filecmp

import pytest
import torch
from transformers import AutoModelForCausalLM

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig
from nvfp4_tensor.integrations import transformers as nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CONFIG = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))


def test_saved_from_a_gpu_is_saved_from_a_cpu(llama, tmp_path, ids):
    _, folder = llama()
    for device in ("cpu", "cuda"):
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CONFIG, device_map=device)
        assert model.model.layers[0].mlp.up_proj.weight.device.type == device
        model.save_pretrained(tmp_path / device)
    assert filecmp.cmp(tmp_path / "cpu/model.safetensors", tmp_path / "cuda/model.safetensors", shallow=False)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "cpu", device_map="cuda")
    assert torch.equal(again(ids.cuda()).logits, model(ids.cuda()).logits)


def test_a_part_waits_in_memory(llama, ids):
    """accelerate moves the offloaded weights to the GPU at each call."""
    _, folder = llama()
    whole = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CONFIG, device_map="cuda")
    places = {"model.embed_tokens": 0, "lm_head": 0, "model.norm": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(four_over_six=True))
    parted = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={**places, "model.layers.1": "cpu"}
    )
    assert parted.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(parted(ids.cuda()).logits, whole(ids.cuda()).logits)


def test_generates_compiled(llama, ids):
    """Generate with a static cache, for which transformers compiles the model."""
    model = AutoModelForCausalLM.from_pretrained(llama()[1], quantization_config=CONFIG, device_map="cuda")
    eager = model.generate(ids.cuda(), max_new_tokens=8, do_sample=False)
    compiled = model.generate(ids.cuda(), max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert (eager == compiled).float().mean() > 0.9  # another order of sums may turn a close choice
    assert sum(isinstance(p, NVFP4Tensor) for p in model.parameters()) == 14
