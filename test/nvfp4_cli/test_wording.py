"""Errors and warnings on the command line name its options, not Python arguments."""

import ast
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_folders import edit_json
from safetensors.torch import load_file, save_file

import nvfp4_cli
import nvfp4_tensor
from nvfp4_cli.wording import WORDS, in_options

PYTHON = re.compile(r"\b[a-z_0-9]+=|\b(?:load|save|convert|quantize_?|calibrate|gptq)\(")
"""An argument, or a call."""

UNREACHED = {
    "mismatched_scales='requantize' gives them one": 'no command passes mismatched_scales="refuse"',
    "accelerate.init_empty_weights(include_buffers=False)": "the commands pass include_buffers=False",
    "{name}=": "the field's value in a message",
    "is sharded over ranks": "a command has one process",
}
ROOMS = ("checkpoints", "quantization/accuracy/gptq", "quantization/plan.py")
"""The packages whose messages a command can show."""


def messages():
    """Yield the location and the text of every error and warning, with {} for each inserted value."""
    package = Path(nvfp4_tensor.__file__).parent
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")) or [package / room]:
            for node in ast.walk(ast.parse(file.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else node
                is_warning = isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "warn"
                if isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
                    yield f"{file.relative_to(package)}:{node.lineno}", text_of(node.value)
                elif isinstance(call, ast.Call) and call.args and (isinstance(node, ast.Raise) or is_warning):
                    yield f"{file.relative_to(package)}:{node.lineno}", text_of(call.args[0])


def text_of(node):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return f"{text_of(node.body)} {text_of(node.orelse)}"
    return "{}"


def test_no_message_names_an_argument_of_python():
    found = [(where, in_options(text)) for where, text in messages()]
    assert len(found) > 200
    left = [(where, text) for where, text in found if PYTHON.search(text) and not any(u in text for u in UNREACHED)]
    assert not [each for each in left if not each[0].startswith("quantization/accuracy/gptq/config")], left
    text = "\n".join(text for _, text in messages())
    assert not [python for python in WORDS if python not in text]


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail; the line that it ends with."""

    def call(*arguments, status=1):
        assert nvfp4_cli.main([str(argument) for argument in arguments]) == status
        error = capsys.readouterr().err
        assert not PYTHON.search(error), error
        return error

    return call


def test_activations_that_no_calibration_saw(quantized, tmp_path, fails):
    folder = shutil.copytree(quantized, tmp_path / "q")
    algorithm = {"quant_algo": "NVFP4"}
    edit_json(folder / "config.json", lambda config: config["quantization_config"].update(algorithm, config_groups={}))
    said = fails("convert", folder, tmp_path / "x", "--to", "compressed-tensors")
    assert "`nvfp4 quantize --calibrate TEXT` of the dense model" in said and "--w4a16" in said


def test_qwen2_as_gguf(dense, tmp_path, fails, run, capsys):
    """Its scales fold in by themselves, or with --lossy."""
    pytest.importorskip("gguf")
    folder = shutil.copytree(dense, tmp_path / "qwen2")
    edit_json(folder / "config.json", lambda config: config.update(model_type="qwen2"))
    tensors = load_file(folder / "model.safetensors")
    shapes = [("q", 64), ("k", 32), ("v", 32)]
    biases = {f"model.layers.{i}.self_attn.{x}_proj.bias": rows for i in range(2) for x, rows in shapes}
    save_file(tensors | {name: torch.randn(n).bfloat16() for name, n in biases.items()}, folder / "model.safetensors")
    said = run("quantize", folder, tmp_path / "a.gguf", "--to", "gguf", "--json")
    assert said["quantized"] == 14
    run("quantize", folder, tmp_path / "q")
    assert "or pass --lossy" in fails("convert", tmp_path / "q", tmp_path / "b.gguf", "--to", "gguf")
    assert run("convert", tmp_path / "q", tmp_path / "b.gguf", "--to", "gguf", "--lossy", "--json")["quantized"] == 14


def test_a_gguf_without_a_tokenizer(dense, tmp_path, fails, run, capsys):
    pytest.importorskip("gguf")
    folder = shutil.copytree(dense, tmp_path / "src")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert nvfp4_cli.main(["quantize", str(folder), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    said = capsys.readouterr().err
    assert "pass --tokenizer FOLDER to add one, or --tokenizer none" in said and not PYTHON.search(said)
    assert (
        nvfp4_cli.main(["quantize", str(folder), str(tmp_path / "b.gguf"), "--to", "gguf", "--tokenizer", "none"]) == 0
    )
    assert "no tokenizer" not in capsys.readouterr().err
    run("quantize", folder, tmp_path / "c.gguf", "--to", "gguf", "--tokenizer", dense)
    assert (tmp_path / "c.gguf").stat().st_size > (tmp_path / "b.gguf").stat().st_size
    fails("quantize", folder, tmp_path / "d.gguf", "--to", "gguf", "--tokenizer", folder, status=2)
    fails("quantize", folder, tmp_path / "d", "--tokenizer", "none", status=2)
