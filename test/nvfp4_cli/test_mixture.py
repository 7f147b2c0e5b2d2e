"""``nvfp4 quantize --calibrate`` of a mixture of experts: static scales, GPTQ and budgets reach the experts."""

import functools
import shutil

import pytest
import torch

import nvfp4_cli
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, checkpoints
from nvfp4_tensor.quantization import gptq

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "moe_intermediate_size": 48, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"Mixtral": 24, "Qwen3Moe": 24, "GptOss": 4}
"""Tensors of experts in files."""


@functools.cache
def make(kind, dense):
    transformers = pytest.importorskip("transformers")
    folder = dense.parent / kind
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, dtype="bfloat16")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def mixture(request, dense):
    return make(request.param, dense)


def of(*kinds):
    return pytest.mark.parametrize("mixture", kinds, indirect=True)


def open_and_batches(folder, text, tokens=64):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text.read_text(), return_tensors="pt").input_ids
    return model.eval(), [ids[:, :tokens]]


def experts_in(folder, part="experts"):
    with checkpoints.read(folder) as checkpoint:
        return {
            name: checkpoint.linear(name)
            for name, entry in checkpoint.entries.items()
            if part in name and entry.quantized
        }


def linears(module, name):
    return isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "gate", "router"))


@of(*EXPERTS)
def test_static_scales(mixture, text, tmp_path, run):
    said = run("quantize", mixture, tmp_path / "q", "--calibrate", text, "--tokens", 64, "--json")
    model, batches = open_and_batches(mixture, text)
    calibrate(model, batches, NVFP4Config(experts=True), filter_fn=linears, progress=False)
    checkpoints.save(model, tmp_path / "library", mismatched_scales="keep", progress=False)
    own, expected = experts_in(tmp_path / "q"), experts_in(tmp_path / "library")
    assert own.keys() == expected.keys() and len(own) == EXPERTS[mixture.name]
    for name, parts in own.items():
        assert parts.quantizes_activations
        torch.testing.assert_close(parts.input_scale, expected[name].input_scale, rtol=2e-7, atol=0)
    with checkpoints.read(tmp_path / "q") as checkpoint:
        assert all(e.quantizes_activations for e in checkpoint.entries.values() if e.quantized)  # none is mixed
    assert len(said["routed_tokens"]) == 2 and all(sum(each) == 128 for each in said["routed_tokens"].values())
    assert run("generate", tmp_path / "q", "the fox", "--raw", "--max-new-tokens", 2, "--json")["new_tokens"] == 2


@pytest.mark.parametrize(
    ("mixture", "how"), [("Mixtral", "--gptq"), ("GptOss", "--gptq"), ("Qwen3Moe", "--weighted")], indirect=["mixture"]
)
def test_experts_are_fitted(how, mixture, text, tmp_path, run):
    said = run("quantize", mixture, tmp_path / "q", "--calibrate", text, "--tokens", 64, how, "--json")
    assert not said["w4a4"] and len(said["routed_tokens"]) == 2
    model, batches = open_and_batches(mixture, text)
    if how == "--gptq":
        gptq(model, batches, progress=False)
    else:
        search = NVFP4WeightOnlyConfig(scale_search="mse", weighted=True, experts=True)
        calibrate(model, batches, search, filter_fn=linears, progress=False)
    checkpoints.save(model, tmp_path / "library", mismatched_scales="refuse", progress=False)
    own, expected = (experts_in(tmp_path / folder, "") for folder in ("q", "library"))
    assert own.keys() == expected.keys() and len(experts_in(tmp_path / "q")) == EXPERTS[mixture.name]
    for name, parts in own.items():
        torch.testing.assert_close(parts.per_tensor_scale, expected[name].per_tensor_scale, rtol=2e-7, atol=0)
    equal = torch.cat([(own[name].qdata == expected[name].qdata).flatten() for name in own]).float().mean()
    assert equal == 1 if how == "--gptq" else equal > 0.99


@of("Mixtral")
def test_what_stays_dense_is_said(mixture, text, tmp_path, capsys):
    """One expert alone cannot stay dense; nobody asks for all of a layer without knowing it."""
    cases = {"*.layers.1.*.experts.2.*": True, "*.layers.1.*.experts.*": False}
    for i, (exclude, is_said) in enumerate(cases.items()):
        flags = ["--calibrate", text, "--tokens", 64, "--gptq", "--exclude", exclude]
        assert nvfp4_cli.main([str(each) for each in ("quantize", mixture, tmp_path / str(i), *flags)]) == 0
        said = "experts stay dense, because NVFP4 in the format modelopt does not have all" in capsys.readouterr().err
        assert said == is_said and len(experts_in(tmp_path / str(i))) == EXPERTS["Mixtral"] / 2
