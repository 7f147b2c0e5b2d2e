"""Every pair of formats: conversion and back is byte-identical, or raises an error."""

import itertools

import pytest
import torch
from helpers.checkpoint_folders import content
from helpers.checkpoints import TINY, InMemory, tiny_tensors

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize
from nvfp4_tensor.checkpoints.checkpoint import Checkpoint, format_named
from nvfp4_tensor.checkpoints.parts import LinearParts

pytest.importorskip("gguf")
pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

FORMATS = ["modelopt", "compressed-tensors", "torchao", "gguf", "mlx", "comfy"]
ENDINGS = {"gguf": "m.gguf", "comfy": "m.safetensors"}
HOLD = {
    "scales of 1": FORMATS,
    "scales": [format for format in FORMATS if format != "mlx"],
    "divisors": [format for format in FORMATS if format != "mlx"],
    "static activations": [format for format in FORMATS if format != "mlx"],
    "some activations": [format for format in FORMATS if format != "mlx"],
}
"""The features of each format. MLX has no per-tensor scales, and does not quantize activations."""
CASES = [
    (what, one, other)
    for what, formats in HOLD.items()
    for one, other in itertools.permutations(formats, 2)
    if {one, other} != {"gguf", "comfy"}  # a GGUF needs a configuration, and a single file for ComfyUI has none
]


class Divided(InMemory):
    """As a file of divisors has it, of which one in seven is not the inverse of its inverse."""

    def linear(self, name: str) -> LinearParts:
        parts = super().linear(name)
        return parts.replace(per_tensor_scale=parts.per_tensor_scale.reciprocal(), divisor=parts.per_tensor_scale)

    def per_tensor_scale(self, name: str) -> torch.Tensor:
        return self.linear(name).per_tensor_scale


@pytest.fixture(scope="module")
def sources() -> dict[str, Checkpoint]:
    """By what is to be held, a small Llama with it."""
    torch.manual_seed(0)
    dense = tiny_tensors()
    plain = {n: quantize(t) if "_proj.weight" in n else t for n, t in dense.items()}
    scales = {n: t._replace(per_tensor_scale=torch.rand(())) if "_proj.weight" in n else t for n, t in plain.items()}
    ones = {n: quantize(t, amax=2688.0) if "_proj.weight" in n else t for n, t in dense.items()}

    def fed(t: torch.Tensor) -> torch.Tensor:
        return t._replace(activation_spec=QuantizeSpec(), activation_amax=torch.rand(()) * 50)

    static = {n: fed(t) if "_proj.weight" in n else t for n, t in scales.items()}
    some = {n: fed(t) if "mlp" in n else t for n, t in scales.items()}
    assert any((1 / (1 / t.per_tensor_scale)) != t.per_tensor_scale for n, t in scales.items() if "_proj" in n)
    return {
        "scales of 1": InMemory(ones, TINY),
        "scales": InMemory(scales, TINY),
        "divisors": Divided(scales, TINY),
        "static activations": InMemory(static, TINY),
        "some activations": InMemory(some, TINY),
    }


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
    b = through(a, tmp_path / "b", other)
    c = through(b, tmp_path / "c", one)
    weights = [path if path.is_file() else path / "model.safetensors" for path in (a, c)]
    assert weights[0].read_bytes() == weights[1].read_bytes(), _different(a, c)


def _different(a, c):
    if a.suffix == ".gguf":
        return "gguf"
    first, second = content(a), content(c)
    return [name for name in first | second if first.get(name) != second.get(name)]


@pytest.mark.parametrize("what", sorted(set(HOLD) - {"scales of 1"}))
def test_mlx_raises_an_error_for_what_it_cannot_store(sources, tmp_path, what):
    with pytest.raises(ValueError, match="cannot be folded into"):
        write(sources[what], tmp_path / "a", "mlx")
    assert not list((tmp_path / "a").iterdir())


def test_a_gguf_has_to_have_a_configuration(sources, tmp_path):
    a = write(sources["scales"], tmp_path / "a", "comfy")
    with pytest.raises(ValueError, match=r"needs a transformers configuration, but .*m\.safetensors has none"):
        through(a, tmp_path / "b", "gguf")


@pytest.mark.parametrize("format", sorted(ENDINGS))
def test_the_scales_beside_a_file_are_not_used_for_other_files(sources, tmp_path, format):
    """A second file of that name does not take the first one's, and a damaged one is named."""
    path = write(sources["divisors"], tmp_path / "a", format)
    kept = tmp_path / "a/m.nvfp4_tensor.json"
    assert kept.exists()
    path.unlink()
    with pytest.raises(ValueError, match=r"m\.nvfp4_tensor\.json already exists"):
        format_named(format).write(sources["scales"], path, progress=False)
    assert not path.exists()
    kept.unlink()
    options = {"tokenizer": None} if format == "gguf" else {}
    format_named(format).write(sources["scales"], path, progress=False, **options)
    kept.write_text('{"factors": [1]}')
    with pytest.raises(ValueError, match=r"m\.nvfp4_tensor\.json: expected factors by tensor name"):
        checkpoints.read(path)
