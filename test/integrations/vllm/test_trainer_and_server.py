"""One rule for trainer and server: what a trainer multiplies with is what vLLM serves, code for code."""

import copy

import pytest
import torch
from helpers.served_by_vllm import serve
from helpers.tiny_models import tiny_model
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints, training
from nvfp4_tensor.training.linear.operands import quantize_operand

pytest.importorskip("vllm", reason="pip install '.[serve-test]' in an environment of its own")

IDS = torch.randint(3, 300, (4, 24), generator=torch.Generator().manual_seed(5))
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def train(model, steps=2, learning_rate=2e-3):
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    losses = []
    for _ in range(steps):
        logits = model(IDS, use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainer_of(recipe):
    model = tiny_model("Llama", torch.float32, quantized=False)
    quantize_(model.base_model, training.NVFP4TrainingConfig(recipe))
    return model


def exported(model, recipe):
    """Return a copy with the weights quantized as the trainer's forward quantizes them: each with its own scale."""
    server = training.to_dense(copy.deepcopy(model))
    for linear in (each for each in server.base_model.modules() if isinstance(each, torch.nn.Linear)):
        quantize_(linear, NVFP4WeightOnlyConfig(weight_spec=training.RECIPES[recipe].w))
    return server


def save(model, folder):
    # "keep": servers of other kernels need one scale for q, k and v; ours does not.
    checkpoints.save(model, folder, mismatched_scales="keep", progress=False)
    return folder


def different(served, operands):
    """Return how many codes, block scales and per-tensor scales of vLLM's layers are not those of the trainer."""
    from nvfp4_tensor.integrations.vllm.linears import NVFP4TensorLinearMethod

    counted, wrong = 0, 0
    for name, module in served.model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), NVFP4TensorLinearMethod):
            continue
        path, _, last = name.rpartition(".")
        fields = module.weight.data, module.nvfp4_scale.data, module.nvfp4_factor.data, module.input_size_per_partition
        weight, start = NVFP4Tensor(*fields, module.params_dtype, QuantizeSpec()), 0
        for part in FUSED.get(last, (last,)):
            expected = operands[f"{path}.{part}"]
            own = weight[start : start + len(expected)]
            start += len(expected)
            wrong += (own.qdata != expected.qdata).sum().item()
            scales = own.unswizzled_scale().view(torch.uint8), expected.unswizzled_scale().view(torch.uint8)
            wrong += (scales[0] != scales[1]).sum().item()
            wrong += (own.row_scale().expand(len(expected)) != expected.row_scale()).sum().item()
            counted += own.qdata.numel()
    assert counted > 200_000 and start == len(weight)
    return wrong


def operands_of(model, recipe):
    """Return the operands of the trainer's own forward, by the linear's name."""
    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, training.NVFP4TrainingLinear)]
    assert len(linears) == 28
    return {
        name: NVFP4Tensor(
            *quantize_operand(each.weight.detach(), each.active_recipe.w),
            each.in_features,
            torch.float32,
            QuantizeSpec(),
        )
        for name, each in linears
    }


@pytest.mark.parametrize("recipe", ["nvidia_4over6", "weight_only"])
def test_a_trained_model(tmp_path, monkeypatch, recipe):
    trainer = trainer_of(recipe)
    train(trainer)
    trainer.eval()
    served = serve(save(exported(trainer, recipe), tmp_path / "m"), monkeypatch)
    assert different(served, operands_of(trainer, recipe)) == 0
    factors = served.model.model.layers[0].self_attn.qkv_proj.nvfp4_factor
    assert factors.unique().numel() == 3  # which is what other kernels cannot multiply with
    if recipe == "weight_only":  # its forward is the server's
        x = torch.randn(7, 128)
        layer, linears = served.model.model.layers[2].self_attn.qkv_proj, trainer.model.layers[2].self_attn
        with torch.no_grad():
            expected = torch.cat([getattr(linears, f"{part}_proj")(x) for part in "qkv"], dim=1)
            got = layer.quant_method.apply(layer, x, layer.bias.float())
        torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)  # the server's biases are bfloat16


def test_each_step_of_reinforcement_learning(tmp_path, monkeypatch):
    """Train, refit a model in NVFP4, write its tensors, reload them into the memory of a running server."""
    recipe = "nvidia"
    trainer = trainer_of(recipe)
    rollout = exported(trainer, recipe)
    served = serve(save(rollout, tmp_path / "0"), monkeypatch)
    addresses = {name: p.data_ptr() for name, p in served.model.named_parameters()}
    first = served.hidden(IDS[0])
    for step in (1, 2):
        train(trainer, steps=1)
        training.refit_(rollout, trainer.state_dict())
        served.reload(save(rollout, tmp_path / str(step)))
        assert different(served, operands_of(trainer, recipe)) == 0
    assert {name: p.data_ptr() for name, p in served.model.named_parameters()} == addresses
    assert not torch.equal(served.hidden(IDS[0]), first)
