"""The commands on a small model, against the library."""

import json
import runpy
import sys

import pytest
import torch
from helpers.coded_folders import in_fp8, write_coded
from safetensors.torch import load_file

from nvfp4_tensor import checkpoints

pytestmark = pytest.mark.slow


def test_what_a_user_gets_wrong_is_one_line_without_a_traceback(dense, quantized, tmp_path, text, run):
    for name in ("empty", "there", "alone", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "there/file").write_text("")
    (tmp_path / "alone/model.safetensors").write_bytes((dense / "model.safetensors").read_bytes())
    for file in quantized.iterdir():  # its last bytes cut off
        data = file.read_bytes()
        (tmp_path / "broken" / file.name).write_bytes(data[:-100] if file.suffix == ".safetensors" else data)
    new = tmp_path / "x"
    cases = [
        (["inspect", tmp_path / "empty"], "is not a checkpoint"),
        (["inspect", tmp_path / "broken"], "model.safetensors"),
        (["quantize", quantized, new], "use `nvfp4 convert` for a quantized model"),
        (["quantize", dense, tmp_path / "there"], "already exists"),
        (["quantize", dense, new, "--exclude", "*.nothing"], "matches no linear"),
        (["quantize", dense, new, "--head", "--exclude", "lm_head"], "--exclude leaves it dense"),
        (["quantize", dense, tmp_path / "there", "--calibrate", text], "already exists"),
        (["quantize", dense, new, "--calibrate", tmp_path / "bytes.txt"], "not text in UTF-8"),
        (["quantize", dense, new, "--to", "mlx", "--calibrate", text, "--gptq"], "add --lossy"),
        (["quantize", dense, new, "--to", "mlx", "--calibrate", text, "--weighted"], "readers of --to mlx have none"),
        (["quantize", dense, new, "--calibrate", text, "--bits", 4.5, "--tokens", 64], "bits"),
        (["convert", dense, new], "has only dense weights: use `nvfp4 quantize`"),
        (["convert", quantized, new, "--to", "mlx"], "pass --lossy, or pass --global-scale"),
        (["compare", dense, quantized, "--text", tmp_path / "bytes.txt"], "not text in UTF-8"),
        (["generate", tmp_path / "alone", "hi"], "--config-from"),
    ]
    for arguments, wanted in cases:
        last = run(*arguments, status=1).strip().splitlines()[-1]
        assert last.startswith("nvfp4: ") and wanted in last, (arguments, last)
    assert not new.exists()


def test_a_process_exits_1_and_says_it_in_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["nvfp4", "inspect", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("nvfp4_tensor", run_name="__main__")
    said = capsys.readouterr()
    error = json.loads(said.err.strip().splitlines()[-1])
    assert ended.value.code == 1 and not said.out
    assert error["type"] == "ValueError" and "is not a checkpoint" in error["error"]


def test_convert_goes_round_trip(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "there", "--to", "compressed-tensors")
    said = run("convert", tmp_path / "there", tmp_path / "back", "--to", "modelopt", "--json")
    there, back, own = (folder / "model.safetensors" for folder in (tmp_path / "there", tmp_path / "back", quantized))
    assert said["quantized"] == 14 and said["source_bytes"] == there.stat().st_size != said["bytes"]
    assert back.read_bytes() == own.read_bytes() and said["bytes"] == own.stat().st_size


def test_convert_takes_the_options_of_every_format(quantized, tmp_path, run):
    run("convert", quantized, tmp_path / "exact", "--to", "mlx", "--global-scale", "--lossy")
    run("convert", quantized, tmp_path / "rounded", "--to", "mlx", "--lossy")
    run("convert", quantized, tmp_path / "a4.safetensors", "--to", "comfy", "--quantize-activations")
    run("convert", quantized, tmp_path / "a16.safetensors", "--to", "comfy", "--no-quantize-activations")
    run("convert", quantized, tmp_path / "parts", "--shard-size", 0.00003)
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 3
    read = {}
    for path in (quantized, *(tmp_path / each for each in ("exact", "rounded", "a4.safetensors", "a16.safetensors"))):
        with checkpoints.read(path) as checkpoint:
            read[path.name] = checkpoint.linear("model.layers.1.mlp.up_proj.weight")
    own = read.pop(quantized.name)
    assert [parts.quantizes_activations for parts in read.values()] == [False, False, True, False]
    assert all(torch.equal(read[key].qdata, own.qdata) for key in ("exact", "a4.safetensors", "a16.safetensors"))
    assert read["exact"].per_tensor_scale == pytest.approx(own.per_tensor_scale.item(), rel=1e-6)
    assert read["rounded"].per_tensor_scale == 1


def test_a_model_in_fp8_is_inspected_quantized_and_compared(dense, text, tmp_path, run):
    tensors, _ = in_fp8(load_file(dense / "model.safetensors"))
    src = write_coded(tmp_path / "fp8", tensors, {"quant_method": "fp8"})
    assert "14 weights are FP8 per tensor: `nvfp4 quantize` reads them" in run("inspect", src, "--quiet")
    assert run("inspect", src, "--quiet", "--json")["coded"] == {"FP8 per tensor": 14}
    assert run("quantize", src, tmp_path / "out", "--quiet", "--json")["quantized"] == 14
    for a, b, least in ((src, tmp_path / "out", 0.05), (dense, src, 0.01)):
        said = run("compare", a, b, "--text", text, "--tokens", 64, "--config-from", dense, "--json")
        assert said["quality"]["divergence"] > 0
        assert {each["name"] for each in said["layers"] if each["relative"]} == {
            n for n in tensors if "_proj.weight" in n and "scale" not in n
        }
        assert all(least < each["relative"] < 0.2 for each in said["layers"] if each["relative"])
    assert "found one quantized by fp8: `nvfp4 quantize` reads" in run("convert", src, tmp_path / "x", status=1)
