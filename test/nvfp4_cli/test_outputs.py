"""Outputs never replace what a command reads, and an interrupt says what is left."""

import hashlib
import os
import shutil

import pytest

import nvfp4_cli
from nvfp4_tensor import checkpoints

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


def test_a_checkpoint_does_not_replace_its_source(folder, dense, capsys):
    before = contents(folder)
    for dst in ("nvfp4", "again", "nvfp4/../nvfp4"):
        assert nvfp4_cli.main(["convert", "nvfp4", dst, "--to", "mlx", "--lossy"]) == 1
        assert "already exists" in capsys.readouterr().err
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


def interrupt(monkeypatch, after):
    from nvfp4_tensor.checkpoints.quantizing import Quantized

    whole, seen = Quantized.linear, []

    def linear(self, name):
        seen.append(name)
        if len(seen) > after:
            raise KeyboardInterrupt
        return whole(self, name)

    monkeypatch.setattr(Quantized, "linear", linear)


@pytest.mark.parametrize("to, left", [
    ("modelopt", r"keeps 1 complete file: run the same again to resume there"),
    ("gguf", "was not written, and nothing of it is left"), ("comfy", "was not written, and nothing of it is left"),
])  # fmt: skip
def test_an_interrupt_says_what_is_left(dense, tmp_path, capsys, monkeypatch, to, left):
    dst = tmp_path / {"gguf": "m.gguf", "comfy": "m.safetensors"}.get(to, "folder")
    command = ["quantize", str(dense), str(dst), "--to", to, *(["--shard-size", "1e-4"] if to == "modelopt" else [])]
    with monkeypatch.context() as patch:
        interrupt(patch, 7)
        assert nvfp4_cli.main(command) == 130
    said = capsys.readouterr().err
    assert f"nvfp4: interrupted: {dst}" in said and left in said and not dst.exists()
    assert len(list(tmp_path.iterdir())) == (to == "modelopt")
    assert nvfp4_cli.main(command) == 0
    assert checkpoints.detect(dst) == to and len(list(tmp_path.iterdir())) == 1


def test_an_interrupt_of_what_cannot_be_resumed(dense, text, tmp_path, capsys, monkeypatch):
    from nvfp4_tensor.checkpoints.models.fitting import Fitted

    def linear(self, name):
        raise KeyboardInterrupt

    for patched in ("linear", "__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(Fitted, patched, linear if patched == "linear" else lambda *a: linear(None, ""))
            dst = tmp_path / "q"
            assert nvfp4_cli.main(["quantize", str(dense), str(dst), "--calibrate", str(text), "--weighted"]) == 130
        assert f"interrupted: {dst} was not written" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments, mode", [
    (["--four-over-six", "SRC", "DST"], "mse"), (["SRC", "DST", "--four-over-six"], "mse"),
    (["--four-over-six", "mae", "SRC", "DST"], "mae"), (["--four-over-six=mae", "SRC", "DST"], "mae"),
    (["--four-over-six", "--", "SRC", "DST"], "mse"),
])  # fmt: skip
def test_four_over_six_does_not_take_the_source_for_its_value(dense, tmp_path, monkeypatch, arguments, mode):
    from nvfp4_cli import quantize

    seen = []
    monkeypatch.setattr(quantize, "run", lambda src, dst, **given: seen.append((src, dst, given["four_over_six"])))
    paths = {"SRC": str(dense), "DST": str(tmp_path / "q")}
    assert nvfp4_cli.main(["quantize", *(paths.get(each, each) for each in arguments)]) == 0
    assert seen == [(dense, tmp_path / "q", mode)]
