"""Files of a checkpoint: regular, inside the folder, and unchanged."""

import json
import os
import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, dense_tensors, same_files, write_dense
from helpers.checkpoints import tiny_tensors, write_gguf

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.gguf.reading import GGUFCheckpoint
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint

DEEP = '{"a":' * 2000 + "1" + "}" * 2000
GOLDEN_FILES = ("config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(GOLDEN / "modelopt_nvfp4", tmp_path / "src")
    (tmp_path / "src/tokenizer.json").write_text("{}")
    return tmp_path / "src"


@pytest.mark.parametrize("name", GOLDEN_FILES)
@pytest.mark.parametrize("kind", ["fifo", "device", "nothing"])
def test_not_a_regular_file(folder, name, kind):
    (folder / name).unlink()
    if kind == "fifo":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero" if kind == "device" else "nowhere")
    with pytest.raises(ValueError, match=rf"src/{name}: expected a regular file|src is not a checkpoint|neither$"):
        checkpoints.read(folder)
    with pytest.raises(ValueError, match=rf"src/{name}: expected a regular file"):
        checkpoints.read(folder, "modelopt")
    with pytest.raises(ValueError, match=r"regular file|not a checkpoint|neither|quantized"):
        checkpoints.quantize(folder, folder.parent / "dst", progress=False)
    assert not (folder.parent / "dst").exists()


def test_a_fifo_by_its_own_name(tmp_path):
    for name in ("a.safetensors", "a.gguf", "a"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=rf"{name}\b.*(regular file|not a checkpoint)"):
            checkpoints.read(tmp_path / name)


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_a_link_out_of_the_folder(folder, name):
    secret = folder.parent / "secret"
    shutil.move(folder / name, secret)
    (folder / name).symlink_to("../secret")
    with pytest.raises(ValueError, match=rf"src/{name} is a link to {secret}, outside of its folder: copy that file"):
        checkpoints.convert(folder, folder.parent / "dst", to="compressed-tensors", progress=False)
    assert not (folder.parent / "dst").exists()


def test_links_within_the_folder_and_to_it(folder):
    (folder / "parts").mkdir()
    shutil.move(folder / "model.safetensors", folder / "parts/real")
    (folder / "model.safetensors").symlink_to("parts/real")
    (folder.parent / "link").symlink_to("src")
    checkpoints.convert(folder.parent / "link", folder.parent / "dst", to="modelopt", progress=False)
    assert checkpoints.detect(folder.parent / "dst") == "modelopt"


@pytest.mark.parametrize("subfolder", [False, True])
def test_a_cache_of_the_hub(folder, subfolder):
    """Its snapshots are links to the blobs of the same repository, as huggingface_hub lays them out."""
    repository = folder.parent / "hub/models--org--name"
    snapshot = repository / "snapshots/0123abc" / ("text_encoder" if subfolder else "")
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, name in enumerate(GOLDEN_FILES):
        shutil.copyfile(folder / name, repository / "blobs" / str(i))
        (snapshot / name).symlink_to(os.path.relpath(repository / "blobs" / str(i), snapshot))
    checkpoints.convert(snapshot, folder.parent / "a", to="modelopt", progress=False)
    checkpoints.convert(folder, folder.parent / "b", to="modelopt", progress=False)
    assert same_files(folder.parent / "a", folder.parent / "b")
    other = repository.parent / "models--org--other"
    other.mkdir()
    shutil.move(repository / "blobs/3", other / "3")
    (snapshot / "tokenizer.json").unlink()
    (snapshot / "tokenizer.json").symlink_to(other / "3")
    with pytest.raises(ValueError, match=r"tokenizer\.json is a link to .*, outside of its folder"):
        checkpoints.read(snapshot)


def test_blobs_on_another_disk(folder):
    repository, disk = folder.parent / "hub/models--org--name", folder.parent / "disk"
    snapshot = repository / "snapshots/0123abc"
    snapshot.mkdir(parents=True)
    disk.mkdir()
    (repository / "blobs").symlink_to(disk)
    for name in GOLDEN_FILES:
        shutil.copyfile(folder / name, disk / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    with checkpoints.read(snapshot) as read:
        assert read.format == "modelopt"


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [150, 400, 2000, 100_000])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "nvfp4_tensor.json"])
def test_json_that_is_nested_deeply(folder, name, depth):
    (folder / name).write_text('{"a":' * depth + "1" + "}" * depth)
    with pytest.raises(ValueError, match=rf"{name}: expected JSON, found .*nested deeper than 100"):
        checkpoints.read(folder, "modelopt")


def test_markers_that_are_nested_deeply(folder):
    checkpoints.convert(folder, folder.parent / "a.safetensors", to="comfy", progress=False)
    data = (folder.parent / "a.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"]["_quantization_metadata"] = DEEP
    text = json.dumps(header).encode()
    (folder.parent / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"a\.safetensors: expected layer markers .*nested deeper than 100"):
        checkpoints.read(folder.parent / "a.safetensors", "comfy")


@pytest.mark.parametrize("factors", [{"a": {"divisor": [[1.0], [2.0, 3.0]]}}, {"a": {"divisor": [1.0, "x"]}}])
def test_a_sidecar_that_is_ragged(folder, factors):
    (folder / "nvfp4_tensor.json").write_text(json.dumps({"factors": factors}))
    with pytest.raises(ValueError, match=r"src/nvfp4_tensor\.json: expected factors by tensor name"):
        checkpoints.read(folder)


# --- a source that changes -------------------------------------------------------------------------------------------


def touched(file):
    """The same bytes and size at another time."""
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def replaced(file):
    """Other bytes, of the same size and time."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    file.rename(file.with_suffix(".old"))
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def rewritten(file):
    """Other bytes in the same file, of the same size and time: programs can set the times, but not that of a change."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    with file.open("r+b") as opened:
        opened.write(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def grown(file):
    with file.open("ab") as opened:
        opened.write(b" ")


@pytest.mark.parametrize("change", [touched, replaced, rewritten, grown, lambda file: file.unlink()])
@pytest.mark.parametrize("to", ["modelopt", "comfy", "gguf"])
@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_a_source_that_changes_while_it_is_read(tmp_path, monkeypatch, to, change, name):
    """Nothing appears, and the next call starts anew."""
    pytest.importorskip("gguf")
    from helpers.checkpoints import TINY

    torch.manual_seed(0)
    write_dense(tmp_path / "src", tiny_tensors(), files=3)
    (tmp_path / "src/config.json").write_text(json.dumps(TINY))
    dst = tmp_path / {"modelopt": "dst", "comfy": "dst.safetensors", "gguf": "dst.gguf"}[to]
    options = {"tokenizer": None} if to == "gguf" else {}
    whole, seen = FolderCheckpoint.rows, []

    def rows(self, *arguments):
        seen.append(arguments)
        if len(seen) == 8:
            change(tmp_path / "src" / name)
        return whole(self, *arguments)

    monkeypatch.setattr(FolderCheckpoint, "rows", rows)
    with pytest.raises(ValueError, match=rf"{name} changed while it was read"):
        checkpoints.quantize(tmp_path / "src", dst, to=to, progress=False, **options)
    assert not dst.exists() and not dst.with_name(dst.name + ".tmp").exists()


def test_a_gguf_that_changes_while_it_is_read(tmp_path, monkeypatch, tensors):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "a.gguf", tensors)
    whole = GGUFCheckpoint.linear

    def linear(self, name):
        touched(tmp_path / "a.gguf")
        return whole(self, name)

    monkeypatch.setattr(GGUFCheckpoint, "linear", linear)
    with pytest.raises(ValueError, match=r"a\.gguf changed while it was read"):
        checkpoints.convert(tmp_path / "a.gguf", tmp_path / "dst", to="modelopt", progress=False)
    assert not (tmp_path / "dst").exists()


def test_a_run_is_not_taken_up_with_another_source(tmp_path, monkeypatch):
    """Of the same sizes and times."""
    torch.manual_seed(0)
    write_dense(tmp_path / "src", dense_tensors(4), files=3)
    whole, seen = FolderCheckpoint.rows, []

    def rows(self, *arguments):
        seen.append(arguments)
        if len(seen) == 20:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FolderCheckpoint, "rows", rows)
        checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    assert (tmp_path / "dst.partial/model-00001-of-00003.safetensors").exists()
    for file in sorted((tmp_path / "src").glob("*.safetensors")):
        replaced(file)
        file.with_suffix(".old").unlink()
    checkpoints.quantize(tmp_path / "src", tmp_path / "dst", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "again", progress=False)
    assert same_files(tmp_path / "dst", tmp_path / "again")


def test_a_model_keeps_its_weights_when_the_file_changes(tmp_path, monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    before = model[0].weight.detach().clone()
    write_dense(tmp_path / "src", {"0.weight": torch.randn(32, 64)})
    whole = FolderCheckpoint.dense

    def dense(self, name):
        value = whole(self, name)
        touched(tmp_path / "src/model.safetensors")
        return value

    monkeypatch.setattr(FolderCheckpoint, "dense", dense)
    with pytest.raises(ValueError, match="changed while it was read"):
        checkpoints.load(model, tmp_path / "src", progress=False)
    assert torch.equal(model[0].weight, before)


def test_files_written_beside_the_source_are_no_change(tmp_path):
    """A destination may be in the source's folder."""
    write_dense(tmp_path / "src")
    checkpoints.quantize(tmp_path / "src", tmp_path / "src/a.safetensors", to="comfy", progress=False)
    checkpoints.quantize(tmp_path / "src", tmp_path / "src/nvfp4", progress=False)
    assert checkpoints.detect(tmp_path / "src/nvfp4") == "modelopt"
