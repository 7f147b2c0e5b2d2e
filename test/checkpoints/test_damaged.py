"""Damaged folders: reading raises a ValueError or returns a tensor, and never anything else."""

import json
import random
import shutil

import pytest
import torch
from helpers.checkpoint_folders import edit_json, write_dense

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

pytestmark = pytest.mark.slow

OTHER_VALUES = [None, 3, -1, "x", [], {}, [1], {"a": 1}, True, "NVFP4", 1.5, ["Linear"]]


@pytest.fixture(scope="session")
def mxfp4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources") / "mxfp4"
    blocks, scales = torch.randint(256, (2, 8, 2, 16)), torch.randint(115, 125, (2, 8, 2))
    write_dense(folder, {"e.down_proj_blocks": blocks.byte(), "e.down_proj_scales": scales.byte()})
    edit_json(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
    return folder


def changed(value, rng):
    """One node of a JSON value replaced by something else, or left out."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[key]
        else:
            value[key] = changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        value[index] = changed(value[index], rng)
        return value
    return rng.choice(OTHER_VALUES)


def damage(file, rng):
    if file.suffix == ".json":
        file.write_text(json.dumps(changed(json.loads(file.read_text()), rng)))
        return
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    if rng.random() < 0.7:
        header = json.dumps(changed(json.loads(header), rng)).encode()
    else:
        at = rng.randrange(length)
        header = header[:at] + rng.randbytes(1) + header[at + 1 :]
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def read_all(folder, format):
    with checkpoints.read(folder, format) as read:
        for name, entry in read.entries.items():
            tensor = tensor_of(read.linear(name)) if entry.quantized else read.dense(name)
            assert isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == entry.shape


def is_refused(path, format):
    try:
        checkpoints.detect(path)
        read_all(path, format)
    except ValueError:
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
