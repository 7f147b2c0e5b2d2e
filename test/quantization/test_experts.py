"""quantize_ of experts with and without experts=True."""

import warnings

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, quantize_experts
from nvfp4_tensor.quantization import calibrate, gptq, sensitivity
from nvfp4_tensor.quantization.experts import is_transposed
from nvfp4_tensor.quantization.weights import dense_experts

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
OWN_SIZES = {
    "DeepseekV3": {"head_dim": 16},
    "Llama4": {"intermediate_size": 48, "intermediate_size_mlp": 96, "num_experts_per_tok": 1,
               "interleave_moe_layer_step": 1},
}  # fmt: skip
KINDS = {"Mixtral": 4, "Qwen3Moe": 4, "GptOss": 4, "DeepseekV3": 2, "Llama4": 4}
"""The number of experts' weights of each model."""
IDS = torch.arange(1, 17)[None]


def mixture(kind, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}{'Text' * (kind == 'Llama4')}Config")
    config = config(**SIZES | OWN_SIZES.get(kind, {}) | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    return model


def linears(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_quantizes_experts_or_names_once_that_they_stay_dense(kind):
    model, config = mixture(kind), NVFP4Config if kind in ("Mixtral", "GptOss") else NVFP4WeightOnlyConfig
    exact = model(IDS).logits.float()
    dense = {each.name: (each.dense.detach(), is_transposed(each.module)) for each in dense_experts(model)}
    assert len(dense) == KINDS[kind]
    first = next(iter(dense)).replace(".", r"\.")
    with pytest.warns(
        UserWarning, match=rf"the experts stay dense, \d+% .*{first}, {KINDS[kind]} in all.*ts=True"
    ) as caught:
        quantize_(model, config(), filter_fn=lambda module, name: name.endswith("o_proj"))
    assert len(caught) == 1 and len(list(dense_experts(model))) == KINDS[kind]
    model = mixture(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, config(experts=False), filter_fn=lambda module, name: name.endswith("o_proj"))
        assert len(list(dense_experts(model))) == KINDS[kind]
        quantize_(
            model, config(experts=True), filter_fn=lambda m, name: linears(m, name) and not name.endswith("o_proj")
        )
    assert not list(dense_experts(model))
    for name, (weight, transposed) in dense.items():
        got = model.get_parameter(name)
        expected = quantize_experts(weight.mT.contiguous()).mT if transposed else quantize_experts(weight)
        assert isinstance(got, NVFP4Tensor) and torch.equal(got.dequantize(), expected.dequantize())
        assert (got.activation_spec is None) == (config is NVFP4WeightOnlyConfig)
    assert 0 < (model(IDS).logits.float() - exact).norm() / exact.norm() < 0.5


@pytest.mark.parametrize(("fails", "dense"), [("quantize", 0), ("quantize_experts", 4)])
def test_a_failure_between_weights_leaves_whole_ones(fails, dense, monkeypatch):
    model = mixture("Mixtral")
    monkeypatch.setattr(f"nvfp4_tensor.quantization.weights.{fails}", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibrate(model, [IDS], NVFP4Config(experts=True), filter_fn=linears, progress=False)
    assert len(list(dense_experts(model))) == dense
    assert all(type(module) is nn.Linear for name, module in model.named_modules() if linears(module, name))
    assert not any("observed" in name for name, _ in model.named_modules())
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("route", ["quantize_", "calibrate", "gptq", "from_pretrained"])
def test_falcons_linears(route, tmp_path):
    """Falcon's linears are a subclass of nn.Linear with its own forward."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes)).bfloat16().eval()
    if route == "from_pretrained":
        nvfp4 = pytest.importorskip("nvfp4_tensor.integrations.transformers")
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=nvfp4.NVFP4TensorConfig())
    elif route == "quantize_":
        found = sensitivity(model, [IDS], filter_fn=linears, progress=False)
        assert all(part.called and part.loss > 0 for part in found.parts)
        quantize_(model.transformer, NVFP4WeightOnlyConfig())
    else:
        {"calibrate": calibrate, "gptq": gptq}[route](model.transformer, [IDS], progress=False)
    found = [name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)]
    assert len(found) == 4 and all("self_attention" in name or "mlp.dense" in name for name in found)
    linear = model.transformer.h[0].mlp.dense_h_to_4h
    assert type(linear).__name__ == "FalconLinear" and linear.forward.__func__ is type(linear).forward
    assert model(IDS).logits.isfinite().all()
