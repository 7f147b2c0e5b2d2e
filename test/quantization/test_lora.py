"""LoRA on frozen NVFP4 weights: peft's adapters get the gradients of a model with decoded weights."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*get_apply_tensor_subclass.*")]  # to merge
LINEARS = 7


def llama(config, device):
    """A small quantized Llama: one layer, grouped queries, sizes that fill no tile."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 80, "intermediate_size": 176, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.1)).to(device)
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name)
    return model


def decoded(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), NVFP4Tensor):
            module.__class__, module.weight = nn.Linear, nn.Parameter(weight.dequantize(), requires_grad=False)
    return model


def with_adapters(model, **options):
    """Rank-4 adapters on every linear except the head, with nonzero factors and a fixed seed."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def assert_same_gradients(model, expected):
    """Of the adapters alone, equal up to the order of summation."""
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(2)).to(expected.device)
    losses = [each(input_ids=tokens, labels=tokens).loss for each in (model, expected)]
    sum(losses).backward()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    pairs = [*zip(model.named_parameters(), expected.parameters(), strict=True)]
    trained = {name: (ours.grad, theirs.grad) for (name, ours), theirs in pairs if ours.requires_grad}
    assert all("lora_" in name for name in trained) and len(trained) >= 2 * LINEARS
    for name, (gradient, other) in trained.items():
        assert gradient.norm() > 0 and (gradient - other).norm() <= 1e-4 * other.norm(), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_gradients_are_those_of_decoded_weights(device, use_dora):
    """DoRA takes the norm of the weight, which is decoded for this product."""
    model = llama(NVFP4WeightOnlyConfig(), device)
    assert_same_gradients(*(with_adapters(each, use_dora=use_dora) for each in (model, decoded(model))))
