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


def test_markers(tmp_path):
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


def test_refusals(tmp_path):
    experts = torch.stack([quantize(torch.randn(16, 32)), quantize(torch.randn(16, 32))])
    rows = torch.cat([quantize(torch.randn(16, 32)), quantize(torch.randn(16, 32) * 9)])
    for tensors, options, name, message in [
        ({"m.weight": experts}, {}, "a.safetensors", r"weights \(N, K\) of .* not m.weight \[2, 16, 32\]"),
        ({"m.weight": rows}, {}, "a.safetensors", "one per-tensor scale per weight"),
        (
            {"weights": quantize(torch.randn(16, 32))},
            {},
            "a.safetensors",
            r"with names like m.weight, not weights \[16, 32\]",
        ),
        (a_model(), {}, "a.ckpt", "one .safetensors file"),
        (a_model(), {"shards": 2}, "a.safetensors", "no option shards"),
    ]:
        with pytest.raises(ValueError, match=message):
            write(tmp_path / name, tensors, **options)
        assert list(tmp_path.iterdir()) == []


def test_wrong_files_raise_an_error(tmp_path):
    write(tmp_path / "a.safetensors", a_model())
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    marker = torch.tensor(list(b'{"format": "nvfp4", "convrot": true}'), dtype=torch.uint8)
    changes = [
        ({"blocks.0.up.weight_scale": None}, r"up\.weight_scale .*is missing"),
        ({"blocks.0.up.weight": None}, "markers name blocks.0.up"),
        (
            {"blocks.0.up.weight_scale": torch.zeros(128, 4).to(torch.float8_e4m3fn)},
            r"expected float8_e4m3fn \[128, 8\]",
        ),
        ({"blocks.0.up.weight_scale_2": torch.ones(2)}, r"weight_scale_2: expected float32 \[\]"),
        ({"blocks.0.up.comfy_quant": marker}, r"format nvfp4, found blocks\.0\.up"),
        ({"blocks.0.up.comfy_quant": marker[:9]}, "expected layer markers in JSON"),
    ]
    for change, message in changes:
        kept = {name: t for name, t in {**tensors, **change}.items() if t is not None}
        save_file(kept, tmp_path / "b.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match=r"b\.safetensors.*" + message):
            FORMAT.read(tmp_path / "b.safetensors")
