"""Files of a checkpoint: regular, inside the folder, unchanged and copied; sizes of shards."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_folders import CONFIG, at_call, content, dense_tensors, same_files, write_dense
from helpers.checkpoints import TINY, tiny_tensors, write_gguf

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.formats.gguf.reading import GGUFCheckpoint
from nvfp4_tensor.checkpoints.io.folder import FolderCheckpoint

GOLDEN_FILES = ("config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def folder(w4a4):
    (w4a4 / "tokenizer.json").write_text("{}")
    return w4a4


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


# --- folders: other files, sizes of shards, and config.json ---------------------------------------------------------


@pytest.fixture
def src(tmp_path):
    write_dense(tmp_path / "src", files=3)
    return tmp_path / "src"


def test_subfolders_and_other_files_are_copied(src, tmp_path):
    """Chat templates, the modules of a sentence transformer, vocabularies; not other copies of the weights."""
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    kept = {
        "additional_chat_templates/rag.jinja": b"RAG", "1_Pooling/config.json": b"{}", "vocab.bin": b"\x00",
        "2_Dense/model.safetensors": b"x", "2_Dense/pytorch_model.bin": b"PK\x03\x04",
        "modules.json": json.dumps(modules).encode(), "a/b/config.json": b"[]", "code/modeling.py": b"pass",
        "progress.json": b"3", "generation_config.json": b"{}", "merges.txt": b"a b", "LICENSE": b"free",
    }  # fmt: skip
    left = {
        "original/consolidated.00.pth": b"x", "pytorch_model.bin": b"x", "state.pt": b"x", "model.gguf": b"x",
        "onnx/model.onnx": b"x", "training_args.bin": b"PK\x03\x04",
        "consolidated.safetensors": (src / "model-00001-of-00003.safetensors").read_bytes(),
    }  # fmt: skip
    hidden = dict.fromkeys((".cache/x", "half.tmp", "code/__pycache__/x.pyc", "old.partial/config.json"), b"x")
    for name, data in (kept | left | hidden).items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(data)
    (src / "link").symlink_to("code")
    (src / "1_Pooling/secret").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("x")
    with pytest.warns(UserWarning, match="are not copied") as warned:
        checkpoints.quantize(src, tmp_path / "dst", progress=False)
    (message,) = [str(each.message) for each in warned if "are not copied" in str(each.message)]
    assert "1_Pooling/secret" in message and re.search(r"and \d+ more", message)
    found = {str(file.relative_to(tmp_path / "dst")) for file in (tmp_path / "dst").rglob("*") if file.is_file()}
    assert kept.keys() <= found and not found & (left | hidden).keys()
    assert {name: (tmp_path / "dst" / name).read_bytes() for name in kept} == kept
    written = json.loads((tmp_path / "dst/config.json").read_text())
    assert {name: written[name] for name in CONFIG} == CONFIG


def test_an_output_inside_of_the_source_is_not_copied_into_itself(src):
    for _ in range(2):
        checkpoints.quantize(src, src / "nvfp4", progress=False)
        assert not (src / "nvfp4/nvfp4").exists() and not (src / "nvfp4.partial").exists()
        for file in sorted((src / "nvfp4").iterdir()):
            file.unlink()


def test_an_output_never_replaces_its_source(src, tmp_path):
    """By its own name, by links, and as the folder or file that is written until the output is complete."""
    before = {file.name: file.read_bytes() for file in src.iterdir()}
    src = src.rename(tmp_path / "dst.partial")
    (src / ".progress.json").write_text('{"key": "of an earlier run", "shards": {}}')
    (tmp_path / "link").symlink_to(src)
    for dst in (src, tmp_path / "link", tmp_path / "dst", src / "../dst.partial"):
        with pytest.raises(ValueError, match=r"already exists|would be written, but it is read"):
            checkpoints.quantize(src, dst, progress=False)
    assert {file.name: file.read_bytes() for file in src.iterdir() if file.name != ".progress.json"} == before


def test_files_are_cut_between_weights(src, tmp_path):
    checkpoints.quantize(src, tmp_path / "whole", progress=False, shard_bytes=1 << 40)
    held, counts = content(tmp_path / "whole"), []
    for name, size in (("each", 1), ("some", 20_000), ("source", None)):
        checkpoints.quantize(src, tmp_path / name, progress=False, shard_bytes=size)
        assert content(tmp_path / name) == held
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == held.keys()
        assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in held.values())
        counts.append(len(list((tmp_path / name).glob("*.safetensors"))))
    assert counts[0] == len(dense_tensors()) > counts[1] > counts[2] == 3
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) == 1


def test_the_dtype_that_config_json_says(src):
    for said, dtype in (("float16", torch.float16), ("torch.float32", torch.float32), ("int8", torch.bfloat16)):
        (src / "config.json").write_text(json.dumps(CONFIG | {"dtype": said}))
        assert checkpoints.read(src).dtype() == dtype
