"""quantize_ of experts with and without experts=True, and errors if there is nothing to quantize."""

import warnings

import pytest
import torch
from torch import nn
from torchao.quantization import quantize_

from nvfp4_tensor import (
    NVFP4Config,
    NVFP4Tensor,
    NVFP4WeightOnlyConfig,
    QuantizeSpec,
    checkpoints,
    quantize_experts,
)
from nvfp4_tensor.quantization import calibrate, gptq, sensitivity
from nvfp4_tensor.quantization.experts import dense_experts, is_transposed

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "head_dim": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
KINDS = {"Mixtral": 4, "Qwen3Moe": 4, "GptOss": 4, "DeepseekV3": 2}
"""The number of experts' weights of each model."""
IDS = torch.arange(1, 17)[None]


def mixture(kind):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "head_dim": 16 if kind == "DeepseekV3" else 32})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    return model


def linears(module, name):
    return isinstance(module, nn.Linear) and "lm_head" not in name


@pytest.mark.parametrize("kind, count", KINDS.items())
@pytest.mark.parametrize("config", [NVFP4WeightOnlyConfig, NVFP4Config])
def test_one_call_quantizes_experts(kind, count, config):
    model = mixture(kind)
    exact = model(IDS).logits.float()
    dense = {
        name: (getattr(module, each).detach(), is_transposed(module)) for name, module, each in dense_experts(model)
    }
    assert len(dense) == count
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(model, config(experts=True), filter_fn=linears)
    assert not list(dense_experts(model))
    for name, (weight, transposed) in dense.items():
        got = model.get_parameter(name)
        expected = quantize_experts(weight.mT.contiguous()).mT if transposed else quantize_experts(weight)
        assert isinstance(got, NVFP4Tensor) and torch.equal(got.dequantize(), expected.dequantize())
        assert (got.activation_spec is None) == (config is NVFP4WeightOnlyConfig)
    assert 0 < (model(IDS).logits.float() - exact).norm() / exact.norm() < 0.5


@pytest.mark.parametrize("kind, count", KINDS.items())
def test_experts_left_dense_are_named_once(kind, count):
    model = mixture(kind)
    with pytest.warns(
        UserWarning, match=rf"experts stay dense, \d+% of .*experts\..*proj, {count} in all.*experts=True"
    ) as caught:
        quantize_(model, NVFP4WeightOnlyConfig(), filter_fn=linears)
    assert len(caught) == 1 and len(list(dense_experts(model))) == count
    quiet = mixture(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(quiet, NVFP4WeightOnlyConfig(experts=False), filter_fn=linears)


def attention(module, name):
    return isinstance(module, nn.Linear) and "self_attn" in name


@pytest.mark.parametrize("fails", [False, True])
def test_calibrate_quantizes_experts(fails, monkeypatch):
    model = mixture("Mixtral")
    before = dict(model.named_parameters())
    config = NVFP4Config(experts=True)
    if fails:
        monkeypatch.setattr("nvfp4_tensor.quantization.linear._quantize_linear", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            calibrate(model, [IDS], config, filter_fn=attention, progress=False)
        after = dict(model.named_parameters())
        assert all(after[name] is parameter for name, parameter in before.items())
        return
    calibrate(model, [IDS], config, filter_fn=attention, progress=False)
    assert not list(dense_experts(model))
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, NVFP4Tensor)


@pytest.mark.parametrize("run", [calibrate, gptq, sensitivity])
@pytest.mark.parametrize("make, filter_fn, match", [
    (lambda: nn.Sequential(nn.Embedding(64, 32)), None, "nothing to quantize .*(it has no linear|1 Embedding)"),
    (lambda: nn.Sequential(nn.Linear(32, 32)), lambda module, name: False,
     r"nothing to quantize .*(linears .* 1 Linear \(filter_fn|left dense \(not selected by filter_fn\): 0)"),
], ids=["no linear", "filter"])  # fmt: skip
def test_nothing_to_quantize(run, make, filter_fn, match):
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=match):
        run(model, [IDS], filter_fn=filter_fn, progress=False)
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())


def falcon(**changes):
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **changes)).bfloat16().eval()


FALCON = ["mlp.dense_4h_to_h", "mlp.dense_h_to_4h", "self_attention.dense", "self_attention.query_key_value"]


@pytest.mark.parametrize("route", ["quantize_", "calibrate", "gptq", "from_pretrained"])
def test_falcons_linears(route, tmp_path):
    """Falcon's linears are a subclass of nn.Linear with its own forward."""
    model = falcon()
    if route == "from_pretrained":
        nvfp4 = pytest.importorskip("nvfp4_tensor.integrations.transformers")
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path, quantization_config=nvfp4.NVFP4TensorConfig())
    elif route == "quantize_":
        quantize_(model.transformer, NVFP4WeightOnlyConfig())
    else:
        {"calibrate": calibrate, "gptq": gptq}[route](model.transformer, [IDS], progress=False)
    found = [name for name, weight in model.named_parameters() if isinstance(weight, NVFP4Tensor)]
    assert sorted(found) == [f"transformer.h.0.{name}.weight" for name in FALCON]
    linear = model.transformer.h[0].mlp.dense_h_to_4h
    assert type(linear).__name__ == "FalconLinear" and linear.forward.__func__ is type(linear).forward
    assert model(IDS).logits.isfinite().all()


def test_sensitivity_leaves_falcons_class():
    model = falcon()
    found = sensitivity(model, [IDS], filter_fn=linears, progress=False)
    assert type(model.transformer.h[0].mlp.dense_h_to_4h).__name__ == "FalconLinear"
    assert all(part.called and part.loss > 0 for part in found.parts)


class Unused(nn.Module):
    def __init__(self, answer=lambda x: x):
        super().__init__()
        self.used, self.unused, self.answer = nn.Linear(32, 32), nn.Linear(32, 32), answer

    def forward(self, x):
        return self.answer(self.used(x))


def test_sensitivity_says_what_was_not_called():
    found = sensitivity(Unused(), [torch.randn(4, 32)], progress=False)
    assert {part.name: part.called for part in found.parts} == {"used.weight": True, "unused.weight": False}
    lines = {line.split()[0]: line for line in str(found).splitlines()}
    assert "not called" in lines["unused.weight"] and "nats" in lines["used.weight"]


@pytest.mark.parametrize("answer", [lambda x: (x, x), lambda x: {"y": x}, lambda x: x.argmax(-1)])
def test_sensitivity_without_logits(answer):
    with pytest.raises(TypeError, match=r"compares logits .* and Unused returned (tuple|dict|Tensor)"):
        sensitivity(Unused(answer), [torch.randn(4, 32)], progress=False)


def small_llama4():
    text = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
            "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**text, dtype="bfloat16")
    model = transformers.Llama4ForCausalLM(config).bfloat16().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    return model


@pytest.mark.parametrize("make", [lambda: mixture("GptOss"), small_llama4], ids=["gpt_oss", "llama4"])
@pytest.mark.parametrize("spec", [QuantizeSpec(), QuantizeSpec(four_over_six=True, block_rows=16)], ids=str)
def test_folders_are_quantized_as_from_pretrained_does(make, spec, tmp_path):
    """checkpoints.quantize (`nvfp4 quantize`) and NVFP4TensorConfig give equal bits."""
    nvfp4 = pytest.importorskip("nvfp4_tensor.integrations.transformers")
    model = make()
    model.save_pretrained(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "nvfp4", spec=spec, progress=False)
    got = type(model).from_pretrained(tmp_path / "nvfp4").state_dict()
    config = nvfp4.NVFP4TensorConfig(NVFP4WeightOnlyConfig(weight_spec=spec))
    expected = type(model).from_pretrained(tmp_path / "dense", quantization_config=config).state_dict()
    count = 0
    for name, weight in expected.items():
        assert isinstance(got[name], NVFP4Tensor) == isinstance(weight, NVFP4Tensor), name
        if isinstance(weight, NVFP4Tensor):
            count += weight.dim() == 3
            assert torch.equal(got[name].qdata, weight.qdata) and torch.equal(got[name].scale, weight.scale)
            torch.testing.assert_close(got[name].per_tensor_scale, weight.per_tensor_scale, rtol=2e-7, atol=0)
    assert count == 4


def test_experts_may_be_excluded_from_a_folder(tmp_path):
    mixture("GptOss").save_pretrained(tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "nvfp4", exclude=["*.experts.*"], progress=False)
    with checkpoints.read(tmp_path / "nvfp4") as read:
        assert {len(entry.shape) for entry in read.entries.values() if entry.quantized} == {2}
