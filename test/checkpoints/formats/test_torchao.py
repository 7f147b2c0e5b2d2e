"""torchao: our files read by torchao and transformers, and its files read by us."""

import json

import pytest
import torch
from helpers.checkpoint_folders import CONFIG, GOLDEN, assert_refused, content
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


@pytest.mark.parametrize(("swizzled", "static"), [(True, True), (True, False), (False, False)])
def test_what_torchao_writes_is_read_and_written_as_it_does(tmp_path, swizzled, static):
    """Swizzled weights come back as the same tensors under the same names, with the same description."""
    weight = torch.randn(64, 80).bfloat16()
    activation = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True, use_dynamic_per_tensor_scale=False)
    theirs = TheirTensor.to_nvfp4(
        weight, per_tensor_scale=weight.float().abs().amax() / 2688, is_swizzled_scales=swizzled,
        act_quant_kwargs=activation if static else None, act_per_tensor_scale=torch.tensor(0.25) if static else None,
    )  # fmt: skip
    tensors, metadata = flatten_tensor_state_dict({"a.weight": theirs, "a.bias": torch.ones(64)})
    (tmp_path / "theirs").mkdir()
    file = tmp_path / "theirs/model.safetensors"
    save_file(tensors, file, metadata=metadata | {"format": "pt"})
    assert checkpoints.detect(file) == "torchao"
    with checkpoints.read(file) as read:
        parts = read.linear("a.weight")
        assert torch.equal(read.dense("a.bias"), torch.ones(64))
    assert torch.allclose(
        tensor_of(parts, torch.float32).dequantize(), theirs.dequantize(torch.float32), rtol=1e-6, atol=0
    )
    assert parts.quantizes_activations == static and parts.input_scale == (0.25 if static else None)
    (tmp_path / "theirs/config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": {"quant_method": "torchao"}})
    )
    checkpoints.convert(tmp_path / "theirs", tmp_path / "ours", to="torchao", progress=False)
    described = [json.loads(Shards(tmp_path / name).metadata["a.weight"]) for name in ("theirs", "ours")]
    names = [set(each.pop("_tensor_data_names")) for each in described]
    assert names[0] == names[1] and (described[0] == described[1]) == swizzled
    assert not swizzled or content(tmp_path / "theirs") == content(tmp_path / "ours")


def test_experts(tmp_path):
    """Their rows are swizzled apart, in tiles of 128."""
    experts = quantize_experts(torch.randn(2, 128, 64) * torch.tensor([1.0, 5.0])[:, None, None])
    checkpoints.save({"experts.down_proj": experts}, tmp_path / "a", format="torchao", progress=False)
    with pytest.warns(UserWarning, match="random values: load them by checkpoints.load"):  # the folder of a model
        state = {"mlp.experts.0.w1.weight": experts[0]}
        checkpoints.save(state, tmp_path / "b", format="torchao", config={"model_type": "mixtral"}, progress=False)
    state, _ = unflatten_tensor_state_dict(load_file(tmp_path / "a/model.safetensors"), Shards(tmp_path / "a").metadata)
    assert torch.allclose(state["experts.down_proj"].dequantize(torch.float32), experts.dequantize(), rtol=1e-6)
    with checkpoints.read(tmp_path / "a") as read:
        again = tensor_of(read.linear("experts.down_proj"), torch.float32)
    assert torch.equal(again.dequantize(), experts.dequantize())
    assert_refused(
        tmp_path / "a",
        lambda t: t.update({"experts._down_proj_qdata": t["experts._down_proj_qdata"][:, :32].clone()}),
        r"_down_proj_qdata: expected experts with rows in multiples of 128",
    )
