"""Errors and warnings on the command line name its options, not Python arguments."""

import ast
import re
import shutil
from pathlib import Path

import pytest

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
    "experts=True in": "the commands pass experts=True",
    "give block_rows=1": "the commands quantize in 1x16 blocks",
    "'lora_' not in name": "a model of a checkpoint has no adapters",
}
ROOMS = ("checkpoints", "quantization/accuracy/gptq", "quantization/conversion.py")
"""The packages whose messages a command can show."""


def messages():
    """Yield the location and the text of every error and warning, with {} for each inserted value."""
    package = Path(nvfp4_tensor.__file__).parent
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")) or [package / room]:
            for node in ast.walk(ast.parse(file.read_text())):
                call = node.exc if isinstance(node, ast.Raise) else node
                called = getattr(call, "func", None)
                is_warning = "warn" in (getattr(called, "attr", ""), getattr(called, "id", "").removesuffix("_user"))
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
    assert not left, left
    text = "\n".join(text for _, text in messages())
    assert not [python for python in WORDS if python not in text]


def test_a_gguf_without_a_tokenizer(dense, tmp_path, capsys):
    pytest.importorskip("gguf")
    folder = shutil.copytree(dense, tmp_path / "src", ignore=shutil.ignore_patterns("tokenizer*"))

    def quantized(name, *more):
        status = nvfp4_cli.main(["quantize", str(folder), str(tmp_path / name), *map(str, more)])
        return status, capsys.readouterr().err

    status, said = quantized("a.gguf", "--to", "gguf")
    assert status == 0 and "pass --tokenizer FOLDER to add one, or --tokenizer none" in said
    status, said = quantized("b.gguf", "--to", "gguf", "--tokenizer", "none")
    assert status == 0 and "no tokenizer" not in said
    assert quantized("c.gguf", "--to", "gguf", "--tokenizer", dense)[0] == 0
    assert (tmp_path / "c.gguf").stat().st_size > (tmp_path / "b.gguf").stat().st_size
    assert quantized("d.gguf", "--to", "gguf", "--tokenizer", folder)[0] == 2
    assert quantized("d", "--tokenizer", "none")[0] == 2
