"""Damaged folders: reading raises a ValueError that names the file, or returns a tensor, and never anything else."""

import importlib.util
import random
import shutil
import warnings

import pytest
import torch
from helpers.checkpoint_folders import edit_json, write_dense
from helpers.damage import damage, damage_a_tensor
from helpers.layouts import LAYOUTS, SMALL

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def mxfp4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "mxfp4"
    blocks, scales = torch.randint(256, (2, 8, 2, 16)), torch.randint(115, 125, (2, 8, 2))
    write_dense(folder, {"e.down_proj_blocks": blocks.byte(), "e.down_proj_scales": scales.byte()})
    edit_json(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
    return folder


def read_all(folder, format):
    with checkpoints.read(folder, format) as read:
        for name, entry in read.entries.items():
            tensor = tensor_of(read.linear(name)) if entry.quantized else read.dense(name)
            assert isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == entry.shape


def is_refused(path, format):
    try:
        checkpoints.detect(path)
        read_all(path, format)
    except ValueError as error:
        assert str(path if path.is_dir() else path.parent) in str(error), error
        return True
    return False


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao", "comfy", "mlx", "mxfp4"])
def test_random_damage(sources, mxfp4, tmp_path, format):
    rng, refused = random.Random(format), 0
    source = mxfp4 if format == "mxfp4" else sources / format
    read_all(source / "model.safetensors" if format == "comfy" else source, format)
    for _ in range(60):
        folder = shutil.copytree(source, tmp_path / "x")
        damage(rng.choice(sorted(file for file in folder.iterdir() if file.name != "tokenizer.json")), rng)
        refused += is_refused(folder / "model.safetensors" if format == "comfy" else folder, format)
        shutil.rmtree(folder)
    assert 8 < refused < 60


@pytest.mark.skipif(not importlib.util.find_spec("compressed_tensors"), reason="it writes the folders")
@pytest.mark.parametrize("name", LAYOUTS)
def test_random_damage_of_a_tensor(tmp_path, name):
    """The error names the file and the tensor, or the weight that it is part of, and nothing is written."""
    rng, refused = random.Random(name), 0
    torch.manual_seed(0)
    LAYOUTS[name].write(tmp_path / "whole", SMALL)
    for _ in range(8):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / "x")
        key = damage_a_tensor(folder, rng, "proj")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                checkpoints.convert(folder, tmp_path / "out", to="modelopt", progress=False)
                shutil.rmtree(tmp_path / "out")
            except ValueError as error:
                refused += 1
                assert str(folder) in str(error) and key.rpartition(".")[0] in str(error), (key, error)
        assert sorted(each.name for each in tmp_path.iterdir()) == ["whole", "x"]
        shutil.rmtree(folder)
    assert refused > 2


def test_random_damage_of_a_gguf(tmp_path, gguf_source):
    """Bytes of its header, keys and names, and of its tensors' places; or the file is cut."""
    rng, path, whole, refused = random.Random(0), tmp_path / "a.gguf", gguf_source.read_bytes(), 0
    start = whole.index(b"output_norm.weight")
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(start + 200)] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(start) if rng.random() < 0.1 else None])
        refused += is_refused(path, "gguf")
    assert 8 < refused < 80
