"""Outputs never replace what a command reads, and an interrupt says what is left."""

import hashlib
import os
import shutil

import pytest

import nvfp4_cli
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
def test_a_report_replaces_reports_alone(folder, capsys, command):
    before = contents(folder)
    for html in ("nvfp4/model.safetensors", "nvfp4/../nvfp4/tokenizer.json", "again/config.json", "symbolic", "hard",
                 "text.html"):  # fmt: skip
        assert nvfp4_cli.main([*command, "--html", html]) == 2
        assert "is not a report of nvfp4: choose another name" in " ".join(capsys.readouterr().err.split())
    assert contents(folder) == before


def test_a_report_is_replaced_by_another(folder, capsys):
    for _ in range(2):
        assert nvfp4_cli.main(["inspect", "nvfp4", "--html", "report.html"]) == 0
    assert nvfp4_cli.main(["inspect", "nvfp4", "--html", "/dev/null"]) == 0
    before = contents(folder)
    arguments = ["compare", "nvfp4", "again", "--text", "report.html", "--html", "./report.html"]
    assert nvfp4_cli.main(arguments) == 2
    assert "--html would replace the text" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_gguf_is_not_its_own_unfinished_output(dense, tmp_path, capsys):
    """A GGUF is known by its first bytes, whatever its name is."""
    pytest.importorskip("gguf")
    assert nvfp4_cli.main(["quantize", str(dense), str(tmp_path / "a.gguf"), "--to", "gguf"]) == 0
    (tmp_path / "a.gguf").rename(tmp_path / "b.gguf.tmp")
    before = contents(tmp_path)
    assert nvfp4_cli.main(["convert", str(tmp_path / "b.gguf.tmp"), str(tmp_path / "b.gguf"), "--to", "gguf"]) == 1
    assert "b.gguf.tmp would be written, but it is read" in capsys.readouterr().err
    assert contents(tmp_path) == before


LOST = "was not written, and nothing of it is left"


@pytest.mark.parametrize("name, owner, more, left", [
    ("folder", Quantized, ["--shard-size", "1e-4"], "keeps 1 complete file: run the same again to resume there"),
    ("m.gguf", Quantized, ["--to", "gguf"], LOST), ("m.safetensors", Quantized, ["--to", "comfy"], LOST),
    ("folder", Fitted, ["--weighted", "--tokens", "64", "--calibrate"], "was not written"),
])  # fmt: skip
def test_an_interrupt_says_what_is_left(dense, text, tmp_path, capsys, monkeypatch, name, owner, more, left):
    dst, whole, seen = tmp_path / name, owner.linear, []
    command = ["quantize", str(dense), str(dst), *more, *([str(text)] if owner is Fitted else [])]

    def linear(self, name):
        seen.append(name)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return whole(self, name)

    monkeypatch.setattr(owner, "linear", linear)
    assert nvfp4_cli.main(command) == 130
    said = capsys.readouterr().err
    assert f"nvfp4: interrupted: {dst}" in said and left in said and not dst.exists()
    assert len(list(tmp_path.iterdir())) == ("keeps" in left)
    assert nvfp4_cli.main(command) == 0 and [each.name for each in tmp_path.iterdir()] == [name]


def test_an_interrupt_before_anything_is_written(dense, tmp_path, capsys, monkeypatch):
    def run(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize, "run", run)
    assert nvfp4_cli.main(["quantize", str(dense), str(tmp_path / "q")]) == 130
    assert f"interrupted: {tmp_path / 'q'} was not written\n" in capsys.readouterr().err


@pytest.mark.parametrize("arguments, mode", [
    (["--four-over-six", "SRC", "DST"], "mse"), (["SRC", "DST", "--four-over-six"], "mse"),
    (["--four-over-six", "mae", "SRC", "DST"], "mae"), (["--four-over-six=mae", "SRC", "DST"], "mae"),
    (["--four-over-six", "--", "SRC", "DST"], "mse"),
])  # fmt: skip
def test_four_over_six_does_not_take_the_source_for_its_value(dense, tmp_path, monkeypatch, arguments, mode):
    seen = []
    monkeypatch.setattr(quantize, "run", lambda src, dst, **given: seen.append((src, dst, given["four_over_six"])))
    paths = {"SRC": str(dense), "DST": str(tmp_path / "q")}
    assert nvfp4_cli.main(["quantize", *(paths.get(each, each) for each in arguments)]) == 0
    assert seen == [(dense, tmp_path / "q", mode)]
