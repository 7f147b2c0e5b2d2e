"""On a GPU: loading, offloading, compiled generation, and the same file as from a CPU."""

import pytest
import torch
from helpers.hub_models import from_pretrained, quantized, same_file
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def test_saved_from_a_gpu_is_saved_from_a_cpu(llama, tmp_path, ids):
    _, folder = llama()
    for device in ("cpu", "cuda"):
        model = from_pretrained(folder, device_map=device)
        assert model.model.layers[0].mlp.up_proj.weight.device.type == device
        model.save_pretrained(tmp_path / device)
    assert same_file(tmp_path / "cpu", tmp_path / "cuda")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "cpu", device_map="cuda")
    assert torch.equal(again(ids.cuda()).logits, model(ids.cuda()).logits)


def test_a_part_waits_in_memory(llama, ids):
    """accelerate moves the offloaded weights to the GPU at each call."""
    _, folder = llama()
    whole = from_pretrained(folder, device_map="cuda")
    places = {"model.embed_tokens": 0, "lm_head": 0, "model.norm": 0, "model.rotary_emb": 0, "model.layers.0": 0}
    parted = from_pretrained(folder, device_map={**places, "model.layers.1": "cpu"})
    assert parted.model.layers[1].mlp.up_proj.weight.is_meta
    assert torch.equal(parted(ids.cuda()).logits, whole(ids.cuda()).logits)


def test_generates_compiled(llama, ids):
    """Generate with a static cache, for which transformers compiles the model."""
    model = from_pretrained(llama()[1], device_map="cuda")
    eager = model.generate(ids.cuda(), max_new_tokens=8, do_sample=False)
    compiled = model.generate(ids.cuda(), max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert (eager == compiled).float().mean() > 0.9  # another order of sums may turn a close choice
    assert len(quantized(model)) == 14
