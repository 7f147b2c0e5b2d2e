"""Checkpoints of whole models in vLLM's model classes, against the same weights in transformers."""

import json

import pytest
import torch
from helpers.mixed_layouts import LAYOUTS
from helpers.served_by_vllm import serve
from helpers.texts import relative_error
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torchao.quantization import quantize_

from nvfp4_tensor import NVFP4Config, NVFP4Tensor, NVFP4WeightOnlyConfig, QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.quantization import calibrate

pytest.importorskip("vllm", reason="pip install '.[serve-test]' in an environment of its own")

IDS = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(3))
EXPERTS = {"Mixtral": {"num_experts_per_tok": 4, "sliding_window": None}, "Qwen3Moe": {"num_experts_per_tok": 4}}
"""All experts for each token, so that no tie of the router decides."""


def is_inner(module, name):
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name and not name.endswith("mlp.gate")


def quantized(family, activations=None, seed=0):
    model = tiny_model(family, quantized=False, **EXPERTS.get(family, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and seed:
                parameter.mul_(1 + seed / 10).add_(torch.randn(parameter.shape).to(parameter.dtype), alpha=0.01)
        for name, parameter in model.named_parameters():  # q, k and v, gate and up with scales apart
            if name.endswith(("k_proj.weight", "up_proj.weight")):
                parameter.mul_(3)
    if activations:
        calibrate(model, [IDS[None]], NVFP4Config(), filter_fn=is_inner, progress=False)
    else:
        inner = {name: each.weight for name, each in model.base_model.named_modules() if is_inner(each, name)}
        quantize_(model.base_model, NVFP4WeightOnlyConfig(experts=True), filter_fn=is_inner)
        for name, weight in inner.items():  # each alone: quantize_ shares their scales
            parameter = torch.nn.Parameter(quantize(weight.detach()), requires_grad=False)
            model.base_model.get_submodule(name).weight = parameter
    return model


def save(model, folder, format="modelopt", activations=None):
    checkpoints.save(model, folder, format=format, mismatched_scales="keep", progress=False)
    if activations == "dynamic":  # we write static scales only; others' checkpoints may have none
        tensors = load_file(folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")}
        assert len(kept) < len(tensors)
        save_file(kept, folder / "model.safetensors")
        model = model.base_model
        for linear in model.modules():
            if isinstance(getattr(linear, "weight", None), NVFP4Tensor):
                spec = QuantizeSpec(row_scaled=True)
                weight = linear.weight.data._replace(activation_spec=spec, activation_amax=None)
                linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    return folder


def hidden(model, ids=IDS):
    with torch.no_grad():
        return model.base_model(ids[None], use_cache=False).last_hidden_state[0]


@pytest.mark.parametrize("family, format", [("Llama", "modelopt"), ("Qwen3", "compressed-tensors")])
def test_weight_only(tmp_path, monkeypatch, family, format):
    model = quantized(family)
    served = serve(save(model, tmp_path / "m", format), monkeypatch)
    layer = served.model.model.layers[1].self_attn.qkv_proj
    assert layer.nvfp4_factor.unique().numel() == 3 or family == "Qwen3"
    parts = [model.get_parameter(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    assert torch.equal(layer.weight, torch.cat([part.qdata for part in parts]))
    assert relative_error(served.hidden(IDS), hidden(model)).max() < 0.03


@pytest.mark.parametrize("layout", ["ct, channel, per token", "ModelOpt FP8_PER_CHANNEL_PER_TOKEN"])
def test_fp8_beside_nvfp4(tmp_path, monkeypatch, layout):
    """vLLM's own FP8 attention beside our MLPs. It has no product of the other FP8 layouts for a CPU without AMX."""
    dense = tiny_model("Llama", quantized=False)
    config = {**dense.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    values = LAYOUTS[layout].write(tmp_path / "m", config, dense.state_dict())
    served = serve(tmp_path / "m", monkeypatch)
    attention, mlp = (getattr(served.model.model.layers[1], name) for name in ("self_attn", "mlp"))
    assert attention.qkv_proj.weight.dtype == attention.o_proj.weight.dtype == torch.float8_e4m3fn
    own = attention.o_proj.weight.float().t() * attention.o_proj.weight_scale.view(-1, 1)
    assert torch.equal(own, values["model.layers.1.self_attn.o_proj.weight"])
    model = checkpoints.load(tiny_model("Llama", quantized=False), tmp_path / "m", progress=False)
    parts = [model.get_parameter(f"model.layers.1.mlp.{name}_proj.weight") for name in ("gate", "up")]
    assert torch.equal(mlp.gate_up_proj.weight, torch.cat([part.qdata for part in parts]))
    seen, linears = [], {name: m for name, m in served.model.named_modules() if name.endswith(("qkv_proj", "o_proj"))}
    for name, module in linears.items():
        module.register_forward_hook(lambda _, x, y, name=name: seen.append((name, x[0], y[0])))
    assert relative_error(served.hidden(IDS), hidden(model)).max() < 0.1
    # Each FP8 linear on the input that it saw: roundings of activations to FP8 spread through the layers.
    assert len(seen) == 8
    for name, x, y in seen:
        parts = [f"{name[: -len('qkv_proj')]}{part}_proj" for part in "qkv"] if "qkv" in name else [name]
        with torch.no_grad():
            expected = torch.cat([model.get_submodule(part)(x) for part in parts], dim=1)
        error = relative_error(y, expected)  # a code of x that falls the other way is up to 2**-4 of it
        assert error.mean() < 2**-7 and error.max() < 2**-5, name


def experts_of(served):
    """Return vLLM's modules of experts, all of which must be ours."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from nvfp4_tensor.integrations.vllm.experts import _Experts

    found = [module for module in served.model.modules() if isinstance(module, RoutedExperts)]
    assert len(found) == 4 and all(isinstance(each.quant_method, _Experts) for each in found)
    return found


@pytest.mark.parametrize("family, format", zip(EXPERTS, ["compressed-tensors", "modelopt"], strict=True))
def test_experts(tmp_path, monkeypatch, family, format):
    model = quantized(family)
    folder = save(model, tmp_path / "m")
    if format != "modelopt":
        checkpoints.convert(folder, tmp_path / "other", to=format, progress=False)
        folder = tmp_path / "other"
    served = serve(folder, monkeypatch)
    before = served.hidden(IDS)
    assert relative_error(before, hidden(model)).max() < 0.03
    for module in experts_of(served):
        assert not hasattr(module, "w13_weight_scale") and not hasattr(module, "w13_weight_packed")
        module.quant_method.process_weights_after_loading(module)
    assert torch.equal(served.hidden(IDS), before)


def test_experts_with_static_activations(tmp_path, monkeypatch):
    """The largest of the experts' scales."""
    model = quantized("Qwen3Moe")
    folder = save(model, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    quantized_names = [name.removesuffix("_scale_2") for name in tensors if name.endswith(".weight_scale_2")]
    for name in quantized_names:
        expert = int(name.split(".experts.")[1][0]) if ".experts." in name else 0
        scale = 0.002 if "down_proj" in name or "o_proj" in name else 0.004
        tensors[name.replace("weight", "input_scale")] = torch.tensor(scale / (1 + expert))
    save_file(tensors, folder / "model.safetensors")
    for file in ("config.json", "hf_quant_config.json"):
        text = (folder / file).read_text()
        assert "W4A16_NVFP4" in text
        found = json.loads(text.replace("W4A16_NVFP4", "NVFP4"))
        found.get("quantization_config", {}).pop("config_groups", None)
        (folder / file).write_text(json.dumps(found))
    served = serve(folder, monkeypatch)
    for module in experts_of(served):
        assert module.nvfp4_w13_amax == torch.tensor(0.004) * 2688
        assert module.nvfp4_w2_amax == torch.tensor(0.002) * 2688
    error = relative_error(served.hidden(IDS), hidden(model))
    assert 0.05 < error.mean() < 0.6
    monkeypatch.setenv("NVFP4_TENSOR_SERVING", "w4a16")
    assert relative_error(serve(folder, monkeypatch).hidden(IDS), hidden(model)).max() < 0.03


@pytest.mark.parametrize(
    "family, activations", [("Llama", None), ("Llama", "static"), ("Llama", "dynamic"), ("Qwen3Moe", None)]
)
def test_reload(tmp_path, monkeypatch, family, activations):
    """Weights of a trainer's next step: in the memory of the first ones, equal to a server that starts with them."""
    first, second = (
        save(quantized(family, activations, seed), tmp_path / str(seed), activations=activations) for seed in (0, 2)
    )
    served = serve(first, monkeypatch)
    before = served.hidden(IDS)
    addresses = {name: p.data_ptr() for name, p in served.model.named_parameters()}
    served.reload(second)
    fresh = serve(second, monkeypatch).hidden(IDS)
    assert {name: p.data_ptr() for name, p in served.model.named_parameters()} == addresses
    assert torch.equal(served.hidden(IDS), fresh) and not torch.equal(fresh, before)
    served.reload(first)
    assert torch.equal(served.hidden(IDS), before)


@pytest.mark.parametrize(
    "family, missing, again",
    [
        ("Llama", "model.layers.1.self_attn.v_proj.weight_scale", True),
        ("Llama", "model.layers.1.mlp.down_proj.weight", False),
        ("Qwen3Moe", "model.layers.1.mlp.experts.0.down_proj.weight_scale_2", True),
    ],
)
def test_an_incomplete_checkpoint_is_refused(tmp_path, monkeypatch, family, missing, again):
    folder = save(quantized(family), tmp_path / "m", "modelopt")
    tensors = load_file(folder / "model.safetensors")
    if again:
        served = serve(folder, monkeypatch)
    del tensors[missing]
    with pytest.raises(ValueError, match="was not loaded"):
        if again:
            served.reload(weights=iter(tensors.items()))
        else:
            save_file(tensors, folder / "model.safetensors")
            serve(folder, monkeypatch)


def test_dummy_weights(tmp_path, monkeypatch):
    for family in ("Llama", "Qwen3Moe"):
        folder = save(quantized(family), tmp_path / family, "modelopt")
        served = serve(folder, monkeypatch, load_format="dummy")
        served.reload(
            weights=iter(load_file(folder / "model.safetensors").items())
        )  # as trainers do: start with dummies, then load
        assert torch.equal(served.hidden(IDS), serve(folder, monkeypatch).hidden(IDS))
