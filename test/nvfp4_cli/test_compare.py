"""``nvfp4 compare``: its errors against those of the tensors."""

import math

import pytest
import torch
from safetensors.torch import save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.comparison import compare

pytestmark = pytest.mark.slow


def values(dense, quantized, name):
    with checkpoints.read(dense) as a, checkpoints.read(quantized) as b:
        return a.dense(name).float(), checkpoints.tensor_of(b.linear(name), torch.float32).dequantize()


def test_compare_says_what_the_tensors_say(dense, quantized, run):
    said = run("compare", dense, quantized, "--json")
    name = "model.layers.0.self_attn.q_proj.weight"
    x, y = values(dense, quantized, name)
    layer = next(layer for layer in said["layers"] if layer["name"] == name)
    assert layer["relative"] == pytest.approx(((y - x).norm() / x.norm()).item(), rel=1e-5)
    assert layer["snr"] == pytest.approx(-20 * math.log10(layer["relative"]))
    assert layer["largest"] == (y - x).abs().max().item()
    worst = said["worst"][0]
    x, y = values(dense, quantized, worst["name"])
    errors = (y - x).view(len(x), -1, 16).norm(dim=-1)
    assert errors[worst["row"], worst["column"] // 16].item() == pytest.approx(worst["error"])
    assert worst["error"] == pytest.approx(errors.max().item())


def test_a_checkpoint_is_identical_to_itself(dense, quantized):
    for path in (dense, quantized):
        found = compare(path, path)
        assert found.snr is None and all(layer.relative == 0 for layer in found.layers)
        assert not found.only_in_a and not found.only_in_b and not found.worst


def test_other_models_are_refused(dense, tmp_path):
    shapes = r"lm_head\.weight is \(320, 64\) in .* and \(2, 2\) in .*a\.safetensors"
    for name, message in {"x": "have no tensor in common", "lm_head.weight": shapes}.items():
        save_file({name: torch.ones(2, 2)}, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match=message):
            compare(dense, tmp_path / "a.safetensors")


def test_compare_runs_both_over_a_text(dense, quantized, text, run):
    said = run("compare", dense, quantized, "--text", text, "--tokens", 96, "--window", 32, "--sweep", 2, "--json")
    quality = said["quality"]
    assert (quality["tokens"], quality["windows"]) == (96, 3) and quality["tokenizer"] == f"{dense}, 311 tokens"
    assert quality["divergence"] > 0 and 0 < quality["agreement"] <= 1
    assert len(quality["outputs"]) == 14 and all(0 < output["relative"] < 0.5 for output in quality["outputs"])
    names = [output["name"].rpartition(".")[2] for output in quality["outputs"]]
    for first in ("q_proj", "gate_proj"):  # what servers join stands together
        for i in (i for i, name in enumerate(names) if name == first):
            assert names[i : i + 3] == ["q_proj", "k_proj", "v_proj"] or names[i : i + 2] == ["gate_proj", "up_proj"]
    none, _, everything = quality["sweep"]
    assert (none["dense_layers"], everything["dense_layers"]) == (0, 14)
    assert none["perplexity"] == quality["perplexity"][1]
    assert everything["perplexity"] == pytest.approx(quality["perplexity"][0]) and everything["bits"] == 16
    given = ["--text", text, "--tokens", 97, "--window", 32, "--summary"]
    one, two = (run("compare", dense, quantized, *given, "--batch", batch, "--json")["quality"] for batch in (1, 2))
    assert (two["windows"], two["divergence"]) == (3, pytest.approx(one["divergence"], rel=0.01))
    assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-3)
    assert f"tokenizer: {dense}, 311 tokens\n" in run("compare", dense, quantized, *given)
    same = run("compare", dense, dense, "--text", text, "--tokens", 96, "--json")["quality"]
    assert same["divergence"] == pytest.approx(0, abs=1e-7) and same["agreement"] == 1


def test_the_summary_comes_first(dense, quantized, run):
    everything, summary = run("compare", dense, quantized), run("compare", dense, quantized, "--summary")
    assert summary.startswith("14 tensors: error 0.") and ", SNR 2" in summary and len(summary.splitlines()) == 1
    assert everything.startswith(summary.rstrip("\n")) and everything.count("q_proj.weight") >= 2
    said = run("compare", dense, quantized, "--summary", "--json")
    assert said["layers"] == said["worst"] == [] and said["relative"] > 0.05
