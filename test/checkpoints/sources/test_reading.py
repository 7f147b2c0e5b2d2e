"""Folders of other quantizations: quantized to the bits of their decoded weights, or refused before anything."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoint_folders import dense_tensors, edit_json, same_files, write_dense
from helpers.coded_folders import in_fp8, in_gptq, write_coded
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8Tensor, PerRow

from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import inspection, quantizing
from nvfp4_tensor.checkpoints.sources import coded


@pytest.fixture(params=["gptq", "torchao", "fp8", "fp8 without settings", "fp8 in text_config"])
def pair(request, tmp_path):
    """A folder of a small Llama in another quantization, and one with the values of its codes."""
    tensors = dense_tensors()
    if request.param == "gptq":
        coded, decoded = in_gptq(tensors)
        write_coded(tmp_path / "coded", coded)
        (tmp_path / "coded/quantize_config.json").write_text(json.dumps({"checkpoint_format": "gptq_v2", "bits": 4}))
    elif "fp8" in request.param:
        coded, decoded = in_fp8(tensors, block=32)
        fp8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
        settings = {} if request.param == "fp8 without settings" else {"quantization_config": fp8}
        nested = request.param == "fp8 in text_config"
        write_coded(tmp_path / "coded", coded, **({"text_config": settings} if nested else settings))
    else:
        weights = {name: Int8Tensor.from_hp(t, PerRow()) if "_proj" in name else t for name, t in tensors.items()}
        decoded = {name: t.dequantize() if "_proj" in name else t for name, t in weights.items()}
        coded, metadata = flatten_tensor_state_dict(weights)
        write_coded(tmp_path / "coded", coded, {"quant_method": "torchao"}, metadata)
    (tmp_path / "coded/tokenizer.json").write_text("{}")
    write_dense(tmp_path / "decoded", decoded)
    if request.param == "fp8 in text_config":
        edit_json(tmp_path / "decoded/config.json", lambda config: config.update(text_config={}))
    return tmp_path


def test_the_bits_of_the_decoded_weights(pair, capsys):
    for name in ("coded", "decoded"):
        checkpoints.quantize(pair / name, pair / f"{name}-out", progress=name == "coded")
    said = capsys.readouterr().err
    assert "two roundings: " in said and " -> NVFP4, 12 weights" in said and "of activations" not in said
    assert same_files(pair / "coded-out", pair / "decoded-out")  # and no quantize_config.json


def test_in_pieces(pair, monkeypatch):
    checkpoints.quantize(pair / "coded", pair / "whole", progress=False)
    monkeypatch.setattr(quantizing, "KEPT_BYTES", 0)
    monkeypatch.setattr(quantizing, "CHUNK", 1)
    monkeypatch.setattr(coded, "STRIP", 1)
    checkpoints.quantize(pair / "coded", pair / "pieces", progress=False)
    assert same_files(pair / "whole", pair / "pieces")


def test_inspect_and_convert_say_what_reads_it(pair):
    found = inspection.inspect(pair / "coded", progress=False)
    assert sum(found.coded.values()) == len(found.listed) == 12 and not found.quantized
    assert {each.kind for each in found.listed} <= {"GPTQ int4", "torchao Int8Tensor", "FP8 in blocks of 32x32"}
    assert all(4 < each.bits < 9 for each in found.listed)
    with pytest.raises(ValueError, match=r"another quantization than NVFP4|torchao's NVFP4Tensor|one quantized by fp8"):
        checkpoints.convert(pair / "coded", pair / "out", to="modelopt", progress=False)


MEMORY = """
import sys
from nvfp4_tensor import checkpoints
from nvfp4_tensor.checkpoints import quantizing

def megabytes(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024

before, quantizing.KEPT_BYTES, quantizing.CHUNK = megabytes("VmRSS"), 0, 8 << 20
checkpoints.quantize(sys.argv[1], sys.argv[2], progress=False)
print(megabytes("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["fp8", "gptq"])
def test_peak_memory(tmp_path, kind):
    """It has the new codes of the largest weight (21 MB) and GPTQ's (19 MB), but never its values (75 MB)."""
    n = 6144
    if kind == "fp8":
        codes = torch.zeros(n, n, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors = {"m.weight": codes, "m.weight_scale_inv": torch.ones(n // 128, n // 128)}
    else:
        words = torch.zeros(n // 8, n, dtype=torch.int32)
        tensors = {"m.qweight": words, "m.qzeros": words[::128, : n // 8], "m.scales": torch.ones(n // 1024, n).half()}
    write_coded(tmp_path / "src", tensors, {"quant_method": kind})
    command = [sys.executable, "-c", MEMORY, tmp_path / "src", tmp_path / "out"]
    at_once = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}  # glibc returns memory that is freed
    peak = float(subprocess.run(command, env=at_once, capture_output=True, text=True, check=True).stdout)
    assert peak < (75 if kind == "fp8" else 94), peak
