"""Damaged folders of other quantizations: a ValueError that names the file before anything is written, or an output."""

import random
import shutil
import warnings

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, dense_tensors
from helpers.coded_folders import in_fp8, write_coded
from helpers.damage import damage, damage_a_tensor
from safetensors.torch import load_file
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8Tensor, PerRow

from nvfp4_tensor import checkpoints

pytestmark = pytest.mark.slow
WRITTEN = load_file(GOLDEN / "other_quantizations.safetensors")


def of_golden(layout):
    return {k.removeprefix(f"{layout}."): t for k, t in WRITTEN.items() if k.startswith(f"{layout}.m.")}


def of_compressed_tensors():
    pytest.importorskip("compressed_tensors")
    codes = {"m.weight_packed": torch.randint(-(2**31), 2**31 - 1, (32, 8)).int(), "m.weight_scale": torch.rand(32, 2)}
    zeros = {"m.weight_zero_point": torch.randint(0, 2**31 - 1, (4, 2)).int(), "m.weight_shape": torch.tensor([32, 64])}
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    groups = {"a": {"targets": ["Linear"], "weights": arguments}}
    return {**codes, **zeros}, {"quant_method": "compressed-tensors", "config_groups": groups}, None


def of_torchao():
    tensors, metadata = flatten_tensor_state_dict({"m.weight": Int8Tensor.from_hp(torch.randn(32, 64), PerRow())})
    return tensors, {"quant_method": "torchao"}, metadata


KINDS = {
    "fp8": lambda: (in_fp8(dense_tensors(1))[0], {"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    "gptq": lambda: (of_golden("gptq_v2"), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, None),
    "awq": lambda: (of_golden("awq"), {"quant_method": "awq", "version": "gemm"}, None),
    "bitsandbytes": lambda: (of_golden("nf4_nested"), {"quant_method": "bitsandbytes"}, None),
    "compressed-tensors": of_compressed_tensors,
    "torchao": of_torchao,
}


def damage_a_file(folder, rng):
    damage(rng.choice(sorted(folder.iterdir())), rng)


def damage_a_number(folder, rng):
    """Of a scale, or of the settings of nf4; or the last byte is missing."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    at = rng.randrange(8 + int.from_bytes(data[:8], "little"), len(data) - 3)
    data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f", rng.randbytes(4)))
    file.write_bytes(data[: rng.choice((None, None, len(data) - 1))])


@pytest.mark.parametrize("kind", KINDS)
def test_random_damage(tmp_path, kind, count=25):
    rng, refused = random.Random(kind), 0
    source = write_coded(tmp_path / "source", *KINDS[kind]())
    checkpoints.quantize(source, tmp_path / "whole", progress=False)
    for _ in range(count):
        folder = shutil.copytree(source, tmp_path / "x")
        rng.choice((damage_a_file, damage_a_tensor, damage_a_number))(folder, rng)
        try:
            with warnings.catch_warnings(action="ignore"):
                checkpoints.quantize(folder, tmp_path / "out", progress=False)
        except ValueError as error:
            refused += 1
            assert str(folder) in str(error), error
            assert not list(tmp_path.glob("out*"))
        shutil.rmtree(folder)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert count / 5 < refused < count
