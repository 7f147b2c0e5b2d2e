"""safetensors files: the bytes of the library, reading by offsets, and invalid files."""

import json

import pytest
import torch
from helpers.checkpoint_folders import dense_tensors, write_dense
from safetensors.torch import save_file

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints.io import safetensors as shards
from nvfp4_tensor.checkpoints.io.safetensors import ShardFile, Shards


def tensors_of_all_kinds():
    return {
        "b": torch.randn(3, 5).bfloat16(),
        "number": torch.tensor(2.5),
        "codes": torch.randint(256, (4, 7), dtype=torch.uint8),
        "scale": torch.randn(4, 3).to(torch.float8_e4m3fn),
        "e8m0": torch.full((2,), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 4),
        "ids": torch.arange(5),
    }


@pytest.mark.parametrize("pieces", [1, 3])
def test_written_as_the_library_writes(tmp_path, pieces):
    tensors = tensors_of_all_kinds()
    file = ShardFile(tmp_path / "ours", {name: t.to("meta") for name, t in tensors.items()}, {"format": "pt"})
    with pytest.raises(AssertionError, match="b"):
        file.finish()
    for name in reversed(tensors):  # in any order
        for piece in tensors[name].reshape(-1).chunk(pieces):
            file.write(name, piece)
    assert [each.name for each in tmp_path.iterdir()] == ["ours.tmp"]
    file.finish()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_read(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK", 8)
    tensors = tensors_of_all_kinds()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"x": "y"})
    read = Shards(tmp_path)
    assert read.metadata == {"x": "y"} and set(read) == set(tensors) and len(read) == len(tensors)
    for name, tensor in tensors.items():
        expected = tensor.reshape(-1).view(torch.uint8)
        assert read[name].shape == tensor.shape and read[name].dtype == tensor.dtype
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), expected)
        chunks = [chunk.clone().reshape(-1).view(torch.uint8) for chunk in read.chunks(name)]
        assert torch.equal(torch.cat([torch.empty(0, dtype=torch.uint8), *chunks]), expected)
        assert len(chunks) == {"b": 3, "codes": 4, "scale": 2, "empty": 0}.get(name, 1)
    assert torch.equal(next(read.chunks("b", 2)), tensors["b"][:2])
    read.close()
    assert torch.equal(read["ids"], tensors["ids"])  # opened again


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-3], lambda b: b[:20], lambda b: b"", lambda b: b + b"x", lambda b: b"GGUF" + b[4:]]
)
def test_invalid_files(tmp_path, damage):
    file = tmp_path / "model.safetensors"
    save_file(dense_tensors(1), file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file \(\d+ bytes"):
        Shards(tmp_path)


def test_an_index_that_does_not_fit(tmp_path):
    write_dense(tmp_path / "src", files=2)
    file = tmp_path / "src/model.safetensors.index.json"
    index = json.loads(file.read_text())

    def raises(message, **changes):
        file.write_text(json.dumps({**index, **changes}))
        with pytest.raises(ValueError, match=message):
            Shards(tmp_path / "src")

    first = "model-00001-of-00002.safetensors"
    raises("says that tensor nothing is in model-00001", weight_map={**index["weight_map"], "nothing": first})
    for name in ("none.safetensors", f"../src/{first}", 5000 * "x", ""):
        raises(rf"names {name[:200]}, which is not in", weight_map={"x": name})
    raises("expected a weight_map", weight_map=3)
    raises(r"found \{\}", weight_map={})
    file.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: expected JSON"):
        Shards(tmp_path / "src")
    for name in "xy":
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"tensor a is in x\.safetensors and in y\.safetensors"):
        Shards(tmp_path)


def test_the_usual_index_counts(tmp_path):
    """Beside it Mistral's folders have the same model under other names, with an index of its own."""
    tensors = write_dense(tmp_path / "src", files=2)
    save_file({"x": torch.zeros(2)}, tmp_path / "src/consolidated.safetensors")
    other = tmp_path / "src/consolidated.safetensors.index.json"
    other.write_text(json.dumps({"weight_map": {"x": "consolidated.safetensors"}}))
    assert set(Shards(tmp_path / "src")) == set(tensors)
    (tmp_path / "src/model.safetensors.index.json").rename(tmp_path / "src/more.safetensors.index.json")
    with pytest.raises(ValueError, match="has 2 indices, expected one"):
        Shards(tmp_path / "src")


def test_a_folder_that_was_saved_twice(tmp_path):
    """With another max_shard_size transformers leaves the earlier files, and loads the single one."""
    folder = tmp_path / "src"
    write_dense(folder, files=2)
    save_file({"x": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"model\.safetensors, which transformers loads, and .*index\.json, which names"
    ):
        Shards(folder)
    for file in folder.glob("model-*"):
        file.unlink()
    with pytest.raises(ValueError, match="remove the model that is not meant"):
        Shards(folder)


def test_a_pickle_is_never_read(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    for read in (Shards, checkpoints.detect):
        with pytest.raises(ValueError, match=r"found pytorch_model\.bin: pickles, which are not read because they can"):
            read(tmp_path)
