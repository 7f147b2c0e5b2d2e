"""Interrupted runs go on at their last whole file, and nobody else's folder is touched."""

import pytest
from checkpoints.folders import dense_tensors, same_files, write_dense

from nvfp4_tensor import QuantizeSpec, checkpoints
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
            raise Interrupted
        return whole(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(Quantized, "linear", linear)
        with pytest.raises(Interrupted):
            checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert not (tmp_path / "dst").exists()
    names = sorted(each.name for each in (tmp_path / "dst.partial").iterdir())
    assert names == ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors.tmp", "progress.json"]
    return (tmp_path / "dst.partial" / names[0]).stat().st_ino


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
    with pytest.raises(ValueError, match=r"dst\.partial is there already, and no interrupted run made it"):
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert (tmp_path / "dst.partial/thesis.txt").read_text() == "x"


def test_an_interruption_in_the_first_file(tmp_path, monkeypatch):
    write_dense(tmp_path / "src")
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Quantized, "linear", lambda self, name: (_ for _ in ()).throw(Interrupted))
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dst", "src"]
