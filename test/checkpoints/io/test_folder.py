"""Folders of safetensors: other files, sizes of shards, and config.json."""

import json
import re

import pytest
import torch
from helpers.checkpoint_folders import CONFIG, content, dense_tensors, write_dense

from nvfp4_tensor import checkpoints


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
