"""What all formats of safetensors refuse: damaged tensors, other configurations, and weights that they cannot store."""

import dataclasses
import json
import shutil

import pytest
import torch
from helpers.checkpoint_folders import edit, edit_json, write_dense
from helpers.checkpoints import InMemory
from safetensors.torch import load_file, save_file

from nvfp4_tensor import QuantizeSpec, checkpoints, quantize, quantize_experts
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.checkpoints.checkpoint import format_named
from nvfp4_tensor.dispatch.fp8 import FP8Tensor

Q = "model.layers.0.self_attn.q_proj"


def cut(key, *where):
    return lambda t: t.update({key: t[key][where].clone()})


def put(key, value):
    return lambda t: t.update({key: value})


def drop(*keys):
    return lambda t: [t.pop(key) for key in keys]


MARKER = torch.tensor(list(b'{"format": "nvfp4", "convrot": true}'), dtype=torch.uint8)
DAMAGES = [
    ("modelopt", cut(f"{Q}.weight_scale", slice(None), slice(3)),
     rf"tensor {Q}\.weight_scale: expected F8_E4M3 \[64, 4\], found F8_E4M3 \[64, 3\]"),
    ("modelopt", put(f"{Q}.input_scale", torch.ones(3)), r"input_scale: expected F32 \[\], found F32 \[3\]"),
    ("modelopt", put(f"{Q}.weight_scale_2", torch.ones(1).int()), r"weight_scale_2: expected F32 \[1\], found I32"),
    ("modelopt", drop(f"{Q}.weight_scale"), rf"tensor {Q}\.weight_scale \(F8_E4M3\) is missing: {Q}\.weight"),
    ("modelopt", drop(f"{Q}.input_scale"), rf"tensor {Q}\.input_scale is missing: .* but other weights do"),
    ("compressed-tensors", put(f"{Q}.weight_packed", torch.zeros(64, 8).int()),
     r"weight_packed: expected uint8 \(N, K / 2\), found I32 \[64, 8\]"),
    ("compressed-tensors", put(f"{Q}.weight_packed", torch.zeros(2, 64, 32).byte()), "weight_packed: expected uint8"),
    ("compressed-tensors", drop(f"{Q}.weight_global_scale"), r"weight_global_scale \(F32 \[\]\) is missing"),
    ("torchao", cut(f"{Q}._weight_scale", slice(31)),
     r"_weight_scale: expected F8_E4M3 \[32, 16\], found F8_E4M3 \[31, 16\]"),
    ("torchao", drop(f"{Q}._weight_qdata"), r"_weight_qdata: expected uint8 \(N, K / 2\), found none"),
    ("torchao", drop("model.norm.weight"), r"the headers describe model\.norm\.weight, but no file has them"),
    ("torchao", drop(f"{Q}._weight_per_tensor_scale"), rf"{Q}\.weight: the header lists .*, found"),
    ("compressed-tensors", lambda t: t.update({f"{Q}.{key}": t[f"{Q}.{key}"][:, :size].contiguous()
                                              for key, size in (("weight_packed", 12), ("weight_scale", 1))}),
     r"q_proj\.weight_packed: expected columns in multiples of 16, found U8"),
    ("comfy", drop(f"{Q}.weight_scale"), r"weight_scale .*is missing"),
    ("comfy", drop(f"{Q}.weight"), f"markers name {Q} as quantized, but they have no weight"),
    ("comfy", cut(f"{Q}.weight_scale", slice(64)), r"expected F8_E4M3 \[128, 4\], found F8_E4M3 \[64, 4\]"),
    ("comfy", put(f"{Q}.weight_scale_2", torch.ones(2)), r"weight_scale_2: expected F32 \[\], found F32 \[2\]"),
    ("comfy", put(f"{Q}.comfy_quant", MARKER), f"expected layers of format nvfp4, found {Q}"),
    ("comfy", put(f"{Q}.comfy_quant", MARKER[:9]), "expected layer markers in JSON"),
    ("comfy", put(f"{Q}.comfy_quant", torch.tensor(list(b'{"format": "nvfp4", "shape": [5, 40]}')).byte()),
     r"expected codes of shape \[5, 40\], found U8 \[64, 32\]"),
    ("mlx", cut(f"{Q}.scales", slice(None), slice(3)), r"scales: expected U8 \[64, 4\], found U8 \[64, 3\]"),
    ("mlx", put(f"{Q}.weight", torch.zeros(64, 8).int()), r"q_proj\.weight: expected uint32 \(N, K / 8\), found I32"),
    ("mlx", drop(f"{Q}.weight"), rf"{Q}\.global_scale, {Q}\.scales belong to no weight of mode nvfp4"),
    ("mlx", drop(f"{Q}.scales"), r"q_proj\.scales \(U8 \[64, 4\]\) is missing"),
    ("mlx", drop(f"{Q}.global_scale"), rf"{Q}\.weight have no global_scale, but other weights do"),
    ("mxfp4", drop("e.down_proj_scales"), r"down_proj_scales \(U8 \[2, 8, 2\]\) is missing"),
    ("mxfp4", put("e.down_proj_blocks", torch.zeros(3, 8, 2, 8).byte()), r"expected uint8 \(N, K/32, 16\) or \(E, N"),
    ("mxfp4", put("e.down_proj_blocks", torch.zeros(3, 8, 2, 16)), r"down_proj_blocks: expected uint8"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "change", "message"), DAMAGES)
def test_damaged_tensors_are_named(copy, format, change, message):
    folder, path = copy(format)
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as raised:
        checkpoints.read(path, format)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("format", "keys"),
    [
        ("modelopt", ("weight_scale_2", "input_scale")),
        ("compressed-tensors", ("weight_global_scale", "input_global_scale")),
        ("comfy", ("weight_scale_2", "input_scale")),
        ("mlx", ("global_scale",)),
    ],
)
def test_one_number_may_have_a_dimension_or_none(copy, format, keys):
    folder, path = copy(format)
    before = checkpoints.read(path).linear(f"{Q}.weight")
    keys = [f"{Q}.{key}" for key in keys]
    edit(folder, lambda t: t.update({key: t[key].reshape(() if t[key].dim() else 1) for key in keys}))
    after = checkpoints.read(path).linear(f"{Q}.weight")
    assert after.per_tensor_scale.shape == () and after.per_tensor_scale == before.per_tensor_scale
    assert after.input_scale == before.input_scale


def group(**changes):
    return lambda q: q["config_groups"]["group_0"].update(changes)


def weights(**changes):
    return lambda q: q["config_groups"]["group_0"]["weights"].update(changes)


CONFIGURATIONS = [
    *(("modelopt", lambda q, a=algorithm: q.update(quant_algo=a), f"quant_algo NVFP4, .* found {algorithm}")
      for algorithm in ("W8A16", None)),
    ("modelopt", lambda q: q.update(quant_algo="FP8"), r"weight is NVFP4 \(uint8\), and FP8 in the configuration"),
    ("modelopt", lambda q: q.update(group_size=32), r"expected group_size 16, found \[32\]"),
    ("modelopt", lambda q: q.update(quant_algo="MIXED_PRECISION", quantized_layers={Q: {"quant_algo": "W8A16"}}),
     r"expected layers of NVFP4 or .* in MIXED_PRECISION, found .*q_proj \(W8A16\)"),
    ("modelopt", lambda q: q.update(quant_algo="MIXED_PRECISION", quantized_layers={}),
     r"proj\.weight is NVFP4 .*but is not in quantized_layers"),
    ("compressed-tensors", weights(num_bits=8), "down_proj.weight_packed is in no config group of NVFP4"),
    ("compressed-tensors", weights(group_size=32), "expected a config group of 4-bit floats with group_size 16"),
    ("compressed-tensors", lambda q: q.update(transform_config={"config_groups": {"R1": {}}}), "_config .* rotates in"),
    ("compressed-tensors", lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity sparse-24"),
    ("compressed-tensors", group(input_activations={"num_bits": 8, "type": "float"}),
     "expected input_activations of 4-bit floats or none, found 8-bit float"),
    ("compressed-tensors", lambda q: q["config_groups"].update(
        group_0={**q["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]},
        group_1={**q["config_groups"]["group_0"], "targets": ["re:.*k_proj.*"]}),
     r"proj\.weight_packed is in no config group"),
    ("mlx", lambda q: q.update(mode="affine", group_size=64), r"found \{'mode': 'affine', 'bits': 4, 'group_size': 64"),
    ("mlx", lambda q: q.update(mode=["nvfp4"]), "expected mode nvfp4 or mxfp4, found"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "change", "message"), CONFIGURATIONS)
def test_other_configurations_raise_an_error(copy, format, change, message):
    folder, path = copy(format)
    edit_json(folder / "config.json", lambda c: change(c["quantization" if format == "mlx" else "quantization_config"]))
    with pytest.raises(ValueError, match=message) as raised:
        checkpoints.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors", "mlx", "mxfp4"])
def test_a_folder_of_another_format(tmp_path, format):
    write_dense(tmp_path / "src")
    assert checkpoints.detect(tmp_path / "src") == "dense"
    with pytest.raises(ValueError, match=rf"src: expected the configuration of {format} in .*config\.json, found none"):
        checkpoints.read(tmp_path / "src", format)
    assert checkpoints.detect(tmp_path / "src/model.safetensors") == "dense"
    with pytest.raises(FileNotFoundError, match="does not exist"):
        checkpoints.detect(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no checkpoint format .awq.: expected one of .*modelopt"):
        checkpoints.convert(tmp_path / "src", tmp_path / "dst", to="awq")


def test_torchaos_headers_of_others(tmp_path):
    metadata = {"a.weight": json.dumps({"_type": "Int4Tensor", "_data": {}}), "tensor_names": '["a.weight"]'}
    save_file({"a._weight_qdata": torch.zeros(4)}, tmp_path / "model.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=r"expected tensors of torchao's NVFP4Tensor, found a.weight \(Int4Tensor\)"):
        checkpoints.read(tmp_path / "model.safetensors", "torchao")


def weight(rows=32, columns=64, amax=None, **changes):
    return quantize(torch.randn(rows, columns), amax=amax)._replace(**changes)


INEXACT = next(scale for scale in torch.linspace(1, 2, 1000) if scale * 2688 / 2688 != scale)
W4A4 = {"activation_spec": QuantizeSpec()}
ROWS = "one per-tensor scale per weight, but a.weight have one per row"
UNLIKE = r"stores NVFP4 weights \(N, K\).* names like m\.weight, not "
REFUSALS = [
    *((format, "a.weight", lambda: torch.cat([weight(16), weight(16, amax=99.0)]), {}, ROWS)
      for format in ("modelopt", "compressed-tensors", "torchao", "comfy")),
    *((format, "a.weight", lambda: weight(8, 40), {}, r"columns in multiples of 16: leave a.weight \[8, 40\] dense")
      for format in ("modelopt", "compressed-tensors", "torchao", "mlx")),
    *((format, "a.weight", lambda: weight(**W4A4), {}, f"a.weight quantize activations by the amax .* but {format}")
      for format in ("modelopt", "compressed-tensors")),
    *((format, "a.weight", lambda: quantize_experts(torch.randn(2, 16, 32)), {}, UNLIKE + r"a\.weight \[2, 16, 32\]")
      for format in ("compressed-tensors", "comfy")),
    *((format, "weights", weight, {}, UNLIKE + r"weights \[32, 64\]")
      for format in ("compressed-tensors", "torchao", "comfy", "mlx")),
    ("torchao", "a.x", lambda: quantize_experts(torch.randn(2, 32, 64)), {}, "rows in multiples of 128, unlike a.x"),
    ("compressed-tensors", "a.weight", lambda: quantize(torch.full((16, 32), 1e-38)), {},
     r"a\.weight: its scale is too small or too large for compressed-tensors, because a\.weight_global_scale"),
    ("mlx", "a.weight", weight, {}, r"a\.weight cannot be folded into .*pass lossy=True"),
    ("mlx", "a.weight", lambda: weight(amax=2688.0, per_tensor_scale=torch.tensor(4096.0)), {},
     "cannot be folded into"),
    ("mlx", "a.weight", lambda: weight(per_tensor_scale=INEXACT), {"global_scale": True},
     r"no float32 is exactly for a\.weight: pass lossy=True"),
    ("mlx", "a.weight", lambda: quantize_experts(torch.randn(2, 16, 32)), {"global_scale": True}, "experts have one"),
    ("modelopt", "a.weight", weight, {"shard": 3}, "modelopt has no option shard"),
    ("mlx", "a.weight", lambda: weight(amax=2688.0), {"shard": 3}, "mlx has no option shard"),
    ("comfy", "a.weight", weight, {"shards": 2}, "no option shards, only quantize_activations"),
    ("mxfp4", "a.weight", weight, {}, "MXFP4 cannot be written"),
    ("dense", "a.weight", lambda: FP8Tensor(torch.ones(16, 32).to(torch.float8_e4m3fn), torch.ones(1, 1)), {},
     r"dense has no weights in FP8, and a\.weight are FP8: choose modelopt"),
    ("dense", "a.weight", weight, {}, "the format dense has no NVFP4, but a.weight are NVFP4"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "name", "tensor", "options", "message"), REFUSALS)
def test_what_a_format_cannot_store_is_refused_and_nothing_written(tmp_path, format, name, tensor, options, message):
    path = tmp_path / ("a.safetensors" if format == "comfy" else "a")
    with pytest.raises(ValueError, match=message):
        format_named(format).write(InMemory({name: tensor()}, {}), path, progress=False, **options)
    assert not [each for each in tmp_path.iterdir() if not each.name.endswith(".partial")]


@pytest.mark.parametrize(
    ("format", "dense"),
    [("modelopt", "a.input_scale"), ("compressed-tensors", "b.weight_scale"), ("comfy", "b.comfy_quant"),
     ("torchao", "a._weight_scale"), ("mlx", "b.biases")],
)  # fmt: skip
def test_names_of_its_own_tensors_are_not_for_dense_ones(tmp_path, format, dense):
    tensors = InMemory({"a.weight": weight(amax=2688.0), dense: torch.ones(2)}, {})
    with pytest.raises(ValueError, match=rf"{format} .*names for .*{dense} are dense: rename them"):
        format_named(format).write(tensors, tmp_path / "a.safetensors", progress=False)


# --- without a configuration -----------------------------------------------------------------------------------------


def without_configuration(source, path):
    """Write the tensors of a folder or file to a file, without markers, metadata or configuration."""
    file = source / "model.safetensors" if source.is_dir() else source
    save_file({name: t for name, t in load_file(file).items() if not name.endswith("comfy_quant")}, path)
    return path


@pytest.mark.parametrize("format", ["modelopt", "comfy", "compressed-tensors"])
def test_weights_that_no_configuration_describes(sources, tmp_path, format):
    """They are recognized by their tensors: one of the two formats with the same names, by shapes that differ."""
    source = sources / format
    path = without_configuration(source, tmp_path / "x.safetensors")
    assert checkpoints.detect(path) == format
    with pytest.warns(UserWarning, match=f"no configuration describes its NVFP4 weights: they are read as {format}"):
        read = checkpoints.read(path)
    described = checkpoints.read(source / "model.safetensors" if format == "comfy" else source)
    for name, entry in described.entries.items():
        assert dataclasses.replace(read.entries[name], shard=entry.shard) == entry
        if entry.quantized:
            ours, theirs = read.linear(name), described.linear(name)
            assert torch.equal(ours.qdata, theirs.qdata) and torch.equal(ours.input_scale, theirs.input_scale)
            assert torch.equal(ours.scale.view(torch.uint8), theirs.scale.view(torch.uint8))
            assert ours.per_tensor_scale == pytest.approx(theirs.per_tensor_scale.item(), rel=1e-6)
    read.close(), described.close()
    with pytest.warns(UserWarning, match="no configuration describes"):
        checkpoints.convert(path, tmp_path / "out", to="modelopt", progress=False)
    folder = shutil.copytree(sources / "dense", tmp_path / "folder")  # or a folder that has lost its configuration
    shutil.copy(path, folder / "model.safetensors")
    assert checkpoints.detect(folder) == format


@pytest.mark.parametrize("format", ["modelopt", "comfy"])
def test_weights_that_could_be_of_two_formats(tmp_path, format):
    """With sizes in multiples of 128 and 64 the shapes are equal: nothing is read until the format is named."""
    model = {"a.weight": weight(128, 256)}
    path = tmp_path / "whole.safetensors" if format == "comfy" else tmp_path / "whole"
    checkpoints.save(model, path, format=format, config={}, weight_only=True, progress=False)
    path = without_configuration(path, tmp_path / "x.safetensors")
    for call in (checkpoints.detect, checkpoints.read, lambda p: checkpoints.convert(p, tmp_path / "o", to="modelopt")):
        with pytest.raises(ValueError, match=r"x\.safetensors has NVFP4 .* pass format='modelopt' or format='comfy'"):
            call(path)
    assert not (tmp_path / "o").exists()
    with pytest.warns(UserWarning, match=f"read as {format}"):
        checkpoints.convert(path, tmp_path / "o", to="modelopt", format=format, progress=False)
    with checkpoints.read(tmp_path / "o") as read:
        assert torch.equal(
            tensor_of(read.linear("a.weight"), torch.float32).dequantize(), model["a.weight"].dequantize()
        )
        assert not read.entries["a.weight"].quantizes_activations
