"""Files of a checkpoint: regular, inside the folder, and unchanged."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, at_call, same_files, write_dense
from helpers.checkpoints import TINY, tiny_tensors, write_gguf

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.gguf.reading import GGUFCheckpoint
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint

GOLDEN_FILES = ("config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN / "modelopt_nvfp4", tmp_path / "src")
    (tmp_path / "src/tokenizer.json").write_text("{}")
    return tmp_path / "src"


@pytest.mark.parametrize(("name", "kind"), [*zip(GOLDEN_FILES, ["fifo", "device", "fifo", "nothing"], strict=True)])
def test_not_a_regular_file(folder, name, kind):
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else "nowhere")
    with pytest.raises(ValueError, match=rf"src/{name}: expected a regular file"):
        checkpoints.read(folder, "modelopt")
    for call in (checkpoints.read, lambda src: checkpoints.quantize(src, folder.parent / "dst", progress=False)):
        with pytest.raises(ValueError, match=r"regular file|not a checkpoint|neither|quantized"):
            call(folder)
    assert not (folder.parent / "dst").exists()


def test_a_fifo_by_its_own_name(tmp_path):
    for name in ("a.safetensors", "a.gguf", "a"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}\b.*(regular file|not a checkpoint)"):
            checkpoints.read(tmp_path / name)


def test_a_link_out_of_the_folder(folder, name="config.json"):
    secret = folder.parent / "secret"
    shutil.move(folder / name, secret)
    (folder / name).symlink_to("../secret")
    with pytest.raises(ValueError, match=rf"src/{name} is a link to {secret}, outside of its folder: copy that file"):
        checkpoints.convert(folder, folder.parent / "dst", to="compressed-tensors", progress=False)
    assert not (folder.parent / "dst").exists()


@pytest.mark.parametrize("subfolder", ["", "text_encoder"])
def test_a_cache_of_the_hub(folder, subfolder):
    """Its snapshots are links to the blobs of the same repository, which may lie on another disk."""
    repository, disk = folder.parent / "hub/models--org--name", folder.parent / "disk"
    snapshot = repository / "snapshots/0123abc" / subfolder
    snapshot.mkdir(parents=True)
    disk.mkdir()
    (repository / "blobs").symlink_to(disk) if subfolder else (repository / "blobs").mkdir()
    for i, name in enumerate(GOLDEN_FILES):
        shutil.copyfile(folder / name, repository / "blobs" / str(i))
        (snapshot / name).symlink_to(os.path.relpath(repository / "blobs" / str(i), snapshot))
    checkpoints.convert(snapshot, folder.parent / "a", to="modelopt", progress=False)
    checkpoints.convert(folder, folder.parent / "b", to="modelopt", progress=False)
    assert same_files(folder.parent / "a", folder.parent / "b")
    other = repository.parent / "models--org--other"
    other.mkdir()
    (other / "3").write_text("{}")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(other / "3")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a link to .*, outside of its folder"):
        checkpoints.read(snapshot)


# --- the file beside the weights ---


DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
RAGGED = [{"a": {"divisor": [[1.0], [2.0, 3.0]]}}, {"a": {"divisor": [1.0, "x"]}}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DEEP, "expected JSON, found JSON that is nested too deeply"),
        *((json.dumps({"factors": factors}), "expected factors by tensor name") for factors in RAGGED),
    ],
    ids=["deep", "ragged", "text"],
)
def test_a_sidecar_that_is_not_one(folder, text, message):
    (folder / "nvfp4_tensor.json").write_text(text)
    with pytest.raises(ValueError, match=rf"src/nvfp4_tensor\.json: {message}"):
        checkpoints.read(folder)


# --- a source that changes -------------------------------------------------------------------------------------------


def touched(file):
    """The same bytes and size at another time."""
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def rewritten(file, is_new=False):
    """Other bytes of the same size and time: programs can set the times, but not that of a change."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    if is_new:
        file.unlink()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 0x80]))  # the sign of the last number
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def replaced(file):
    rewritten(file, is_new=True)


@pytest.mark.parametrize(
    ("change", "to", "name"),
    [
        (touched, "modelopt", "model-00001-of-00003.safetensors"),
        (replaced, "comfy", "model-00001-of-00003.safetensors"),
        (rewritten, "gguf", "model-00001-of-00003.safetensors"),
        (lambda file: file.write_text("{} "), "modelopt", "config.json"),
        (Path.unlink, "comfy", "config.json"),
    ],
)
def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch, to, change, name):
    """Nothing appears, and the next call starts anew."""
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    write_dense(tmp_path / "src", tiny_tensors(), files=3)
    (tmp_path / "src/config.json").write_text(json.dumps(TINY))
    dst = tmp_path / {"modelopt": "dst", "comfy": "dst.safetensors", "gguf": "dst.gguf"}[to]
    options = {"tokenizer": None} if to == "gguf" else {}
    at_call(monkeypatch, FolderCheckpoint, "chunks", 8, lambda: change(tmp_path / "src" / name))
    with pytest.raises(ValueError, match=rf"{name} changed while it was read"):
        checkpoints.quantize(tmp_path / "src", dst, to=to, progress=False, **options)
    assert not dst.exists() and not dst.with_name(dst.name + ".tmp").exists()


def test_a_gguf_that_changes_while_it_is_read(tmp_path, monkeypatch, tensors):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "a.gguf", tensors)
    at_call(monkeypatch, GGUFCheckpoint, "value", 1, lambda: touched(tmp_path / "a.gguf"))
    with pytest.raises(ValueError, match=r"a\.gguf changed while it was read"):
        checkpoints.convert(tmp_path / "a.gguf", tmp_path / "dst", to="modelopt", progress=False)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("change", [touched, lambda file: file.write_bytes(b"")])
def test_a_model_keeps_its_weights_when_the_file_changes(tmp_path, monkeypatch, change):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 32, bias=False))
    before = model[0].weight.detach().clone()
    file = tmp_path / "src/model.safetensors"
    write_dense(tmp_path / "src", {"0.weight": torch.randn(32, 64), "1.weight": torch.randn(32, 32)})
    at_call(monkeypatch, FolderCheckpoint, "value", 2, lambda: change(file))
    with pytest.raises(ValueError, match=r"model\.safetensors (was truncated|changed while it was read)"):
        checkpoints.load(model, tmp_path / "src", progress=False)
    assert torch.equal(model[0].weight, before)
