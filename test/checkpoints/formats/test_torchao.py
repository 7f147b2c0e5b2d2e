"""torchao: our files read by torchao and transformers, and its files read by us."""

import json

import pytest
import torch
from helpers.checkpoint_folders import CONFIG, GOLDEN
from safetensors.torch import load_file, save_file
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as TheirTensor
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict, unflatten_tensor_state_dict

from nvfp4_tensor import checkpoints, quantize_experts
from nvfp4_tensor.checkpoints import tensor_of
from nvfp4_tensor.checkpoints.io.safetensors import Shards


@pytest.fixture(params=["modelopt_nvfp4", "modelopt_w4a16"])
def folder(request, tmp_path):
    checkpoints.convert(GOLDEN / request.param, tmp_path / "ao", to="torchao", progress=False)
    return tmp_path / "ao"


def test_torchao_reads_it(folder):
    shards = Shards(folder)
    state, left = unflatten_tensor_state_dict(load_file(folder / "model.safetensors"), shards.metadata)
    assert not left and checkpoints.detect(folder) == "torchao"
    with checkpoints.read(folder) as read:
        assert set(state) == set(read.entries)
        for name, entry in read.entries.items():
            assert isinstance(state[name], TheirTensor) == entry.quantized
            if entry.quantized:
                parts = read.linear(name)
                theirs = state[name]
                assert torch.allclose(
                    theirs.dequantize(torch.float32), tensor_of(parts, torch.float32).dequantize(), rtol=1e-6
                )
                assert (
                    theirs.orig_dtype == torch.bfloat16
                    and (theirs.act_quant_kwargs is not None) == entry.has_input_scale
                )
                assert theirs.act_per_tensor_scale == parts.input_scale


def test_transformers_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoints.convert(GOLDEN / "modelopt_w4a16", tmp_path / "ao", to="torchao", shard_bytes=30_000, progress=False)
    assert len(list((tmp_path / "ao").glob("*.safetensors"))) > 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ao", dtype=torch.bfloat16)
    with checkpoints.read(tmp_path / "ao") as read:
        for name, parameter in model.named_parameters():
            if read.entries[name].quantized:
                assert isinstance(parameter.data, TheirTensor)
                assert torch.allclose(
                    parameter.dequantize().float(), tensor_of(read.linear(name)).dequantize().float(), rtol=2**-7
                )
            else:
                assert torch.equal(parameter, read.dense(name))


@pytest.mark.parametrize(("swizzled", "static"), [(True, True), (False, False)])
def test_what_torchao_writes_is_read(tmp_path, swizzled, static):
    weight = torch.randn(48, 80).bfloat16()
    scale = weight.float().abs().amax() / 2688
    activation = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True) if static else None
    theirs = TheirTensor.to_nvfp4(
        weight, per_tensor_scale=scale, is_swizzled_scales=swizzled, act_quant_kwargs=activation,
        act_per_tensor_scale=torch.tensor(0.25) if static else None,
    )  # fmt: skip
    tensors, metadata = flatten_tensor_state_dict({"a.weight": theirs, "a.bias": torch.ones(48)})
    save_file(tensors, tmp_path / "model.safetensors", metadata=metadata)
    assert checkpoints.detect(tmp_path / "model.safetensors") == "torchao"
    with checkpoints.read(tmp_path / "model.safetensors") as read:
        parts = read.linear("a.weight")
        assert torch.equal(read.dense("a.bias"), torch.ones(48))
    ours = tensor_of(parts, torch.float32)
    assert torch.allclose(ours.dequantize(), theirs.dequantize(torch.float32), rtol=1e-6)
    assert parts.quantizes_activations == static and (
        parts.input_scale == 0.25 if static else parts.input_scale is None
    )


def test_what_torchao_quantizes_is_written_as_it_does(tmp_path):
    """Weight-only as its config makes it: the same tensors under the same names, and the same description."""
    weight = torch.randn(64, 128).bfloat16()
    theirs = TheirTensor.to_nvfp4(weight, per_tensor_scale=weight.float().abs().amax() / 2688, is_swizzled_scales=True)
    tensors, metadata = flatten_tensor_state_dict({"a.weight": theirs})
    (tmp_path / "theirs").mkdir()
    save_file(tensors, tmp_path / "theirs/model.safetensors", metadata=metadata | {"format": "pt"})
    quantization = {"quant_method": "torchao"}
    (tmp_path / "theirs/config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    checkpoints.convert(tmp_path / "theirs", tmp_path / "ours", to="torchao", progress=False)
    read = {name: Shards(tmp_path / name) for name in ("theirs", "ours")}
    described = {name: json.loads(shards.metadata["a.weight"]) for name, shards in read.items()}
    assert {**described["theirs"], "_tensor_data_names": 0} == {**described["ours"], "_tensor_data_names": 0}
    assert set(described["theirs"]["_tensor_data_names"]) == set(described["ours"]["_tensor_data_names"])
    for name, tensor in read["theirs"].items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), read["ours"][name].reshape(-1).view(torch.uint8)), name
        assert tensor.shape == read["ours"][name].shape


def test_experts(tmp_path):
    experts = quantize_experts(torch.randn(2, 128, 64) * torch.tensor([1.0, 5.0])[:, None, None])
    checkpoints.save({"experts.down_proj": experts}, tmp_path / "a", format="torchao", progress=False)
    state, _ = unflatten_tensor_state_dict(load_file(tmp_path / "a/model.safetensors"), Shards(tmp_path / "a").metadata)
    assert torch.allclose(state["experts.down_proj"].dequantize(torch.float32), experts.dequantize(), rtol=1e-6)
    with checkpoints.read(tmp_path / "a") as read:
        again = tensor_of(read.linear("experts.down_proj"), torch.float32)
    assert torch.equal(again.dequantize(), experts.dequantize())
