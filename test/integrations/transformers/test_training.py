"""Adapters on NVFP4 weights with peft and Trainer: gradients, checkpoints, resuming; and training recipes."""

import pytest
import torch
from helpers.hub_models import from_pretrained, quantized, same_codes
from packaging.version import Version
from torch import nn
from torchao.quantization import quantize_
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from nvfp4_tensor import quantize
from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.training import NVFP4TrainingConfig, NVFP4TrainingLinear, keep_dense

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow
TARGETS = ["q_proj", "v_proj", "down_proj"]


def base(folder):
    return from_pretrained(folder, dtype=torch.float32)


def adapted(model):
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_trainer_trains_adapters_alone_and_resumes(llama, tmp_path, trainer):
    """A checkpoint has the adapters; training resumed from it ends like training without an interruption."""
    _, folder = llama()
    model = adapted(base(folder))
    codes = [weight.qdata.clone() for weight in quantized(model).values()]
    before = trained(model)
    trainer(model, tmp_path / "whole", 6, save_steps=3).train()
    after = trained(model)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(weight.qdata, code) for weight, code in zip(quantized(model).values(), codes, strict=True))
    saved = {path.name for path in (tmp_path / "whole/checkpoint-3").iterdir()}
    assert "adapter_model.safetensors" in saved and "model.safetensors" not in saved
    again = adapted(base(folder))
    trainer(again, tmp_path / "again", 6, save_steps=3).train(str(tmp_path / "whole/checkpoint-3"))
    for name, parameter in trained(again).items():
        torch.testing.assert_close(parameter, after[name], rtol=0, atol=0)


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers asks for peft {MIN_PEFT_VERSION}"
)
def test_adapters_are_loaded_onto_the_checkpoint(llama, tmp_path, ids):
    model = base(llama()[1])
    nvfp4.save(model, tmp_path / "base")
    model = adapted(model)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "adapters")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert torch.equal(peft.PeftModel.from_pretrained(again, tmp_path / "adapters")(ids).logits, expected)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again.load_adapter(tmp_path / "adapters")  # transformers' own way
    assert torch.equal(again(ids).logits, expected)
    again.save_pretrained(tmp_path / "adapters again")
    assert not (tmp_path / "adapters again/model.safetensors").exists()
    assert (tmp_path / "adapters again/adapter_model.safetensors").exists()


def test_merged_adapters_are_quantized_by_the_config(llama, tmp_path, ids):
    """peft merges the sum and quantizes it again with the model's config."""
    model = base(llama()[1])
    weight = model.model.layers[0].mlp.down_proj.weight
    lora = adapted(model)
    layer = lora.base_model.model.model.layers[0].mlp.down_proj
    expected = quantize(weight.dequantize() + layer.get_delta_weight("default"), weight.spec)
    merged = lora.merge_and_unload()
    assert same_codes(merged.model.layers[0].mlp.down_proj.weight, expected)
    with pytest.warns(UserWarning, match="requantizing"):  # merged one by one, q and v have scales of their own
        merged.save_pretrained(tmp_path / "merged")
    assert len(quantized(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))) == 14


def test_a_quantized_model_alone_is_not_trained(llama, tmp_path, trainer):
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trainer(base(llama()[1]), tmp_path, 1)


def test_trainer_with_a_recipe(llama, tmp_path, trainer):
    """NVFP4TrainingConfig's linears keep dense weights, which Trainer saves, resumes and reloads as usual."""
    _, folder = llama()

    def fresh():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        quantize_(model, NVFP4TrainingConfig("nvidia"), filter_fn=keep_dense("lm_head"))
        return model

    model = fresh()
    assert sum(isinstance(module, NVFP4TrainingLinear) for module in model.modules()) == 14
    trainer(model, tmp_path / "whole", 4, save_steps=2).train()
    after = trained(model)
    again = fresh()
    trainer(again, tmp_path / "again", 4, save_steps=2).train(str(tmp_path / "whole/checkpoint-2"))
    for name, parameter in trained(again).items():
        assert torch.equal(parameter, after[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/checkpoint-4")
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, after["model.layers.0.mlp.up_proj.weight"])
