"""Damaged folders: reading raises a ValueError or returns a tensor, and never anything else."""

import json
import random
import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, edit_json, write_dense
from helpers.checkpoints import write_gguf

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

pytestmark = pytest.mark.slow

OTHER_VALUES = [None, 3, -1, "x", [], {}, [1], {"a": 1}, True, "NVFP4", 1.5, ["Linear"]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for format in ("modelopt", "compressed-tensors", "torchao"):
        checkpoints.convert(GOLDEN / "modelopt_nvfp4", folder / format, to=format, progress=False)
    (folder / "comfy").mkdir()
    checkpoints.convert(folder / "modelopt", folder / "comfy/model.safetensors", to="comfy", progress=False)
    write_dense(folder / "dense")
    checkpoints.quantize(folder / "dense", folder / "mlx", to="mlx", progress=False)
    blocks, scales = torch.randint(256, (2, 8, 2, 16)), torch.randint(115, 125, (2, 8, 2))
    write_dense(folder / "mxfp4", {"e.down_proj_blocks": blocks.byte(), "e.down_proj_scales": scales.byte()})
    edit_json(folder / "mxfp4/config.json", lambda c: c.update(quantization_config={"quant_method": "mxfp4"}))
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


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao", "comfy", "mlx", "mxfp4"])
def test_random_damage(sources, tmp_path, format):
    rng = random.Random(format)
    read_all(sources / ("comfy/model.safetensors" if format == "comfy" else format), format)
    refused = 0
    for _ in range(150):
        folder = shutil.copytree(sources / format, tmp_path / "x")
        damage(rng.choice(sorted(file for file in folder.iterdir() if file.name != "tokenizer.json")), rng)
        path = folder / "model.safetensors" if format == "comfy" else folder
        try:
            checkpoints.detect(path)
            read_all(path, format)
        except ValueError:
            refused += 1
        shutil.rmtree(folder)
    assert 20 < refused < 150


def test_random_damage_of_a_gguf(tmp_path, tensors):
    """Bytes of its header, keys and names, and of its tensors' places; or the file is cut."""
    pytest.importorskip("gguf")
    rng, path = random.Random(0), tmp_path / "a.gguf"
    write_gguf(path, tensors)
    whole, refused = path.read_bytes(), 0
    start = whole.index(b"output_norm.weight")
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(start + 200)] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(start) if rng.random() < 0.1 else None])
        try:
            checkpoints.detect(path)
            read_all(path, "gguf")
        except ValueError:
            refused += 1
    assert 20 < refused < 200
