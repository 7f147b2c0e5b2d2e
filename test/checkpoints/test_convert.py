"""Folders that are converted to another format and back are byte-identical for all scales."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from helpers.checkpoint_folders import GOLDEN, content, edit, same_files, write_dense

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import Checkpoint, Entry, LinearParts
from nvfp4_tensor.checkpoints.checkpoint import format_named

pytestmark = pytest.mark.slow

FORMATS = ["modelopt", "compressed-tensors", "torchao"]


@pytest.mark.parametrize("source", ["modelopt_nvfp4", "modelopt_w4a16"])
@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(FORMATS, 2)])
def test_files_of_every_pair(tmp_path, source, one, other):
    options = {"progress": False, "shard_bytes": 30_000}
    checkpoints.convert(GOLDEN / source, tmp_path / "a", to=one, **options)
    checkpoints.convert(tmp_path / "a", tmp_path / "b", to=other, **options)
    checkpoints.convert(tmp_path / "b", tmp_path / "c", to=one, **options)
    (tmp_path / "b/nvfp4_tensor.json").unlink(missing_ok=True)
    (tmp_path / "a/nvfp4_tensor.json").unlink(missing_ok=True)
    (tmp_path / "c/nvfp4_tensor.json").unlink(missing_ok=True)
    assert same_files(tmp_path / "a", tmp_path / "c")


class Made(Checkpoint):
    """500 linears of arbitrary scales; stored as what values are divided by, or multiplied."""

    format, path = "made", None

    def __init__(self, divisors):
        self.config = {}
        self.scales = torch.rand(500, 2) * torch.logspace(-8, 3, 500)[:, None]
        self.divisors = divisors
        entry = Entry(
            shape=(1, 16), dtype=torch.bfloat16, quantized=True, quantizes_activations=True, has_input_scale=True
        )
        self.entries = {f"layers.{i}.weight": dataclasses.replace(entry) for i in range(500)}

    def linear(self, name):
        factor, input_factor = self.scales[int(name.split(".")[1])]
        scales = {"per_tensor_scale": factor, "input_scale": input_factor}
        if self.divisors:
            scales = {"per_tensor_scale": factor.reciprocal(), "divisor": factor}
            scales |= {"input_scale": input_factor.reciprocal(), "input_divisor": input_factor}
        codes = torch.randint(256, (1, 8), dtype=torch.uint8)
        return LinearParts(
            qdata=codes,
            scale=torch.ones(1, 1).to(torch.float8_e4m3fn),
            columns=16,
            quantizes_activations=True,
            **scales,
        )

    def dense(self, name):
        raise KeyError(name)


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(FORMATS, 2)])
def test_every_scale_comes_back(tmp_path, one, other):
    """1 / (1 / x) is not x for one scale in seven: the file beside the shards has those."""
    made = Made(divisors=one == "compressed-tensors")
    inverse = made.scales.reciprocal().reciprocal()
    assert 50 < (inverse != made.scales).any(1).sum() < 450
    format_named(one).write(made, tmp_path / "a", progress=False)
    checkpoints.convert(tmp_path / "a", tmp_path / "b", to=other, progress=False)
    checkpoints.convert(tmp_path / "b", tmp_path / "c", to=one, progress=False)
    assert content(tmp_path / "a") == content(tmp_path / "c")
    key = {"modelopt": "layers.7.weight_scale_2", "compressed-tensors": "layers.7.weight_global_scale"}
    stored = content(tmp_path / "a")[key.get(one, "layers.7._weight_per_tensor_scale")][2]
    assert torch.tensor(stored, dtype=torch.uint8).view(torch.float32) == made.scales[7, 0]


def test_without_the_sidecar_scales_are_off_by_a_bit_at_most(tmp_path):
    made = Made(divisors=False)
    format_named("compressed-tensors").write(made, tmp_path / "b", progress=False)
    (tmp_path / "b/nvfp4_tensor.json").unlink()
    with checkpoints.read(tmp_path / "b") as read:
        scales = torch.stack([read.per_tensor_scale(f"layers.{i}.weight") for i in range(500)])
    assert torch.allclose(scales, made.scales[:, 0], rtol=2**-22, atol=0) and not torch.equal(scales, made.scales[:, 0])


def test_weight_only_on_the_way(tmp_path):
    checkpoints.convert(GOLDEN / "modelopt_nvfp4", tmp_path / "a", to="modelopt", weight_only=True, progress=False)
    assert not any(name.endswith("input_scale") for name in content(tmp_path / "a"))
    assert {entry.quantizes_activations for entry in checkpoints.read(tmp_path / "a").entries.values()} == {False}


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "torchao"])
def test_dense_weights_are_not_converted(tmp_path, to):
    write_dense(tmp_path / "src")
    with pytest.raises(ValueError, match="has only dense weights: use checkpoints"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", to=to, progress=False)
    assert not (tmp_path / "dst").exists()


def test_different_scales_warn(tmp_path):
    write_dense(tmp_path / "src", {f"{name}_proj.weight": torch.randn(16, 32) for name in "qkv"})
    checkpoints.quantize(tmp_path / "src", tmp_path / "a", progress=False)
    state = {
        f"{name}_proj.weight": checkpoints.tensor_of(checkpoints.read(tmp_path / "a").linear(f"{name}_proj.weight"))
        for name in "qkv"
    }
    state["v_proj.weight"] = state["v_proj.weight"]._replace(per_tensor_scale=torch.tensor(3.0))
    checkpoints.save(state, tmp_path / "b", mismatched_scales="keep", progress=False)
    with pytest.warns(UserWarning, match="1 groups of linears that servers join"):
        checkpoints.convert(tmp_path / "b", tmp_path / "c", to="compressed-tensors", progress=False)


def test_scales_of_a_cache_are_omitted_with_a_warning(tmp_path):
    source = shutil.copytree(GOLDEN / "modelopt_nvfp4", tmp_path / "src")
    edit(source, lambda t: t.update({"model.layers.0.self_attn.k_proj.k_scale": torch.ones(())}))
    with pytest.warns(UserWarning, match=r"key-value cache are omitted \(model\.layers\.0\.self_attn\.k_proj\.k_scale"):
        checkpoints.convert(source, tmp_path / "a", to="compressed-tensors", progress=False)
    assert not any(name.endswith("k_scale") for name in content(tmp_path / "a"))
