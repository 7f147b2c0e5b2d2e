"""gpt-oss in GGUF: experts apart, gate and up not interleaved, biases, sinks, yarn; of dense and MXFP4 folders."""

import json

import numpy as np
import pytest
import torch
from helpers.checkpoints import InMemory
from helpers.llama_cpp import llama_cpp_logits
from helpers.tiny_models import tiny_model
from safetensors.torch import save_file

from nvfp4_tensor import NVFP4Tensor, checkpoints
from nvfp4_tensor.checkpoints.formats.gguf.format import FORMAT

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers", minversion="5.21")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
EXPERTS = "model.layers.{}.mlp.experts.{}"


def model_of(**changes):
    model = tiny_model("GptOss", torch.float32, quantized=False, **{**SIZES, **changes})
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    return model


@pytest.fixture
def folder(tmp_path):
    model_of().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def names_of(model, name):
    """llama.cpp's names and the values of a parameter, by its rules of conversion: transposed, and taken apart."""
    value = model.get_parameter(name)
    module = name.split(".")[-1]
    layer = name.removeprefix("model.layers.").partition(".")[0]
    kind = "bias" if module.endswith("_bias") else "weight"
    if ".experts." not in name:
        found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 4)
        stem = found.get_name(name, try_suffixes=(".weight", ".bias"))
        return {f"{stem}.weight" if name.endswith("sinks") else stem: value}
    rows = value.transpose(1, 2) if kind == "weight" else value
    if module.startswith("down"):
        return {f"blk.{layer}.ffn_down_exps.{kind}": rows}
    return {f"blk.{layer}.ffn_gate_exps.{kind}": rows[:, 0::2], f"blk.{layer}.ffn_up_exps.{kind}": rows[:, 1::2]}


def test_the_package_gguf_reads_what_llama_cpp_converts(tmp_path, folder):
    checkpoints.convert(folder, tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    for name, _ in model.named_parameters():
        for gguf_name, want in names_of(model, name).items():
            found = tensors.pop(gguf_name)
            read = torch.from_numpy(np.array(gguf.quants.dequantize(found.data, found.tensor_type)))
            torch.testing.assert_close(read.view(want.shape), want.float(), rtol=0, atol=0)
    assert not tensors
    with checkpoints.read(folder) as dense, FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        assert checkpoint.entries.keys() == dense.entries.keys()
        for name, entry in dense.entries.items():
            assert checkpoint.entries[name].shape == entry.shape, name
            assert torch.equal(checkpoint.dense(name), dense.dense(name)), name
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", to="gguf", tokenizer=None, progress=False)
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_quantized_experts_load_into_the_model(tmp_path, folder):
    """llama.cpp ignores the per-tensor scales of the experts: all are 1. What is read equals what gguf decodes."""
    checkpoints.quantize(folder, tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    checkpoints.convert(tmp_path / "a.gguf", tmp_path / "b", to="modelopt", progress=False)
    model, again = (checkpoints.load(model_of(), tmp_path / name, progress=False) for name in ("a.gguf", "b"))
    assert_same(model, again)
    tensors = {t.name: t for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    dense = model_of()
    for name in (EXPERTS.format(1, "gate_up_proj"), EXPERTS.format(2, "down_proj")):
        weight = model.get_parameter(name)
        assert isinstance(weight, NVFP4Tensor) and (weight.per_tensor_scale == 1).all()
        error = (weight.dequantize() - dense.get_parameter(name)).norm() / dense.get_parameter(name).norm()
        assert 0.05 < error < 0.13
        decoded = transformers.AutoModelForCausalLM.from_config(dense.config, dtype=torch.float32)
        decoded.get_parameter(name).data = weight.dequantize()
        for gguf_name, want in names_of(decoded, name).items():
            read = gguf.quants.dequantize(tensors[gguf_name].data, tensors[gguf_name].tensor_type)
            assert torch.equal(torch.from_numpy(np.array(read)).view(want.shape), want)
            assert (tensors[gguf_name.replace(".weight", ".scale")].data == 1).all()


def plain(t):
    return t.dequantize() if isinstance(t, NVFP4Tensor) else t


def assert_same(model, other):
    for name, parameter in model.named_parameters():
        assert torch.equal(plain(other.get_parameter(name)), plain(parameter)), name


def test_a_folder_of_mxfp4_keeps_its_values(tmp_path):
    model, folder = model_of(num_hidden_layers=2), tmp_path / "mxfp4"
    tensors = {}
    for name, t in model.bfloat16().state_dict().items():
        if t.dim() == 3:
            experts, columns, rows = t.shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(119, 124, (experts, rows, columns // 32), dtype=torch.uint8)
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = t.clone()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []}}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoints.convert(folder, tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    want, got = (
        checkpoints.load(model_of(num_hidden_layers=2), path, progress=False) for path in (folder, tmp_path / "a.gguf")
    )
    assert_same(want, got)


def test_gate_and_up_of_other_scales_become_one(tmp_path, folder):
    """llama.cpp's own files have MXFP4 experts, whose powers of two differ between gate and up."""
    checkpoints.quantize(folder, tmp_path / "a.gguf", to="gguf", tokenizer=None, progress=False)
    reader = gguf.GGUFReader(tmp_path / "a.gguf", "r+")
    want = {}
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        for name in ("gate_up_proj", "down_proj"):
            want[name] = checkpoints.tensor_of(checkpoint.linear(EXPERTS.format(0, name)), torch.float32).dequantize()
    (scale,) = (t for t in reader.tensors if t.name == "blk.0.ffn_up_exps.scale")
    scale.data[:] = [0.5, 1, 2, 1]
    del reader, scale
    with FORMAT.read(tmp_path / "a.gguf") as checkpoint:
        parts = checkpoint.linear(EXPERTS.format(0, "gate_up_proj"))
        assert parts.per_tensor_scale.shape == (4, 1)
        got = checkpoints.tensor_of(parts, torch.float32).dequantize()
    assert torch.equal(got[:, 0::2], want["gate_up_proj"][:, 0::2])
    assert torch.equal(got[:, 1::2], want["gate_up_proj"][:, 1::2] * torch.tensor([0.5, 1, 2, 1]).view(4, 1, 1))


@pytest.mark.slow
def test_llama_cpp_computes_the_same_logits(tmp_path, folder):
    checkpoints.quantize(folder, tmp_path / "nvfp4.gguf", to="gguf", tokenizer=None, progress=False)
    model = checkpoints.load(model_of(), tmp_path / "nvfp4.gguf", progress=False)
    state = {name: plain(p) for name, p in model.state_dict().items()}
    FORMAT.write(InMemory(state, model.config.to_dict()), tmp_path / "dense.gguf", progress=False, tokenizer=None)
    decoded, ids = model_of(), torch.arange(3, 63)
    decoded.load_state_dict(state)
    with torch.no_grad():
        ours = decoded(ids[None]).logits[0]
    # A router's tie may choose another expert, for later tokens too: compare the median token.
    for kind, bound in (("dense", 1e-5), ("nvfp4", 0.05)):
        theirs = llama_cpp_logits(tmp_path / f"{kind}.gguf", ids)
        assert ((ours - theirs).norm(dim=-1) / ours.norm(dim=-1)).median() < bound
