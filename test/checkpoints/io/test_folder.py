"""Folders of safetensors: other files, sizes of shards, and config.json."""

import json

import pytest
import torch
from helpers.checkpoint_folders import CONFIG, content, dense_tensors, write_dense

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.checkpoint import format_named
from nvfp4_tensor.checkpoints.io.folder import config_has


@pytest.fixture
def src(tmp_path):
    write_dense(tmp_path / "src", files=3)
    return tmp_path / "src"


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "torchao", "mlx"])
def test_other_files_are_copied_and_pickles_and_hidden_ones_are_not(src, tmp_path, to):
    kept = {"generation_config.json": "{}", "merges.txt": "a b", "LICENSE": "free"}
    left = {"pytorch_model.bin": "x", "state.pt": "x", ".gitattributes": "x", "model.gguf": "x", "half.tmp": "x"}
    for name, text in (kept | left).items():
        (src / name).write_text(text)
    (src / "original").mkdir()
    checkpoints.quantize(src, tmp_path / "dst", to=to, progress=False)
    names = {file.name for file in (tmp_path / "dst").iterdir()}
    assert {name: (tmp_path / "dst" / name).read_text() for name in kept} == kept
    assert not names & set(left) and "original" not in names and "progress.json" not in names
    written = json.loads((tmp_path / "dst/config.json").read_text())
    assert {name: written[name] for name in CONFIG} == CONFIG


def test_the_index_names_every_tensor_and_counts_their_bytes(src, tmp_path):
    checkpoints.quantize(src, tmp_path / "dst", progress=False)
    index = json.loads((tmp_path / "dst/model.safetensors.index.json").read_text())
    held = content(tmp_path / "dst")
    assert index["weight_map"].keys() == held.keys()
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in held.values())
    assert len(set(index["weight_map"].values())) == 3


@pytest.mark.parametrize("size", [1, 20_000, 1 << 40])
def test_files_are_cut_between_weights(src, tmp_path, size):
    checkpoints.quantize(src, tmp_path / "dst", progress=False, shard_bytes=size)
    checkpoints.quantize(src, tmp_path / "whole", progress=False)
    assert content(tmp_path / "dst") == content(tmp_path / "whole")
    files = sorted((tmp_path / "dst").glob("*.safetensors"))
    entries = len(dense_tensors())
    assert {1: len(files) == entries, 20_000: 2 < len(files) < entries, 1 << 40: len(files) == 1}[size]


def test_a_folder_that_is_empty_is_taken_and_a_file_is_not(src, tmp_path):
    (tmp_path / "dst").mkdir()
    checkpoints.quantize(src, tmp_path / "dst", progress=False)
    assert checkpoints.detect(tmp_path / "dst") == "modelopt"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="already exists"):
        checkpoints.quantize(src, tmp_path / "file", progress=False)
    assert (tmp_path / "file").read_text() == "mine"


def test_config_has(tmp_path):
    assert not config_has(tmp_path, bool) and not config_has(tmp_path / "none", bool)
    for text, says in ((b'{"a": 1}', True), (b"{}", False), (b"[1]", False), (b"{", False), (b"\xff", False)):
        (tmp_path / "config.json").write_bytes(text)
        assert config_has(tmp_path, lambda config: config.get("a")) == says, text


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao", "mlx", "mxfp4", "dense"])
def test_options_that_do_not_exist_raise_an_error_and_nothing_is_written(src, tmp_path, format):
    message = "cannot be written" if format == "mxfp4" else "has no option shards"
    with checkpoints.read(src) as checkpoint, pytest.raises(ValueError, match=message):
        format_named(format).write(checkpoint, tmp_path / "dst", progress=False, shards=3)
    assert [each.name for each in tmp_path.iterdir()] == ["src"]


def test_the_dtype_that_config_json_says(src):
    for said, dtype in (("float16", torch.float16), ("torch.float32", torch.float32), ("int8", torch.bfloat16)):
        (src / "config.json").write_text(json.dumps(CONFIG | {"dtype": said}))
        assert checkpoints.read(src).dtype() == dtype
