"""What the commands do, on a small model: numbers against the library's own."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nvfp4_cli
from nvfp4_cli import options
from nvfp4_tensor import QuantizeSpec, ScaleSearch, checkpoints, quantize
from nvfp4_tensor.checkpoints.common import LinearParts, parts_of
from nvfp4_tensor.cli.compare import compare
from nvfp4_tensor.cli.inspect import CODES, weight_of
from nvfp4_tensor.cli.results import plain, table


@pytest.mark.parametrize("to", options.FORMATS)
def test_quantize_writes_every_format(to, dense, tmp_path, run):
    if to in ("gguf",):
        pytest.importorskip("gguf")
    dst = tmp_path / {"gguf": "m.gguf", "comfy": "m.safetensors"}.get(to, "folder")
    said = run("quantize", dense, dst, "--to", to, "--json")
    assert checkpoints.detect(dst) == to == said["format"]
    assert (said["quantized"], said["w4a4"]) == (14, False)
    assert said["bits_per_weight"] == pytest.approx(4.5, abs=0.02)


@pytest.mark.parametrize(
    "flags, spec",
    [
        ([], QuantizeSpec()),
        (["--four-over-six"], QuantizeSpec(four_over_six="mse")),
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


def test_quantize_leaves_dense_what_it_is_told(dense, tmp_path, run):
    said = run("quantize", dense, tmp_path / "q", "--exclude", "*.down_proj", "--include", "lm_head", "--json")
    assert said["quantized"] == 14 - 2 + 1


@pytest.mark.parametrize("how", [["--w4a16"], [], ["--gptq"]], ids=["w4a16", "w4a4", "gptq"])
def test_a_budget_leaves_dense_what_costs_most(how, dense, text, tmp_path, run):
    given = ["--calibrate", text, "--tokens", 64, "--bits", 7, "--json", *how]
    said = run("quantize", dense, tmp_path / "q", *given)
    budget = said["budget"]
    costs = budget["costs"]
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
    assert "left dense: model.layers" in run("quantize", dense, tmp_path / "said", *(g for g in given if g != "--json"))


def test_a_budget_that_is_too_small(dense, text, tmp_path):
    arguments = ["quantize", dense, tmp_path / "q", "--calibrate", text, "--bits", 4.5, "--tokens", 64]
    assert nvfp4_cli.main([str(each) for each in arguments]) == 1 and not (tmp_path / "q").exists()
    assert nvfp4_cli.main(["quantize", str(dense), str(tmp_path / "q"), "--bits", "5"]) == 2


@pytest.mark.parametrize("how", [[], ["--calibrate"], ["--calibrate", "--gptq"]])
def test_quantize_the_head_of_a_model_that_ties_it(how, dense, text, tmp_path, run):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    embedding = model.model.embed_tokens.weight.detach()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    config = model.config.to_dict() | {"tie_word_embeddings": True}
    checkpoints.save(state, tmp_path / "tied", format="dense", config=config, progress=False)
    for file in dense.glob("tokenizer*"):
        (tmp_path / "tied" / file.name).write_bytes(file.read_bytes())
    flags = [flag for each in how for flag in ((each, text, "--tokens", 64) if each == "--calibrate" else (each,))]
    said = run("quantize", tmp_path / "tied", tmp_path / "q", "--head", *flags, "--json")
    assert (said["quantized"], said["w4a4"]) == (15, how == ["--calibrate"])
    with checkpoints.read(tmp_path / "q") as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert torch.equal(checkpoint.dense("model.embed_tokens.weight"), embedding)
        head = checkpoints.tensor_of(checkpoint.linear("lm_head.weight"), torch.float32).dequantize()
    assert 0.05 < ((head - embedding.float()).norm() / embedding.float().norm()).item() < 0.2
    assert run("generate", tmp_path / "q", "the fox", "--raw", "--max-new-tokens", 2, "--json")["new_tokens"] == 2


def test_calibrate_takes_the_largest_input(dense, text, tmp_path, run):
    transformers = pytest.importorskip("transformers")
    said = run("quantize", dense, tmp_path / "q", "--calibrate", text, "--tokens", 64, "--json")
    assert said["w4a4"]
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :64]
    seen = {}
    name = "model.layers.1.mlp.down_proj"
    model.get_submodule(name).register_forward_hook(lambda m, inputs, out: seen.update(amax=inputs[0].abs().amax()))
    with torch.no_grad():
        model(ids)
    with checkpoints.read(tmp_path / "q") as checkpoint:
        assert checkpoint.linear(f"{name}.weight").input_scale.item() == (seen["amax"].float() / 2688).item()


def test_gptq_errs_less_on_the_text_than_rounding(dense, text, tmp_path, run):
    run("quantize", dense, tmp_path / "gptq", "--calibrate", text, "--gptq", "--tokens", 256)
    run("quantize", dense, tmp_path / "searched", "--scale-search")
    errors = []
    for folder in ("gptq", "searched"):
        said = run("compare", dense, tmp_path / folder, "--text", text, "--tokens", 256, "--json")
        errors.append(sum(output["relative"] ** 2 for output in said["quality"]["outputs"]))
    assert errors[0] < 0.9 * errors[1]


def test_convert_goes_there_and_back(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "there", "--to", "compressed-tensors")
    said = run("convert", tmp_path / "there", tmp_path / "back", "--to", "modelopt", "--json")
    assert said["quantized"] == 14
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (quantized / file).read_bytes()


def test_convert_takes_the_options_of_every_format(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "exact", "--to", "mlx", "--global-scale", "--lossy")
    run("convert", quantized, tmp_path / "rounded", "--to", "mlx", "--lossy")
    run("convert", quantized, tmp_path / "a4.safetensors", "--to", "comfy", "--quantize-activations")
    run("convert", quantized, tmp_path / "a16.safetensors", "--to", "comfy", "--no-quantize-activations")
    name = "model.layers.1.mlp.up_proj.weight"
    read = {}
    for path in (quantized, *(tmp_path / each for each in ("exact", "rounded", "a4.safetensors", "a16.safetensors"))):
        with checkpoints.read(path) as checkpoint:
            read[path.name] = checkpoint.linear(name)
    own = read.pop(quantized.name)
    assert [parts.quantizes_activations for parts in read.values()] == [False, False, True, False]
    assert all(torch.equal(read[key].qdata, own.qdata) for key in ("exact", "a4.safetensors", "a16.safetensors"))
    assert read["exact"].per_tensor_scale == pytest.approx(own.per_tensor_scale.item(), rel=1e-6)
    assert read["rounded"].per_tensor_scale == 1


def test_quantize_takes_them_too(dense, tmp_path, run):
    run("quantize", dense, tmp_path / "m", "--to", "mlx", "--global-scale")
    with checkpoints.read(tmp_path / "m") as checkpoint:
        assert checkpoint.linear("model.layers.1.mlp.up_proj.weight").per_tensor_scale != 1
    run("quantize", dense, tmp_path / "parts", "--shard-size", 0.00003)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 3


def test_inspect_sums_up_what_it_lists(quantized, run):
    said = run("inspect", quantized, "--json")
    total = said["total"]
    assert (said["format"], total["quantized_tensors"], len(said["tensors"])) == ("modelopt", 14, 14)
    assert sum(total["codes"].values()) == total["quantized_numbers"] == 16 * total["blocks"]
    assert total["quantized_numbers"] == 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    assert total["clipped"] == sum(tensor["clipped"] for tensor in said["tensors"]) >= 2 * 3  # one an amax
    assert total["scales"][1] == 448.0 and total["bits_of_quantized"] == pytest.approx(4.5, abs=0.01)
    everything = run("inspect", quantized, "--all", "--json")["tensors"]
    assert {tensor["kind"] for tensor in everything} == {"W4A16", "bfloat16"}
    assert "14 of 21 tensors are NVFP4" in run("inspect", quantized)


def test_inspect_counts_zero_clipped_and_nan_blocks():
    x = torch.ones(4, 64)
    x[0, :32] = 0  # two blocks of zeros
    x[1, 5] = float("nan")
    x[2, 16] = 1000.0  # every other block is tiny beside it: 1000 / 6 / 448 a step
    found = weight_of("w", parts_of(quantize(x, amax=1000.0)))
    assert (found.blocks, found.nan, found.clipped) == (16, 1, 1)
    assert found.zero == 2
    assert sum(found.codes) == 64 * 4
    assert found.codes[CODES.index("6")] >= 1


def test_inspect_finds_blocks_whose_codes_are_all_zero():
    scale = torch.full((1, 2), 2.0).to(torch.float8_e4m3fn)
    qdata = torch.tensor([[0x80] * 8 + [0x08] * 7 + [0x18]], dtype=torch.uint8)  # -0 and +0; one 0.5 in the second
    parts = LinearParts(qdata=qdata, scale=scale, per_tensor_scale=torch.ones(()), columns=32)
    found = weight_of("w", parts)
    assert (found.zero, found.blocks, found.scales) == (1, 2, (2.0, 2.0))
    assert (found.codes[CODES.index("-0")], found.codes[CODES.index("0.5")]) == (16, 1)


def test_compare_says_what_the_tensors_say(dense, quantized, run):
    said = run("compare", dense, quantized, "--json")
    name = "model.layers.0.self_attn.q_proj.weight"
    with checkpoints.read(dense) as a, checkpoints.read(quantized) as b:
        x = a.dense(name).float()
        y = checkpoints.tensor_of(b.linear(name), torch.float32).dequantize()
    layer = next(layer for layer in said["layers"] if layer["name"] == name)
    assert layer["relative"] == pytest.approx(((y - x).norm() / x.norm()).item(), rel=1e-5)
    assert layer["snr"] == pytest.approx(-20 * math.log10(layer["relative"]))
    assert layer["largest"] == (y - x).abs().max().item()
    worst = said["worst"][0]
    with checkpoints.read(dense) as a, checkpoints.read(quantized) as b:
        x = a.dense(worst["name"]).float()
        y = checkpoints.tensor_of(b.linear(worst["name"]), torch.float32).dequantize()
    errors = (y - x).view(len(x), -1, 16).norm(dim=-1)
    assert errors[worst["row"], worst["column"] // 16].item() == pytest.approx(worst["error"])
    assert worst["error"] == pytest.approx(errors.max().item())


def test_a_checkpoint_is_identical_to_itself(dense, quantized):
    for path in (dense, quantized):
        found = compare(path, path)
        assert found.snr is None and all(layer.relative == 0 for layer in found.layers)
        assert not found.only_in_a and not found.only_in_b


def test_compare_runs_both_over_a_text(dense, quantized, text, run):
    said = run("compare", dense, quantized, "--text", text, "--tokens", 96, "--window", 32, "--sweep", 2, "--json")
    quality = said["quality"]
    assert quality["tokens"] == 96 and quality["divergence"] > 0 and 0 < quality["agreement"] <= 1
    assert len(quality["outputs"]) == 14 and all(0 < output["relative"] < 0.5 for output in quality["outputs"])
    names = [output["name"].rpartition(".")[2] for output in quality["outputs"]]
    for first in ("q_proj", "gate_proj"):  # what servers join stands together
        for i in (i for i, name in enumerate(names) if name == first):
            assert names[i : i + 3] == ["q_proj", "k_proj", "v_proj"] or names[i : i + 2] == ["gate_proj", "up_proj"]
    none, _, everything = quality["sweep"]
    assert (none["dense_layers"], everything["dense_layers"]) == (0, 14)
    assert none["perplexity"] == quality["perplexity"][1]
    assert everything["perplexity"] == pytest.approx(quality["perplexity"][0]) and everything["bits"] == 16
    same = run("compare", dense, dense, "--text", text, "--tokens", 96, "--json")["quality"]
    assert same["divergence"] == pytest.approx(0, abs=1e-7) and same["agreement"] == 1


def test_generate_is_transformers_own(quantized, dense, run):
    transformers = pytest.importorskip("transformers")
    said = run("generate", quantized, "the quick", "--raw", "--max-new-tokens", 6, "--json")
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    checkpoints.load(model, quantized, progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(dense)
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert said["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert said["new_tokens"] == len(expected)
    assert "the quick" in run("generate", quantized, "the quick", "--raw", "--max-new-tokens", 2)


@pytest.mark.slow
def test_a_compiled_model_says_the_same(quantized, monkeypatch, capsys, run):
    """In chat too, where the second question is asked of a model that is compiled already."""
    flags = ["--raw", "--max-new-tokens", 6, "--json"]
    eager, compiled = (run("generate", quantized, "the quick", *flags, *more) for more in ([], ["--compile"]))
    assert compiled["text"] == eager["text"] and compiled["new_tokens"] == eager["new_tokens"]
    answers = []
    for more in ([], ["--compile"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n"))
        assert nvfp4_cli.main(["chat", str(quantized), "--max-new-tokens", "3", "--json", *more]) == 0
        answers.append([json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()])
    assert answers[0] == answers[1] and len(answers[0]) == 2


def test_chat_answers_line_by_line(quantized, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the fox\nthe dog\n\nnever read\n"))
    assert nvfp4_cli.main(["chat", str(quantized), "--max-new-tokens", "3", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == ["the fox", "the dog"]
    assert answers[1]["prompt_tokens"] > answers[0]["prompt_tokens"] + answers[0]["new_tokens"]


def _broken(folder: Path, quantized: Path) -> Path:
    """The checkpoint with its last bytes cut off."""
    folder.mkdir()
    for file in quantized.iterdir():
        data = file.read_bytes()
        (folder / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    return folder


def test_what_a_user_gets_wrong_is_one_line_without_a_traceback(dense, quantized, tmp_path, text):
    """In processes of their own, as a shell runs them."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    broken = _broken(tmp_path / "broken", quantized)
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").write_text("")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    cases = [
        (["inspect", tmp_path / "empty"], "is no checkpoint"),
        (["inspect", broken], "model.safetensors"),
        (["inspect", quantized, "--html", tmp_path / "no" / "r.html"], "No such file"),
        (["quantize", quantized, tmp_path / "x"], "dense"),
        (["quantize", dense, there], "is there already"),
        (["quantize", dense, tmp_path / "x", "--exclude", "*.nothing"], "matches no linear"),
        (["quantize", dense, tmp_path / "x", "--dense", "Q8_0"], "has no option dense"),
        (["quantize", dense, there, "--calibrate", text], "is there already"),
        (["quantize", dense, tmp_path / "x", "--global-scale"], "has no option global_scale"),
        (["convert", quantized, tmp_path / "x", "--to", "torchao", "--quantize-activations"], "no option quantize_act"),
        (["quantize", dense, tmp_path / "x", "--calibrate", tmp_path / "bytes.txt"], "no text in UTF-8"),
        (["convert", dense, tmp_path / "x"], "holds no NVFP4"),
        (["convert", quantized, tmp_path / "x", "--to", "mlx"], "lossy"),
        (["compare", dense, quantized, "--text", tmp_path / "bytes.txt"], "no text in UTF-8"),
        (["generate", alone, "hi"], "--config-from"),
    ]
    script = (
        "import json, sys, nvfp4_cli\nfor arguments in json.load(sys.stdin):\n"
        "    print('@', nvfp4_cli.main(arguments), file=sys.stderr)\n"
    )
    given = json.dumps([[str(each) for each in arguments] for arguments, _ in cases])
    done = subprocess.run([sys.executable, "-c", script], input=given, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    said = done.stderr.split("@ 1\n")[:-1]
    assert len(said) == len(cases), done.stderr
    for (arguments, wanted), error in zip(cases, said, strict=True):
        last = error.strip().splitlines()[-1]
        assert last.startswith("nvfp4: ") and wanted in last, (arguments, error)
    assert not (tmp_path / "x").exists()


def test_a_process_exits_1_and_says_it_in_json(tmp_path):
    command = [sys.executable, "-m", "nvfp4_tensor", "inspect", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and not done.stdout
    error = json.loads(done.stderr.strip().splitlines()[-1])
    assert error["type"] == "ValueError" and "is no checkpoint" in error["error"]


def test_json_has_neither_nan_nor_infinity():
    assert plain({"a": [math.inf, 1.0, Path("x")], "b": math.nan}) == {"a": [None, 1.0, "x"], "b": None}


def test_tables_are_aligned():
    assert table(("a", "bc"), [("long", "1")]).split("\n") == ["a     bc", "long   1"]
