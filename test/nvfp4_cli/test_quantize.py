"""``nvfp4 quantize`` against the library, and what ``--bits`` leaves dense."""

import itertools
import math
import re
import shutil
import sys

import pytest
import torch
from helpers.checkpoint_folders import edit, edit_json, same_files
from helpers.coded_folders import CODINGS
from safetensors.torch import load_file, save_file

import nvfp4_cli
from nvfp4_cli import options
from nvfp4_tensor import QuantizeSpec, ScaleSearch, checkpoints
from nvfp4_tensor.checkpoints.models.opening import open_model, open_tokenizer


@pytest.mark.parametrize("to", options.FORMATS)
def test_quantize_writes_every_format(to, dense, tmp_path, run):
    if to == "gguf":
        pytest.importorskip("gguf")
    dst = tmp_path / {"gguf": "m.gguf", "comfy": "m.safetensors"}.get(to, "folder")
    said = run("quantize", dense, dst, "--to", to, "--json")
    assert checkpoints.detect(dst) == to == said["format"]
    assert (said["quantized"], said["w4a4"]) == (14, False) and 0 < said["seconds"] < 600
    assert said["bits_per_weight"] == pytest.approx(4.5, abs=0.02)


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "flags, spec",
    [
        (["--four-over-six", "mae"], QuantizeSpec(four_over_six="mae")),
        (["--scale-search", "--w4a16"], QuantizeSpec(scale_search=ScaleSearch.MSE)),
        (["--round-mode", "stochastic", "--seed", "3"], QuantizeSpec(round_mode="stochastic")),
    ],
)
def test_quantize_rounds_as_it_is_told(flags, spec, dense, tmp_path, run):
    run("quantize", dense, tmp_path / "cli", *flags)
    checkpoints.quantize(dense, tmp_path / "library", spec=spec, seed=3, progress=False)
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cli", "library")]
    assert both[0] == both[1]


def test_the_seed_of_a_weighted_search(dense, text, tmp_path, run):
    flags = ["--calibrate", text, "--tokens", 64, "--weighted", "--round-mode", "stochastic", "--seed"]
    for name, seed in {"a": 3, "again": 3, "b": 4}.items():
        run("quantize", dense, tmp_path / name, *flags, seed)
    a, again, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "again", "b"))
    assert a == again != b


def test_quantize_leaves_dense_what_it_is_told(dense, tmp_path, run):
    said = run("quantize", dense, tmp_path / "q", "--exclude", "*.down_proj", "--include", "lm_head", "--json")
    assert said["quantized"] == 14 - 2 + 1


@pytest.mark.parametrize("how", [[], ["--calibrate"], ["--gptq", "--calibrate"]], ids=str)
def test_quantize_the_head_of_a_model_that_ties_it(how, dense, text, tmp_path, run):
    shutil.copytree(dense, tmp_path / "tied")
    edit(tmp_path / "tied", lambda tensors: tensors.pop("lm_head.weight"))
    edit_json(tmp_path / "tied/config.json", lambda config: config.update(tie_word_embeddings=True))
    embedding = load_file(dense / "model.safetensors")["model.embed_tokens.weight"]
    flags = [*how, text, "--tokens", 64] if how else []
    said = run("quantize", tmp_path / "tied", tmp_path / "q", "--head", *flags, "--json")
    assert (said["quantized"], said["w4a4"]) == (15, how == ["--calibrate"])
    with checkpoints.read(tmp_path / "q") as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert torch.equal(checkpoint.dense("model.embed_tokens.weight"), embedding)
        head = checkpoints.tensor_of(checkpoint.linear("lm_head.weight"), torch.float32).dequantize()
    assert 0.05 < ((head - embedding.float()).norm() / embedding.float().norm()).item() < 0.2
    assert run("generate", tmp_path / "q", "the fox", "--raw", "--max-new-tokens", 2, "--json")["new_tokens"] == 2


def test_calibrate_takes_the_largest_input(dense, text, tmp_path, run):
    assert run("quantize", dense, tmp_path / "q", "--calibrate", text, "--tokens", 64, "--json")["w4a4"]
    model, ids = open_model(dense), open_tokenizer(dense)(text.read_text(), return_tensors="pt").input_ids[:, :64]
    seen, name = {}, "model.layers.1.mlp.down_proj"
    model.get_submodule(name).register_forward_hook(lambda m, inputs, out: seen.update(amax=inputs[0].abs().amax()))
    with torch.no_grad():
        model(ids)
    with checkpoints.read(tmp_path / "q") as checkpoint:
        assert checkpoint.linear(f"{name}.weight").input_scale.item() == (seen["amax"].float() / 2688).item()


@pytest.mark.parametrize(
    "kind, how, flags",
    [
        ("fp8", "--calibrate", []),
        ("gptq", "--calibrate", ["--bits", 8, "--w4a16"]),
        ("awq", "--calibrate", ["--weighted"]),
        ("fp8", "--distill", []),
    ],
)
def test_codes_of_another_quantization_are_fitted_like_their_values(kind, how, flags, dense, text, tmp_path, run):
    coding, settings = CODINGS[kind]
    coded, decoded = coding(load_file(dense / "model.safetensors"))
    for name, tensors in {"coded": coded, "decoded": decoded}.items():
        shutil.copytree(dense, tmp_path / name)
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "coded/config.json", lambda config: config.update(quantization_config=settings))
    given = [how, text, "--tokens", 64, *flags]
    at_once = ["--minutes", 1e-9] if how == "--distill" else []  # no step, of which two runs take different numbers
    for name in ("coded", "decoded"):
        run("quantize", tmp_path / name, tmp_path / f"{name}-out", *given, *at_once)
    assert same_files(tmp_path / "coded-out", tmp_path / "decoded-out")
    if at_once:
        said = run("quantize", tmp_path / "coded", tmp_path / "trained", *given, "--minutes", 0.02, "--json")
        assert (said["quantized"], said["w4a4"]) == (14, not flags) and 0 < said["divergence"] < 0.1
    name = f"model.layers.1.self_attn.v_proj.{'weight_scale_inv' if kind == 'fp8' else 'scales'}"
    edit(tmp_path / "coded", lambda tensors: tensors.update({name: torch.full_like(tensors[name], torch.inf)}))
    said = run("quantize", tmp_path / "coded", tmp_path / "no", *given, status=1)
    assert f"tensor {name}: expected finite numbers" in said and not (tmp_path / "no").exists()


@pytest.mark.parametrize("how", [["--w4a16"], [], ["--gptq"]], ids=["w4a16", "w4a4", "gptq"])
def test_a_budget_leaves_dense_what_costs_most(how, dense, text, tmp_path, run):
    given = ["--calibrate", text, "--tokens", 64, "--bits", 7, *how]
    said = run("quantize", dense, tmp_path / "q", *given, "--json")
    budget, costs = said["budget"], said["budget"]["costs"]
    assert 4.5 < budget["bits"] <= 7 and len(costs) == 8 and sum(len(c["weights"]) for c in costs) == 14
    assert [c["loss"] for c in costs] == sorted((c["loss"] for c in costs), reverse=True) and costs[-1]["loss"] > 0
    assert {len(c["weights"]) for c in costs} == {1, 2, 3}  # q, k, v and gate, up stay together
    left = {name for c in costs if c["dense"] for name in c["weights"]}
    with checkpoints.read(tmp_path / "q") as checkpoint:
        entries = checkpoint.entries
    assert left and left == {n for n, e in entries.items() if n.endswith("_proj.weight") and not e.quantized}
    assert said["w4a4"] == (not how)
    bits = sum((16 if n in left else 4.5) * math.prod(entries[n].shape) for c in costs for n in c["weights"])
    # In memory, where a budget counts, the scales of such small weights are padded.
    assert bits / sum(c["elements"] for c in costs) == pytest.approx(budget["bits"], abs=0.3)
    room = (7 - budget["bits"]) * sum(c["elements"] for c in costs)
    assert all(c["elements"] * 11.4 > room for c in costs if not c["dense"])
    if how == ["--w4a16"]:
        assert "left dense: model.layers" in run("quantize", dense, tmp_path / "said", *given)


@pytest.mark.parametrize("source, flags", [("sample", []), ("self", ["--w4a16", "--head"])])
def test_distill_writes_what_it_trained(source, flags, dense, text, tmp_path, run):
    given = ["--distill", text if source == "sample" else "self", "--minutes", 0.02, "--tokens", 128, *flags]
    said = run("quantize", dense, tmp_path / "q", *given, "--to", "compressed-tensors", "--json")
    assert (said["quantized"], said["w4a4"]) == (14 + (flags != []), flags == [])
    assert [each.name for each in tmp_path.iterdir()] == ["q"]  # the state of the run is gone
    if source == "sample":
        again = run("compare", dense, tmp_path / "q", "--text", text, "--tokens", 128, "--json")
        assert said["divergence"] == pytest.approx(again["quality"]["divergence"], rel=1e-6)
    assert 0 < said["divergence"] < 0.1
    folder, none = tmp_path / "none", ["--distill", text]
    for more, why in {
        ("--gptq",): "leave out --calibrate, --gptq",
        ("--round-mode", "zero"): "rounds to nearest",
    }.items():
        assert why in run("quantize", dense, folder, *none, *more, status=2)
    for alone in (("--minutes", 1), ("--compile",)):
        assert "are for --distill TEXT" in run("quantize", dense, folder, *alone, status=2)


def test_distill_shows_its_progress(dense, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    given = [dense, tmp_path / "q", "--distill", "self", "--minutes", 1e-9, "--tokens", 64]
    assert nvfp4_cli.main(["quantize", *map(str, given)]) == 0
    bars = re.findall(r"([\w ]+): 100%", capsys.readouterr().err)
    expected = ["loading dense", "writing text", "writing q", "loading dense", "loading q", "running"]
    assert [name for name, _ in itertools.groupby(bars)] == expected
