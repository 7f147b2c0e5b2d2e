"""Whatever is wrong with a folder, reading it raises a ValueError or gives a tensor: never anything else."""

import json
import random
import shutil

import pytest
import torch
from checkpoints.folders import GOLDEN

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import tensor_of

OTHER_VALUES = [None, 3, -1, "x", [], {}, [1], {"a": 1}, True, "NVFP4", 1.5, ["Linear"]]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for format in ("modelopt", "compressed-tensors", "torchao"):
        checkpoints.convert(GOLDEN / "modelopt_nvfp4", folder / format, to=format, progress=False)
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


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "torchao"])
def test_random_damage(sources, tmp_path, format):
    rng = random.Random(format)
    read_all(sources / format, format)
    refused = 0
    for _ in range(150):
        folder = shutil.copytree(sources / format, tmp_path / "x")
        damage(rng.choice(sorted(folder.iterdir())), rng)
        try:
            checkpoints.detect(folder)
            read_all(folder, format)
        except ValueError:
            refused += 1
        shutil.rmtree(folder)
    assert 30 < refused < 150
