"""Files, models that are being loaded, and models in memory are quantized alike: the same matrices, the same bits."""

import re

import pytest
import torch
import transformers
from helpers import hub_models
from helpers.checkpoint_folders import content
from torchao.quantization import quantize_

import nvfp4_tensor.integrations.transformers as nvfp4
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, checkpoints, quantize_model
from nvfp4_tensor.quantization import gptq

SIZES = {**hub_models.SIZES, "intermediate_size": 96}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "Llama": SIZES,
    "Qwen3": {**SIZES, "tie_word_embeddings": True},
    "Qwen3Moe": {**SIZES, **MIXTURE},
    "Mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4Text": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96},
    "GPT2": {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
             "eos_token_id": 2},
    "Phi3": SIZES,
    "Gemma3Text": {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 32},
    "NemotronH": {**SIZES, "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4,
                  "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                  "moe_shared_expert_intermediate_size": 64, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1,
                  "ssm_state_size": 16},
    "HunYuanMoEV1": {**SIZES, "num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 32},
    "Qwen3_5Text": {**SIZES, **LINEAR_ATTENTION},
}  # fmt: skip
DENSE = {
    "Qwen3Moe": ["mlp.gate"], "Mixtral": ["gate"], "GptOss": ["router"], "Llama4Text": ["router"],
    "NemotronH": ["mixer.gate"], "HunYuanMoEV1": ["mlp.gate.wg"], "Qwen3_5Text": ["in_proj_a", "in_proj_b"],
}  # fmt: skip
"""The ends of names of matrices that must stay dense, beside output layers."""


ROUNDING = [
    {}, {"four_over_six": True}, {"scale_search": "mse", "scale_ceiling": 448}, {"scale_rounding": "up"},
    {"round_mode": "zero", "block_rows": 16},
]  # fmt: skip
STOCHASTIC = ("Phi3", "Mixtral", "GptOss")
CASES = [
    *((name, ROUNDING[i % len(ROUNDING)]) for i, name in enumerate(MODELS)),
    *((name, {"round_mode": "stochastic", "seed": 3}) for name in STOCHASTIC),
]


def written(folder):
    """The tensors of a folder. checkpoints.save writes NemotronH's under the names in the model."""
    return {
        re.sub("^model(?=.*[.](mixer|norm|embeddings))", "backbone", name): t for name, t in content(folder).items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "rounding"), CASES)
def test_every_route_writes_the_same_bytes(name, rounding, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # different amaxes, so that a shared per-tensor scale shows
            parameter.mul_(1 + 15 * torch.rand(()))
    model.save_pretrained(tmp_path / "dense")
    config = NVFP4WeightOnlyConfig(experts=True, **rounding)

    checkpoints.quantize(tmp_path / "dense", tmp_path / "files", spec=config.weight, seed=3, progress=False)
    hub_models.from_pretrained(tmp_path / "dense", config).save_pretrained(tmp_path / "loading")
    in_memory, of_torchao = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense") for _ in range(2))
    report = quantize_model(in_memory, config)
    nvfp4.attach_quantizer(in_memory).save_pretrained(tmp_path / "memory")
    checkpoints.save(in_memory, tmp_path / "saved", mismatched_scales="refuse", progress=False)
    quantize_(of_torchao, config, filter_fn=lambda module, path: f"{path}.weight" in report.quantized)
    checkpoints.save(of_torchao, tmp_path / "of_torchao", mismatched_scales="refuse", progress=False)

    with checkpoints.read(tmp_path / "files") as checkpoint:
        quantized = {each for each, entry in checkpoint.entries.items() if entry.quantized}
        dense = checkpoint.entries.keys() - quantized
    assert quantized and all(any(each.endswith(f"{end}.weight") for each in dense) for end in DENSE.get(name, ()))
    assert not any(f"{end}.weight" in each for each in quantized for end in DENSE.get(name, ()))
    assert not any("lm_head" in each or "embed" in each or "norm" in each for each in quantized)
    expected = written(tmp_path / "files")
    for route in ("loading", "memory", "saved", "of_torchao"):
        found = written(tmp_path / route)
        assert found.keys() == expected.keys(), route
        assert not [each for each in expected if found[each] != expected[each]], route
    for group in {report[each].group for each in report.quantized if len(report[each].group) > 1}:
        assert len({in_memory.get_parameter(each).per_tensor_scale.item() for each in group}) == 1, group
    if name == "GPT2":  # whose Conv1Ds become linears
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "memory")
        assert torch.equal(hub_models.logits(again), hub_models.logits(in_memory))
    heads = [each for each in report.values() if "lm_head.weight" in (each.name, *each.tied)]
    assert [each.is_quantized for each in heads] == [False]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3_5Text"])
@pytest.mark.parametrize("fit", [calibrate, gptq])
def test_calibrate_and_gptq_choose_the_same_linears(fit, name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    twin = transformers.AutoModelForCausalLM.from_config(config).eval()
    fit(model, [torch.randint(3, 90, (2, 32))], NVFP4Config(), progress=False)
    report = quantize_model(twin)
    assert hub_models.quantized(model).keys() == set(report.quantized)
    if fit is calibrate:
        for group in {report[each].group for each in report.quantized}:
            assert len({model.get_parameter(each).per_tensor_scale.item() for each in group}) == 1
