"""LoRA on frozen NVFP4 weights: peft's adapters get the gradients of a model with decoded weights."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, fake_quantize

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*get_apply_tensor_subclass.*"),  # peft: merging needs it, see below
]
CONFIGS = {"weight only": NVFP4WeightOnlyConfig(), "w4a4": NVFP4Config()}
LINEARS = 7


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def llama(config, device="cpu", dtype=torch.float32) -> nn.Module:
    """A small quantized Llama: one layer, grouped queries, sizes that fill no tile."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 80, "intermediate_size": 176, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.1))
    quantize_(model.to(device, dtype), CONFIGS[config], filter_fn=is_quantized)
    return model


def decoded(model: nn.Module) -> nn.Module:
    """Return a copy with decoded weights, with straight-through fake quantization of quantized activations."""
    model = copy.deepcopy(model)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, NVFP4Tensor):
            spec = weight.activation_spec
            module.__class__, module.weight = nn.Linear, nn.Parameter(weight.dequantize(), requires_grad=False)
            if spec is not None:
                module.register_forward_pre_hook(lambda _, inputs, spec=spec: fake_quantize(inputs[0], spec))
    return model


def with_adapters(model: nn.Module, **options) -> nn.Module:
    """Add rank-4 adapters to every linear except the head, with nonzero factors and a fixed seed."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **options)
    return peft.get_peft_model(model, config)


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


def tokens(device="cpu") -> torch.Tensor:
    return torch.randint(96, (2, 24), device=device, generator=torch.Generator(device).manual_seed(2))


def loss_and_gradients(model: nn.Module, device="cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=tokens(device), labels=tokens(device)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_same_gradients(model: nn.Module, expected: nn.Module, device="cpu") -> None:
    """Equal up to the order of summation."""
    (loss, gradients), (expected_loss, others) = (loss_and_gradients(m, device) for m in (model, expected))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    gradients = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients.items()}
    assert gradients.keys() == others.keys()
    assert all("lora_" in name for name in gradients) and len(gradients) >= 2 * LINEARS
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (gradient - others[name]).norm() <= 1e-4 * others[name].norm(), name


@pytest.mark.parametrize("use_dora", [False, True])
def test_gradients_are_those_of_decoded_weights(device, use_dora):
    """Only adapters have gradients. DoRA takes the norm of the weight, which is decoded for this product."""
    model = llama("weight only", device)
    adapted, expected = (with_adapters(each, use_dora=use_dora) for each in (model, decoded(model)))
    assert_same_gradients(adapted, expected, device)
    if not use_dora:  # one graph forward and backward
        model = with_adapters(llama("w4a4", device))
        assert_same_gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), copy.deepcopy(model), device)


def test_gradients_of_w4a4_are_straight_through(device):
    """Against fake quantization of each linear's input, one linear at a time, on the same input and output gradient.

    As a whole the models may part: an activation on the edge between two codes changes all that follows.
    """
    model = llama("w4a4", device)
    layers, others = (adapters_of(with_adapters(each)) for each in (model, decoded(model)))
    assert len(layers) == LINEARS
    for name, layer in layers.items():
        x = torch.randn(2, 5, layer.in_features, device=device)
        grad, results = torch.randn(2, 5, layer.out_features, device=device), []
        for module in (layer, others[name]):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(grad)
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
        assert len(results[0]) == 4
        for got, wanted in zip(*results, strict=True):
            assert (got - wanted).norm() <= 1e-5 * wanted.norm(), name
