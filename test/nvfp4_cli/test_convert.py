"""``nvfp4 convert``: the same codes and scales in another format."""

import pytest
import torch

from nvfp4_tensor import checkpoints


def test_convert_goes_round_trip(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "there", "--to", "compressed-tensors")
    said = run("convert", tmp_path / "there", tmp_path / "back", "--to", "modelopt", "--json")
    assert said["quantized"] == 14
    file = "model.safetensors"
    assert (tmp_path / "back" / file).read_bytes() == (quantized / file).read_bytes()


def test_convert_takes_the_options_of_every_format(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "exact", "--to", "mlx", "--global-scale", "--lossy")
    run("convert", quantized, tmp_path / "rounded", "--to", "mlx", "--lossy")
    run("convert", quantized, tmp_path / "a4.safetensors", "--to", "comfy", "--quantize-activations")
    run("convert", quantized, tmp_path / "a16.safetensors", "--to", "comfy", "--no-quantize-activations")
    name = "model.layers.1.mlp.up_proj.weight"
    read = {}
    for path in (quantized, *(tmp_path / each for each in ("exact", "rounded", "a4.safetensors", "a16.safetensors"))):
        with checkpoints.read(path) as checkpoint:
            read[path.name] = checkpoint.linear(name)
    own = read.pop(quantized.name)
    assert [parts.quantizes_activations for parts in read.values()] == [False, False, True, False]
    assert all(torch.equal(read[key].qdata, own.qdata) for key in ("exact", "a4.safetensors", "a16.safetensors"))
    assert read["exact"].per_tensor_scale == pytest.approx(own.per_tensor_scale.item(), rel=1e-6)
    assert read["rounded"].per_tensor_scale == 1
