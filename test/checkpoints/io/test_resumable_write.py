"""Interrupted runs continue after their last complete file, and do not touch other folders."""

import contextlib
import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_folders import dense_tensors, same_files, write_dense
from helpers.checkpoints import TINY, InMemory, quantized, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints.checkpoint import format_named
from nvfp4_tensor.checkpoints.quantizing import Quantized


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run that stopped in its second of three files; the inode of the first."""
    write_dense(tmp_path / "src", dense_tensors(4), files=3)
    whole = Quantized.linear
    seen = []

    def linear(self, name):
        seen.append(name)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return whole(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Quantized, "linear", linear)
        with pytest.raises(KeyboardInterrupt, match=r"dst\.partial keeps 1 complete file: run the same again"):
            checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert not (tmp_path / "dst").exists()
    names = sorted(each.name for each in (tmp_path / "dst.partial").iterdir())
    assert names == [".progress.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors.tmp"]
    return (tmp_path / "dst.partial" / names[1]).stat().st_ino


def test_an_interrupted_run_is_taken_up(tmp_path, interrupted):
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert (tmp_path / "dst/model-00001-of-00003.safetensors").stat().st_ino == interrupted
    checkpoints.quantize(tmp_path / "src", tmp_path / "again", progress=False)
    assert same_files(tmp_path / "dst", tmp_path / "again") and not (tmp_path / "dst.partial").exists()


@pytest.mark.usefixtures("interrupted")
def test_another_run_starts_anew(tmp_path):
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", spec=QuantizeSpec(four_over_six=True), progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "again", spec=QuantizeSpec(four_over_six=True), progress=False)
    assert same_files(tmp_path / "dst", tmp_path / "again")


@pytest.mark.usefixtures("interrupted")
def test_a_shard_that_was_cut_is_written_again(tmp_path):
    file = tmp_path / "dst.partial/model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "again", progress=False)
    assert same_files(tmp_path / "dst", tmp_path / "again")


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(tmp_path):
    write_dense(tmp_path / "src")
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"dst\.partial already exists, and was not made by an interrupted run"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert (tmp_path / "dst.partial/thesis.txt").read_text() == "x"


def test_an_interruption_in_the_first_file(tmp_path, monkeypatch):
    write_dense(tmp_path / "src")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Quantized, "linear", lambda self, name: (_ for _ in ()).throw(Interrupted))
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


def test_a_run_that_was_killed_before_its_first_manifest(tmp_path):
    write_dense(tmp_path / "src")
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/.progress.tmp").write_text('{"key": ')
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


@contextlib.contextmanager
def other_writer(monkeypatch, write):
    """Inside, every weight that is read makes ``write`` try to write the same destination at the same time."""
    whole, refused = InMemory.linear, []

    def linear(self, name):
        if not refused:
            refused.append(None)
            with pytest.raises(ValueError, match="is being written by another process"):
                write()
            refused[0] = name
        return whole(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(InMemory, "linear", linear)
        yield
    assert refused[0] is not None


@pytest.mark.parametrize(("format", "name"), [("modelopt", "m"), ("comfy", "m.safetensors"), ("gguf", "m.gguf")])
def test_two_writers_of_one_destination(tmp_path, monkeypatch, format, name):
    """The second is refused, and the first one's checkpoint is whole."""
    if format == "gguf":
        pytest.importorskip("gguf")
    torch.manual_seed(0)
    source = InMemory(quantized(tiny_tensors()), TINY)
    options = {"tokenizer": None} if format == "gguf" else {}
    alone, contested = tmp_path / "alone" / name, tmp_path / "contested" / name

    def write(path):
        format_named(format).write(source, path, progress=False, **options)

    write(alone)
    with other_writer(monkeypatch, lambda: write(contested)):
        write(contested)
    assert [each.name for each in contested.parent.iterdir()] == [name]
    if alone.is_dir():
        assert same_files(alone, contested)
    else:
        assert alone.read_bytes() == contested.read_bytes()


@pytest.mark.parametrize(("format", "name"), [("modelopt", "m"), ("comfy", "m.safetensors"), ("gguf", "m.gguf")])
def test_a_full_disk_is_named_and_leaves_no_file(tmp_path, format, name):
    """A limit on the size of files stands in for the disk."""
    if format == "gguf":
        pytest.importorskip("gguf")
    source = InMemory(quantized(tiny_tensors()), TINY)
    options = {"tokenizer": None} if format == "gguf" else {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"{tmp_path}/{name}\.(partial|tmp)"):
            format_named(format).write(source, tmp_path / name, progress=False, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


# --- destinations that are there -------------------------------------------------------------------------------------


def never(*arguments):
    raise AssertionError("no work before it is known that the destination can be written")


def test_an_empty_folder_that_cannot_be_replaced(tmp_path, monkeypatch):
    """A mount point, by what the system says of one."""
    write_dense(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    remove = Path.rmdir

    def rmdir(self):
        if self.name == "dst":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self))
        remove(self)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    monkeypatch.setattr(Quantized, "linear", never)
    with pytest.raises(ValueError, match=r"dst cannot be replaced .*busy\): write to a new folder in it, .*dst/model$"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


def test_the_current_folder(tmp_path, monkeypatch):
    write_dense(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    monkeypatch.chdir(tmp_path / "dst")
    with pytest.raises(ValueError, match=r"^\. cannot be replaced .*: write to a new folder in it, such as model$"):
        checkpoints.quantize("../src", ".", progress=False)
    checkpoints.quantize("../src", "model", progress=False)
    assert checkpoints.detect("model") == "modelopt"


def test_a_link_to_an_empty_folder(tmp_path):
    write_dense(tmp_path / "src")
    (tmp_path / "elsewhere/real").mkdir(parents=True)
    (tmp_path / "dst").symlink_to(tmp_path / "elsewhere/real")
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert (tmp_path / "dst").is_symlink() and checkpoints.detect(tmp_path / "elsewhere/real") == "modelopt"
    assert [each.name for each in (tmp_path / "elsewhere").iterdir()] == ["real"]


@pytest.mark.parametrize("to", ["modelopt", "comfy"])
def test_a_link_to_nothing(tmp_path, to):
    write_dense(tmp_path / "src")
    dst = tmp_path / ("dst.safetensors" if to == "comfy" else "dst")
    dst.symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"dst.* already exists"):
        checkpoints.quantize(tmp_path / "src", dst, to=to, progress=False)


def test_a_destination_that_is_taken_meanwhile_loses_no_work(tmp_path, monkeypatch):
    """The manifest stays: the next call has nothing to quantize."""
    write_dense(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    whole = Quantized.linear

    def linear(self, name):
        (tmp_path / "dst/thesis.txt").write_text("x")
        return whole(self, name)

    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"dst"):
        patch.setattr(Quantized, "linear", linear)
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    (tmp_path / "dst/thesis.txt").unlink()
    monkeypatch.setattr(Quantized, "linear", never)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert checkpoints.detect(tmp_path / "dst") == "modelopt"
