"""Outputs never replace what a command reads, and an interrupt says what is left."""

import hashlib
import os
import shutil

import pytest
from helpers.checkpoint_folders import at_call

from nvfp4_cli import quantize
from nvfp4_tensor.checkpoints.models.fitting import Fitted
from nvfp4_tensor.checkpoints.quantizing import Quantized

pytestmark = pytest.mark.slow


def contents(folder):
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture
def folder(quantized, text, tmp_path, monkeypatch):
    """A folder with a model, a text, and links to their files."""
    shutil.copytree(quantized, tmp_path / "nvfp4")
    shutil.copyfile(text, tmp_path / "text.html")
    (tmp_path / "symbolic").symlink_to("nvfp4/config.json")
    (tmp_path / "again").symlink_to("nvfp4")
    os.link(tmp_path / "nvfp4/model.safetensors", tmp_path / "hard")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [["inspect", "nvfp4"], ["compare", "nvfp4", "again", "--text", "text.html"]])
def test_a_report_replaces_reports_alone(folder, run, command):
    before = contents(folder)
    for html in ("nvfp4/model.safetensors", "nvfp4/../nvfp4/tokenizer.json", "again/config.json", "symbolic", "hard",
                 "text.html"):  # fmt: skip
        said = " ".join(run(*command, "--html", html, status=2).split())
        assert "is not a report of nvfp4: choose another name" in said
    assert contents(folder) == before


def test_a_report_is_replaced_by_another(folder, run):
    for html in ("report.html", "report.html", "/dev/null"):
        run("inspect", "nvfp4", "--html", html)
    before = contents(folder)
    arguments = ["compare", "nvfp4", "again", "--text", "report.html", "--html", "./report.html"]
    assert "--html would replace the text" in run(*arguments, status=2)
    assert contents(folder) == before


def test_a_gguf_is_not_its_own_unfinished_output(dense, tmp_path, run):
    """A GGUF is known by its first bytes, whatever its name is."""
    pytest.importorskip("gguf")
    run("quantize", dense, tmp_path / "a.gguf", "--to", "gguf")
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf.tmp")
    before = contents(tmp_path)
    said = run("convert", tmp_path / "b.gguf.tmp", tmp_path / "b.gguf", "--to", "gguf", status=1)
    assert "b.gguf.tmp would be written, but it is read" in said
    assert contents(tmp_path) == before


LOST = "was not written, and nothing of it is left"


@pytest.mark.parametrize("name, owner, more, left", [
    ("folder", Quantized, ["--shard-size", "1e-4"], "keeps 1 complete file: run the same again to resume there"),
    ("m.gguf", Quantized, ["--to", "gguf"], LOST), ("m.safetensors", Quantized, ["--to", "comfy"], LOST),
    ("folder", Fitted, ["--weighted", "--tokens", "64", "--calibrate"], "was not written"),
])  # fmt: skip
def test_an_interrupt_says_what_is_left(dense, text, tmp_path, run, monkeypatch, name, owner, more, left):
    dst = tmp_path / name
    command = ["quantize", dense, dst, *more, *([text] if owner is Fitted else [])]
    at_call(monkeypatch, owner, "value", 8, KeyboardInterrupt())
    said = run(*command, status=130)
    assert f"nvfp4: interrupted: {dst}" in said and left in said and not dst.exists()
    assert len(list(tmp_path.iterdir())) == ("keeps" in left)
    run(*command)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_an_interrupt_before_anything_is_written(dense, tmp_path, run, monkeypatch):
    def interrupted(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "run", interrupted)
    said = run("quantize", dense, tmp_path / "q", status=130)
    assert f"interrupted: {tmp_path / 'q'} was not written\n" in said


@pytest.mark.parametrize("arguments, mode", [
    (["--four-over-six", "SRC", "DST"], "mse"), (["SRC", "DST", "--four-over-six"], "mse"),
    (["--four-over-six", "mae", "SRC", "DST"], "mae"), (["--four-over-six=mae", "SRC", "DST"], "mae"),
    (["--four-over-six", "--", "SRC", "DST"], "mse"),
])  # fmt: skip
def test_four_over_six_does_not_take_the_source_for_its_value(dense, tmp_path, monkeypatch, run, arguments, mode):
    seen = []
    monkeypatch.setattr(quantize, "run", lambda src, dst, **given: seen.append((src, dst, given["four_over_six"])))
    paths = {"SRC": dense, "DST": tmp_path / "q"}
    run("quantize", *(paths.get(each, each) for each in arguments))
    assert seen == [(dense, tmp_path / "q", mode)]
