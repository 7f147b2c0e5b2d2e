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


def is_quantized(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not name.endswith("lm_head")


def llama(device="cpu", dtype=torch.float32) -> nn.Module:
    """A small Llama: two layers, grouped queries, sizes that fill no tile."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=80,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=96,
        initializer_range=0.1,
    )
    return transformers.LlamaForCausalLM(config).to(device, dtype)


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


def adapted(config, device="cpu", dtype=torch.float32) -> tuple[nn.Module, nn.Module]:
    """Return (NVFP4 model, model with decoded weights), with the same adapters."""
    model = llama(device, dtype)
    quantize_(model, config, filter_fn=is_quantized)
    return tuple(with_adapters(each) for each in (model, decoded(model)))


def tokens(device="cpu") -> torch.Tensor:
    return torch.randint(96, (2, 24), device=device, generator=torch.Generator(device).manual_seed(2))


def loss_and_gradients(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("config", CONFIGS)
def test_only_adapters_train(config):
    model, _ = adapted(CONFIGS[config])
    adapter = model.base_model.model.model.layers[0].mlp.down_proj
    assert isinstance(adapter.base_layer.weight, NVFP4Tensor)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    frozen = {name: w.qdata.clone() for name, w in model.named_parameters() if isinstance(w, NVFP4Tensor)}
    assert len(frozen) == 7 * 2
    train(model, 2)
    assert all(torch.equal(dict(model.named_parameters())[name].qdata, codes) for name, codes in frozen.items())


def test_gradients_are_those_of_decoded_weights(device):
    """Weight-only in float32: equal up to the order of summation, through both layers."""
    model, dense = adapted(CONFIGS["weight only"], device)
    (loss, gradients), (expected_loss, expected) = (loss_and_gradients(m, tokens(device)) for m in (model, dense))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected.keys() and len(gradients) == 28
    for name, gradient in gradients.items():
        assert gradient.norm() > 0
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


def test_gradients_of_w4a4_are_straight_through(device):
    """Against fake quantization of each linear's input, one linear at a time, on the same input and output gradient.

    As a whole the models may part: an activation on the edge between two codes changes all that follows.
    """
    model, dense = adapted(CONFIGS["w4a4"], device)
    names = [name for name, module in model.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert len(names) == 14
    for name in names:
        quantized, expected = (m.get_submodule(name) for m in (model, dense))
        x = torch.randn(2, 5, quantized.in_features, device=device)
        grad = torch.randn(2, 5, quantized.out_features, device=device)
        results = []
        for module in (quantized, expected):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            y.backward(grad)
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters() if p.requires_grad)])
        assert len(results[0]) == 4
        for got, wanted in zip(*results, strict=True):
            assert (got - wanted).norm() <= 1e-5 * wanted.norm(), name


def test_gradients_of_a_whole_w4a4_model(device):
    model, dense = adapted(CONFIGS["w4a4"], device)
    (loss, gradients), (expected_loss, expected) = (loss_and_gradients(m, tokens(device)) for m in (model, dense))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=1e-2)
    flat, flat_expected = (torch.cat([g.flatten() for g in each.values()]) for each in (gradients, expected))
    assert torch.cosine_similarity(flat, flat_expected, dim=0) > 0.99


def train(model: nn.Module, steps: int, device="cpu") -> list[float]:
    """Return the losses of ``steps`` steps of AdamW on one batch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens(device), labels=tokens(device)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS)
def test_training_lowers_the_loss(device, config, dtype):
    model, _ = adapted(CONFIGS[config], device, dtype)
    losses = train(model, 12, device)
    assert losses[-1] < 0.7 * losses[0], losses


def test_weight_only_trains_like_the_decoded_model(device):
    model, dense = adapted(CONFIGS["weight only"], device)
    torch.testing.assert_close(train(model, 5, device), train(dense, 5, device), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_save_and_load(tmp_path, config):
    model, _ = adapted(CONFIGS[config])
    train(model, 2)
    model.save_pretrained(tmp_path)
    fresh = llama()
    quantize_(fresh, CONFIGS[config], filter_fn=is_quantized)
    loaded = peft.PeftModel.from_pretrained(fresh, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=tokens()).logits, model.eval()(input_ids=tokens()).logits)
        with model.disable_adapter():
            assert not torch.equal(loaded(input_ids=tokens()).logits, model(input_ids=tokens()).logits)


@pytest.mark.parametrize("config", CONFIGS)
def test_merging_needs_to_be_told_how_to_quantize(config):
    """peft merges only if its layers have the config; then it dequantizes, adds and quantizes again."""
    model, _ = adapted(CONFIGS[config])
    with pytest.raises(ValueError, match=r"get_apply_tensor_subclass.*re-quantize"):
        model.merge_adapter()
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    expected = [layer.base_layer.weight.dequantize() + layer.get_delta_weight("default") for layer in layers]
    for layer in layers:
        layer.get_apply_tensor_subclass = lambda: CONFIGS[config]
    merged = model.merge_and_unload()
    linears = [module for name, module in merged.named_modules() if is_quantized(module, name)]
    assert len(linears) == len(expected)
    for linear, weight in zip(linears, expected, strict=True):
        assert isinstance(linear.weight, NVFP4Tensor)
        assert linear.weight.activation_spec == getattr(CONFIGS[config], "activation", None)
        assert (linear.weight.dequantize() - weight).norm() < 0.12 * weight.norm()
    assert merged(input_ids=tokens()).logits.isfinite().all()


@pytest.mark.parametrize("config", CONFIGS)
def test_one_graph_forward_and_backward(device, config):
    model, _ = adapted(CONFIGS[config], device)
    loss, gradients = loss_and_gradients(model, tokens(device))
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    compiled_loss = compiled(input_ids=tokens(device), labels=tokens(device)).loss
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss.detach(), loss, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5)


def test_dora_takes_the_norm_of_the_weight():
    """The weight is decoded for this product."""
    model = llama()
    quantize_(model, CONFIGS["weight only"], filter_fn=is_quantized)
    expected, _ = loss_and_gradients(with_adapters(decoded(model), use_dora=True), tokens())
    loss, gradients = loss_and_gradients(with_adapters(model, use_dora=True), tokens())
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    assert all(gradient.norm() > 0 for gradient in gradients.values())
