"""ComfyUI's files against comfy-kitchen, the package that ComfyUI decodes them with."""

import json

import pytest
import torch
from helpers.checkpoints import InMemory, same_parts
from safetensors import safe_open
from safetensors.torch import save_file

from nvfp4_tensor import QuantizeSpec, quantize
from nvfp4_tensor.checkpoints import parts_of, tensor_of
from nvfp4_tensor.checkpoints.formats.comfy import FORMAT
from nvfp4_tensor.numerics.layout import unpack


def write(path, tensors, **options):
    FORMAT.write(InMemory(tensors, {}), path, progress=False, **options)
    return FORMAT.read(path)


def a_model(rows=48, columns=80):
    static = {"activation_spec": QuantizeSpec(), "activation_amax": torch.tensor(2688.0 * 5)}
    return {
        "blocks.0.up.weight": quantize(torch.randn(rows, columns, dtype=torch.bfloat16)),
        "blocks.0.up.bias": torch.randn(rows),
        "blocks.0.down.weight": quantize(torch.randn(160, 256, dtype=torch.bfloat16))._replace(**static),
        "blocks.0.out.weight": quantize(torch.randn(32, 64, dtype=torch.bfloat16))._replace(
            activation_spec=QuantizeSpec()
        ),
    }


@pytest.mark.parametrize(("rows", "columns"), [(130, 272), (5, 40)])
def test_round_trip(tmp_path, rows, columns):
    tensors = a_model(rows, columns)
    with write(tmp_path / "a.safetensors", tensors) as checkpoint:
        assert FORMAT.detect(tmp_path / "a.safetensors")
        assert set(checkpoint.entries) == set(tensors)
        for name, want in tensors.items():
            entry = checkpoint.entries[name]
            assert entry.shape == tuple(want.shape), name
            if entry.quantized:
                assert same_parts(checkpoint.linear(name), parts_of(want)), name
            else:
                assert torch.equal(checkpoint.dense(name), want)
        FORMAT.write(checkpoint, tmp_path / "b.safetensors", progress=False)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        first = file.get_tensor("blocks.0.up.weight")[:rows, : columns // 2] >> 4  # the even element is the high nibble
    assert torch.equal(first, unpack(tensors["blocks.0.up.weight"].qdata)[:, :columns:2])
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(("rows", "columns"), [(130, 272), (5, 40)])
def test_comfy_kitchen_decodes_the_same(tmp_path, rows, columns):
    kitchen = pytest.importorskip("comfy_kitchen")
    want = quantize(torch.randn(rows, columns))
    write(tmp_path / "a.safetensors", {"m.weight": want})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        codes, scale, factor = (file.get_tensor(f"m.weight{suffix}") for suffix in ("", "_scale", "_scale_2"))
    got = kitchen.dequantize_nvfp4(codes, factor, scale, torch.float32)
    assert got.shape == (-(-rows // 16) * 16, -(-columns // 16) * 16)
    assert torch.allclose(got[:rows, :columns], want.dequantize(), rtol=1e-6, atol=0)
    assert not got[rows:].any() and not got[:, columns:].any()


def test_what_comfy_kitchen_writes_is_read(tmp_path):
    nvfp4 = pytest.importorskip("comfy_kitchen.tensor.nvfp4")
    layout = nvfp4.TensorCoreNVFP4Layout
    codes, params = layout.quantize(torch.randn(100, 88))
    tensors = {f"m.weight{suffix}": t for suffix, t in layout.state_dict_tensors(codes, params).items()}
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": {"m": {"format": "nvfp4"}}})}
    save_file(tensors, tmp_path / "a.safetensors", metadata=header)  # no markers beside the weights
    with FORMAT.read(tmp_path / "a.safetensors") as checkpoint:
        parts = checkpoint.linear("m.weight")
        assert parts.shape == (112, 96) and parts.quantizes_activations and parts.input_scale is None
    got = tensor_of(parts, torch.float32).dequantize()
    assert torch.allclose(got, layout.dequantize(codes, params), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("error:.*no configuration describes")
def test_markers(tmp_path):
    """They say what is in the file."""
    write(tmp_path / "a.safetensors", a_model())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        markers = {
            name: json.loads(bytes(file.get_tensor(f"blocks.0.{name}.comfy_quant").tolist()))
            for name in ("up", "down", "out")
        }
        header = json.loads(file.metadata()["_quantization_metadata"])
        assert file.get_tensor("blocks.0.down.input_scale") == 5.0
    full = {"format": "nvfp4", "full_precision_matrix_mult": True}
    assert markers == {"up": full, "down": {"format": "nvfp4"}, "out": {"format": "nvfp4"}}
    assert header == {"format_version": "1.0", "layers": {f"blocks.0.{name}": m for name, m in markers.items()}}


@pytest.mark.parametrize("wanted", [True, False])
def test_activations_by_choice(tmp_path, wanted):
    with write(tmp_path / "a.safetensors", a_model(), quantize_activations=wanted) as checkpoint:
        quantized = {n.split(".")[2]: e for n, e in checkpoint.entries.items() if e.quantized}
        assert [e.quantizes_activations for e in quantized.values()] == [wanted] * 3
        assert quantized["down"].has_input_scale == wanted and not quantized["up"].has_input_scale
        assert checkpoint.linear("blocks.0.down.weight").quantizes_activations == wanted


def test_a_name_without_its_suffix(tmp_path):
    with pytest.raises(ValueError, match=r"one \.safetensors file: expected a path with this suffix, found a\.ckpt"):
        write(tmp_path / "a.ckpt", a_model())
