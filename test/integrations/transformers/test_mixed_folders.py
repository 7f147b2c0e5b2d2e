"""from_pretrained of folders that do not fit the model, or that mix NVFP4 with other weights: refused by name."""

import re

import pytest
import torch
import transformers
from helpers.checkpoint_folders import edit
from helpers.hub_models import SIZES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Transpose, WeightConverter

from nvfp4_tensor import NVFP4Tensor, checkpoints
from nvfp4_tensor.integrations import transformers as nvfp4
from nvfp4_tensor.integrations.transformers import experts
from nvfp4_tensor.integrations.transformers.while_loading import Quantize

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("natively")]

Q = "model.layers.0.self_attn.q_proj.weight"


MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4}


def separate(tensors):
    """Phi-3's joined weights, as other models have them."""
    for joined, parts in {"qkv": {"q": 64, "k": 32, "v": 32}, "gate_up": {"gate": 64, "up": 64}}.items():
        for name in [name for name in tensors if f"{joined}_proj" in name]:
            for part, rows in zip(parts, tensors.pop(name).split(list(parts.values())), strict=True):
                tensors[name.replace(joined, part)] = rows.clone()


def model_of(family, folder, **changes):
    """Return a model that was saved in a folder, Phi3's with its joined weights apart."""
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 64} | (MOE if family == "Qwen3Moe" else {}) | changes
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    if family == "Phi3":
        edit(folder, separate)
    return model


def assert_refused(folder, message, **options):
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, **options)


def test_shapes_are_compared_with_the_config(tmp_path):
    model_of("Llama", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    for name, changes in (("k_proj", {"num_key_value_heads": 4}), ("_proj", {"hidden_size": 128})):
        message = rf"{name}\S*: expected \[.*\], found \[.*\] for .*config\.json"
        assert_refused(tmp_path / "q", message, **changes)
    assert_refused(tmp_path / "q", message, ignore_mismatched_sizes=True, **changes)


@pytest.mark.parametrize("family, form, pattern", [
    ("Qwen3Moe", "modelopt", "experts.0."), ("Qwen3Moe", "compressed-tensors", "experts.1.up_proj"),
    ("Phi3", "modelopt", "q_proj"),
])  # fmt: skip
def test_what_a_model_joins_is_all_nvfp4_or_none(tmp_path, family, form, pattern):
    model = model_of(family, tmp_path / "dense")
    with pytest.warns(UserWarning, match="are dense, but linears that servers join them with"):
        checkpoints.quantize(tmp_path / "dense", tmp_path / "q", to=form, exclude=[f"*{pattern}*"], progress=False)
    message = rf"{re.escape(pattern)}\S* is dense, but tensors that the model joins with it are NVFP4"
    assert_refused(tmp_path / "q", message)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        checkpoints.load(model, tmp_path / "q", progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_missing_expert_is_named(tmp_path):
    model_of("Qwen3Moe", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    edit(tmp_path / "q", lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp.experts.3.up_proj" in name])
    assert_refused(tmp_path / "q", r"weights of model\.layers\.1\.mlp\.experts\.gate_up_proj are missing")
    edit(tmp_path / "q", lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp.experts.3." in name])
    assert_refused(tmp_path / "q", r"expected \[4, .*, found \[3, .* for model\.layers\.1\.mlp\.experts\.\w+: make")


@pytest.mark.parametrize("exclude", [[], ["*self_attn*"]])
def test_weights_that_the_model_joins(tmp_path, exclude):
    """As load() of the same folder, saved and loaded again too."""
    model = model_of("Phi3", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", exclude=exclude, progress=False)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    read.save_pretrained(tmp_path / "again")
    ids = torch.arange(3, 35)[None]
    base = transformers.AutoModel.from_pretrained(tmp_path / "q")  # whose names have no prefix
    filled = transformers.AutoModel.from_config(model.config, dtype=torch.bfloat16)
    checkpoints.load(filled, tmp_path / "q", strict=False, progress=False)
    for each in (base, filled.eval()):
        assert torch.equal(each(ids).last_hidden_state, read.model(ids).last_hidden_state)
    expected = checkpoints.load(model, tmp_path / "q", progress=False)(ids).logits
    kinds = {name: type(p.data) for name, p in model.named_parameters()}
    assert list(kinds.values()).count(NVFP4Tensor) == 8 - 4 * len(exclude)
    for each in (read, AutoModelForCausalLM.from_pretrained(tmp_path / "again")):
        assert {name: type(p.data) for name, p in each.named_parameters()} == kinds
        torch.testing.assert_close(each(ids).logits, expected, rtol=0, atol=0)


def test_weights_that_the_model_makes_otherwise_are_refused(tmp_path, monkeypatch):
    model_of("Llama", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    turned = WeightConverter("q_proj.weight", "q_proj.weight", operations=[Transpose(0, 1)])
    monkeypatch.setattr(experts, "get_model_conversion_mapping", lambda model: [turned])
    assert_refused(tmp_path / "q", "is made of .* by Transpose, which NVFP4 weights do not support")


@pytest.mark.parametrize("source", ["dense", "q"])
def test_no_parameter_stays_random(tmp_path, source):
    model_of("Llama", tmp_path / "dense", tie_word_embeddings=False)
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    options = {"quantization_config": nvfp4.NVFP4TensorConfig()} if source == "dense" else {}
    whole = load_file(tmp_path / source / "model.safetensors")
    for name in ("q_proj", "norm", "lm_head", "embed_tokens", "layers.1."):
        kept = {each: tensor for each, tensor in whole.items() if name not in each}
        save_file(kept, tmp_path / source / "model.safetensors", metadata={"format": "pt"})
        message, error = rf"has no tensors for \S*{re.escape(name)}.* would keep random", ValueError
        if source == "dense" and name == "q_proj":  # k and v wait for it
            message, error = r"but not model\.layers\.0\.self_attn\.q_proj", RuntimeError
        with pytest.raises(error, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / source, **options)


def test_separate_weights_of_a_dense_model_are_named(tmp_path):
    model_of("Phi3", tmp_path / "dense")
    assert_refused(tmp_path / "dense", "has no tensors for .*qkv_proj", quantization_config=nvfp4.NVFP4TensorConfig())


def test_the_head_of_another_task_is_new(tmp_path):
    model_of("Llama", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "q", num_labels=3)
    assert model.score.weight.shape == (3, 64) and isinstance(model.get_parameter(Q).data, NVFP4Tensor)


def test_tensors_that_rescale_a_dense_weight_and_weights_in_fp8(tmp_path):
    """Which every checkpoint that is read refuses: test/checkpoints/test_understood.py."""
    model_of("Llama", tmp_path / "dense")
    options = {"quantization_config": nvfp4.NVFP4TensorConfig()}
    name = Q.replace("weight", "pre_quant_scale")
    edit(tmp_path / "dense", lambda tensors: tensors.update({name: torch.full((64,), 4.0)}))
    assert_refused(tmp_path / "dense", f"{name} change the meaning", **options)
    edit(tmp_path / "dense", lambda tensors: tensors.update({Q: tensors[Q].to(torch.float8_e4m3fn)}))
    edit(tmp_path / "dense", lambda tensors: tensors.pop(name))
    assert_refused(tmp_path / "dense", rf"{Q} \(float8_e4m3fn\) are weights of another", **options)


def test_the_exception_has_the_reason(tmp_path):
    """What is found only when values are read: transformers refers to a report instead."""
    model_of("Qwen3Moe", tmp_path / "dense")
    checkpoints.quantize(tmp_path / "dense", tmp_path / "q", progress=False)
    key = next(
        name for name in load_file(tmp_path / "q/model.safetensors") if name.endswith("down_proj.weight_scale_2")
    )
    edit(tmp_path / "q", lambda tensors: tensors.update({key: torch.tensor(float("nan"))}))
    weight = re.escape(key.replace("_scale_2", ""))
    assert_refused(tmp_path / "q", rf"model\.safetensors: tensor {weight}: expected a per-tensor scale that is finite")


def test_the_exception_has_the_reason_while_loading(tmp_path, monkeypatch):
    model_of("Llama", tmp_path / "dense")

    def quantized(self, model, group):
        raise ValueError("the reason")

    monkeypatch.setattr(Quantize, "_quantized", quantized)
    assert_refused(tmp_path / "dense", "the reason", quantization_config=nvfp4.NVFP4TensorConfig())
