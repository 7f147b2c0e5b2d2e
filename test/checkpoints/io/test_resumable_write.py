"""Interrupted runs continue after their last complete file, and do not touch other folders."""

import resource
from pathlib import Path

import pytest
from checkpoints.io.test_files import replaced
from helpers.checkpoint_folders import at_call, dense_tensors, same_files, write_dense
from helpers.checkpoints import TINY, InMemory, quantized, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints
from nvfp4_tensor.checkpoints.checkpoint import format_named
from nvfp4_tensor.checkpoints.quantizing import Quantized


@pytest.fixture
def interrupted(tmp_path, monkeypatch):
    """A run that stopped in its second of three files; the inode of the first."""
    write_dense(tmp_path / "src", dense_tensors(4), files=3)
    said = r"dst\.partial keeps 1 complete file: run the same again"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match=said):
        at_call(patch, Quantized, "value", 12, KeyboardInterrupt())
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert not (tmp_path / "dst").exists()
    names = sorted(each.name for each in (tmp_path / "dst.partial").iterdir())
    assert names == [".progress.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors.tmp"]
    return (tmp_path / "dst.partial" / names[1]).stat().st_ino


@pytest.mark.parametrize("changed", ["nothing", "the spec", "a shard", "the source"])
def test_an_interrupted_run_is_taken_up(tmp_path, interrupted, changed):
    """What was written for another spec, of other files of the same sizes and times, or was cut, is written again."""
    spec = QuantizeSpec(four_over_six=changed == "the spec")
    file = tmp_path / "dst.partial/model-00001-of-00003.safetensors"
    if changed == "a shard":
        file.write_bytes(file.read_bytes()[:-1])
    for each in (tmp_path / "src").glob("*.safetensors") if changed == "the source" else ():
        replaced(each)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", spec=spec, progress=False)
    assert changed != "nothing" or (tmp_path / "dst" / file.name).stat().st_ino == interrupted
    checkpoints.quantize(tmp_path / "src", tmp_path / "again", spec=spec, progress=False)
    assert same_files(tmp_path / "dst", tmp_path / "again") and not (tmp_path / "dst.partial").exists()


def test_an_interrupt_before_the_last_rename(tmp_path, monkeypatch):
    """The manifest has gone by then, without which the folder would not be known as ours."""
    write_dense(tmp_path / "src")
    replace = Path.replace

    def interrupted_replace(self, target):
        if target.name == "dst":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match=r"dst\.partial keeps 1 complete file"):
        patch.setattr(Path, "replace", interrupted_replace)
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


def test_a_folder_of_that_name_that_is_not_ours_is_left_alone(tmp_path):
    """But one of a run that was killed before its first manifest is."""
    write_dense(tmp_path / "src")
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/thesis.txt").write_text("x")
    with pytest.raises(ValueError, match=r"dst\.partial already exists, and was not made by an interrupted run"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    (tmp_path / "dst.partial/thesis.txt").rename(tmp_path / "dst.partial/.progress.tmp")
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]


@pytest.fixture(params=[("modelopt", "m"), ("comfy", "m.safetensors"), ("gguf", "m.gguf")], ids=str)
def write(request):
    """Writes a small Llama to a folder, by a fixed name in it."""
    format, name = request.param
    if format == "gguf":
        pytest.importorskip("gguf")
    source = InMemory(quantized(tiny_tensors()), TINY)
    options = {"tokenizer": None} if format == "gguf" else {}

    def call(folder):
        format_named(format).write(source, folder / name, progress=False, **options)
        return folder / name

    return call


def test_two_writers_of_one_destination(tmp_path, monkeypatch, write):
    """The second is refused, and the first one's checkpoint is whole."""
    alone, contested = write(tmp_path / "alone"), tmp_path / "contested"
    refused = []

    def write_too():
        with pytest.raises(ValueError, match="is being written by another process") as raised:
            write(contested)
        refused.append(raised)

    at_call(monkeypatch, InMemory, "value", 1, write_too)
    other = write(contested)
    assert refused and [each.name for each in contested.iterdir()] == [alone.name]
    assert same_files(alone, other) if alone.is_dir() else alone.read_bytes() == other.read_bytes()


def test_a_full_disk_is_named_and_leaves_no_file(tmp_path, write):
    """A limit on the size of files stands in for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"{tmp_path}/m[.\w]*\.(partial|tmp)"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


# --- destinations that are there -------------------------------------------------------------------------------------


def never(*arguments):
    raise AssertionError("no work before it is known that the destination can be written")


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
    for name, to in (("nowhere", "modelopt"), ("nowhere.safetensors", "comfy")):
        (tmp_path / name).symlink_to(tmp_path / "nothing")
        with pytest.raises(ValueError, match=r"nowhere.* already exists"):
            checkpoints.quantize(tmp_path / "src", tmp_path / name, to=to, progress=False)


def test_a_destination_that_is_taken_meanwhile_loses_no_work(tmp_path, monkeypatch):
    """The manifest stays: the next call has nothing to quantize."""
    write_dense(tmp_path / "src")
    (tmp_path / "dst").mkdir()
    with monkeypatch.context() as patch, pytest.raises(OSError, match=r"dst"):
        at_call(patch, Quantized, "value", 1, lambda: (tmp_path / "dst/thesis.txt").write_text("x"))
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    (tmp_path / "dst/thesis.txt").unlink()
    monkeypatch.setattr(Quantized, "value", never)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert checkpoints.detect(tmp_path / "dst") == "modelopt"
