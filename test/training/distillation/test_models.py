"""distill of mixtures, tied heads, adapters and float32 models, with checkpointing and autocast; their checkpoints."""

import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.21")
from helpers.distillation import batches, dense_model, same_bits, trained, weights_of
from transformers import GPT2Config, GPT2LMHeadModel

from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, checkpoints, quantize_model
from nvfp4_tensor.training import DistillConfig, distill
from nvfp4_tensor.training.distillation import divergence

pytestmark = pytest.mark.slow
CONFIG = DistillConfig(static=True, learning_rate=5e-4)


@pytest.mark.parametrize("format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("family, linears, experts", [("Llama", 14, 0), ("Qwen3Moe", 8, 4), ("GptOss", 8, 4)])
def test_what_is_saved_is_what_trained(family, linears, experts, format, tmp_path):
    """The mean loss of a pass falls, and the logits of the checkpoint are those of the model."""
    model, losses = trained(dense_model(family), CONFIG, steps=24)
    assert sum(losses[-6:]) < 0.95 * sum(losses[:6])
    weights = weights_of(model)
    assert sorted(each.dim() for each in weights.values()) == [2] * linears + [3] * experts
    assert all(each.activation_amax is not None for each in weights.values())
    if experts and format != "modelopt":
        return
    checkpoints.save(model, tmp_path / "saved", format=format, mismatched_scales="refuse", progress=False)
    checkpoints.load(read := dense_model(family), tmp_path / "saved", progress=False)
    with torch.no_grad():
        assert all(torch.equal(read(ids).logits, model(ids).logits) for ids in batches())


def test_a_tied_head_stays_as_it_is():
    model, losses = trained(dense_model(tie_word_embeddings=True), CONFIG)
    assert model.lm_head.weight is model.model.embed_tokens.weight and losses[-1] < losses[0]
    assert torch.equal(model.lm_head.weight, dense_model(tie_word_embeddings=True).lm_head.weight)


def test_checkpointing_changes_no_bits():
    model = dense_model()
    model.gradient_checkpointing_enable()
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    trained(model, CONFIG, steps=4)
    assert sum(runs) == 8  # each step runs a layer again
    assert same_bits(model, trained(dense_model(), CONFIG, steps=4)[0]) and not model.training


@pytest.mark.parametrize(("family", "checkpointing"), [("Llama", False), ("Llama", True), ("Qwen3Moe", False)])
def test_compiled_blocks(family, checkpointing, monkeypatch):
    """Compiled during the steps only; not by Inductor, which takes minutes of a CPU: the bits are those of eager."""
    counted, compile = Counter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self: compile(self, backend=backend))

    def backend(graph, inputs):
        counted["graphs"] += 1
        return graph.forward

    monkeypatch.setattr(divergence, "_compiled_rows", divergence._of_rows)
    models = [dense_model(family) for _ in range(2)]
    if checkpointing:
        for model in models:
            model.gradient_checkpointing_enable()
    expected, losses = trained(models[0], DistillConfig(learning_rate=2e-3), steps=3)
    assert not counted
    model, found = trained(models[1], DistillConfig(learning_rate=2e-3, compile=True), steps=3)
    assert found == losses and same_bits(model, expected)
    assert 0 < counted["graphs"] <= 8 and not any(each._compiled_call_impl for each in model.modules())


def test_tokens_that_a_mask_hides_do_not_count():
    losses = []
    for hidden in (1, 2):
        ids, mask = batches(1)[0].clone(), torch.ones(4, 24, dtype=torch.int64)
        ids[1:, 17:], mask[1:, 17:] = hidden, 0
        given = [{"input_ids": ids, "attention_mask": mask, "labels": ids}]
        seen, config = [], DistillConfig(base_config=NVFP4WeightOnlyConfig(), learning_rate=1e-3)
        distill(dense_model(), given, config, steps=3, on_step=seen.append, progress=False)
        losses.append([each.loss for each in seen])
    assert losses[0] == losses[1] and losses[0][2] < losses[0][0]


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_alone_train_under_autocast(quantized):
    """Casts that autocast keeps of the adapters would leave the loss where it was."""
    peft = pytest.importorskip("peft")
    dense, config = dense_model(), DistillConfig(trains="adapters", learning_rate=5e-3)
    model = copy.deepcopy(dense)
    if quantized:
        quantize_model(model, NVFP4Config())
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_alpha=8))
    model = model.float() if not quantized else model
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        _, losses = trained(model, config, steps=30, **{"teacher": dense} if quantized else {})
    assert sum(losses[-6:]) < 0.8 * sum(losses[:6])
    assert len(weights_of(model)) == 14
    adapters = {name for name in before if "lora_" in name}
    changed = {n for n, each in model.named_parameters() if n in before and n not in weights_of(model)
               and not torch.equal(each, before[n])}  # fmt: skip
    assert changed == adapters and {n for n, each in model.named_parameters() if each.requires_grad} == adapters


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_on_a_gpu(static, capfd):
    """The loss falls, and is that of the reloaded model to the digits that are printed."""
    given = [ids.cuda() for ids in batches()]
    model = distill(dense_model().cuda(), given, dataclasses.replace(CONFIG, static=static), steps=40)
    words = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("loss ")).split()
    before, after, reloaded = (float(words[i]) for i in (1, 4, 8))
    assert after == reloaded < 0.8 * before
    assert {each.device.type for each in weights_of(model).values()} == {"cuda"}


def test_a_float32_model_and_minutes(capfd):
    """A run ends by time too, and its learning rate falls to 0 by it."""
    seen, model = [], dense_model(dtype=torch.float32)
    distill(model, batches(), dataclasses.replace(CONFIG, warmup=0.0), minutes=0.02, on_step=seen.append)
    assert model.lm_head.weight.dtype == torch.float32 and len(seen) == seen[-1].step
    rates = [each.learning_rate for each in seen]
    assert rates == sorted(rates, reverse=True) and rates[0] <= CONFIG.learning_rate
    assert "distilling: " in capfd.readouterr().err


def test_conv1d_begins_from_its_dense_weight():
    """From codes alone, whose distance to the next ones is largest, the loss would fall by a tenth in these steps."""
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model, losses = trained(model, dataclasses.replace(CONFIG, static=False), steps=40)
    assert sum(losses[-6:]) < 0.75 * sum(losses[:6]) and len(weights_of(model)) == 8
