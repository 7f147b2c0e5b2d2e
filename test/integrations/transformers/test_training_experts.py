"""Training experts of transformers models with a recipe."""

import copy

import pytest
import torch
from torchao.quantization import quantize_

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)

from nvfp4_tensor import quantize_experts, training
from nvfp4_tensor.integrations.transformers import accept_checkpoint_names, train_experts
from nvfp4_tensor.integrations.transformers.training_experts import _forward
from nvfp4_tensor.training import RECIPES, Recipe

pytestmark = pytest.mark.slow

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
DECODER = dict(SIZES, num_hidden_layers=2, head_dim=16)
CONFIGS = {
    "mixtral": MixtralConfig(num_local_experts=4, **DECODER),
    "qwen3_moe": Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, **DECODER),
    "gpt_oss": GptOssConfig(num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2, **DECODER),
    "nemotron_h": NemotronHConfig(
        layers_block_type=["moe", "attention"], n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
        head_dim=16, moe_shared_expert_intermediate_size=48, **SIZES,
    ),
}  # fmt: skip
"""Gated experts; experts stored (E, K, N) with biases and their own gate; experts without a gate."""


def model_of(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]))
    for key, parameter in model.named_parameters():
        if "experts" in key and key.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model, torch.randint(64, (2, 16))


def step(model, ids):
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_products_are_grouped_linears_of_the_recipe(name):
    """Dense ones are those of transformers."""
    model, ids = model_of(name)
    model.set_experts_implementation("eager")
    dense, dense_gradients = step(model, ids)
    train_experts(model, Recipe(name="dense experts"))
    loss, gradients = step(model, ids)
    torch.testing.assert_close(loss, dense)
    assert gradients.keys() == dense_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, dense_gradients[key], rtol=1e-4, atol=1e-6)
    train_experts(model, "nvidia")
    assert model.config._experts_implementation == "nvfp4_nvidia"
    loss, gradients = step(model, ids)
    assert loss != dense and abs(loss - dense) < 0.05
    experts = [key for key in gradients if "experts" in key and "bias" not in key and "shared" not in key]
    assert len(experts) in (2, 4)
    for key in experts:
        cosine = torch.cosine_similarity(gradients[key].flatten(), dense_gradients[key].flatten(), 0)
        assert 0.9 < cosine < 0.9999
    again = step(model, ids)
    assert again[0] == loss and all(torch.equal(again[1][key], gradients[key]) for key in gradients)


def test_one_graph_beside_linears_that_train():
    model, ids = model_of("mixtral")
    quantize_(model, training.NVFP4TrainingConfig("nvidia"), training.keep_dense("lm_head", "*.gate"))
    train_experts(model)
    loss, gradients = step(model, ids)
    compiled, got = step(torch.compile(model, fullgraph=True, backend="aot_eager"), ids)
    assert compiled == loss
    assert all(torch.equal(got[f"_orig_mod.{key}"], gradient) for key, gradient in gradients.items())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_no_bit(reentrant):
    model, ids = model_of("gpt_oss")
    model.train().config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.register_forward_hook(lambda layer, args, y: torch.nn.functional.dropout(y, 0.1))
    train_experts(model)
    loss, gradients = step(model, ids)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    again = step(model, ids)
    assert again[0] == loss and all(torch.equal(again[1][key], gradients[key]) for key in gradients)


def test_rows_of_other_ranks_are_zero():
    model, _ = model_of("gpt_oss")
    experts = model.model.layers[0].mlp.experts
    torch.nn.init.normal_(experts.down_proj_bias)
    x, weights = torch.randn(6, 64), torch.rand(6, 2)
    chosen = torch.tensor([[0, 4], [4, 4], [3, 1], [4, 2], [1, 0], [2, 4]])
    dense = Recipe(name="dense")
    whole = _forward(experts, x, chosen.clamp(max=3), weights * (chosen < 4), recipe=dense)
    torch.testing.assert_close(_forward(experts, x, chosen, weights, recipe=dense), whole)


@torch.no_grad()
def test_an_evaluation_draws_nothing_and_back_again():
    model, ids = model_of("mixtral")
    before = model.eval()(ids).logits
    train_experts(model, "accurate")
    state = torch.get_rng_state()
    assert not torch.equal(model(ids).logits, before)
    assert torch.equal(torch.get_rng_state(), state)
    model.set_experts_implementation("eager")
    torch.testing.assert_close(model(ids).logits, before)


def test_refused():
    model, _ = model_of("mixtral")
    with pytest.raises(ValueError, match="unknown recipe 'x'"):
        train_experts(model, "x")
    with pytest.raises(ValueError, match=r"another recipe is named 'nvidia': .*recipe.replace\(name="):
        train_experts(model, RECIPES["accurate"].replace(name="nvidia"))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        train_experts(AutoModelForCausalLM.from_config(LlamaConfig(**DECODER)))
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(quantize_experts(experts.down_proj.detach()), requires_grad=False)
    with pytest.raises(TypeError, match=r"model.layers.1.mlp.experts has NVFP4 weights, which cannot be trained"):
        train_experts(model)


@pytest.mark.parametrize("name, recipe", [("mixtral", None), ("qwen3_moe", Recipe(name="dense experts"))])
def test_trainer_resumes_with_the_experts(tmp_path, name, recipe, trainer):
    """transformers' files name Mixtral's experts one by one; what was resumed ends like an uninterrupted training."""

    def fresh():
        model, _ = model_of(name)
        if recipe is None:
            return accept_checkpoint_names(model)
        train_experts(model, recipe)
        return model

    whole = fresh()
    trainer(whole, tmp_path / "whole", 3, save_steps=2).train()
    resumed = fresh()
    trainer(resumed, tmp_path / "resumed", 3, save_steps=2).train(str(tmp_path / "whole/checkpoint-2"))
    for (key, expected), got in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(got, expected), key


def test_an_incomplete_checkpoint_still_misses_its_experts():
    model = accept_checkpoint_names(model_of("mixtral")[0])
    state = {"model.layers.0.block_sparse_moe.experts.0.w2.weight": torch.zeros(64, 48), "unknown": torch.zeros(2)}
    before = model.model.layers[0].mlp.experts.down_proj.clone()
    with pytest.raises(RuntimeError, match=r"experts\.down_proj"):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, before)
    assert model.load_state_dict({"unknown": torch.zeros(2)}, strict=False).unexpected_keys == ["unknown"]
    own = {name: value + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(own)
    assert torch.equal(model.model.layers[0].mlp.experts.down_proj, before + 1)
