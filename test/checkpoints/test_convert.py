"""Pairs of formats: conversion and back is byte-identical, or raises an error; what is left out is said."""

import itertools

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, content, write_dense
from helpers.checkpoints import TINY, InMemory, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named
from nvfp4_tensor.checkpoints.parts import LinearParts

pytest.importorskip("gguf")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

RING = ["modelopt", "gguf", "compressed-tensors", "comfy", "torchao", "modelopt"]
"""Not comfy beside gguf, which needs a configuration: a single file for ComfyUI has none."""
ENDINGS = {"gguf": "m.gguf", "comfy": "m.safetensors"}
CASES = [("all", *pair) for pair in (*itertools.pairwise(RING), *itertools.pairwise(RING[::-1]))]
CASES += [("scales of 1", "mlx", "modelopt"), ("scales of 1", "gguf", "mlx")]
"""MLX has no per-tensor scales, and does not quantize activations."""


class Divided(InMemory):
    """As a file of divisors has it, of which one in seven is not the inverse of its inverse."""

    def value(self, name: str) -> LinearParts | torch.Tensor:
        parts = super().value(name)
        if "self_attn" in name or not isinstance(parts, LinearParts):
            return parts
        return parts.replace(per_tensor_scale=parts.per_tensor_scale.reciprocal(), divisor=parts.per_tensor_scale)

    def per_tensor_scale(self, name: str) -> torch.Tensor:
        return self.linear(name).per_tensor_scale


@pytest.fixture(scope="module")
def sources() -> dict[str, Checkpoint]:
    """A small Llama with scales that are multiplied by, divisors, static activations and weight-only linears."""
    torch.manual_seed(0)
    dense = tiny_tensors()
    tensors = dict(dense)
    for name in (name for name in dense if "_proj.weight" in name):
        tensors[name] = quantize(dense[name])._replace(per_tensor_scale=torch.rand(()))
        if "o_proj" not in name and "down" not in name:
            static = {"activation_spec": QuantizeSpec(), "activation_amax": torch.rand(()) * 50}
            tensors[name] = tensors[name]._replace(**static)
    for part in ("self_attn", "mlp"):  # both have some that are lost without the file beside the weights
        scales = [t.per_tensor_scale for name, t in tensors.items() if "_proj" in name and part in name]
        assert any((1 / (1 / scale)) != scale for scale in scales)
    ones = {n: quantize(t, amax=2688.0) if "_proj.weight" in n else t for n, t in dense.items()}
    return {"all": Divided(tensors, TINY), "scales of 1": InMemory(ones, TINY)}


def write(checkpoint, folder, format):
    folder.mkdir()
    path = folder / ENDINGS.get(format, "m")
    options = {"tokenizer": None} if format == "gguf" else {}
    format_named(format).write(checkpoint, path, progress=False, **options)
    return path


def through(path, folder, format):
    with checkpoints.read(path) as checkpoint:
        return write(checkpoint, folder, format)


@pytest.mark.parametrize(("what", "one", "other"), CASES)
def test_round_trip(sources, tmp_path, what, one, other):
    a = write(sources[what], tmp_path / "a", one)
    c = through(through(a, tmp_path / "b", other), tmp_path / "c", one)
    first, second = (path if path.is_file() else path / "model.safetensors" for path in (a, c))
    different = ["gguf"]
    if one != "gguf":
        tensors = content(a), content(c)
        different = [name for name in tensors[0] | tensors[1] if tensors[0].get(name) != tensors[1].get(name)]
    assert first.read_bytes() == second.read_bytes(), different


def test_without_the_file_beside_it_scales_are_off_by_a_bit_at_most(sources, tmp_path):
    path = write(sources["all"], tmp_path / "a", "compressed-tensors")
    (path / "nvfp4_tensor.json").unlink()
    names = [name for name, entry in sources["all"].entries.items() if entry.quantized]
    with checkpoints.read(path) as read:
        scales = torch.stack([read.per_tensor_scale(name) for name in names])
    want = torch.stack([sources["all"].per_tensor_scale(name) for name in names])
    assert torch.allclose(scales, want, rtol=2**-22, atol=0) and not torch.equal(scales, want)


def test_what_a_format_cannot_store_is_refused(sources, tmp_path):
    with pytest.raises(ValueError, match="cannot be folded into"):
        write(sources["all"], tmp_path / "a", "mlx")
    assert not list((tmp_path / "a").iterdir())
    single = write(sources["all"], tmp_path / "b", "comfy")
    with pytest.raises(ValueError, match=r"needs a transformers configuration, but .*m\.safetensors has none"):
        through(single, tmp_path / "c", "gguf")
    write_dense(tmp_path / "src")
    with pytest.raises(ValueError, match="has only dense weights: use checkpoints"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", to="modelopt", progress=False)
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("format", sorted(ENDINGS))
def test_the_scales_beside_a_file_are_not_used_for_other_files(sources, tmp_path, format):
    """A second file of that name does not take the first one's, and a damaged one is named."""
    path = write(sources["all"], tmp_path / "a", format)
    kept = tmp_path / "a/m.nvfp4_tensor.json"
    path.unlink()
    options = {"progress": False, **({"tokenizer": None} if format == "gguf" else {})}
    with pytest.raises(ValueError, match=r"m\.nvfp4_tensor\.json already exists"):
        format_named(format).write(sources["scales of 1"], path, **options)
    assert not path.exists()
    kept.unlink()
    format_named(format).write(sources["scales of 1"], path, **options)
    kept.write_text('{"factors": [1]}')
    with pytest.raises(ValueError, match=r"m\.nvfp4_tensor\.json: expected factors by tensor name"):
        checkpoints.read(path)


def test_weight_only_on_the_way(tmp_path):
    checkpoints.convert(GOLDEN / "modelopt_nvfp4", tmp_path / "a", to="modelopt", weight_only=True, progress=False)
    assert not any(name.endswith("input_scale") for name in content(tmp_path / "a"))
    assert {entry.quantizes_activations for entry in checkpoints.read(tmp_path / "a").entries.values()} == {False}


def test_what_servers_cannot_use_warns(sources, tmp_path):
    source = write(sources["all"], tmp_path / "a", "compressed-tensors")
    with pytest.warns(UserWarning, match="4 groups of linears that servers join"):
        checkpoints.convert(source, tmp_path / "b", to="modelopt", progress=False)
