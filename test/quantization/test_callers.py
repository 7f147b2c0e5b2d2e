"""What peft, transformers and load_state_dict do with a quantized model, and what is said of it: once, at the call."""

import functools

import pytest
import torch
from helpers.tiny_models import tiny_model
from helpers.user_warnings import user_warnings
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, calibrate
from nvfp4_tensor.training import NVFP4TrainingConfig

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
count = functools.partial(user_warnings, file=__file__, action="default")  # which tells a line once
CONFIG = NVFP4WeightOnlyConfig()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 16))


def quantized():
    model = net()
    quantize_(model, CONFIG)
    return model


def adapted(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0", "2"]))


def trainable(model):
    return sum(p.requires_grad for p in model.parameters())


# --- adapters --------------------------------------------------------------------------------------------------------

FREEZES = "matrices of adapters"


def every(module, name):
    return isinstance(module, nn.Linear)


def test_quantized_adapters_are_named_once():
    for call in (
        lambda model: quantize_(model, CONFIG),
        lambda model: calibrate(model, [torch.randn(4, 64)], NVFP4Config(), filter_fn=every, progress=False),
    ):
        model = adapted(net())
        assert count(lambda: call(model), match=FREEZES) == 1  # noqa: B023
        assert trainable(model) == 0


def test_adapters_that_stay_or_do_not_train_are_not_named():
    for call in (
        lambda model: calibrate(model, [torch.randn(4, 64)], NVFP4Config(), progress=False),  # which leaves them dense
        lambda model: quantize_(
            model, CONFIG, filter_fn=lambda module, name: every(module, name) and "lora" not in name
        ),
    ):
        model = adapted(net())
        assert count(lambda: call(model), match=FREEZES) == 0  # noqa: B023
        assert trainable(model) == 4
    trains = lambda module, name: "lora_" in name and isinstance(module, nn.Linear)  # noqa: E731
    assert count(lambda: quantize_(adapted(net()), NVFP4TrainingConfig(), filter_fn=trains), match=FREEZES) == 0
    finished = adapted(net()).requires_grad_(False)
    assert count(lambda: quantize_(finished, CONFIG), match=FREEZES) == 0


def mergeable():
    model = adapted(quantized())
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.get_apply_tensor_subclass = lambda: CONFIG
            nn.init.normal_(module.lora_B["default"].weight, std=0.5)
    return model


def test_merge_adapter_says_once_that_it_cannot_be_undone():
    model = mergeable()
    before = model.base_model.model[0].base_layer.weight.dequantize()
    assert count(lambda: model.merge_adapter(), match="does not bring the weights back") == 1
    model.unmerge_adapter()
    after = model.base_model.model[0].base_layer.weight.dequantize()
    assert (after - before).norm() > 0.1 * before.norm()
    assert count(lambda: mergeable().merge_and_unload(), match="does not bring") == 0
    assert count(lambda: adapted(net()).merge_adapter(), match="does not bring") == 0


# --- the Trainer -----------------------------------------------------------------------------------------------------

FROZEN = "the Trainer trains only the others"


def train(model, folder):
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    how = {"max_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    options = transformers.TrainingArguments(str(folder), per_device_train_batch_size=2, **how)
    transformers.Trainer(model=model, args=options, train_dataset=data).train()


@pytest.mark.parametrize(("kind", "said"), [("weights", 1), ("adapters", 0), ("lm_head", 0), ("training linears", 0)])
def test_the_trainer_of_frozen_weights_is_told_once(kind, said, tmp_path):
    model = tiny_model("Llama", num_hidden_layers=1, quantized=kind != "training linears")
    if kind == "adapters":
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    elif kind == "lm_head":
        model.requires_grad_(False)
        model.lm_head.requires_grad_()
    elif kind == "training linears":
        quantize_(model.model, NVFP4TrainingConfig())
    assert count(lambda: train(model, tmp_path), match=FROZEN) == said
    if said:
        assert count(lambda: train(model, tmp_path), match=FROZEN) == 0  # once
        assert count(lambda: quantized().train(), match="NVFP4") == 0  # a loop of the user's


# --- load_state_dict -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dense", "assign"), [(True, True), (True, False), (False, True)])
def test_load_state_dict_that_assigns_dense_weights_says_so_once(dense, assign):
    model, state = quantized(), (net() if dense else quantized()).state_dict()
    replaces = dense and assign
    assert count(lambda: model.load_state_dict(state, assign=assign), match="NVFP4") == replaces
    assert isinstance(model[0].weight, NVFP4Tensor) != replaces
