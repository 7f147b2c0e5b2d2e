"""``nvfp4 quantize --calibrate`` of a mixture of experts: static scales, GPTQ and budgets reach the experts."""

import functools
import json
import shutil
import sys

import pytest
import torch
from quantization.test_experts import mixture

import nvfp4_cli
from nvfp4_tensor import NVFP4Config, NVFP4WeightOnlyConfig, calibrate, checkpoints
from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer
from nvfp4_tensor.quantization import gptq

pytestmark = pytest.mark.slow

EXPERTS = {"Mixtral": 24, "Qwen3Moe": 24, "GptOss": 4}
"""Tensors of experts in files."""


@functools.cache
def make(kind, dense):
    folder = dense.parent / kind
    mixture(kind, vocab_size=320, dtype="bfloat16").save_pretrained(folder)
    for file in dense.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def quantized_in(folder):
    with checkpoints.read(folder) as read:
        return {name: read.linear(name) for name, entry in read.entries.items() if entry.quantized}


def linears(module, name):
    return isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", "gate", "router"))


STATIC = NVFP4Config(experts=True)
SEARCH = NVFP4WeightOnlyConfig(scale_search="mse", weighted=True, experts=True)


@pytest.mark.parametrize(
    ("kind", "how"),
    [*((kind, None) for kind in EXPERTS), ("Mixtral", "--gptq"), ("GptOss", "--gptq"), ("Qwen3Moe", "--weighted")],
)
def test_experts_are_those_of_the_library(kind, how, dense, text, tmp_path, run):
    mixture, flags = make(kind, dense), ["--calibrate", text, "--tokens", 64, *([how] if how else [])]
    said = run("quantize", mixture, tmp_path / "q", *flags, "--json")
    assert said["w4a4"] == (how is None) and len(said["routed_tokens"]) == 2
    assert all(sum(each) == 128 for each in said["routed_tokens"].values())
    model, tokenizer = open_model(mixture), open_tokenizer(mixture)
    batches = [tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :64]]
    if how == "--gptq":
        gptq(model, batches, progress=False)
    else:
        calibrate(model, batches, SEARCH if how else STATIC, filter_fn=linears, progress=False)
    checkpoints.save(model, tmp_path / "library", mismatched_scales="refuse" if how else "keep", progress=False)
    own, expected = (quantized_in(tmp_path / folder) for folder in ("q", "library"))
    assert own.keys() == expected.keys() and sum("experts" in name for name in own) == EXPERTS[kind]
    for name, parts in own.items():
        assert parts.quantizes_activations == (how is None)  # none is mixed
        scale = "per_tensor_scale" if how else "input_scale"
        torch.testing.assert_close(getattr(parts, scale), getattr(expected[name], scale), rtol=2e-7, atol=0)
    if how is None:
        assert run("generate", tmp_path / "q", "the fox", "--raw", "--max-new-tokens", 2, "--json")["new_tokens"] == 2
    else:
        equal = torch.cat([(own[name].qdata == expected[name].qdata).flatten() for name in own]).float().mean()
        assert equal == 1


BARS = {
    (): {"calibrating"},
    ("--gptq",): {"GPTQ"},
    ("--weighted",): {"calibrating", "quantizing"},
    ("--bits", 7, "--gptq"): {"sensitivity", "GPTQ"},
    ("--bits", 7, "--weighted"): {"sensitivity", "calibrating", "quantizing"},
}  # fmt: skip


@pytest.mark.parametrize("how", BARS, ids=str)
def test_every_way_shows_its_progress_and_keeps_experts_together(how, dense, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    given = ("quantize", make("Qwen3Moe", dense), tmp_path / "q", "--calibrate", text, "--tokens", 64, *how, "--json")
    assert nvfp4_cli.main([str(each) for each in given]) == 0
    out, shown = capsys.readouterr()
    assert {bar for bars in BARS.values() for bar in bars if f"{bar}:" in shown} == BARS[how] and "writing" in shown
    assert "experts saw all tokens; the router sent" in shown
    costs = (json.loads(out).get("budget") or {"costs": []})["costs"]
    layers = [cost["dense"] for cost in costs if "experts" in cost["name"]]
    assert len(layers) == (2 if "--bits" in how else 0)
    own = [name for name in quantized_in(tmp_path / "q") if "experts" in name]
    assert len(own) == EXPERTS["Qwen3Moe"] // 2 * (2 - sum(layers))


def test_what_stays_dense_is_said(dense, text, tmp_path, capsys):
    """One expert alone cannot stay dense; nobody asks for all of a layer without knowing it."""
    cases = {"*.layers.1.*.experts.2.*": True, "*.layers.1.*.experts.*": False}
    for i, (exclude, is_said) in enumerate(cases.items()):
        flags = ["--calibrate", text, "--tokens", 64, "--gptq", "--exclude", exclude]
        assert (
            nvfp4_cli.main([str(each) for each in ("quantize", make("Mixtral", dense), tmp_path / str(i), *flags)]) == 0
        )
        said = "experts stay dense, because NVFP4 in the format modelopt does not have all" in capsys.readouterr().err
        own = quantized_in(tmp_path / str(i))
        assert said == is_said and sum("experts" in name for name in own) == EXPERTS["Mixtral"] / 2
